"""Configuration: frozen dataclasses, one home for every default, TOML on disk.

An `Experiment` has a section for each part of a run. `[machine]` says where and how it runs; all the others together
decide the result. What is absent keeps its default. Unknown keys and values of the wrong type or out of range are
refused before any work, with the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tomli_w

from pfedla.algorithm import Algorithm
from pfedla.algorithms import ALGORITHMS, PFedLA
from pfedla.codec import PRESETS, Codec
from pfedla.data.federation import OWN_DATA, Data
from pfedla.data.splits import SPLITS, NonIID1, Split
from pfedla.errors import ConfigError, known_name, unknown_name
from pfedla.models import PYTHON, Model, import_object
from pfedla.objective import OBJECTIVES, Classification, Objective
from pfedla.privacy import Privacy
from pfedla.rounds import Schedule
from pfedla.settings import NonNegative, Range, Settings, build, name_of, names_of
from pfedla.training import Training

__all__ = [
    "Experiment",
    "Machine",
    "Tables",
    "algorithm_name",
    "merge",
    "parse_assignments",
    "parse_codec",
    "parse_value",
    "read_tables",
]

log = logging.getLogger("pfedla")

Tables = dict[str, dict[str, Any]]

DEFAULT_NAMES = {"algorithm": "pfedla", "split": "non-iid-1", "objective": "classification"}
CHOICES: dict[str, tuple[Mapping[str, type[Settings]], type]] = {  # sections whose class is chosen by name
    "algorithm": (ALGORITHMS, Algorithm),
    "split": (SPLITS, Split),
    "objective": (OBJECTIVES, Objective),
}
MOVED = {  # settings of earlier versions -> where they are now
    **{f"run.{name}": f"schedule.{name}" for name in ("seed", "rounds", "participants", "eval_every")},
    **{f"run.{name}": f"machine.{name}" for name in ("workers", "device", "storage", "keep_models", "fleet")},
    **{f"run.{name}": f"machine.{name}" for name in ("ray_address", "checkpoint_every")},
    **{f"data.{name}": f"machine.{name}" for name in ("data_dir", "download")},
}
FEW = {"peers", "refresh"}  # settings that pFedLA had, now those of pfedla-peers
ABSENT = {  # what once stood for "by default"
    "run.participants": 0,
    "run.workers": -1,
    "run.ray_address": "",
    "data.data_dir": "",
    "data.folder": "",
    "data.test_samples_per_client": 0,
    "data.fewest_samples": 0,
}


@dataclass(frozen=True)
class Machine(Settings):
    """Where a run's data lies, who does the work, and what is written on the way; never changes the result."""

    section: ClassVar[str] = "machine"
    workers: Annotated[int, Range(least=0)] | None = None  # processes; one per core by default, 0: this process
    device: str = "cpu"
    storage: Literal["memory", "disk"] = "memory"  # where the clients' models lie; on disk they may exceed memory
    fleet: Literal["local", "ray"] = "local"  # this machine, or a Ray cluster
    ray_address: str | None = None  # host:port, auto or local; by default the running cluster, or else a new one here
    data_dir: str | None = None  # where data sets lie; $PFEDLA_DATA by default
    download: bool = False  # fetch missing data sets
    checkpoints: bool = True  # at regular intervals and at the end; without, only at Ctrl-C and the like
    checkpoint_every: NonNegative = 60.0  # seconds, and so seldom that they take no more than a fiftieth of the time
    keep_models: bool = True  # make and write every client's personalized model at the end
    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()  # where figures go, too, as the run goes on


PARTS: dict[str, type] = {
    **{kind.section: kind for kind in (Data, Model, Training, Codec, Privacy, Schedule, Machine)},
    **{name: base for name, (_, base) in CHOICES.items()},
}


