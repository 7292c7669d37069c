"""Which sample of a labelled data set goes to which client.

`partition` asks a split how many samples of each class every client is to hold, checks that against what there
is, draws the samples and divides them into training and test parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pfedla.data.splits import Column, Ints, Request, Split, apportion
from pfedla.errors import ConfigError, DataError
from pfedla.randomness import numpy_stream

__all__ = ["Part", "count_classes", "partition"]


MOST_CLIENTS = 10**7
Labels = npt.NDArray[np.integer]


class Part(NamedTuple):
    """One client's share of a data set, as indices into it."""

    train: Ints
    test: Ints


def partition(
    y: npt.NDArray[np.integer],
    split: Split,
    *,
    clients: int,
    samples_per_client: int | None,
    test_samples_per_client: int | None = None,
    train_fraction: float = 0.7,
    fewest_samples: int | None = None,
    size_power: float | None = None,
    reuse: bool = False,
    seed: int,
    owner: npt.NDArray[np.integer] | None = None,
) -> list[Part]:
    """Divide a labelled data set over clients.

    Each client's samples are divided into training and test with the same class distribution. No sample is in
    two of these parts, of the same or of different clients, unless `reuse` says otherwise.

    Parameters
    ----------
    y
        The class of each sample, from 0.
    split
        Which classes go where.
    clients
        How many clients there are.
    samples_per_client
        Training and test samples together. None, with the split `column` only: all that the client owns.
    test_samples_per_client
        None: what `train_fraction` leaves. Otherwise the size of every test part: the client's own test
        samples first, then further samples with the client's class distribution that no client holds. These
        are nobody's training samples and are distinct within a client, but two clients may be tested on the
        same ones. The training parts do not depend on this number.
    train_fraction
        The share of the client's samples to train on.
    fewest_samples
        Clients of unequal size: everyone's is drawn evenly from this to `samples_per_client`. None: all are alike.
    size_power
        Clients of unequal size, by a power law: in a random order, the k-th holds `samples_per_client / k **
        size_power` samples, and at least `fewest_samples`, or 2.
    reuse
        For more clients than there are samples: two clients may hold the same sample. It is distinct within a client,
        and what anybody trains on nobody is tested on: `train_fraction` of each class is for training.
    seed
        Every choice depends on this number and the other arguments only.
    owner
        For the split `column`: the client of each sample. Samples of owners from `clients` on are left out.

    Returns
    -------
    list of Part
        One part per client, own samples in ascending order.
    """
    labels = _labels("labels", y)
    by_owner = isinstance(split, Column)
    if samples_per_client is None and not by_owner:
        raise ConfigError("data.samples_per_client must be given unless the split is 'column'")
    if reuse and by_owner:
        raise ConfigError("data.reuse: the split 'column' says whose each sample is, so no two clients can hold it")
    if not by_owner:
        _check_numbers(len(labels), clients, samples_per_client or 2, test_samples_per_client or 1, reuse)
    classes = int(labels.max()) + 1
    pools = np.zeros_like(labels)
    if by_owner:
        if owner is None:
            raise ConfigError(
                "the split 'column' needs a column that says whose each sample is: give own data with "
                "data.folder = FILE.npz, with arrays x, y and client"
            )
        pools = _labels("client column", owner)
        if len(pools) != len(labels):
            raise DataError(f"the client column has {len(pools)} entries for {len(labels)} labels")

    # All samples in random order, sorted by pool and class: each cell (pool, class) is a run from `start` on.
    cell = pools * classes + labels
    order = numpy_stream(seed, "partition", "samples").permutation(len(labels))
    order = order[np.argsort(cell[order], kind="stable")]
    bounds = np.searchsorted(cell[order], np.arange((clients if by_owner else 1) * classes + 1))
    start, supply = bounds[:-1].reshape(-1, classes), np.diff(bounds).reshape(-1, classes)

    if samples_per_client is None:
        plan, held = supply, supply.sum(axis=1)
        if held.min() < 2:
            who = f"client {held.argmin()}: " if len(held) > 1 else ""
            raise DataError(f"{who}of the 2 samples that a client needs at least, there are {held.min()}")
    else:
        task_supply = supply if by_owner else supply[0]
        rng, unequal = (numpy_stream(seed, "partition", what) for what in ("plan", "sizes"))
        sizes = _sizes(clients, samples_per_client, fewest_samples, size_power, unequal)
        plan = split.plan(Request(task_supply * (clients if reuse else 1), clients, samples_per_client, rng, sizes))
        if sizes.min() < samples_per_client:
            kept = zip(plan, sizes, strict=True)
            plan = np.array([apportion(row, size, unequal.permutation(classes)) for row, size in kept])
    train, own = _stratify(plan, train_fraction, seed)
    if reuse:
        tests = _resized(own, plan, test_samples_per_client, seed)
        return _reusing(order, start[0], supply[0], train, tests, train_fraction, seed)
    pool_of = np.arange(clients) if by_owner else np.zeros(clients, np.int64)
    used = plan if by_owner else plan.sum(axis=0, keepdims=True)
    _check_supply(used, supply, split)

    extra = _further_tests(plan, own, (supply - used)[pool_of], test_samples_per_client, seed)
    next_free = start.copy()
    parts = []
    for client, pool in enumerate(pool_of):
        rng = numpy_stream(seed, "partition", "test", client)
        first, rest = next_free[pool].copy(), start[pool] + used[pool]
        next_free[pool] += plan[client]
        tested = own[client]
        if test_samples_per_client is not None and test_samples_per_client < tested.sum():
            tested = apportion(tested, test_samples_per_client, rng.permutation(classes))
        further = [
            rest[c] + rng.choice(supply[pool, c] - used[pool, c], extra[client, c], replace=False)
            for c in np.flatnonzero(extra[client])
        ]
        test = np.sort(order[_runs(first + train[client], tested)])
        parts.append(
            Part(
                train=np.sort(order[_runs(first, train[client])]),
                test=np.concatenate([test, *(np.sort(order[chosen]) for chosen in further)]),
            )
        )
    return parts


