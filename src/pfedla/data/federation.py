"""Everybody's data: data sets that are split over clients, and data that clients bring themselves."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfedla.data.datasets import DATASETS, load_dataset
from pfedla.data.files import load_column, load_folder
from pfedla.data.partition import Part, count_classes, partition
from pfedla.data.shifts import Shift, blocks_of, shift_words, shifted
from pfedla.data.splits import Column, Groups, Split
from pfedla.errors import ConfigError, DataError, known_name
from pfedla.objective import Classification, Objective
from pfedla.settings import Count, Positive, Range, Settings
from pfedla.training import ClientData, Samples, are_pixels

__all__ = ["FEW", "OWN_DATA", "Client", "Clients", "Data", "Federation", "federate", "named", "own_data"]

Array = Tensor | np.ndarray
Client = tuple[Array, Array] | tuple[Array, Array, Array, Array]
MOST_CLASSES = 100_000  # a label beyond is a mistake, and each would take memory
Clients = Sequence[Client] | Mapping[str, Client]
LONGEST_NAME = 200
FEW = 10  # a client scored on fewer samples is pointed out: one more right answer is a whole step
Fraction = Annotated[float, Range(above=0, below=1)]
AtLeastTwo = Annotated[int, Range(least=2)]
GROUPS = 3  # of clients whose data are shifted
OWN_DATA = ("folder", "train_fraction", "validation")  # the settings of Data that clients' own data have


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
        object.__setattr__(self, "dataset", known_name("data set", self.dataset, DATASETS))
        if self.reuse and self.validation is not None:
            raise ConfigError(
                f"data.validation = {self.validation:g} does not go with data.reuse: what one client is scored on, "
                "others may train on"
            )
        if self.shift_groups is not None and self.shift is None:
            raise ConfigError(f"data.shift_groups = {self.shift_groups} needs data.shift: none, labels, inputs or both")
        for name in ("test_samples_per_client", "fewest_samples", "reuse", "size_power", "shift"):
            if self.folder and getattr(self, name):
                raise ConfigError(f"data.{name} is for data sets: own data, data.folder, stay as they are")

    @property
    def name(self) -> str:
        """What the data is called: the data set's name, or the folder's."""
        return Path(self.folder).name.removesuffix(".npz") if self.folder else self.dataset


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

    @property
    def few(self) -> tuple[str, ...]:
        """The clients that are scored on so few samples that their scores are rough."""
        return tuple(self.names[client] for client, samples in self.data.items() if len(samples.test) < FEW)

    @property
    def pixels(self) -> bool:
        """Whether inputs are images of bytes, which are scaled to [-1, 1]."""
        return self.data[0].train.parts()[0].dtype == np.uint8

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
        path = Path(settings.folder).expanduser()
        files = load_column(path, labels=by_class) if path.is_file() else load_folder(path, labels=by_class)
        clients: list[Client] = [
            (f.x, f.y) if f.x_test is None or f.y_test is None else (f.x, f.y, f.x_test, f.y_test) for f in files
        ]
        names = [f.name for f in files]
        return own_data(
            clients, names, settings.train_fraction, seed, objective, validation=settings.validation, rename=True
        )
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
    rename: bool = False,
) -> Federation:
    """Check clients' own arrays and divide those that bring no test data.

    With `rename`, labels that number no classes (100, 110, 120) become the names of classes 0, 1, 2: see `_renamed`.
    """
    objective = objective or Classification()
    by_class = objective.by_class
    if not clients:
        raise DataError("there are no clients: give a list of (x, y), one per client")
    _check_names(names)
    quartets: list[tuple[Array, Array, Array, Array]] = []
    for name, given in zip(names, clients, strict=True):
        _check_kind(name, given)
        client: Any = tuple(_viewable(part) for part in given)
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
    kinds = {are_pixels(part): name for name, q in zip(names, quartets, strict=True) for part in (q[0], q[2])}
    if len(kinds) > 1:
        raise DataError(
            f"images of bytes are scaled to [-1, 1], so inputs are such for all or for none: {kinds[True]}'s are, "
            f"and those of {kinds[False]} are not"
        )
    whole = {_is_whole(part): name for name, q in zip(names, quartets, strict=True) for part in (q[0], q[2])}
    if len(whole) > 1:
        raise DataError(
            f"inputs are whole numbers for all clients, training and test samples, or for none: some of "
            f"{whole[True]}'s are, and some of {whole[False]}'s are not"
        )
    labels = [(np.asarray(q[1]), np.asarray(q[3])) for q in quartets]
    classes: tuple[str, ...] = ()
    note = ""
    if by_class and rename:
        labels, classes, note = _renamed(labels)
        quartets = [(q[0], train, q[2], test) for q, (train, test) in zip(quartets, labels, strict=True)]
    outputs = objective.outputs([part for pair in labels for part in pair])
    if by_class and not classes:
        classes = tuple(map(str, range(outputs)))
    federation = Federation(
        {i: ClientData(Samples(q[0], q[1]), Samples(q[2], q[3])) for i, q in enumerate(quartets)},
        inputs.pop(),
        outputs,
        classes,
        count_classes(labels, outputs) if by_class else np.zeros((len(quartets), 0, 2), np.int64),
        tuple(names),
        note,
    )
    return _validated(federation, validation, seed)


def _is_whole(x: Any) -> bool:
    """Say whether a model is given an array or tensor as whole numbers: bytes become floating-point ones."""
    return not (x.is_floating_point() if isinstance(x, Tensor) else x.dtype.kind == "f") and x.dtype not in (
        torch.uint8,
        np.dtype(np.uint8),
    )


def _viewable(part: Any) -> Any:
    """Return an array or tensor as numpy can look at it, wherever it lies."""
    if not isinstance(part, Tensor):
        return part
    part = part.detach().cpu()
    return part.float() if part.dtype is torch.bfloat16 else part


def _validated(federation: Federation, share: float | None, seed: int) -> Federation:
    """Return the federation with a share of every client's training samples, by class, in place of its test samples.

    Clients with few of either are pointed out.
    """
    if share is None:
        return _noted(federation)
    data: dict[int, ClientData] = {}
    for client, (train, _) in federation.data.items():
        labels = train.targets.numpy() if federation.classes else np.zeros(len(train), np.int64)
        part = _divide(labels, 1 - share, seed, f"{federation.names[client]}, data.validation = {share:g}")
        data[client] = ClientData(*(train.subset(torch.from_numpy(some)) for some in part))
    counts = _counted(data, len(federation.classes)) if federation.classes else federation.counts
    return _noted(federation._replace(data=data, counts=counts, scored_on="validation"))


def _noted(federation: Federation) -> Federation:
    """Point out clients with few samples to be scored on."""
    few = federation.few
    if not few:
        return federation
    who = ", ".join(few[:3]) + (f" and {len(few) - 3} more" if len(few) > 3 else "")
    words = f"fewer than {FEW} {federation.scored_on} samples: {who}. Scores of so few are rough"
    return federation._replace(note=". ".join(filter(None, [federation.note.rstrip("."), words])))


def _renamed(
    labels: list[tuple[np.ndarray, np.ndarray]],
) -> tuple[list[tuple[np.ndarray, np.ndarray]], tuple[str, ...], str]:
    """Give numbers to classes whose labels are names, such as 100, 110, 120; return labels, names, and a note.

    Labels are taken for names if fewer than half of the numbers from 0 to the highest occur anywhere: otherwise they
    number the classes already, and one that occurs nowhere keeps its place.
    """
    present = np.unique(np.concatenate([part for pair in labels for part in pair]))
    if 2 * len(present) > present[-1]:
        return labels, (), ""
    numbered = [(np.searchsorted(present, train), np.searchsorted(present, test)) for train, test in labels]
    names = tuple(map(str, present.tolist()))
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return numbered, names, f"the labels {shown} are taken for names of {len(names)} classes"


def _counted(data: dict[int, ClientData], classes: int) -> np.ndarray:
    """Return the samples of each class that clients have, `(clients, classes, 2)`."""
    return count_classes([(train.targets.numpy(), test.targets.numpy()) for train, test in data.values()], classes)


def _check_names(names: Sequence[str]) -> None:
    """Refuse names that no table, file or message could show."""
    for name in names:
        if not isinstance(name, str):
            raise DataError(f"a client's name must be text, not {name!r:.40}")
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


def named(clients: Clients) -> dict[str, Client]:
    """Return clients by name: a list's are numbered, `client-0` and so on."""
    if isinstance(clients, Mapping):
        return dict(clients)
    if not isinstance(clients, list | tuple):
        raise DataError(
            "clients must be a list of (x, y), one per client, or a dictionary of names and (x, y); "
            f"found {_kind(clients)}"
        )
    return {f"client-{i}": client for i, client in enumerate(clients)}