@dataclass(frozen=True)
class Experiment:
    """A whole run."""

    algorithm: Algorithm[Any] = field(default_factory=PFedLA)
    data: Data = field(default_factory=Data)
    split: Split = field(default_factory=NonIID1)
    model: Model = field(default_factory=Model)
    objective: Objective = field(default_factory=Classification)
    training: Training = field(default_factory=Training)
    codec: Codec = field(default_factory=Codec)
    schedule: Schedule = field(default_factory=Schedule)
    machine: Machine = field(default_factory=Machine)
    privacy: Privacy = field(default_factory=Privacy)

    def __post_init__(self) -> None:
        """Refuse parts that are none."""
        for part, kind in PARTS.items():
            if not isinstance(value := getattr(self, part), kind):
                raise ConfigError(f"{part} must be a pfedla.{kind.__name__} or one derived from it, not {value!r:.100}")

    @classmethod
    def from_tables(cls, tables: Mapping[str, Mapping[str, Any]]) -> Experiment:
        """Build an experiment from nested tables; what is not named keeps its default."""
        names = [part.name for part in dataclasses.fields(cls)]
        for name, table in tables.items():
            if not isinstance(table, Mapping):
                raise ConfigError(f"[{name}] must be a section of settings, not {table!r}")
            for old in (f"{name}.{key}" for key in table):
                if old in MOVED:
                    raise ConfigError(f"unknown setting {old!r}: it is now {MOVED[old]!r}")
            if name == "algorithm" and _plain_pfedla(table) and FEW & table.keys():
                raise ConfigError("algorithm.peers and algorithm.refresh are now settings of pfedla-peers")
            if name == "run":
                raise ConfigError("unknown section 'run': its settings are now in [schedule] and [machine]")
            if name not in names:
                raise unknown_name("section", name, names)
        plain = {name: kind for name, kind in PARTS.items() if name not in CHOICES}
        parts: dict[str, Any] = {name: build(kind, tables.get(name, {})) for name, kind in plain.items()}
        for name, (known, base) in CHOICES.items():
            table = dict(tables.get(name, {}))
            parts[name] = build(_class_of(table.pop("name", DEFAULT_NAMES[name]), name, known, base), table)
        return cls(**parts)

    @classmethod
    def load(cls, path: Path | str, changes: Tables | None = None) -> Experiment:
        """Read a TOML file, with `changes` laid over it."""
        return cls.from_tables(merge(read_tables(Path(path)), changes or {}))

    @property
    def own_data(self) -> bool:
        """Whether clients bring their own data: no data set is split over them."""
        return bool(self.data.folder) or self.model.name == PYTHON

    def tables(self) -> Tables:
        """Return every setting that has a value, defaults included, as nested tables that `from_tables` takes.

        Where clients bring their own data, nothing is said of a data set and its split.
        """
        tables: Tables = {}
        for part in dataclasses.fields(self):
            value: Settings = getattr(self, part.name)
            found = {name: _plain(getattr(value, name)) for name in names_of(value)}
            tables[part.name] = {name: setting for name, setting in found.items() if setting is not None}
        tables["algorithm"] = {"name": algorithm_name(self.algorithm), **tables["algorithm"]}
        tables["split"] = {"name": name_of(self.split, SPLITS), **tables["split"]}
        tables["objective"] = {"name": self.objective.name, **tables["objective"]}
        if self.own_data:
            del tables["split"]
            tables["data"] = {name: setting for name, setting in tables["data"].items() if name in OWN_DATA}
        return tables

    def decisive(self) -> Tables:
        """Return the settings that decide the result: all sections but `[machine]`."""
        return {name: table for name, table in self.tables().items() if name != Machine.section}

    def toml(self) -> str:
        """Return the complete configuration as TOML."""
        try:
            return tomli_w.dumps(self.tables())
        except TypeError as error:
            raise ConfigError(f"the configuration cannot be written to a file: {error}") from None


def algorithm_name(algorithm: Algorithm[Any]) -> str:
    """Return the name by which configuration knows a method: a short one, or `package.module:Class`."""
    return name_of(algorithm, ALGORITHMS)


