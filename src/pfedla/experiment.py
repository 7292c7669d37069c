"""From a configuration, or from Python objects, to a finished run; and from its folder back to its result."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pfedla.algorithm import Algorithm
from pfedla.client import Setting
from pfedla.codec import Codec
from pfedla.config import Experiment, Machine, algorithm_name, read_tables
from pfedla.data.federation import Clients, Data, Federation, federate, named, own_data
from pfedla.errors import ConfigError, RunError
from pfedla.facts import facts_of, refuse_changes, reopened, settings_of
from pfedla.fleet import SimulatedFleet
from pfedla.layers import Groups, Layers, LayerSpec
from pfedla.models import PYTHON, Model, check_model, make_model, needs_nothing, seeded
from pfedla.objective import Classification, Objective
from pfedla.pool import Pool, local_pool
from pfedla.privacy import Privacy, accountant
from pfedla.record import RunRecord
from pfedla.report.live import watched
from pfedla.result import Result
from pfedla.rounds import Schedule, Watch, participants
from pfedla.rounds import run as run_rounds
from pfedla.storage import mapped
from pfedla.summary import result_of
from pfedla.trackers import Tracker, asked_for, trackers_of, tracking
from pfedla.training import Training

__all__ = [
    "assemble",
    "experiment_of",
    "federation_of",
    "load",
    "prepare",
    "resume",
    "run",
    "run_experiment",
    "setting_of",
]


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
    facts = facts_of(experiment, federation)
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
    return _run(setting, experiment, federation, reopened(path, experiment, federation), watch)


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
    if not all(type(size) is int and size > 0 for size in (*facts["shape"], facts["outputs"] or 1)):
        raise RunError(f"{record.path} is damaged: its inputs or outputs have no such sizes")
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
        0. Images of type uint8 are taken for pixels and scaled to [-1, 1]; all else is used as it is. Images are
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
    if watch is not None and not callable(watch):
        raise ConfigError(f"watch must be a function of a pfedla.Progress, not {watch!r:.100}")
    if out is not None and not isinstance(out, str | os.PathLike):
        raise ConfigError(f"out must be a folder's path, not {out!r:.100}")
    asked, trackers = asked_for(track)
    schedule = Schedule(seed, rounds, participants, eval_every)
    machine = Machine(workers, device, storage, fleet, keep_models=keep_models, track=asked)
    known_clients = named(clients)
    data = Data(train_fraction=train_fraction, validation=validation)
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
        schedule=schedule,
        machine=machine,
    )
    template = _first_model(model, seed)
    setting = _setting(experiment, template, LayerSpec.of(template, layers), federation)
    facts = facts_of(experiment, federation, layers)
    if resume and out is not None and not overwrite:
        known = RunRecord.unfinished(out, longer=True).facts()
        refuse_changes(out, known, experiment, "the arguments")
        if known.get("layers") != facts["layers"]:
            raise RunError(f"{out} holds a run with other layers: resume it with its own")
        record: RunRecord | None = reopened(out, experiment, federation)
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


def _first_model(model: Any, seed: int) -> nn.Module:
    """Make a run's first model; refuse what is neither a module nor makes one."""
    if isinstance(model, nn.Module):
        return seeded(lambda: copy.deepcopy(model), seed)
    if not callable(model) or not needs_nothing(model):
        raise ConfigError(f"model must be a torch.nn.Module or a function without arguments, not {model!r:.100}")
    return seeded(model, seed)


def assemble(experiment: Experiment, model: Callable[[], nn.Module], names: Sequence[str] = ()) -> Setting:
    """Put together what is fixed for a run of clients with these names, where there is no data yet."""
    template = _first_model(model, experiment.schedule.seed)
    setting = setting_of(experiment, template, LayerSpec.of(template, experiment.model.layers), names)
    setting.algorithm.check(experiment.training, len(names))
    return replace(setting, deployed=True)


def _setting(experiment: Experiment, template: nn.Module, spec: LayerSpec, federation: Federation) -> Setting:
    """Put together what is fixed for a run; refuse what does not fit the data, the method or the machine."""
    _pool_of(experiment.machine)
    trackers_of(experiment.machine.track)
    if experiment.privacy.noise:
        accountant()
    setting = setting_of(experiment, template, spec, federation.names)
    check_model(template, experiment.objective, federation.data, federation.names)
    participants(experiment.schedule, 0, len(federation.data))
    setting.algorithm.check(experiment.training, len(federation.data))
    return setting


def setting_of(experiment: Experiment, template: nn.Module, spec: LayerSpec, names: Sequence[str] = ()) -> Setting:
    """Put together what is fixed for a run with this model; refuse a device that is not there."""
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
    refuse_changes(path, record.facts(), experiment, record.config.name)
    schedule = experiment.schedule if rounds is None else replace(experiment.schedule, rounds=rounds)  # checks them
    if schedule.rounds < experiment.schedule.rounds:
        raise ConfigError(f"schedule.rounds = {rounds}: the run has {experiment.schedule.rounds}, and can only grow")
    return replace(experiment, schedule=schedule)


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
            with mapped(place), tracking(trackers, experiment, record, setting.spec, federation.groups) as track:
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
                record.reconfigure(experiment.toml(), settings=settings_of(experiment))
        samples = [[len(part) for part in own] for own in federation.data.values()]
        result = result_of(setting, experiment, federation.names, samples, outcome, federation.scored_on)
        if record:
            record.finish(result, resumable=machine.checkpoints)
    except BaseException as error:
        if record:
            record.fail(error)
        raise
    return result