def _check_kind(name: str, client: object) -> None:
    """Refuse what is no tuple of arrays, and say how to make one of it."""
    wanted = f"{name} must be (x, y) or (x, y, x_test, y_test)"
    if isinstance(client, Mapping):
        keys = ", ".join(map(repr, list(client)[:4]))
        raise DataError(f"{wanted}; found a dictionary with {keys or 'nothing'}: give its arrays as a tuple")
    if not isinstance(client, list | tuple):
        how = ": x, y = map(np.stack, zip(*dataset)) makes arrays of a data set of pairs"
        array = isinstance(client, np.ndarray | Tensor)
        raise DataError(f"{wanted}; found {_kind(client)}{'' if array else how}")
    if len(client) not in (2, 4):
        raise DataError(f"{wanted}, not {len(client)} values")
    for part, values in zip(("x", "y", "x_test", "y_test"), client, strict=False):
        if not isinstance(values, np.ndarray | Tensor):
            how = f"{part}.to_numpy()" if hasattr(values, "to_numpy") else f"np.asarray({part})"
            raise DataError(f"{wanted}; its {part} is {_kind(values)}: {how} makes an array")


def _kind(value: object) -> str:
    """Return what something is, for a message."""
    if isinstance(value, np.ndarray | Tensor):
        return f"an array of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


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
    if targets.dtype.kind == "f" and not _finite(targets).all():
        raise DataError(f"{name}: targets must be finite in single precision")
    if kind.kind == "f":
        strange = ~_finite(np.asarray(x))
        if strange.any():
            place = int(np.argwhere(strange)[0, 0])
            what = "NaN" if np.isnan(np.asarray(x[place])).any() else "infinity"
            raise DataError(f"{name}: inputs must be finite numbers in single precision; sample {place} has {what}")


def _finite(values: np.ndarray) -> np.ndarray:
    """Say where numbers are finite as they are kept, in single precision."""
    with np.errstate(over="ignore"):
        return np.isfinite(values.astype(np.float32, copy=False))
