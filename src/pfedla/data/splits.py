"""Splits: how many samples of each class every client holds.

A split only plans; it sees class sizes, never samples. Numbers are rounded by largest remainder in integer
arithmetic, so totals are always exact.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from pfedla.errors import ConfigError, DataError
from pfedla.settings import Count, Range, Settings

__all__ = [
    "IID",
    "SPLITS",
    "Classes",
    "Column",
    "Dirichlet",
    "Groups",
    "Ints",
    "NonIID1",
    "NonIID2",
    "Request",
    "Split",
    "apportion",
]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_SCALE = 2**20  # weights are whole numbers in units of 1 / _SCALE


class Request(NamedTuple):
    """What a split has to plan: clients of `samples` samples each, out of `supply` samples per class.

    Where clients differ in `sizes`, up to `samples`, a split may plan for that at once; what is beyond is taken off
    its plan, of every class alike.
    """

    supply: Ints
    clients: int
    samples: int
    rng: np.random.Generator
    sizes: Ints  # (clients,)

    @property
    def present(self) -> Ints:
        """The classes that have samples."""
        return np.flatnonzero(self.supply)


@dataclass(frozen=True)
class Split(Settings, ABC):
    """A rule for how many samples of each class each client holds."""

    section: ClassVar[str] = "split"
    name: ClassVar[str]
    remedy: ClassVar[str] = ""

    @abstractmethod
    def plan(self, task: Request) -> Ints:
        """Return the samples of each class each client is to hold, of shape (clients, classes)."""


@dataclass(frozen=True)
class NonIID1(Split):
    """Each client holds a few classes in equal amounts; every class is used by equally many clients."""

    classes_per_client: Count | None = None  # by default 4, or 12 of 100 classes and more
    name: ClassVar[str] = "non-iid-1"
    remedy: ClassVar[str] = ", or raise split.classes_per_client"

    def plan(self, task: Request) -> Ints:
        """Give every client equal amounts of its classes."""
        k = _number_of_classes("classes_per_client", self.classes_per_client, task, small=4, large=12)
        _at_least_one_each(task, k)
        return _plan_favoured(task, k, favoured=1, others=0, rows=np.arange(task.clients))


@dataclass(frozen=True)
class NonIID2(Split):
    """Each client holds all classes, a few of them in larger amounts; every class is favoured equally often."""

    dominant_classes: Count | None = None  # by default 2, or 6 of 100 classes and more
    dominance: Annotated[float, Range(least=1)] = 3.0  # times the samples of another class
    name: ClassVar[str] = "non-iid-2"
    remedy: ClassVar[str] = ", or change split.dominance"

    def plan(self, task: Request) -> Ints:
        """Give every client all classes, its dominant ones in larger amounts."""
        k = _number_of_classes("dominant_classes", self.dominant_classes, task, small=2, large=6)
        least = math.ceil(len(task.present) + k * (self.dominance - 1))
        if task.samples < least:
            raise ConfigError(
                f"data.samples_per_client must be at least {least} for every client to hold all "
                f"{len(task.present)} classes, {k} of them {self.dominance:g} times, not {task.samples}"
            )
        favoured = round(self.dominance * _SCALE)
        return _plan_favoured(task, k, favoured=favoured, others=_SCALE, rows=np.arange(task.clients))


@dataclass(frozen=True)
class Groups(Split):
    """Hidden groups: clients of the same group hold the same few classes, in equal amounts.

    Groups are contiguous blocks of equal size; no two hold the same classes where that is possible.
    """

    groups: Count = 4
    classes_per_client: Count = 4
    name: ClassVar[str] = "groups"
    remedy: ClassVar[str] = ", or raise split.groups or split.classes_per_client"

    def group_of(self, clients: int) -> Ints:
        """Return the group of each of `clients` clients."""
        if self.groups > clients:
            raise ConfigError(f"split.groups must be at most {clients}, as many as data.clients, not {self.groups}")
        return np.arange(clients) * self.groups // clients

    def plan(self, task: Request) -> Ints:
        """Give every client equal amounts of its group's classes."""
        rows = self.group_of(task.clients)
        k = _number_of_classes("classes_per_client", self.classes_per_client, task)
        _at_least_one_each(task, k)
        return _plan_favoured(task, k, favoured=1, others=0, rows=rows, distinct=True)


