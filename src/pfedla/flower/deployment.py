"""A deployment's folder, the Flower app: one TOML file, and the code that every site runs.

`pfedla.toml` has the sections of any experiment, as far as they do not say where simulated data come from, and
`[deploy]`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from torch import nn
from torch.utils.data import Dataset

from pfedla.client import Setting
from pfedla.config import Experiment, read_tables
from pfedla.data.federation import Federation, own_data
from pfedla.errors import ConfigError, DataError, ModelError
from pfedla.experiment import assemble
from pfedla.models import PYTHON
from pfedla.settings import Count, Positive, Range, Settings, build

__all__ = ["CONFIG", "Deploy", "Deployment", "SiteCode"]

CONFIG = "pfedla.toml"
LONGEST_NAME = 60
TAKEN = {  # sections of which a deployment takes some settings, or none; and where the others stand
    "split": ((), "data(site) returns a site's data"),
    "data": (("train_fraction", "validation"), "data(site) returns a site's data"),
    "model": (("layers",), "model() makes the model"),
    "machine": (("device", "track"), "it is for simulations"),
}


@dataclass(frozen=True)
class Deploy(Settings):
    """Who takes part, with which code, and what the server does when sites are late."""

    section: ClassVar[str] = "deploy"
    sites: tuple[str, ...] = ()  # names; the first is client 0
    code: str = "site_code.py"  # a file of the app with model() and data(site), or an installed package.module
    fewest: Count = 1  # answers without which a round is repeated
    tries: Count = 3  # times that a round is tried before the run stops
    timeout: Positive = 600.0  # seconds that a site may take for a message
    patience: Annotated[float, Range(least=0)] = 600.0  # seconds to wait for all sites at the start
    registered: bool = True  # a site's key must be registered under the site's name; false only for trials
    examples: bool = True  # sites tell their number of training examples; without, all weigh the same
    scores: bool = True  # sites tell how well they do on their test data; without, their own logs say it
    models: bool = False  # sites send the server their personalized models at the end, too

    def __post_init__(self) -> None:
        """Refuse names that cannot be those of sites."""
        super().__post_init__()
        if not self.sites:
            raise ConfigError('deploy.sites must name the sites, such as ["north", "south"]')
        for name in self.sites:
            plain = name.replace("-", "").replace("_", "").replace(".", "")
            if not (plain.isascii() and plain.isalnum() and name[0].isalnum() and len(name) <= LONGEST_NAME):
                what = f"at most {LONGEST_NAME} letters and digits, with - or _ or . after the first"
                raise ConfigError(f"deploy.sites: {name[:80]!r} must be {what}")
        if len(set(self.sites)) < len(self.sites):
            raise ConfigError("deploy.sites names a site twice")
        if self.fewest > len(self.sites):
            raise ConfigError(f"deploy.fewest = {self.fewest} is more than there are sites, {len(self.sites)}")


@dataclass(frozen=True)
class Deployment:
    """What everybody has: the settings, and where the code lies."""

    folder: Path
    deploy: Deploy
    experiment: Experiment

    @classmethod
    def load(cls, folder: Path | str) -> Deployment:
        """Read a deployment's `pfedla.toml`."""
        folder = Path(folder)
        tables = read_tables(folder / CONFIG)
        given: object = tables.pop("deploy", {})
        if not isinstance(given, dict):
            raise ConfigError(f"[deploy] must be a section of settings, not {given!r:.100}")
        deploy = build(Deploy, given)
        for section, (taken, instead) in TAKEN.items():
            table: object = tables.get(section, {})
            if needless := [key for key in table if key not in taken] if isinstance(table, dict) else []:
                raise ConfigError(f"{section}.{needless[0]} says nothing to a deployment: {instead}")
        experiment = Experiment.from_tables(tables)
        data = replace(experiment.data, clients=len(deploy.sites), folder=None)
        model = replace(experiment.model, name=PYTHON)
        if deploy.models and experiment.privacy.clip is not None:
            raise ConfigError("deploy.models = true would send the server models that are neither clipped nor noised")
        return cls(folder, deploy, replace(experiment, data=data, model=model))

    def code(self, other: str | None = None) -> SiteCode:
        """Import the sites' code; a site may bring an `other` file or module of its own."""
        name = other or self.deploy.code
        what = f"the site's code = {other!r}" if other else f"deploy.code = {name!r}"
        try:
            if name.endswith(".py"):
                path = (self.folder / name).resolve()
                if str(path.parent) not in sys.path:  # for modules beside it
                    sys.path.insert(0, str(path.parent))
                spec = importlib.util.spec_from_file_location(path.stem, path)
                if spec is None or spec.loader is None or not path.is_file():
                    raise ConfigError(f"{what}: there is no file {path}")
                module = importlib.util.module_from_spec(spec)
                sys.modules[path.stem] = module
                spec.loader.exec_module(module)
            else:
                module = importlib.import_module(name)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # it is the site's own code
            raise ConfigError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error
        for function in ("model", "data"):
            if not callable(getattr(module, function, None)):
                raise ConfigError(f"{what} has no function {function}()")
        return SiteCode(module.model, module.data)

    def setting(self, code: SiteCode, device: str | None = None) -> Setting:
        """Make the model and put together what is fixed for the run."""
        machine = replace(self.experiment.machine, device=device or self.experiment.machine.device)
        found = assemble(replace(self.experiment, machine=machine), code.made, self.deploy.sites)
        algorithm = found.algorithm
        if algorithm.tells_steps and not self.deploy.examples:
            what = ", ".join(algorithm.uploads_beside)
            raise ConfigError(
                f"deploy.examples = false: {type(algorithm).__name__} uploads {what}, from which a site's steps may be "
                "computed, and so its number of examples"
            )
        return replace(found, counted=self.deploy.examples)

    def data(self, code: SiteCode, site: str) -> Federation:
        """Return a site's data: a federation of one."""
        experiment = self.experiment
        try:
            found = _arrays(code.data(site), f"data({site!r})")
        except DataError:
            raise
        except (Exception, SystemExit) as error:  # it is the site's own code
            raise DataError(f"data({site!r}) failed: {type(error).__name__}: {error}") from error
        settings = experiment.data
        seed, validation = experiment.schedule.seed, settings.validation
        return own_data([found], [site], settings.train_fraction, seed, experiment.objective, validation=validation)