def read_tables(path: Path) -> Tables:
    """Read a TOML file; one of an earlier version is brought up to date, and a warning says what moved."""
    try:
        tables, moved = _modernized(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
    if moved:
        log.warning("%s is of an earlier version; these settings have moved: %s", path, ", ".join(moved))
    return tables


def _modernized(tables: dict[str, Any]) -> tuple[Tables, list[str]]:
    """Return tables of an earlier version as they are written now, and what was changed."""
    new: Tables = {}
    moved: list[str] = []
    for section, table in tables.items():
        if not isinstance(table, Mapping):
            new[section] = table
            continue
        for key, value in table.items():
            old = f"{section}.{key}"
            place = MOVED.get(old, old)
            if old in ABSENT and value == ABSENT[old]:
                moved.append(f"{old} = {value!r} is now written by leaving it out")
                continue
            if old == "run.checkpoint_every" and value == 0:
                place, value = "machine.checkpoints", False
            if place != old:
                moved.append(f"{old} is now {place}")
            new.setdefault(place.partition(".")[0], {})[place.partition(".")[2]] = value
        if section != "run":
            new.setdefault(section, {})
    method: Any = new.get("algorithm", {})
    named = method.get("name", "pfedla") if isinstance(method, Mapping) else None
    if named in ("pfedla", "heurpfedla") and method.keys() & FEW:
        if method.get("peers"):
            retain = {"retain": 1} if named == "heurpfedla" else {}
            new["algorithm"] = {**retain, **method, "name": "pfedla-peers"}
        else:  # everybody is everybody's candidate
            new["algorithm"] = {key: value for key, value in method.items() if key not in FEW}
        moved.append("algorithm.peers and algorithm.refresh are now settings of the algorithm pfedla-peers")
    if named in ("pfedla", "heurpfedla", "pfedla-peers") and "statistics" in method:
        new["algorithm"] = {key: value for key, value in new["algorithm"].items() if key != "statistics"}
        moved.append("algorithm.statistics is gone: running statistics are those on the client's training samples")
    return new, moved


def merge(tables: Tables, changes: Tables) -> Tables:
    """Return tables with `changes` laid over them; another method or split starts from its own defaults."""
    merged = dict(tables)
    for section, table in changes.items():
        kept = merged.get(section, {})
        if not isinstance(kept, Mapping):
            raise ConfigError(f"[{section}] must be a section of settings, not {kept!r}")
        default = DEFAULT_NAMES.get(section)
        names = (str(table.get("name")).casefold(), str(kept.get("name", default)).casefold())
        renamed = default is not None and "name" in table and names[0] != names[1]
        merged[section] = {**({} if renamed else kept), **table}
    return merged


def parse_assignments(assignments: Iterable[str]) -> Tables:
    """Read `section.key=value` texts; values are TOML, bare words are strings."""
    tables: Tables = {}
    for text in assignments:
        address, equals, value = text.partition("=")
        section, dot, key = address.strip().partition(".")
        if not (equals and dot and section and key):
            raise ConfigError(f"a setting is given as SECTION.KEY=VALUE, such as algorithm.retain=2, not {text!r}")
        tables.setdefault(section, {})[key] = parse_value(value.strip())
    return tables


def parse_codec(texts: Iterable[str]) -> Tables:
    """Read `up=int8`, `down=float16` or `keep=0.05`, or a preset's name: settings of `[codec]`, the last one counts."""
    table: dict[str, Any] = {}
    for text in texts:
        if "=" in text:
            table |= parse_assignments([f"codec.{text}"])["codec"]
        elif text in PRESETS:
            table |= PRESETS[text]
        else:
            raise unknown_name("codec", text, [*PRESETS, "up=...", "down=...", "keep=..."])
    return {"codec": table} if table else {}


def parse_value(text: str) -> Any:
    """Read a TOML value; what is none is taken as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _plain_pfedla(table: Mapping[str, Any]) -> bool:
    return str(table.get("name", "pfedla")).casefold() in ("pfedla", "heurpfedla")


def _class_of(name: object, section: str, known: Mapping[str, type[Settings]], base: type) -> type[Settings]:
    """Return the class of a short name, or of `package.module:Class`."""
    if not isinstance(name, str):
        raise ConfigError(f"{section}.name must be text, not {name!r:.100}")
    if ":" in name:
        found: Any = import_object(name, f"{section}.name")
        if not (isinstance(found, type) and issubclass(found, base) and dataclasses.is_dataclass(found)):
            raise ConfigError(f"{section}.name = {name!r} is not a dataclass derived from pfedla.{base.__name__}")
        if inspect.isabstract(found):
            raise ConfigError(f"{section}.name = {name!r} is an abstract class: name one that is derived from it")
        return found  # type: ignore[return-value]
    return known[known_name(section, name, known)]
