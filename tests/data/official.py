"""Small files in the formats of the official archives, and a pickle that would run a command."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
Bytes = npt.NDArray[np.uint8]


def pixels(*shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def idx(array: Bytes) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return path


def write_idx(folder: Path, prefix: str, x: Bytes, y: list[int], suffix: str = ".gz") -> None:
    write(folder / f"{prefix}-images-idx3-ubyte{suffix}", idx(x))
    write(folder / f"{prefix}-labels-idx1-ubyte{suffix}", idx(np.array(y, np.uint8)))


def pickled(x: object, labels: object, key: str = "labels", protocol: int = 2) -> bytes:
    return pickle.dumps({b"data": x, key.encode(): labels, b"filenames": [b"a.png"]}, protocol)


class Command:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch PWNED",)
