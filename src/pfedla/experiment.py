"""From a configuration, or from Python objects, to a finished run; and from its folder back to its result."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from pfedla import kernels
from pfedla.algorithm import Algorithm
from pfedla.client import Setting
from pfedla.codec import Codec
from pfedla.config import Experiment, Machine, algorithm_name, read_tables
from pfedla.data.federation import FEW, Clients, Data, Federation, federate, named, own_data
from pfedla.errors import ConfigError, RunError
from pfedla.fleet import Fleet, SimulatedFleet
from pfedla.layers import Groups, Layers, LayerSpec
from pfedla.ledger import Ledger
from pfedla.models import Model, check_model, make_model, model_name, seeded
from pfedla.objective import Classification, Objective
from pfedla.pool import Pool, local_pool
from pfedla.privacy import DELTA, Privacy, accountant, epsilon
from pfedla.randomness import stream
from pfedla.record import RunRecord
from pfedla.report.live import watched
from pfedla.result import Result
from pfedla.rounds import Outcome, Schedule, Track, Watch, participants
from pfedla.rounds import run as run_rounds
from pfedla.storage import mapped
from pfedla.trackers import Tracked, Tracker, asked_for, tracked, trackers_of
from pfedla.training import Training
from pfedla.version import __version__, commit

__all__ = [
    "PYTHON",
    "assemble",
    "experiment_of",
    "federation_of",
    "load",
    "open_run",
    "prepare",
    "resume",
    "run",
    "run_experiment",
    "run_on",
    "widen_run",
]

ROUNDS = "schedule.rounds"
PYTHON = "python"  # the model of a run whose model and data came from Python


def federation_of(experiment: Experiment, progress: Callable[[str, int, int | None], None] | None = None) -> Federation:
    """Load an experiment's data and split it over the clients."""
    machine = experiment.machine
    return federate(
        experiment.data,
        experiment.split,
        experiment.schedule.seed,
        objective=experiment.objective,
        data_dir=machine.data_dir,
        download=machine.download,
        progress=progress,
    )


def run_experiment(
    experiment: Experiment,
    out: Path | str | None = None,
    *,
    overwrite: bool = False,
    watch: Watch | None = None,
    federation: Federation | None = None,
) -> Result:
    """Run an experiment; with `out`, leave a run's record there."""
    federation = federation or federation_of(experiment)
    setting = prepare(experiment, federation)
    facts = _facts(experiment, federation)
    record = RunRecord.create(out, experiment.toml(), facts, overwrite=overwrite) if out else None
    return _run(setting, experiment, federation, record, watch)


def resume(
    path: Path | str,
    watch: Watch | None = None,
    *,
    workers: int | None = None,
    rounds: int | None = None,
    track: Sequence[str] | None = None,
    federation: Federation | None = None,
) -> Result:
    """Resume an unfinished run from its checkpoint; the result is as if it had never stopped.

    With `rounds` a run, complete or not, is made longer. Its configuration and data must be as they were; `workers`
    and `track` may differ.
    """
    experiment = experiment_of(path, rounds)
    if workers is not None:
        experiment = replace(experiment, machine=replace(experiment.machine, workers=workers))
    if track is not None:
        machine = replace(experiment.machine, track=track)  # type: ignore[arg-type]  # which checks it
        experiment = replace(experiment, machine=machine)
    federation = federation or federation_of(experiment)
    setting = prepare(experiment, federation)
    return _run(setting, experiment, federation, _reopened(path, experiment, federation), watch)


def load(path: Path | str, model: Callable[[], nn.Module] | nn.Module | None = None) -> Result:
    """Read a complete run: the result that it returned when it ended.

    `model` is needed to build the personalized models of a run whose model came from Python.
    """
    record = RunRecord(path)
    if not record.complete:
        raise RunError(f"{record.path} holds no complete run")
    facts, template, groups = record.facts(), None, None
    kinds = {"names": list, "shape": list, "outputs": int}
    if missing := {name for name, kind in kinds.items() if not isinstance(facts.get(name), kind)}:
        raise RunError(
            f"{record.path} is damaged or of an earlier version: nothing tells its {', '.join(sorted(missing))}"
        )
    tables = read_tables(record.config)  # a method or an objective may have come from where we are not
    experiment = Experiment.from_tables({name: tables[name] for name in ("model", "schedule") if name in tables})
    if model is not None:
        template, groups = _first_model(model, experiment.schedule.seed), facts.get("layers")
    elif facts.get("model") != PYTHON:
        template, groups = _template(experiment, tuple(facts["shape"]), facts["outputs"]), experiment.model.layers
    spec, names = LayerSpec.of(template, groups) if template is not None else None, tuple(facts["names"])
    models: Callable[[], Layers] = dict
    if template is not None and spec is not None:
        record.freeze(template, spec)
        models = partial(record.models, template, spec, len(names))
    diagnostics = {name: values for name, values in record.diagnostics().items() if name != "layers"}
    return Result(record.summary(), record.history(), diagnostics, record.ledger(), names, template, spec, models)


