"""What is known of a run from its start: what decides it, and whether a folder still holds the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.config import Experiment
from pfedla.data.federation import Federation
from pfedla.errors import ConfigError, RunError
from pfedla.layers import Groups
from pfedla.models import PYTHON, model_name
from pfedla.record import RunRecord
from pfedla.version import __version__, commit

__all__ = ["ROUNDS", "facts_elsewhere", "facts_of", "flat", "refuse_changes", "reopened", "settings_of"]

ROUNDS, FOLDER = "schedule.rounds", "data.folder"


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that decide the result, as JSON gives them back; of own data's folder, its name."""
    known: dict[str, Any] = json.loads(json.dumps(experiment.decisive(), sort_keys=True, default=str))
    if folder := known["data"].get("folder"):
        known["data"]["folder"] = Path(folder).name  # where it lies is no matter of the result
    return known


def flat(tables: Any) -> dict[str, Any]:
    """Return settings by their full names, as far as these are tables of settings."""
    sections = tables.items() if isinstance(tables, dict) else ()
    found = {section: table for section, table in sections if isinstance(table, dict)}
    return {f"{section}.{key}": value for section, table in found.items() for key, value in table.items()}


def _fingerprint(settings: Any, data: str) -> str:
    """Return a checksum of all that decides a run, with that of its data, but for its rounds, which may grow."""
    decisive = {key: value for key, value in flat(settings).items() if key != ROUNDS}
    return hashlib.sha256(json.dumps([decisive, data], sort_keys=True).encode()).hexdigest()


def facts_of(experiment: Experiment, federation: Federation, layers: Groups | None = None) -> dict[str, Any]:
    """Return what is known from the start beside the configuration, as JSON gives it back."""
    data = federation.fingerprint()
    facts = {
        "version": __version__,
        "commit": commit(),
        "model": experiment.model.name,
        "factory": None if experiment.model.name == PYTHON else model_name(experiment.model.name, federation.shape),
        "layers": layers if layers is not None else experiment.model.layers,
        "names": list(federation.names),
        "shape": list(federation.shape),
        "outputs": federation.outputs,
        "classes": list(federation.classes),
        "groups": federation.groups,
        "pixels": federation.pixels,
        "samples": [[len(part) for part in samples] for samples in federation.data.values()],
        "holdings": _holdings(federation.counts),
        "scored_on": federation.scored_on,
        **_headline(experiment),
        "settings": settings_of(experiment),
        "data": data,
        "fingerprint": _fingerprint(settings_of(experiment), data),
    }
    known: dict[str, Any] = json.loads(json.dumps(facts))
    return known


def _headline(experiment: Experiment) -> dict[str, Any]:
    """Return what pages need to know of the metric that counts."""
    return {key: getattr(experiment.objective, key) for key in ("headline", "higher_is_better", "percent")}


def _holdings(counts: np.ndarray) -> list[dict[str, list[int]]]:
    """Return each client's classes with its training and test samples of them."""
    return [{str(c): row[c].tolist() for c in np.flatnonzero(row.any(1)).tolist()} for row in counts]


def facts_elsewhere(experiment: Experiment, names: Sequence[str], samples: list[list[int]]) -> dict[str, Any]:
    """Return what is known of a run whose clients have their data elsewhere."""
    return {
        "version": __version__,
        "commit": commit(),
        "model": PYTHON,
        "layers": experiment.model.layers,
        "names": list(names),
        "shape": [],
        "outputs": 0,
        "classes": [],
        "groups": None,
        "samples": samples,
        "scored_on": "test" if experiment.data.validation is None else "validation",
        **_headline(experiment),
        "settings": settings_of(experiment),
        "data": "",  # it lies with the clients
        "fingerprint": _fingerprint(settings_of(experiment), ""),
    }


def refuse_changes(path: Path | str, known: dict[str, Any], experiment: Experiment, where: str) -> None:
    """Refuse settings other than those that a run was started with, but for more rounds."""
    before, now = flat(_as_now(known.get("settings"))), flat(settings_of(experiment))
    changed = [key for key in sorted(before.keys() | now) if before.get(key) != now.get(key)]
    if FOLDER in before.keys() & now.keys() & set(changed):  # a checksum tells whether data are the same
        changed.remove(FOLDER)
    if _longer(known, experiment):
        changed.remove(ROUNDS)
    if changed:
        words = [f"{key} is {now.get(key, 'not set')} and was {before.get(key, 'not set')}" for key in changed]
        raise RunError(f"the run in {path} was started with other settings than {where} has: {'; '.join(words)}")


def _as_now(settings: Any) -> Any:
    """Return a run's settings as they are recorded now; earlier versions named a data set where none was used."""
    try:
        return settings_of(Experiment.from_tables(settings))
    except (ConfigError, AttributeError):  # settings that are gone, or none at all
        return settings


def _longer(known: dict[str, Any], experiment: Experiment) -> bool:
    rounds = flat(known.get("settings")).get(ROUNDS)
    return isinstance(rounds, int) and experiment.schedule.rounds > rounds


def reopened(path: Path | str, experiment: Experiment, federation: Federation) -> RunRecord:
    """Open a run's record to continue it with its own settings (`refuse_changes`), if its data are still the same."""
    known, data = RunRecord(path).facts(), federation.fingerprint()
    if known.get("data") != data:
        raise RunError(f"the run in {path} was started with other data: they have changed since")
    settings: dict[str, Any] = known.get("settings") or {}
    if known.get("fingerprint") != _fingerprint(settings, data):
        raise RunError(f"the run in {path} was started with other settings or data than it has now")
    if not _longer(known, experiment):
        return RunRecord.resume(path)
    longer = {**settings, "schedule": settings_of(experiment)["schedule"]}  # all else as it was written
    return RunRecord.resume(path, experiment.toml(), settings=longer)
