"""Everybody's data: data sets that are split over clients, and data that clients bring themselves."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfedla.data.datasets import DATASETS, load_dataset
from pfedla.data.files import load_column, load_folder
from pfedla.data.partition import Part, count_classes, partition
from pfedla.data.shifts import Shift, blocks_of, shift_words, shifted
from pfedla.data.splits import Column, Groups, Split
from pfedla.errors import ConfigError, DataError, unknown_name
from pfedla.objective import Classification, Objective
from pfedla.settings import Count, Positive, Range, Settings
from pfedla.training import ClientData, Samples

__all__ = ["Client", "Data", "Federation", "federate", "own_data"]

Array = Tensor | np.ndarray
Client = tuple[Array, Array] | tuple[Array, Array, Array, Array]
MOST_CLASSES = 100_000  # a label beyond is a mistake, and each would take memory
LONGEST_NAME = 200
Fraction = Annotated[float, Range(above=0, below=1)]
AtLeastTwo = Annotated[int, Range(least=2)]
GROUPS = 3  # of clients whose data are shifted


@dataclass(frozen=True)
class Data(Settings):
    """Which samples, and how many each client holds."""

    section: ClassVar[str] = "data"
    dataset: str = "fashion-mnist-10k"
    folder: str | None = None  # own data: a folder with one .npz (x, y) per client, or one .npz (x, y, client)
    clients: Count = 10
    samples_per_client: AtLeastTwo = 200
    test_samples_per_client: Count | None = None  # by default the rest of the samples, 1 - train_fraction of them
    train_fraction: Fraction = 0.7
    validation: Fraction | None = None  # hold out so much of the training samples, and score on that: never on test
    fewest_samples: AtLeastTwo | None = None  # clients of unequal size, from this to samples_per_client
    reuse: bool = False  # two clients may hold the same sample: for more clients than the data set serves
    size_power: Positive | None = None  # sizes by a power law: of samples_per_client, rank k holds 1 / k ** size_power
    shift: Shift | None = None  # what differs by hidden group of clients, beside what the split does
    shift_groups: Count | None = None  # how many groups; 3 by default

    def __post_init__(self) -> None:
        """Refuse a data set that there is not."""
        super().__post_init__()
        if self.dataset not in DATASETS:
            raise unknown_name("data set", self.dataset, DATASETS)
        if self.shift_groups is not None and self.shift is None:
            raise ConfigError(f"data.shift_groups = {self.shift_groups} needs data.shift: none, labels, inputs or both")
        if self.shift is not None and self.folder is not None:
            raise ConfigError("data.shift is for data sets: own data, data.folder, stay as they are")

    @property
    def name(self) -> str:
        """What the data is called: the data set's name, or the folder's."""
        return Path(self.folder).stem if self.folder else self.dataset


class Federation(NamedTuple):
    """Everybody's data: what a simulation is run on."""

    data: dict[int, ClientData]
    shape: tuple[int, ...]  # of one input
    outputs: int  # that a model needs: one per class, or per value of a target
    classes: tuple[str, ...]  # none if targets are no labels
    counts: np.ndarray  # (clients, classes, 2): training samples, and those that models are scored on
    names: tuple[str, ...]  # of the clients
    note: str = ""  # what the user should know about the data set
    scored_on: str = "test"  # or "validation"
    groups: tuple[int, ...] | None = None  # the hidden group of each client, if split or shift form any
    shifts: tuple[str, ...] = ()  # what each group has, in words, if there is a shift

    def fingerprint(self) -> str:
        """Return a checksum of all clients' samples and names: the same data, split the same way, has the same."""
        found = hashlib.sha256(json.dumps(self.names).encode())
        for client, parts in self.data.items():
            for samples in parts:
                x, y, image = samples.parts()
                found.update(f"{client} {x.dtype} {x.shape} {y.dtype} {y.shape} {image}".encode())
                found.update(x.data)
                found.update(y.data)
        return found.hexdigest()