def run(
    algorithm: Algorithm[Any],
    model: Callable[[], nn.Module] | nn.Module,
    clients: Clients,
    rounds: int = 50,
    *,
    participants: int | None = None,
    training: Training | None = None,
    codec: Codec | None = None,
    privacy: Privacy | None = None,
    objective: Objective | None = None,
    layers: Groups | None = None,
    train_fraction: float = 0.7,
    validation: float | None = None,
    eval_every: int = 5,
    seed: int = 0,
    workers: int | None = None,
    device: str = "cpu",
    storage: Literal["memory", "disk"] = "memory",
    keep_models: bool = True,
    fleet: Literal["local", "ray"] = "local",
    out: Path | str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    track: str | Tracker | Sequence[str | Tracker] = (),
    watch: Watch | None = None,
    progress: bool | None = None,
) -> Result:
    """Run a federation on your own data and model.

    Parameters
    ----------
    algorithm
        The method, such as `pfedla.PFedLA(retain=1)`.
    model
        A function that makes the common first model (called once, with torch's generator seeded by `seed`),
        or a module, which is copied.
    clients
        Each client's data, in a list or, by name, in a dictionary: `(x, y)`, of which `train_fraction` is trained on
        and the rest kept for the test, or `(x, y, x_test, y_test)`. Arrays or tensors; labels are whole numbers from
        0. Inputs of type uint8 are taken for pixels and scaled to [-1, 1]; others are used as they are. Images are
        `(n, channels, height, width)`.
    rounds
        How many rounds to run.
    participants
        How many clients take part in each round; all by default.
    training
        How clients train, `pfedla.Training(local_epochs=10, batch_size=32, lr=0.01)` by default.
    codec
        How layers travel, `pfedla.Codec(up="int8", down="float16")`; as they are by default.
    privacy
        How far uploads are clipped and noised at the clients, `pfedla.Privacy(clip=1.0, noise=0.5)`; not by default.
    objective
        What is trained for and measured: `pfedla.Classification()` by default, `Regression`, `Binary`, `MultiLabel`,
        `PerPosition`, or `Custom` with a loss and a metric of your own.
    layers
        Modules to join into one layer, `{"encoder": "encoder.*"}`; by default each module is a layer.
    train_fraction
        The share of a client's samples to train on, if it brings no test data.
    validation
        Hold out this share of the training samples and score on it, not on test samples: to choose settings by.
    eval_every
        Rounds between evaluations; the last round is always evaluated.
    seed
        Decides every random number.
    workers
        Processes; one per core by default, 0 to work in this one. The result does not depend on it.
    device
        Where models are trained: `"cpu"`, `"cuda"`, ...
    storage
        Where all clients' models lie: in memory, or on disk, in temporary files, if they exceed it.
    keep_models
        Make every client's personalized model at the end. Without, there is no `Result.model`.
    fleet
        Where the clients run: on this machine, or on a Ray cluster (docs/scale.md). The result does not depend on it.
    out
        A folder for the run's record, which `pfedla.load` reads; none by default.
    overwrite
        Replace the run that `out` holds.
    resume
        Resume the unfinished run that `out` holds, which was started with the same arguments.
    track
        Where figures, weights and settings go as the run goes on: `"tensorboard"`, `"mlflow"`, `"wandb"`, a
        `pfedla.Tracker` of your own, or several of them.
    watch
        Called after every round with a `pfedla.Progress`. If it returns False, that round is the last: the result, and
        what lies in `out`, are those of a run of so many rounds.
    progress
        Show how the run goes: by default in a terminal and in a notebook.

    Returns
    -------
    Result
        `summary`, `history`, `alpha`, and `model(client)`, a client's personalized model, by number or name.
    """
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm must be one such as pfedla.PFedLA(), not {algorithm!r}")
    objective = objective or Classification()
    if not isinstance(objective, Objective):
        raise ConfigError(f"objective must be one such as pfedla.Regression(), not {objective!r}")
    asked, trackers = asked_for(track)
    known_clients = named(clients)
    data = Data(clients=max(1, len(known_clients)), train_fraction=train_fraction, validation=validation)
    given, names = list(known_clients.values()), list(known_clients)
    federation = own_data(given, names, train_fraction, seed, objective, validation=validation)
    experiment = Experiment(
        algorithm,
        data,
        model=Model(PYTHON),
        objective=objective,
        training=training or Training(),
        codec=codec or Codec(),
        privacy=privacy or Privacy(),
        schedule=Schedule(seed, rounds, participants, eval_every),
        machine=Machine(workers, device, storage, fleet, keep_models=keep_models, track=asked),
    )
    template = _first_model(model, seed)
    setting = _setting(experiment, template, LayerSpec.of(template, layers), federation)
    facts = _facts(experiment, federation, layers)
    if resume and out is not None and not overwrite:
        known = RunRecord.unfinished(out, longer=True).facts()
        _refuse_changes(out, known, experiment, "the arguments")
        if known.get("layers") != facts["layers"]:
            raise RunError(f"{out} holds a run with other layers: resume it with its own")
        record: RunRecord | None = _reopened(out, experiment, federation)
    elif resume:
        raise ConfigError("resume needs the folder of an unfinished run (out), and does not go with overwrite")
    else:
        record = RunRecord.create(out, experiment.toml(), facts, overwrite=overwrite) if out else None
    with watched(algorithm_name(algorithm), rounds, watch, progress, federation.note) as told:
        return _run(setting, experiment, federation, record, told, trackers)