def _check_numbers(samples: int, clients: int, each: int, tests: int, reuse: bool) -> None:
    """Refuse numbers that no split could serve, before anything is planned for so many."""
    for setting, value in (("samples_per_client", each), ("test_samples_per_client", tests)):
        if value > samples:
            raise DataError(f"data.{setting} = {value}: there are {samples:,} samples in all")
    most = MOST_CLIENTS if reuse else samples // 2
    if clients > most:
        raise DataError(f"data.clients = {clients}: there can be {most:,} at most, with two samples each")


def count_classes(labels: Sequence[tuple[Labels, Labels]], classes: int) -> Ints:
    """Return the (training, test) samples of each class of each client, of shape (clients, classes, 2)."""
    return np.stack([np.stack([np.bincount(part, minlength=classes) for part in pair], axis=-1) for pair in labels])


def _stratify(plan: Ints, train_fraction: float, seed: int) -> tuple[Ints, Ints]:
    """Return the training and the test samples of each class of each client."""
    train = np.zeros_like(plan)
    for client, row in enumerate(plan):
        total = int(row.sum())
        trained = round(train_fraction * total)
        if not 0 < trained < total:
            raise ConfigError(
                f"data.train_fraction {train_fraction:g} puts {trained} of client {client}'s {total} samples "
                "into training: it must leave at least one for training and one for the test"
            )
        order = numpy_stream(seed, "partition", "train", client).permutation(len(row))
        train[client] = apportion(row, trained, order)
    return train, plan - train


def _sizes(clients: int, most: int, fewest: int | None, power: float | None, rng: np.random.Generator) -> Ints:
    """Return how many samples each client holds, from `fewest` to `most`: drawn evenly, or down by a power of its rank.

    Without either of them, all hold as many as `most`.
    """
    least = 2 if fewest is None else fewest
    if fewest is not None and not 2 <= fewest <= most:
        raise ConfigError(f"data.fewest_samples must be from 2 to data.samples_per_client, {most}, not {fewest}")
    if power is not None:
        rank = 1.0 + rng.permutation(clients)
        falling: Ints = np.rint(most * rank**-power).astype(np.int64).clip(least, most)
        return falling
    return np.full(clients, most) if fewest is None else rng.integers(least, most, clients, endpoint=True)


