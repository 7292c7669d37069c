"""Configuration: frozen dataclasses, one home for every default, TOML on disk.

An `Experiment` has a section for each part of a run. Unknown keys and values of the wrong type are refused
before any work, with the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w

from pfedla.algorithm import Algorithm
from pfedla.algorithms import ALGORITHMS, PFedLA
from pfedla.data.datasets import DATASETS
from pfedla.data.splits import SPLITS, NonIID1, Split
from pfedla.errors import ConfigError, unknown_name
from pfedla.models import import_object
from pfedla.training import Training

__all__ = ["Data", "Experiment", "Model", "Run", "Tables", "algorithm_name", "parse_assignments"]

Tables = dict[str, dict[str, Any]]
T = TypeVar("T")

DEFAULT_NAMES = {"algorithm": "pfedla", "split": "non-iid-1"}


@dataclass(frozen=True)
class Run:
    """How long, with whom, and where."""

    seed: int = 0
    rounds: int = 50
    participants: int = 0  # clients a round; 0 for all
    eval_every: int = 5  # rounds between evaluations; the last round is always evaluated
    checkpoint_every: int = 20  # rounds between checkpoints; 0 for none but at Ctrl-C
    workers: int = -1  # processes; -1 for one a core, 0 to work in this process
    device: str = "cpu"
    storage: Literal["memory", "disk"] = "memory"  # where the clients' models lie; on disk they may exceed memory
    keep_models: bool = True  # make and write every client's personalized model at the end
    fleet: Literal["local", "ray"] = "local"  # this machine, or a Ray cluster; never changes the result
    ray_address: str = ""  # host:port, auto or local; empty for the running cluster, or else a new one here

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        _at_least("run", self, rounds=1, participants=0, eval_every=1, checkpoint_every=0, workers=-1)
        for name, hint in typing.get_type_hints(type(self)).items():
            if typing.get_origin(hint) is Literal:
                _coerce(getattr(self, name), hint, f"run.{name}")


@dataclass(frozen=True)
class Data:
    """Which samples, and how many each client holds."""

    dataset: str = "fashion-mnist-10k"
    folder: str = ""  # own data: a folder with one .npz (x, y) a client, or one .npz (x, y, client)
    data_dir: str = ""  # where data sets lie; $PFEDLA_DATA if empty
    download: bool = False
    clients: int = 10
    samples_per_client: int = 200
    test_samples_per_client: int = 0  # 0: the rest of the samples, 1 - train_fraction of them
    train_fraction: float = 0.7
    fewest_samples: int = 0  # clients of unequal size, from this to samples_per_client; 0: all alike
    reuse: bool = False  # two clients may hold the same sample: for more clients than the data set serves

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        if self.dataset not in DATASETS:
            raise unknown_name("data set", self.dataset, DATASETS)
        _at_least("data", self, clients=1, samples_per_client=2, test_samples_per_client=0, fewest_samples=0)
        if not 0 < self.train_fraction < 1:
            raise ConfigError(f"data.train_fraction = {self.train_fraction} must lie between 0 and 1")


@dataclass(frozen=True)
class Model:
    """The network, and which of its modules form one layer."""

    name: str = "auto"
    layers: dict[str, str] = field(default_factory=dict)  # layer name -> pattern of module names


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run's result."""

    algorithm: Algorithm[Any] = field(default_factory=PFedLA)
    data: Data = field(default_factory=Data)
    split: Split = field(default_factory=NonIID1)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    run: Run = field(default_factory=Run)

    @classmethod
    def from_tables(cls, tables: Mapping[str, Mapping[str, Any]]) -> Experiment:
        """Build an experiment from nested tables; what is not named keeps its default."""
        sections: dict[str, type] = {"data": Data, "model": Model, "training": Training, "run": Run}
        for name, table in tables.items():
            if name not in (*sections, "algorithm", "split"):
                raise unknown_name("section", name, [*sections, "algorithm", "split"])
            if not isinstance(table, Mapping):
                raise ConfigError(f"[{name}] must be a section of settings, not {table!r}")
        parts: dict[str, Any] = {name: build(kind, tables.get(name, {}), name) for name, kind in sections.items()}
        for name, default in DEFAULT_NAMES.items():
            table = dict(tables.get(name, {}))
            kind = _algorithm_class if name == "algorithm" else _split_class
            parts[name] = build(kind(table.pop("name", default)), table, name)
        return cls(**parts)

    @classmethod
    def load(cls, path: Path, changes: Tables | None = None) -> Experiment:
        """Read a TOML file, with `changes` laid over it."""
        return cls.from_tables(merge(read_tables(path), changes or {}))

    @property
    def data_name(self) -> str:
        """What the data is called: the data set's name, or the folder's."""
        return Path(self.data.folder).stem if self.data.folder else self.data.dataset

    def tables(self) -> Tables:
        """Return every setting, defaults included, as nested tables that `from_tables` takes."""
        tables: Tables = {}
        for part in dataclasses.fields(self):
            value = getattr(self, part.name)
            table = {name: getattr(value, name) for name in _settings(value)}
            tables[part.name] = {k: _plain(v) for k, v in table.items() if v is not None}
        tables["algorithm"] = {"name": algorithm_name(self.algorithm), **tables["algorithm"]}
        tables["split"] = {"name": self.split.name, **tables["split"]}
        return tables

    def toml(self) -> str:
        """Return the complete configuration as TOML."""
        return tomli_w.dumps(self.tables())


