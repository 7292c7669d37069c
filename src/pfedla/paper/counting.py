"""What can be counted of two columns of figures: ranks, how alike two orders are, and who comes first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from typing import Protocol

import numpy as np

__all__ = ["Spread", "among_the_first", "chance_of", "correlation", "count_first", "ranks", "spearman"]


class Spread(Protocol):
    """A mean and its standard deviation, None where there is one seed."""

    @property
    def mean(self) -> float: ...  # noqa: D102

    @property
    def std(self) -> float | None: ...  # noqa: D102


def ranks(values: Sequence[float]) -> np.ndarray:
    """Return ranks from 1, equals sharing the mean of theirs."""
    x = np.asarray(values, float)
    below, equal = (x[:, None] > x).sum(1), (x[:, None] == x).sum(1)
    return np.asarray(below + (equal + 1) / 2)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the rank correlation; None if there are fewer than three pairs, or one side is constant."""
    if len(a) < 3:
        return None
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else None


def chance_of(a: Sequence[float], b: Sequence[float], orders: int = 20_000) -> float:
    """Return the share of orders in which the rank correlation is as far from 0: of all if they are few, else drawn.

    Among those drawn the order as it is counts as one more, so the share is never 0.
    """
    x, y = (found - found.mean() for found in (ranks(a), ranks(b)))
    n, rng = len(x), np.random.default_rng(0)
    every = math.factorial(n) <= orders
    drawn = (
        np.array(list(permutations(range(n)))) if every else rng.permuted(np.tile(np.arange(n), (orders, 1)), axis=1)
    )
    far = np.abs(x[drawn] @ y) >= abs(float(x @ y)) - 1e-9
    return float(far.mean() if every else (far.sum() + 1) / (orders + 1))


def correlation(a: Sequence[float], b: Sequence[float]) -> str | None:
    """Return the rank correlation in words, with the share of random orders that are as far from 0; None if none is."""
    found = spearman(a, b)
    return f"{found:+.2f} (p = {chance_of(a, b):.2g})" if found is not None else None


def among_the_first(column: Mapping[str, Spread], names: Iterable[str], *, within: bool) -> bool:
    """Say whether one of these methods is first; or `within` one standard deviation of the first.

    That is the larger of the two methods' deviations. Where there is one seed there is none.
    """
    best = max(column.values(), key=lambda entry: entry.mean)
    for name in names:
        room = max(best.std or 0.0, column[name].std or 0.0) if within else 0.0
        if best.mean - column[name].mean <= room:
            return True
    return False


def count_first(columns: Sequence[Mapping[str, Spread]], names: Sequence[str]) -> tuple[int, int]:
    """Return in how many columns one of these methods is first, and first or within one standard deviation of it."""
    first, near = (sum(among_the_first(column, names, within=within) for column in columns) for within in (False, True))
    return first, near
