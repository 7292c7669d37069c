"""Shifts: what hidden groups of clients have differently, laid over any split by class.

Labels: each group names the classes in its own way. Inputs: each group has images of another kind. Groups are blocks of
clients of equal size, one after another; the first has everything as it is.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from pfedla.data.splits import Ints
from pfedla.errors import ConfigError
from pfedla.randomness import numpy_stream

__all__ = ["IMAGES", "Shift", "blocks_of", "imaged", "relabelled", "shift_words", "shifted"]

Shift = Literal["none", "labels", "inputs", "both"]
IMAGES = ("as they are", "inverted", "rotated by 90°", "blurred and noisy")  # by group
BLUR = np.array([1, 4, 6, 4, 1], np.float32) / 16
NOISE = 25.0  # standard deviation, of 255


def blocks_of(clients: int, groups: int) -> Ints:
    """Return the group of each client."""
    if groups > clients:
        raise ConfigError(f"data.shift_groups = {groups} must be at most data.clients, {clients}")
    return np.arange(clients) * groups // clients


def relabelled(y: np.ndarray, group: int, classes: int, seed: int) -> np.ndarray:
    """Return labels as a group names them: one random cycle through all classes, `group` places on.

    No two groups agree on the name of any class, as long as there are no more groups than classes.
    """
    cycle = numpy_stream(seed, "shift", "labels").permutation(classes)
    place = np.argsort(cycle)
    renamed: np.ndarray = cycle[(place[y] + group) % classes].astype(y.dtype)
    return renamed


def imaged(x: np.ndarray, group: int, rng: np.random.Generator) -> np.ndarray:
    """Return uint8 images `(n, channels, height, width)` as a group sees them, in the order of `IMAGES`."""
    seen = x
    if group == 1:
        seen = 255 - x
    elif group == 2:
        seen = np.ascontiguousarray(np.rot90(x, axes=(2, 3)))
    elif group == 3:
        noise = NOISE * rng.standard_normal(x.shape, np.float32)
        seen = np.rint(_blurred(_blurred(x.astype(np.float32), 2), 3) + noise).clip(0, 255).astype(np.uint8)
    return seen


def _blurred(x: np.ndarray, axis: int) -> np.ndarray:
    """Return images smoothed along an axis, edges going on as they end."""
    wide = np.pad(x, [(2, 2) if a == axis else (0, 0) for a in range(x.ndim)], mode="edge")
    pieces = np.stack([np.take(wide, np.arange(k, k + x.shape[axis]), axis) for k in range(len(BLUR))])
    smooth: np.ndarray = np.tensordot(BLUR, pieces, 1)
    return smooth


def shifted(
    kind: Shift, x: np.ndarray, y: np.ndarray, group: int, classes: int, seed: int, *key: str | int
) -> tuple[np.ndarray, np.ndarray]:
    """Return a client's samples as its group has them; `key` names whose they are, so that their noise is their own."""
    if kind in ("inputs", "both"):
        x = imaged(x, group, numpy_stream(seed, "shift", "noise", *key))
    if kind in ("labels", "both"):
        y = relabelled(y, group, classes, seed)
    return x, y


def shift_words(kind: Shift, groups: int, classes: int, shape: tuple[int, ...]) -> list[str]:
    """Say what each group has, or refuse what cannot be done with these images or so many groups."""
    if kind in ("inputs", "both"):
        if groups > len(IMAGES):
            raise ConfigError(f"data.shift_groups = {groups}: there are {len(IMAGES)} kinds of inputs at most")
        if groups > 2 and (len(shape) != 3 or shape[1] != shape[2]):
            raise ConfigError(f"data.shift = {kind!r}: a third group's images are rotated, and these are not square")
    if kind in ("labels", "both") and groups > classes:
        raise ConfigError(f"data.shift_groups = {groups}: there are {classes} classes, and as many ways to name them")
    images = [f"images {words}" for words in (IMAGES if kind in ("inputs", "both") else IMAGES[:1] * groups)]
    moved = kind in ("labels", "both")
    labels = [f"labels {f'moved by {g} along a cycle' if g and moved else 'as they are'}" for g in range(groups)]
    return [f"group {g}: {images[g]}, {labels[g]}" for g in range(groups)]
