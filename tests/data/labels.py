"""Labels to split, and what was made of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import settings

from pfedla.data.partition import Part, count_classes
from pfedla.data.splits import Ints

TEN = np.repeat(np.arange(10), 300)
modest = settings(deadline=None, max_examples=60)


def shuffled(counts: list[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def all_of(parts: list[Part]) -> np.ndarray:
    return np.concatenate([np.concatenate(part) for part in parts])


def class_counts(y: np.ndarray, parts: Sequence[Part]) -> Ints:
    """Return the (training, test) samples of each class of each client, of shape (clients, classes, 2)."""
    return count_classes([(y[part.train], y[part.test]) for part in parts], int(y.max()) + 1)
