"""From a configuration, or from Python objects, to a finished run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pfedla.algorithm import Algorithm
from pfedla.config import Experiment, Run, algorithm_name
from pfedla.data.datasets import load_dataset
from pfedla.data.files import load_column, load_folder
from pfedla.data.partition import Part, count_classes, partition
from pfedla.data.splits import Column
from pfedla.errors import ConfigError, DataError
from pfedla.fleet import Setting
from pfedla.layers import Groups, LayerSpec
from pfedla.models import make_model
from pfedla.rounds import participants as draw_participants
from pfedla.rundirectory import RunDirectory
from pfedla.simulation import Result, Watch, check_model, fleet_of, seeded, simulate
from pfedla.training import Samples, Training

__all__ = ["Federation", "federate", "prepare", "resume", "run", "run_experiment"]

Array = Tensor | np.ndarray
Client = tuple[Array, Array] | tuple[Array, Array, Array, Array]


class Federation(NamedTuple):
    """Everybody's data: what a simulation is run on."""

    train: list[Samples]
    test: list[Samples]
    shape: tuple[int, ...]  # of one input
    classes: tuple[str, ...]
    counts: np.ndarray  # (clients, classes, 2): training and test samples
    names: tuple[str, ...]  # of the clients
    note: str  # what the user should know about the data set


def federate(experiment: Experiment, progress: Callable[[str, int, int | None], None] | None = None) -> Federation:
    """Load an experiment's data and split it over the clients."""
    data = experiment.data
    test_samples = data.test_samples_per_client or None
    if data.folder:
        path = Path(data.folder)
        files = load_column(path) if path.is_file() else load_folder(path)
        clients: list[Client] = [
            (f.x, f.y) if f.x_test is None or f.y_test is None else (f.x, f.y, f.x_test, f.y_test) for f in files
        ]
        return _own_data(clients, [f.name for f in files], data.train_fraction, experiment.run.seed)
    directory = Path(data.data_dir) if data.data_dir else None
    dataset = load_dataset(data.dataset, directory, download=data.download, progress=progress)
    parts = partition(
        dataset.y,
        experiment.split,
        clients=data.clients,
        samples_per_client=data.samples_per_client,
        test_samples_per_client=test_samples,
        train_fraction=data.train_fraction,
        fewest_samples=data.fewest_samples or None,
        reuse=data.reuse,
        seed=experiment.run.seed,
    )
    return Federation(
        [Samples(dataset.x[part.train], dataset.y[part.train]) for part in parts],
        [Samples(dataset.x[part.test], dataset.y[part.test]) for part in parts],
        dataset.x.shape[1:],
        dataset.classes,
        count_classes([(dataset.y[part.train], dataset.y[part.test]) for part in parts], len(dataset.classes)),
        tuple(f"client-{client:0{len(str(len(parts) - 1))}}" for client in range(len(parts))),
        dataset.note,
    )


def run_experiment(
    experiment: Experiment,
    out: Path | None = None,
    *,
    overwrite: bool = False,
    watch: Watch | None = None,
    federation: Federation | None = None,
) -> Result:
    """Run an experiment; with `out`, leave a run directory there."""

    def directory() -> RunDirectory | None:
        return RunDirectory.create(out, experiment.toml(), overwrite=overwrite) if out else None

    return _run(experiment, federation or federate(experiment), directory, watch)


def resume(
    path: Path, watch: Watch | None = None, *, workers: int | None = None, federation: Federation | None = None
) -> Result:
    """Go on with an unfinished run where its checkpoint was taken; the result is as if it had never stopped."""
    directory = RunDirectory.open(path)
    changes = {} if workers is None else {"run": {"workers": workers}}
    experiment = Experiment.load(path / "config.toml", changes)
    return _run(experiment, federation or federate(experiment), lambda: directory, watch)


