"""Runs whose clients are elsewhere, with data that this machine never sees: the server's side of a deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.client import Setting
from pfedla.config import Experiment
from pfedla.errors import RunError
from pfedla.facts import facts_elsewhere, refuse_changes, settings_of
from pfedla.fleet import Fleet
from pfedla.privacy import accountant
from pfedla.randomness import stream
from pfedla.record import RunRecord
from pfedla.result import Result
from pfedla.rounds import Watch
from pfedla.rounds import run as run_rounds
from pfedla.summary import result_of
from pfedla.trackers import trackers_of, tracking

__all__ = ["open_run", "run_on", "went_on", "widen_run"]


def open_run(
    experiment: Experiment,
    names: Sequence[str],
    examples: Sequence[int],
    out: Path | str,
    *,
    resume: bool = False,
    tells: Mapping[str, bool] | None = None,
    accept: bool = False,
) -> RunRecord:
    """Open the record of a run whose clients, known by name and number of examples, have their data elsewhere.

    A complete run can be resumed, too: with more rounds, or to hand out its models again. What clients tell, by the
    name of the setting, must be as it was then, unless `accept` takes in that it changed.
    """
    facts = facts_elsewhere(experiment, names, [[count, 0] for count in examples]) | {"tells": dict(tells or {})}
    if not resume:
        return RunRecord.create(out, experiment.toml(), facts)
    known = RunRecord.unfinished(out, longer=True).facts()
    _refuse_branches(out, known)
    refuse_changes(out, known, experiment, "the deployment")
    before = known.get("tells", facts["tells"])
    if not accept and (other := [key for key, now in facts["tells"].items() if before.get(key, now) != now]):
        raise RunError(
            f"the run in {out} was started with another deploy.{other[0]}: sites were told what leaves them. "
            "Set it as it was, or, if all agree, resume with accept=true"
        )
    if known.get("names") != facts["names"]:
        raise RunError(f"the run in {out} was started with other clients: {', '.join(known.get('names', []))}")
    return RunRecord.resume(out, experiment.toml(), settings=settings_of(experiment))


def _refuse_branches(path: Path | str, known: dict[str, Any]) -> None:
    """Refuse to go on with a run that went on elsewhere: its clients keep one line of rounds for both."""
    if (other := known.get("continued")) and Path(other).exists():
        raise RunError(f"the run in {path} went on in {other}: resume it there")


def widen_run(
    path: Path | str, experiment: Experiment, name: str, setting: Setting, fleet: Any, wider: Any, out: Path | str
) -> int:
    """Copy a run whose clients are elsewhere, complete or not, to `out` with a row for one more; return its round.

    It stays the same run, under the same id, and can be resumed. `experiment` has the settings from then on; `fleet` is
    like the snapshot of the clients that the run has, and `wider` makes that of one more from it.
    """
    old, n = RunRecord(path), experiment.data.clients - 1
    facts = old.facts()
    _refuse_branches(path, facts)
    if old.state == "running":
        raise RunError(f"the run in {old.path} is under way: stop it first")
    if len(facts["names"]) != n:
        raise RunError(f"the run in {old.path} has {len(facts['names'])} clients, not {n}")
    before = replace(experiment, data=replace(experiment.data, clients=n))
    refuse_changes(path, facts, before, "the deployment")
    algorithm, seed = setting.algorithm, experiment.schedule.seed
    saved = old.latest(algorithm.init(setting.spec.read(setting.template), n, stream(seed, "init")), fleet)
    if saved is None:
        raise RunError(f"{old.path} has no checkpoint")
    if saved.t >= experiment.schedule.rounds:
        raise RunError(f"the run has had its {saved.t} rounds: raise schedule.rounds for those with {name}")
    for line in saved.history:
        line["clients"] = {metric: [*values, None] for metric, values in line["clients"].items()}
    snapshot = saved._replace(
        state=algorithm.admit(saved.state, stream(seed, "join", name)),
        clients=wider(saved.clients),
        diagnostics={t: _padded(record) for t, record in saved.diagnostics.items()},
    )
    samples = [*facts["samples"], [0, 0]]
    known = facts_elsewhere(experiment, [*facts["names"], name], samples) | {"id": facts["id"]}
    record = RunRecord.create(out, experiment.toml(), known)
    try:
        record.rewrite(snapshot.history)
        record.checkpoint(snapshot)
    finally:
        record.release()
    return saved.t


def went_on(path: Path | str, out: Path | str) -> None:
    """Note that a run goes on in another folder: it is not to be resumed where it was."""
    record = RunRecord(path)
    record.reconfigure(record.config.read_text(encoding="utf-8"), continued=str(Path(out).resolve()))


def _padded(diagnostics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return diagnostics with a row, and of weights a column, of zeros for one more client."""
    axes = {"alpha": (0, 2)}
    return {
        name: np.pad(values, [(0, int(axis in axes.get(name, (0,)))) for axis in range(values.ndim)])
        for name, values in diagnostics.items()
    }


def run_on(
    fleet: Fleet, setting: Setting, experiment: Experiment, record: RunRecord, watch: Watch | None = None
) -> Result:
    """Run all rounds on clients that are elsewhere, with a checkpoint after each, and write the results."""
    facts = record.facts()
    names, samples = facts["names"], facts["samples"]
    schedule, trackers = experiment.schedule, trackers_of(experiment.machine.track)
    if experiment.privacy.noise:
        accountant()
    try:
        with tracking(trackers, experiment, record, setting.spec) as track:
            outcome = run_rounds(setting, fleet, len(names), schedule, record, watch, checkpoint_every=0, track=track)
        result = result_of(setting, experiment, names, samples, outcome, facts.get("scored_on", "test"))
        record.finish(result, resumable=True)
    except BaseException as error:
        record.fail(error)
        raise
    finally:
        fleet.close()
    return result
