"""Every random number has an address: a seed and a key.

`stream(7, "batches", 3, 12)` is the generator behind client 12's mini-batches in round 3 of seed 7.
It depends on nothing else: not on the number of workers, not on what was drawn before.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

__all__ = ["numpy_stream", "seed_of", "stream"]


def seed_of(seed: int, *key: str | int) -> int:
    """Return the 63-bit number that belongs to `seed` and `key`."""
    text = "\x1f".join([str(int(seed)), *(f"{type(part).__name__}:{part}" for part in key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def stream(seed: int, *key: str | int) -> torch.Generator:
    """Return the torch generator at this address."""
    generator = torch.Generator()
    generator.manual_seed(seed_of(seed, *key))
    return generator


def numpy_stream(seed: int, *key: str | int) -> np.random.Generator:
    """Return the numpy generator at this address."""
    return np.random.default_rng(seed_of(seed, *key))
