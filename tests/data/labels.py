"""Labels to split, and what was made of them."""

from __future__ import annotations

import numpy as np
from hypothesis import settings

from pfedla.data.partition import Part

TEN = np.repeat(np.arange(10), 300)
modest = settings(deadline=None, max_examples=60)


def shuffled(counts: list[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def all_of(parts: list[Part]) -> np.ndarray:
    return np.concatenate([np.concatenate(part) for part in parts])