def algorithm_name(algorithm: Algorithm[Any]) -> str:
    """Return the name by which configuration knows a method: a short one, or `package.module:Class`."""
    kind = type(algorithm)
    known = {cls: name for name, cls in ALGORITHMS.items()}
    return known.get(kind, f"{kind.__module__}:{kind.__qualname__}")


def read_tables(path: Path) -> Tables:
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None


def merge(tables: Tables, changes: Tables) -> Tables:
    """Return tables with `changes` laid over them; another method or split starts from its own defaults."""
    merged = dict(tables)
    for section, table in changes.items():
        kept = merged.get(section, {})
        if not isinstance(kept, Mapping):
            raise ConfigError(f"[{section}] must be a section of settings, not {kept!r}")
        default = DEFAULT_NAMES.get(section)
        renamed = default is not None and "name" in table and table["name"] != kept.get("name", default)
        merged[section] = {**({} if renamed else kept), **table}
    return merged


def parse_assignments(assignments: Iterable[str]) -> Tables:
    """Read `section.key=value` texts, as given to `--set`; values are TOML, bare words are strings."""
    tables: Tables = {}
    for text in assignments:
        address, equals, value = text.partition("=")
        section, dot, key = address.strip().partition(".")
        if not (equals and dot and section and key):
            raise ConfigError(f"--set takes SECTION.KEY=VALUE, such as algorithm.retain=2, not {text!r}")
        tables.setdefault(section, {})[key] = parse_value(value.strip())
    return tables


def parse_value(text: str) -> Any:
    """Read a TOML value; what is none is taken as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def build(kind: type[T], table: Mapping[str, Any], section: str) -> T:
    """Make a dataclass from a table, strictly."""
    hints = typing.get_type_hints(kind)
    names = _settings(kind)
    for key in table:
        if key not in names:
            of = f" (of {kind.__name__})" if section in ("algorithm", "split") else ""
            raise unknown_name(f"setting{of}", f"{section}.{key}", [f"{section}.{name}" for name in names])
    return kind(**{key: _coerce(value, hints[key], f"{section}.{key}") for key, value in table.items()})


def _coerce(value: Any, hint: Any, where: str) -> Any:
    """Return `value` as the type `hint` asks for, or refuse it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _coerce(value, next(a for a in arguments if a is not type(None)), where)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where} = {value!r}: choose one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_coerce(part, arguments[0], where) for part in value)
    if origin is dict and isinstance(value, Mapping):
        return {str(key): _coerce(part, arguments[1], where) for key, part in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = origin or hint
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        names = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            str: "text",
            tuple: "a list",
        }
        raise ConfigError(f"{where} = {value!r} must be {names.get(wanted, 'a table')}")
    return value


def _settings(kind: Any) -> list[str]:
    """Return the names of a dataclass's settings, without what a method fills in itself."""
    return [field.name for field in dataclasses.fields(kind) if "resolved" not in field.metadata]


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _algorithm_class(name: str) -> type[Algorithm[Any]]:
    if ":" in str(name):
        found = import_object(name, "algorithm.name")
        if not (isinstance(found, type) and issubclass(found, Algorithm) and dataclasses.is_dataclass(found)):
            raise ConfigError(f"algorithm.name = {name!r} is not a dataclass derived from pfedla.Algorithm")
        return found
    if str(name) not in ALGORITHMS:
        raise unknown_name("algorithm", str(name), ALGORITHMS)
    return ALGORITHMS[name]


def _split_class(name: str) -> type[Split]:
    if str(name) not in SPLITS:
        raise unknown_name("split", str(name), SPLITS)
    return SPLITS[name]


def _at_least(section: str, settings: object, **bounds: int) -> None:
    for name, bound in bounds.items():
        if getattr(settings, name) < bound:
            raise ConfigError(f"{section}.{name} = {getattr(settings, name)} must be at least {bound}")
