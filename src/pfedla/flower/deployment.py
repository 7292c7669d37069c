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
from pfedla.errors import ConfigError, DataError
from pfedla.experiment import assemble
from pfedla.models import PYTHON
from pfedla.settings import Count, Positive, Range, Settings, build

__all__ = ["CONFIG", "Deploy", "Deployment", "SiteCode"]

CONFIG = "pfedla.toml"
LONGEST_NAME = 60
STEPS = {"path", "control"}  # uploads that tell how many steps a site took


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
    models: bool = False  # sites send the server their personalized models at the end, too

    def __post_init__(self) -> None:
        """Refuse names that cannot be those of sites."""
        super().__post_init__()
        if not self.sites:
            raise ConfigError('deploy.sites must name the sites, such as ["north", "south"]')
        for name in self.sites:
            plain = name.replace("-", "").replace("_", "").replace(".", "")
            if not (plain.isascii() and plain.isalnum() and name[0].isalnum() and len(name) <= LONGEST_NAME):
                raise ConfigError(f"deploy.sites: {name!r} must be letters and digits, with - or _ or . between")
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
        deploy = build(Deploy, tables.pop("deploy", {}))
        if needless := {"split"} & tables.keys():
            raise ConfigError(f"[{', '.join(needless)}] is for simulations: at a site, data(site) returns its data")
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
        except Exception as error:  # it is the site's own code
            raise ConfigError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error
        for function in ("model", "data"):
            if not callable(getattr(module, function, None)):
                raise ConfigError(f"{what} has no function {function}()")
        return SiteCode(module.model, module.data)

    def setting(self, code: SiteCode, device: str | None = None) -> Setting:
        """Make the model and put together what is fixed for the run."""
        machine = replace(self.experiment.machine, device=device or self.experiment.machine.device)
        found = assemble(replace(self.experiment, machine=machine), code.model, self.deploy.sites)
        if telling := STEPS & set(found.algorithm.uploads_beside) if not self.deploy.examples else ():
            method = type(found.algorithm).__name__
            raise ConfigError(
                f"deploy.examples = false: {method} uploads its {min(telling)}, from which a site's steps can be "
                "computed, and so its number of examples"
            )
        return found

    def data(self, code: SiteCode, site: str) -> Federation:
        """Return a site's data: a federation of one."""
        experiment = self.experiment
        try:
            found = code.data(site)
        except DataError:
            raise
        except Exception as error:  # it is the site's own code
            raise DataError(f"data({site!r}) failed: {type(error).__name__}: {error}") from error
        if isinstance(found, Dataset):
            found = (found,)
        if not isinstance(found, tuple):
            raise DataError(f"data({site!r}) must return (x, y), (x, y, x_test, y_test), or one or two torch Datasets")
        if any(isinstance(part, Dataset) for part in found):
            found = tuple(array for part in found for array in _arrays(part))
        settings = experiment.data
        seed, validation = experiment.schedule.seed, settings.validation
        return own_data([found], [site], settings.train_fraction, seed, experiment.objective, validation=validation)


@dataclass(frozen=True)
class SiteCode:
    """What a site brings."""

    model: Callable[[], nn.Module]
    data: Callable[[str], Any]


def _arrays(samples: Any) -> tuple[np.ndarray, np.ndarray]:
    """Read a whole Dataset."""
    pairs = [samples[index] for index in range(len(samples))]
    if not pairs:
        raise DataError("data(site) returned an empty Dataset")
    x, y = zip(*pairs, strict=True)
    inputs, targets = ([np.asarray(one) for one in part] for part in (x, y))
    return np.stack(inputs), np.stack(targets)