def federate(
    settings: Data,
    split: Split,
    seed: int,
    *,
    objective: Objective | None = None,
    data_dir: str | None = None,
    download: bool = False,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> Federation:
    """Load data and split it over the clients."""
    objective = objective or Classification()
    by_class = objective.by_class
    if settings.folder:
        path = Path(settings.folder)
        files = load_column(path, labels=by_class) if path.is_file() else load_folder(path, labels=by_class)
        clients: list[Client] = [
            (f.x, f.y) if f.x_test is None or f.y_test is None else (f.x, f.y, f.x_test, f.y_test) for f in files
        ]
        names = [f.name for f in files]
        return own_data(clients, names, settings.train_fraction, seed, objective, validation=settings.validation)
    if not by_class:
        raise ConfigError(
            f"data.dataset = {settings.dataset!r} has labels of classes: set objective.name to classification, "
            "or data.folder to own data"
        )
    dataset = load_dataset(settings.dataset, Path(data_dir) if data_dir else None, download=download, progress=progress)
    x, y, classes = dataset.x, dataset.y, dataset.classes
    parts = partition(
        y,
        split,
        clients=settings.clients,
        samples_per_client=settings.samples_per_client,
        test_samples_per_client=settings.test_samples_per_client,
        train_fraction=settings.train_fraction,
        fewest_samples=settings.fewest_samples,
        size_power=settings.size_power,
        reuse=settings.reuse,
        seed=seed,
    )
    groups, shifts = _grouped(settings, split, len(classes), x.shape[1:])

    def held(client: int, part: str, some: np.ndarray) -> Samples:
        kind, group = settings.shift or "none", groups[client] if groups else 0
        return Samples(*shifted(kind, x[some], y[some], group, len(classes), seed, part, client))

    data = {
        client: ClientData(held(client, "train", part.train), held(client, "test", part.test))
        for client, part in enumerate(parts)
    }
    federation = Federation(
        data,
        x.shape[1:],
        len(classes),
        classes,
        _counted(data, len(classes)),
        tuple(f"client-{client:0{len(str(len(parts) - 1))}}" for client in range(len(parts))),
        dataset.note,
        groups=groups,
        shifts=shifts,
    )
    return _validated(federation, settings.validation, seed)


def _grouped(
    settings: Data, split: Split, classes: int, shape: tuple[int, ...]
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Return the hidden group of each client, of the shift or else of the split, and what a shift gives each group."""
    if settings.shift is not None:
        count = settings.shift_groups or GROUPS
        words = shift_words(settings.shift, count, classes, shape)
        return tuple(blocks_of(settings.clients, count).tolist()), tuple(words)
    return (tuple(split.group_of(settings.clients).tolist()) if isinstance(split, Groups) else None), ()


def own_data(
    clients: Sequence[Client],
    names: Sequence[str],
    train_fraction: float,
    seed: int,
    objective: Objective | None = None,
    *,
    validation: float | None = None,
) -> Federation:
    """Check clients' own arrays and divide those that bring no test data."""
    objective = objective or Classification()
    by_class = objective.by_class
    if not clients:
        raise DataError("there are no clients: give a list of (x, y), one per client")
    _check_names(names)
    quartets: list[tuple[Array, Array, Array, Array]] = []
    for name, client in zip(names, clients, strict=True):
        if len(client) not in (2, 4):
            raise DataError(f"{name} must be (x, y) or (x, y, x_test, y_test), not {len(client)} values")
        x, y = client[0], client[1]
        _check(name, x, y, by_class)
        if len(client) == 4:
            _check(name, client[2], client[3], by_class)
            quartets.append(client)
            continue
        part = _divide(np.asarray(y) if by_class else np.zeros(len(y), np.int64), train_fraction, seed, name)
        quartets.append((x[part.train], y[part.train], x[part.test], y[part.test]))
    inputs, targets = ({tuple(part.shape[1:]) for q in quartets for part in q[first::2]} for first in (0, 1))
    for what, shapes in (("inputs", inputs), ("targets", targets)):
        if len(shapes) > 1:
            raise DataError(f"all clients' {what} must have one shape, not {' and '.join(map(str, sorted(shapes)))}")
    labels = [(np.asarray(q[1]), np.asarray(q[3])) for q in quartets]
    outputs = objective.outputs([part for pair in labels for part in pair])
    classes = outputs if by_class else 0
    federation = Federation(
        {i: ClientData(Samples(q[0], q[1]), Samples(q[2], q[3])) for i, q in enumerate(quartets)},
        inputs.pop(),
        outputs,
        tuple(map(str, range(classes))),
        count_classes(labels, classes) if by_class else np.zeros((len(quartets), 0, 2), np.int64),
        tuple(names),
    )
    return _validated(federation, validation, seed)


def _validated(federation: Federation, share: float | None, seed: int) -> Federation:
    """Return the federation with a share of every client's training samples, by class, in place of its test samples."""
    if share is None:
        return federation
    data: dict[int, ClientData] = {}
    for client, (train, _) in federation.data.items():
        labels = train.targets.numpy() if federation.classes else np.zeros(len(train), np.int64)
        part = _divide(labels, 1 - share, seed, f"{federation.names[client]}, data.validation = {share:g}")
        data[client] = ClientData(*(train.subset(torch.from_numpy(some)) for some in part))
    counts = _counted(data, len(federation.classes)) if federation.classes else federation.counts
    return federation._replace(data=data, counts=counts, scored_on="validation")


def _counted(data: dict[int, ClientData], classes: int) -> np.ndarray:
    """Return the samples of each class that clients have, `(clients, classes, 2)`."""
    return count_classes([(train.targets.numpy(), test.targets.numpy()) for train, test in data.values()], classes)


def _check_names(names: Sequence[str]) -> None:
    """Refuse names that no table, file or message could show."""
    for name in names:
        try:
            name.encode()
            fault = "must not be empty" if not name.strip() else "has characters that cannot be printed"
            fault = "" if name.strip() and name.isprintable() else fault
        except UnicodeEncodeError:
            fault = "is no text that UTF-8 could write"
        if len(name) > LONGEST_NAME:
            fault = f"is longer than {LONGEST_NAME} characters"
        if fault:
            raise DataError(f"the client's name {name[:40]!a} {fault}")
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"two clients have the name {twice[0]!r}")


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
        raise type(error)(f"{name}: {error}") from None


def _check(name: str, x: Array, y: Array, by_class: bool) -> None:
    targets = np.asarray(y)
    kind = np.asarray(x[:0] if x.ndim else x).dtype
    if x.ndim < 2 or kind.kind not in "uifb":
        raise DataError(f"{name}: inputs must be numbers of shape (samples, ...), not {kind} {tuple(x.shape)}")
    if by_class and (targets.ndim != 1 or targets.dtype.kind not in "iu"):
        raise DataError(f"{name}: labels must be whole numbers in one dimension, not {targets.dtype} {targets.shape}")
    if targets.dtype.kind not in "uifb" or not targets.ndim:
        raise DataError(f"{name}: targets must be numbers, one or more per sample, not {targets.dtype} {targets.shape}")
    if len(x) != len(targets):
        raise DataError(f"{name}: {len(x)} inputs but {len(targets)} {'labels' if by_class else 'targets'}")
    if not len(targets):
        raise DataError(f"{name} has no samples")
    if by_class and not 0 <= targets.min() <= targets.max() < MOST_CLASSES:
        strange = targets.min() if targets.min() < 0 else targets.max()
        raise DataError(f"{name}: label {strange}: labels are numbered from 0, and at most {MOST_CLASSES - 1:,}")
    if targets.dtype.kind == "f" and not np.isfinite(targets).all():
        raise DataError(f"{name}: targets must be finite")