@dataclass(frozen=True)
class Dirichlet(Split):
    """Each client's class proportions are drawn from a symmetric Dirichlet distribution.

    A class that runs out is capped at what remains; the client's other classes make up for it in proportion.
    """

    concentration: Annotated[float, Range(least=0.001, most=1e6)] = 0.3  # small: few classes per client
    name: ClassVar[str] = "dirichlet"

    def plan(self, task: Request) -> Ints:
        """Draw every client's proportions, capped at what is left."""
        _enough_in_total(task)
        plan = np.zeros((task.clients, len(task.supply)), np.int64)
        left = task.supply[task.present]
        for row, size in zip(plan, task.sizes, strict=True):
            proportions = task.rng.dirichlet(np.full(len(left), self.concentration))
            weights = (proportions * _SCALE).astype(np.int64)
            row[task.present] = apportion(weights, size, task.rng.permutation(len(left)), left)
            left = left - row[task.present]
        return plan


@dataclass(frozen=True)
class IID(Split):
    """Each client is a random draw without replacement: class proportions as in the data set."""

    name: ClassVar[str] = "iid"

    def plan(self, task: Request) -> Ints:
        """Draw every client's samples from what is left."""
        _enough_in_total(task)
        plan = np.zeros((task.clients, len(task.supply)), np.int64)
        for client in range(task.clients):
            left = task.supply - plan.sum(axis=0)
            plan[client] = task.rng.multivariate_hypergeometric(left, task.sizes[client])
        return plan


@dataclass(frozen=True)
class Classes(Split):
    """Each client holds the classes it is given, in equal amounts; a remainder goes to the first of them."""

    classes: tuple[tuple[int, ...], ...] = ()  # a list for each client
    name: ClassVar[str] = "classes"

    def plan(self, task: Request) -> Ints:
        """Give every client equal amounts of the classes listed for it."""
        if len(self.classes) != task.clients:
            raise ConfigError(
                f"split.classes must have one list for each of the {task.clients} clients (data.clients), "
                f"not {len(self.classes)}"
            )
        plan = np.zeros((task.clients, len(task.supply)), np.int64)
        for client, held in enumerate(self.classes):
            if not held or len(set(held)) < len(held) or not set(held) <= set(task.present.tolist()):
                raise ConfigError(
                    f"split.classes of client {client} must be distinct classes from "
                    f"{task.present[0]} to {task.present[-1]} that have samples, not {list(held)}"
                )
            _at_least_one_each(task, len(held))
            plan[client, list(held)] = apportion(np.ones(len(held), np.int64), task.samples)
        return plan


@dataclass(frozen=True)
class Column(Split):
    """A column of the data set says whose sample each one is; `task.supply` has one row per client."""

    name: ClassVar[str] = "column"

    def plan(self, task: Request) -> Ints:
        """Draw from what each client owns."""
        held = task.supply.sum(axis=1)
        if held.min() < task.samples:
            raise DataError(
                f"client {held.argmin()} has {held.min()} samples, {task.samples} are needed: "
                "lower data.samples_per_client, or leave it out to use all samples"
            )
        return np.array([task.rng.multivariate_hypergeometric(row, task.samples) for row in task.supply])


SPLITS: dict[str, type[Split]] = {
    split.name: split for split in (NonIID1, NonIID2, Groups, Dirichlet, IID, Classes, Column)
}


def _plan_favoured(task: Request, k: int, *, favoured: int, others: int, rows: Ints, distinct: bool = False) -> Ints:
    """Return a plan in which each row of clients favours `k` classes, weighted `favoured` against `others`.

    All classes are favoured equally often (to within one), except that a class is not favoured more often
    than its samples allow as long as others can take its place.
    """
    present = task.present
    weights = np.where(np.arange(len(present)) < k, favoured, others)
    amounts = np.append(apportion(weights, task.samples), 0)  # the first of its kind gets the most
    high, low = amounts[0], amounts[k]
    room = (task.supply[present] - task.clients * low) // (np.bincount(rows).max() * max(high - low, 1))
    held = _deal(int(rows[-1]) + 1, k, room, task.rng)
    if distinct:
        _set_apart(held)
    plan = np.zeros((task.clients, len(task.supply)), np.int64)
    for client, row in enumerate(rows):
        weights = np.where(held[row], favoured, others)
        plan[client, present] = apportion(weights, task.samples, task.rng.permutation(len(present)))
    return plan