@dataclass(frozen=True)
class SiteCode:
    """What a site brings."""

    model: Callable[[], nn.Module]
    data: Callable[[str], Any]

    def made(self) -> nn.Module:
        """Make the model; what goes wrong is the site's own code."""
        try:
            return self.model()
        except (Exception, SystemExit) as error:
            raise ModelError(f"model() failed: {type(error).__name__}: {error}") from error


def _arrays(found: Any, who: str) -> tuple[Any, ...]:
    """Return what data() returned as two or four arrays, Datasets read as a whole."""
    parts = tuple(found) if isinstance(found, tuple | list) else (found,)
    sets = [isinstance(part, Dataset) for part in parts]
    if all(sets) and len(parts) in (1, 2):
        return tuple(array for samples in parts for array in _read(samples, who))
    if any(sets) or len(parts) not in (2, 4):
        raise DataError(f"{who} must return (x, y), (x, y, x_test, y_test), or one or two torch Datasets")
    return parts


def _read(samples: Any, who: str) -> tuple[np.ndarray, np.ndarray]:
    """Read a whole Dataset."""
    if not hasattr(samples, "__len__"):
        raise DataError(f"{who} returned a {type(samples).__name__} without a length: Datasets must have one")
    pairs = [samples[index] for index in range(len(samples))]
    if not pairs:
        raise DataError(f"{who} returned an empty Dataset")
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise DataError(f"{who} returned a Dataset whose items are not all pairs (x, y)")
    parts = [[np.asarray(pair[which]) for pair in pairs] for which in (0, 1)]
    for name, part in zip(("inputs", "targets"), parts, strict=True):
        if len(shapes := {one.shape for one in part}) > 1:
            some = " and ".join(map(str, sorted(shapes)[:2]))
            raise DataError(f"{who} returned a Dataset whose {name} have different shapes: {some}")
    return np.stack(parts[0]), np.stack(parts[1])