def _resized(own: Ints, plan: Ints, wanted: int | None, seed: int) -> Ints:
    """Return the test samples of each class: as they are, or `wanted` of them with the client's distribution."""
    if wanted is None:
        return own
    order = [
        numpy_stream(seed, "partition", "further", client).permutation(plan.shape[1]) for client in range(len(plan))
    ]
    return np.array([apportion(row, wanted, places) for row, places in zip(plan, order, strict=True)])


def _reusing(
    order: Ints, start: Ints, supply: Ints, train: Ints, tests: Ints, train_fraction: float, seed: int
) -> list[Part]:
    """Draw every client's samples from all that are for training, and from all that are for the test."""
    pools = np.stack([np.round(train_fraction * supply).astype(np.int64), np.zeros_like(supply)])
    pools[1] = supply - pools[0]  # (training and test, classes)
    for what, need, pool in zip(("training", "test"), (train, tests), pools, strict=True):
        worst, c = np.unravel_index(np.argmax(need - pool), need.shape)
        if need[worst, c] > pool[c]:
            raise DataError(
                f"client {worst} needs {need[worst, c]} {what} samples of class {c}, {pool[c]} are for that: "
                "lower data.samples_per_client or data.test_samples_per_client"
            )
    parts = []
    for client, needs in enumerate(zip(train, tests, strict=True)):
        rng = numpy_stream(seed, "partition", "reuse", client)
        drawn = []
        for need, pool, first in zip(needs, pools, (start, start + pools[0]), strict=True):
            chosen = [first[c] + rng.choice(pool[c], need[c], replace=False) for c in np.flatnonzero(need)]
            drawn.append(np.sort(order[np.concatenate(chosen)]))
        parts.append(Part(*drawn))
    return parts


def _further_tests(plan: Ints, own: Ints, unused: Ints, wanted: int | None, seed: int) -> Ints:
    """Return how many further test samples of each class each client gets."""
    extra = np.zeros_like(plan)
    for client, row in enumerate(plan):
        missing = 0 if wanted is None else wanted - int(own[client].sum())
        order = numpy_stream(seed, "partition", "further", client).permutation(len(row))
        extra[client] = apportion(row, missing, order)
    worst, c = np.unravel_index(np.argmax(extra - unused), plan.shape)
    if extra[worst, c] > unused[worst, c]:
        raise DataError(
            f"client {worst} needs {extra[worst, c]} further test samples of class {c}, "
            f"{unused[worst, c]} are unused: lower data.test_samples_per_client, "
            "data.samples_per_client or data.clients"
        )
    return extra


def _runs(first: Ints, lengths: Ints) -> Ints:
    """Return the numbers from each `first` on, as many as `lengths` says, in one array."""
    return np.concatenate([np.arange(a, a + n) for a, n in zip(first, lengths, strict=True)])


def _labels(what: str, values: npt.NDArray[np.integer]) -> Ints:
    """Return `values` as one whole number from 0 per sample, or refuse."""
    if values.ndim != 1 or values.dtype.kind not in "iu" or not len(values) or values.min() < 0:
        raise DataError(f"the {what} must be one whole number from 0 per sample, in one dimension")
    return values.astype(np.int64)


def _check_supply(demand: Ints, supply: Ints, split: Split) -> None:
    """Refuse a plan that needs more of a class than there is, naming the worst class."""
    pool, c = np.unravel_index(np.argmax(demand - supply), supply.shape)
    if demand[pool, c] > supply[pool, c]:
        remedy = split.remedy if demand.sum() <= supply.sum() else ""
        raise DataError(
            f"the clients need {demand[pool, c]} samples of class {c}, the data set has {supply[pool, c]}: "
            f"lower data.samples_per_client or data.clients{remedy}"
        )