def _deal(rows: int, k: int, caps: Ints, rng: np.random.Generator) -> Bools:
    """Return a random choice of `k` columns in each row, all columns chosen equally often where `caps` allow.

    Without rejection: a column that every row from here on must choose to use up its quota is chosen; the
    other places go to random columns, weighted by what is left of their quota.
    """
    caps = caps.clip(0, rows)
    if caps.sum() < rows * k:
        caps = np.full(len(caps), rows)
    filled = np.minimum(caps, np.arange(rows + 1)[:, None]).sum(axis=1)
    level = int(np.searchsorted(filled, rows * k, side="right")) - 1
    quota = np.minimum(caps, level)
    quota[rng.permutation(np.flatnonzero(caps > level))[: rows * k - quota.sum()]] += 1
    held = np.zeros((rows, len(caps)), bool)
    for row in range(rows):
        key = np.where(quota > 0, rng.exponential(size=len(caps)) / np.maximum(quota, 1), np.inf)
        key[quota == rows - row] = -1
        held[row, np.argsort(key)[:k]] = True
        quota = quota - held[row]
    return held


def _set_apart(held: Bools) -> None:
    """Swap columns between rows, in place, until no two rows are the same or no single swap helps."""
    sets = math.comb(held.shape[1], int(held[0].sum()))

    def unique(row: int) -> bool:
        return int((held == held[row]).all(axis=1).sum()) == 1

    for a in range(len(held)):
        if unique(a):
            continue
        if len(np.unique(held, axis=0)) == sets:
            return  # every set is some row's already
        for b in range(len(held)):
            mine, theirs = np.flatnonzero(held[a] & ~held[b]), np.flatnonzero(held[b] & ~held[a])
            for pair in itertools.product(mine, theirs):
                swap = ([[a], [b]], list(pair))
                held[swap] ^= True
                if unique(a) and unique(b):
                    break
                held[swap] ^= True
            if unique(a):
                break


def _enough_in_total(task: Request) -> None:
    needed, there = int(task.sizes.sum()), int(task.supply.sum())
    if needed > there:
        up_to = "up to " if task.sizes.min() < task.samples else ""
        raise DataError(
            f"{task.clients} clients of {up_to}{task.samples} samples need {needed}, the data set has {there}: "
            "lower data.samples_per_client or data.clients"
        )


def _at_least_one_each(task: Request, k: int) -> None:
    if task.samples < k:
        raise ConfigError(f"data.samples_per_client must be at least {k}, one per class, not {task.samples}")


def _number_of_classes(setting: str, value: int | None, task: Request, small: int = 0, large: int = 0) -> int:
    """Return how many classes a client holds or favours: `value`, or what None means."""
    classes = len(task.present)
    if value is None:
        return large if classes >= 100 else min(small, classes)
    if not 1 <= value <= classes:
        raise ConfigError(f"split.{setting} must be from 1 to {classes}, the number of classes, not {value}")
    return value


def apportion(weights: Ints, total: int, order: Ints | None = None, caps: Ints | None = None) -> Ints:
    """Return whole numbers in proportion to `weights` that sum to `total`, none above its cap.

    By largest remainder, ties to the first in `order`. What does not fit under a cap goes to the others in
    proportion, and to whatever has room when no weighted entry has any. Each pass but the last fills one.
    """
    order = np.arange(len(weights)) if order is None else order
    caps = np.full(len(weights), total) if caps is None else caps
    counts = np.zeros(len(weights), np.int64)
    while (rest := total - int(counts.sum())) > 0:
        active = np.where(counts < caps, weights, 0)
        if not active.any():
            active = caps - counts
        share, remainder = np.divmod(active * rest, active.sum())
        share[order[np.argsort(-remainder[order], kind="stable")][: rest - share.sum()]] += 1
        counts += np.minimum(share, caps - counts)
    return counts