def run(
    algorithm: Algorithm[Any],
    model: Callable[[], nn.Module] | nn.Module,
    clients: Sequence[Client],
    rounds: int = 50,
    *,
    participants: int | None = None,
    training: Training | None = None,
    layers: Groups | None = None,
    train_fraction: float = 0.7,
    eval_every: int = 5,
    seed: int = 0,
    workers: int | None = None,
    device: str = "cpu",
    storage: Literal["memory", "disk"] = "memory",
    keep_models: bool = True,
    fleet: Literal["local", "ray"] = "local",
    watch: Watch | None = None,
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
        Each client's data: `(x, y)`, of which `train_fraction` is trained on and the rest kept for the test, or
        `(x, y, x_test, y_test)`. Arrays or tensors; labels are whole numbers from 0. Inputs of type uint8 are
        taken for pixels and scaled to [-1, 1]; others are used as they are. Images are `(n, channels, height, width)`.
    rounds
        How many rounds to run.
    participants
        How many clients take part in each round; all by default.
    training
        How clients train, `pfedla.Training(local_epochs=10, batch_size=32, lr=0.01)` by default.
    layers
        Modules to join into one layer, `{"encoder": "encoder.*"}`; by default each module is a layer.
    eval_every
        Rounds between evaluations; the last round is always evaluated.
    seed
        Decides every random number.
    workers
        Processes; one a core by default, 0 to work in this one. The result does not depend on it.
    device
        Where models are trained: `"cpu"`, `"cuda"`, ...
    storage
        Where all clients' models lie: in memory, or on disk, in temporary files, if they exceed it.
    keep_models
        Make every client's personalized model at the end. Without, there is no `Result.model`.
    fleet
        Where the clients run: on this machine, or on a Ray cluster (docs/scale.md). The result does not depend on it.
    watch
        Called after every round with a `pfedla.Progress`.

    Returns
    -------
    Result
        `summary`, `history`, `alpha`, and `model(i)`, the personalized model of client i.
    """
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm must be one such as pfedla.PFedLA(), not {algorithm!r}")
    names = [f"client-{i}" for i in range(len(clients))]
    federation = _own_data(clients, names, train_fraction, seed)
    settings = Run(
        seed=seed,
        rounds=rounds,
        participants=participants or 0,
        eval_every=eval_every,
        workers=-1 if workers is None else workers,
        device=device,
        storage=storage,
        keep_models=keep_models,
        fleet=fleet,
    )
    make = (lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else model
    template = seeded(make, seed)
    spec = LayerSpec.of(template, layers)
    setting = _setting(algorithm, template, spec, training or Training(), settings, federation)
    return _finish(setting, federation, settings, "own data", None, watch)


def prepare(experiment: Experiment, federation: Federation) -> Setting:
    """Make the model and check everything that can be checked before any work."""
    model, seed = experiment.model, experiment.run.seed
    template = seeded(lambda: make_model(model.name, federation.shape, len(federation.classes)), seed)
    spec = LayerSpec.of(template, model.layers)
    return _setting(experiment.algorithm, template, spec, experiment.training, experiment.run, federation)


def _run(
    experiment: Experiment,
    federation: Federation,
    directory: Callable[[], RunDirectory | None],
    watch: Watch | None,
) -> Result:
    """Run an experiment on its data; the directory is made only when nothing is left to refuse."""
    setting = prepare(experiment, federation)
    return _finish(setting, federation, experiment.run, experiment.data_name, directory(), watch)


def _setting(
    algorithm: Algorithm[Any],
    template: nn.Module,
    spec: LayerSpec,
    training: Training,
    run: Run,
    federation: Federation,
) -> Setting:
    """Put together what is fixed for a run; refuse what does not fit the data, the method or the machine."""
    try:
        torch.empty(0, device=run.device)
    except RuntimeError as error:
        raise ConfigError(f"run.device = {run.device!r} is not available: {str(error).partition('.')[0]}") from None
    fleet_of(run)
    setting = Setting(template, spec, algorithm.for_model(spec), training, run.seed, run.device)
    check_model(template, federation.train + federation.test)
    draw_participants(run.seed, 0, len(federation.train), run.participants or len(federation.train))
    return setting


def _finish(
    setting: Setting,
    federation: Federation,
    run: Run,
    dataset: str,
    directory: RunDirectory | None,
    watch: Watch | None,
) -> Result:
    """Simulate, and write the results."""
    facts = {
        "algorithm": algorithm_name(setting.algorithm),
        "dataset": dataset,
        "clients": len(federation.train),
        "rounds": run.rounds,
        "seed": run.seed,
    }
    result = simulate(setting, federation.train, federation.test, run, facts, directory, watch)
    if directory:
        kept = federation.names if run.keep_models else ()
        models = ((name, result.model(client).state_dict()) for client, name in enumerate(kept))
        directory.finish(result.summary, result.ledger, result.inspected, models)
    return result


def _own_data(clients: Sequence[Client], names: Sequence[str], train_fraction: float, seed: int) -> Federation:
    """Check clients' own arrays and divide those that bring no test data."""
    if not clients:
        raise DataError("there are no clients: give a list of (x, y), one a client")
    pairs: list[tuple[Array, Array, Array, Array]] = []
    for name, client in zip(names, clients, strict=True):
        if len(client) not in (2, 4):
            raise DataError(f"{name} must be (x, y) or (x, y, x_test, y_test), not {len(client)} values")
        x, y = client[0], client[1]
        _check_labels(name, x, y)
        if len(client) == 4:
            _check_labels(name, client[2], client[3])
            pairs.append(client)
            continue
        part = _divide(np.asarray(y), train_fraction, seed, name)
        pairs.append((x[part.train], y[part.train], x[part.test], y[part.test]))
    shapes = {tuple(x.shape[1:]) for pair in pairs for x in (pair[0], pair[2])}
    if len(shapes) > 1:
        raise DataError(f"all clients' inputs must have one shape, not {' and '.join(map(str, sorted(shapes)))}")
    labels = [(np.asarray(pair[1]), np.asarray(pair[3])) for pair in pairs]
    classes = 1 + max(int(part.max()) for pair in labels for part in pair)
    return Federation(
        [Samples(pair[0], pair[1]) for pair in pairs],
        [Samples(pair[2], pair[3]) for pair in pairs],
        shapes.pop(),
        tuple(map(str, range(classes))),
        count_classes(labels, classes),
        tuple(names),
        "",
    )


def _divide(labels: np.ndarray, train_fraction: float, seed: int, name: str) -> Part:
    try:
        return partition(
            labels,
            Column(),
            clients=1,
            samples_per_client=None,
            train_fraction=train_fraction,
            seed=seed,
            owner=np.zeros(len(labels), dtype=np.int64),
        )[0]
    except (DataError, ConfigError) as error:
        raise DataError(f"{name}: {error}") from None


def _check_labels(name: str, x: Array, y: Array) -> None:
    labels = np.asarray(y)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"{name}: labels must be whole numbers in one dimension, not {labels.dtype} {labels.shape}")
    if len(x) != len(labels):
        raise DataError(f"{name}: {len(x)} inputs but {len(labels)} labels")
    if not len(labels):
        raise DataError(f"{name} has no samples")
    if labels.min() < 0:
        raise DataError(f"{name}: label {labels.min()} is negative: labels are numbered from 0")