def prepare(experiment: Experiment, federation: Federation) -> Setting:
    """Make the model and check everything that can be checked before any work."""
    template = _template(experiment, federation.shape, federation.outputs)
    return _setting(experiment, template, LayerSpec.of(template, experiment.model.layers), federation)


def _template(experiment: Experiment, shape: tuple[int, ...], outputs: int) -> nn.Module:
    return seeded(lambda: make_model(experiment.model.name, shape, outputs), experiment.schedule.seed)


def _first_model(model: Callable[[], nn.Module] | nn.Module, seed: int) -> nn.Module:
    return seeded((lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else model, seed)


def assemble(experiment: Experiment, model: Callable[[], nn.Module], names: Sequence[str] = ()) -> Setting:
    """Put together what is fixed for a run of clients with these names, where there is no data yet."""
    template = _first_model(model, experiment.schedule.seed)
    setting = _assemble(experiment, template, LayerSpec.of(template, experiment.model.layers), names)
    return replace(setting, deployed=True)


def _setting(experiment: Experiment, template: nn.Module, spec: LayerSpec, federation: Federation) -> Setting:
    """Put together what is fixed for a run; refuse what does not fit the data, the method or the machine."""
    _pool_of(experiment.machine)
    trackers_of(experiment.machine.track)
    if experiment.privacy.noise:
        accountant()
    setting = _assemble(experiment, template, spec, federation.names)
    check_model(template, experiment.objective, federation.data, federation.names)
    participants(experiment.schedule, 0, len(federation.data))
    return setting


def _assemble(experiment: Experiment, template: nn.Module, spec: LayerSpec, names: Sequence[str] = ()) -> Setting:
    device, seed = experiment.machine.device, experiment.schedule.seed
    try:
        float(torch.ones(1, device=device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"machine.device = {device!r} is not available: {str(error).partition('.')[0]}") from None
    algorithm, training, objective = experiment.algorithm.for_model(spec), experiment.training, experiment.objective
    codec, privacy = experiment.codec, experiment.privacy
    return Setting(template, spec, algorithm, training, seed, device, objective, codec, tuple(names), privacy)


def _pool_of(machine: Machine) -> Callable[..., Pool]:
    """Return what makes the pool that a run asks for; refuse one whose extra is not installed."""
    if machine.fleet == "local":
        return local_pool
    try:
        from pfedla.ray import ray_pool
    except ImportError as error:
        raise ConfigError(f"machine.fleet = {machine.fleet!r}: {error}") from None
    return partial(ray_pool, address=machine.ray_address)


def experiment_of(path: Path | str, rounds: int | None = None) -> Experiment:
    """Return the configuration of a run to be resumed, with more `rounds` if given; refuse one that was changed."""
    record = RunRecord.unfinished(path, longer=rounds is not None)
    if record.facts().get("model") == PYTHON:
        raise RunError(
            f"the run in {record.path} was started from Python, with a model and data of its own: "
            "pfedla.run(..., out=path, resume=True) resumes it"
        )
    experiment = Experiment.load(record.config)
    _refuse_changes(path, record.facts(), experiment, record.config.name)
    if rounds is not None and rounds < experiment.schedule.rounds:
        raise ConfigError(f"schedule.rounds = {rounds}: the run has {experiment.schedule.rounds}, and can only grow")
    schedule = experiment.schedule if rounds is None else replace(experiment.schedule, rounds=rounds)
    return replace(experiment, schedule=schedule)


def _refuse_changes(path: Path | str, known: dict[str, Any], experiment: Experiment, where: str) -> None:
    """Refuse settings other than those that a run was started with, but for more rounds."""
    before, now = _flat(known.get("settings")), _flat(json.loads(_settings(experiment)))
    changed = [key for key in sorted(before.keys() | now) if before.get(key) != now.get(key)]
    if _longer(known, experiment):
        changed.remove(ROUNDS)
    if changed:
        words = [f"{key} is {now.get(key, 'not set')} and was {before.get(key, 'not set')}" for key in changed]
        raise RunError(f"the run in {path} was started with other settings than {where} has: {'; '.join(words)}")


def _longer(known: dict[str, Any], experiment: Experiment) -> bool:
    rounds = _flat(known.get("settings")).get(ROUNDS)
    return isinstance(rounds, int) and experiment.schedule.rounds > rounds


def _reopened(path: Path | str, experiment: Experiment, federation: Federation) -> RunRecord:
    """Open a run's record to continue it, if its data are still the same."""
    known, data = RunRecord(path).facts(), federation.fingerprint()
    if known.get("data") != data:
        raise RunError(f"the run in {path} was started with other data: they have changed since")
    if known.get("fingerprint") != _fingerprint(experiment, data):
        raise RunError(f"the run in {path} was started with other settings or data than it has now")
    if not _longer(known, experiment):
        return RunRecord.resume(path)
    return RunRecord.resume(path, experiment.toml(), settings=json.loads(_settings(experiment)))


def _settings(experiment: Experiment) -> str:
    """Return the settings that decide the result as JSON."""
    return json.dumps(experiment.decisive(), sort_keys=True, default=str)


def _fingerprint(experiment: Experiment, data: str) -> str:
    """Return a checksum of all that decides a run, with that of its data, but for its rounds, which may grow."""
    decisive = {key: value for key, value in _flat(json.loads(_settings(experiment))).items() if key != ROUNDS}
    return hashlib.sha256(json.dumps([decisive, data], sort_keys=True).encode()).hexdigest()


def _flat(tables: Any) -> dict[str, Any]:
    """Return settings by their full names, as far as these are tables of settings."""
    sections = tables.items() if isinstance(tables, dict) else ()
    found = {section: table for section, table in sections if isinstance(table, dict)}
    return {f"{section}.{key}": value for section, table in found.items() for key, value in table.items()}


def _facts(experiment: Experiment, federation: Federation, layers: Groups | None = None) -> dict[str, Any]:
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
        "headline": experiment.objective.headline,
        "higher_is_better": experiment.objective.higher_is_better,
        "percent": experiment.objective.percent,
        "settings": json.loads(_settings(experiment)),
        "data": data,
        "fingerprint": _fingerprint(experiment, data),
    }
    known: dict[str, Any] = json.loads(json.dumps(facts))
    return known


def _holdings(counts: np.ndarray) -> list[dict[str, list[int]]]:
    """Return each client's classes with its training and test samples of them."""
    return [{str(c): row[c].tolist() for c in np.flatnonzero(row.any(1)).tolist()} for row in counts]


def open_run(
    experiment: Experiment, names: Sequence[str], examples: Sequence[int], out: Path | str, *, resume: bool = False
) -> RunRecord:
    """Open the record of a run whose clients, known by name and number of examples, have their data elsewhere."""
    facts = _elsewhere(experiment, names, [[count, 0] for count in examples])
    if not resume:
        return RunRecord.create(out, experiment.toml(), facts)
    known = RunRecord.unfinished(out).facts()
    _refuse_changes(out, known, experiment, "the deployment")
    if known.get("names") != facts["names"]:
        raise RunError(f"the run in {out} was started with other clients: {', '.join(known.get('names', []))}")
    return RunRecord.resume(out)


def widen_run(
    path: Path | str, experiment: Experiment, name: str, setting: Setting, fleet: Any, wider: Any, out: Path | str
) -> int:
    """Copy a run whose clients are elsewhere, complete or not, to `out` with a row for one more; return its round.

    It stays the same run, under the same id, and can be resumed. `experiment` has the settings from then on; `fleet` is
    like the snapshot of the clients that the run has, and `wider` makes that of one more from it.
    """
    old, n = RunRecord(path), experiment.data.clients - 1
    facts = old.facts()
    if old.state == "running":
        raise RunError(f"the run in {old.path} is under way: stop it first")
    if len(facts["names"]) != n:
        raise RunError(f"the run in {old.path} has {len(facts['names'])} clients, not {n}")
    before = replace(experiment, data=replace(experiment.data, clients=n))
    _refuse_changes(path, facts, before, "the deployment")
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
    known = _elsewhere(experiment, [*facts["names"], name], samples) | {"id": facts["id"]}
    record = RunRecord.create(out, experiment.toml(), known)
    try:
        record.rewrite(snapshot.history)
        record.checkpoint(snapshot)
    finally:
        record.release()
    return saved.t


def _padded(diagnostics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return diagnostics with a row, and of weights a column, of zeros for one more client."""
    axes = {"alpha": (0, 2)}
    return {
        name: np.pad(values, [(0, int(axis in axes.get(name, (0,)))) for axis in range(values.ndim)])
        for name, values in diagnostics.items()
    }


def _elsewhere(experiment: Experiment, names: Sequence[str], samples: list[list[int]]) -> dict[str, Any]:
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
        "settings": json.loads(_settings(experiment)),
        "data": "",  # it lies with the clients
        "fingerprint": _fingerprint(experiment, ""),
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
        with _tracked(trackers, experiment, record, setting.spec) as track:
            outcome = run_rounds(setting, fleet, len(names), schedule, record, watch, checkpoint_every=0, track=track)
        result = _result(setting, experiment, names, samples, outcome)
        record.finish(result, resumable=True)
    except BaseException as error:
        record.fail(error)
        raise
    finally:
        fleet.close()
    return result


def _tracked(
    trackers: Sequence[Tracker],
    experiment: Experiment,
    record: RunRecord | None,
    spec: LayerSpec,
    groups: Sequence[int] | None = None,
) -> AbstractContextManager[Track | None]:
    """Have trackers told of a run, if there are any."""
    if not trackers:
        return nullcontext()
    folder = record.path.resolve() if record else None
    known = record.facts()["id"] if record else uuid.uuid4().hex
    name = folder.name if folder else f"{algorithm_name(experiment.algorithm)}-seed{experiment.schedule.seed}"
    run = Tracked(known, name, folder, experiment.toml(), _flat(experiment.tables()))
    return tracked(trackers, run, experiment.schedule, spec.names, groups)


def _run(
    setting: Setting,
    experiment: Experiment,
    federation: Federation,
    record: RunRecord | None,
    watch: Watch | None,
    trackers: Sequence[Tracker] = (),
) -> Result:
    """Run all rounds on a simulated fleet, and write the results."""
    machine, schedule, n = experiment.machine, experiment.schedule, len(federation.data)
    place = None if machine.storage == "memory" else record.path if record else Path(tempfile.gettempdir())
    try:
        pool = _pool_of(machine)(setting, federation.data, machine.workers)
        try:
            trackers = [*trackers_of(machine.track), *trackers]
            with mapped(place), _tracked(trackers, experiment, record, setting.spec, federation.groups) as track:
                fleet = SimulatedFleet(setting, federation.data, pool)
                every = machine.checkpoint_every if machine.checkpoints else None
                how: dict[str, Any] = {"checkpoint_every": every, "models": machine.keep_models, "track": track}
                outcome = run_rounds(setting, fleet, n, schedule, record, watch, **how)
        finally:
            pool.close()
        ended = outcome.history[-1]["round"]
        if ended < schedule.rounds:  # its watcher has seen enough
            experiment = replace(experiment, schedule=replace(schedule, rounds=ended))
            if record:
                record.reconfigure(experiment.toml(), settings=json.loads(_settings(experiment)))
        samples = [[len(part) for part in own] for own in federation.data.values()]
        result = _result(setting, experiment, federation.names, samples, outcome, federation.scored_on)
        if record:
            record.finish(result, resumable=machine.checkpoints)
    except BaseException as error:
        if record:
            record.fail(error)
        raise
    return result


def _result(
    setting: Setting,
    experiment: Experiment,
    names: Sequence[str],
    samples: Sequence[Sequence[int]],  # each client's: to train on, to be scored on; 0 if that is not known
    outcome: Outcome,
    scored_on: str = "test",
) -> Result:
    """Sum a run up. The headline is the last round; the best round stands beside it as what it is."""
    history, ledger, objective = outcome.history, outcome.ledger, experiment.objective
    headline = f"{objective.headline}_mean"
    known = [record for record in history if record[headline] is not None]
    pick = max if objective.higher_is_better else min
    best = pick(known, key=lambda record: record[headline]) if known else {"round": None, headline: None}
    passes = (
        int(np.array([train for train, _ in samples])[ledger.arrays()["client"]].sum()) * setting.training.local_epochs
    )
    beside = ("round", "bytes_down", "bytes_up", "seconds", "clients", "missing")
    summary = {
        "algorithm": algorithm_name(experiment.algorithm),
        "dataset": "own data" if experiment.model.name == PYTHON else experiment.data.name,
        "clients": len(names),
        "rounds": experiment.schedule.rounds,
        "seed": experiment.schedule.seed,
        "scored_on": scored_on,
        "headline": objective.headline,
        "higher_is_better": objective.higher_is_better,
        "percent": objective.percent,
        **{key: figure for key, figure in history[-1].items() if key not in beside},
        f"{objective.headline}_weighted": _weighted(history[-1]["clients"].get(objective.headline, []), samples),
        "few_test_samples": sum(0 < test < FEW for _, test in samples),
        "best_round": best["round"],
        f"best_round_{headline}": best[headline],
        "bytes_down": ledger.down,
        "bytes_up": ledger.up,
        "overhead_down": ledger.overhead_down,
        "overhead_up": ledger.overhead_up,
        **_guarantee(setting, ledger),
        "seconds": round(outcome.seconds, 3),
        "samples_per_second": round(passes / outcome.seconds, 1),
        "version": __version__,
        "commit": commit(),
        "settings": json.loads(_settings(experiment)),
        "compiled_loop": kernels.level(),
    }
    template, spec = setting.template, setting.spec
    models: Callable[[], Layers] = partial(dict, outcome.personalized)
    return Result(summary, history, outcome.diagnostics, ledger, tuple(names), template, spec, models)


def _guarantee(setting: Setting, ledger: Ledger) -> dict[str, Any]:
    """Return what a client's uploads reveal of it at most, if they are clipped: of who was asked most often."""
    privacy, algorithm = setting.privacy, setting.algorithm
    if privacy.clip is None:
        return {}
    asked = np.bincount(ledger.arrays()["client"], minlength=1).max()
    uploads = int(asked) if any(map(algorithm.uploads, setting.spec.names)) else 0
    delta = privacy.delta or DELTA
    spent = 0.0 if not uploads else epsilon(uploads, privacy.noise, delta) if privacy.noise else None
    return {"epsilon": spent, "delta": delta, "uploads_per_client": uploads}


def _weighted(values: list[float | None], samples: Sequence[Sequence[int]]) -> float | None:
    """Return the mean over clients weighted by the samples they are scored on; None if nobody has a value."""
    known = [(value, test) for value, (_, test) in zip(values, samples, strict=False) if value is not None]
    total = sum(test for _, test in known)
    return sum(value * test for value, test in known) / total if total else None
