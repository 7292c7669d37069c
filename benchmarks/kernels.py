"""What the compiled loops bring to whole runs: rounds of pFedLA with all of them and with some left to torch, in turns.

The paper's settings: 10 clients x 140 images, 10 local epochs, everybody takes part, on 3x32x32 with batch norm and on
1x28x28 without; and 10 of 100 clients, 20 local epochs. A kernel stays only if a whole run gets at least 5 % faster
with it. What single loops bring is measured module by module: a step through the whole network has no parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.federation import Federation
from benchmarks.measuring import Row, in_turns
from benchmarks.work import Work
from pfedla import PFedLA, kernels
from pfedla.blocks import Conv2d, ConvPoolReLU, NormPoolReLU
from pfedla.chain import Chain
from pfedla.pool import available_cores

__all__ = ["measure"]

EVERYTHING, BETWEEN = "all loops", "the way between modules"


def normed(block: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Do what `NormPoolReLU` does."""
    return pooled(nn.BatchNorm2d.forward(block, x))


def convolved(block: nn.Conv2d, x: Tensor) -> Tensor:
    """Do what `ConvPoolReLU` does."""
    return pooled(nn.Conv2d.forward(block, x))


def half(block: Conv2d, x: Tensor) -> Tensor:
    """Do what `ConvPoolReLU` does, of which the convolution by a loop."""
    return pooled(kernels.conv2d(x, block.weight, block.get_parameter("bias")))


def pooled(x: Tensor) -> Tensor:
    """Pool images, and pass them through ReLU."""
    return functional.max_pool2d(x, 2).relu()


BLOCKS: dict[str, tuple[type[nn.Module], Callable[..., Tensor]]] = {
    "convolutions": (Conv2d, nn.Conv2d.forward),
    "batch norm, pooling, ReLU": (NormPoolReLU, normed),
    "convolutions, pooling, ReLU": (ConvPoolReLU, convolved),
    "pooling, ReLU": (ConvPoolReLU, half),
}
GRAY = Work(images=140, shape=(1, 28, 28), batch_norm=False)
SETTINGS = {
    "10 clients, 3x32x32": (Work(images=140), range(10), ("convolutions", "batch norm, pooling, ReLU")),
    "10 clients, 1x28x28": (GRAY, range(10), ("convolutions, pooling, ReLU", "pooling, ReLU")),
    "10 of 100 clients, 3x32x32": (Work(clients=100, images=140, epochs=20), range(0, 100, 10), ()),
}


def measure(quick: bool) -> list[Row]:
    """Return a line for each setting and what is left to torch in it."""
    rows: list[Row] = []
    for name, (usual, ids, parts) in SETTINGS.items():
        work = replace(usual, clients=2, images=40, epochs=1) if quick else usual
        with ExitStack() as opened:
            contestants = {}
            for left in ("", EVERYTHING, BETWEEN, *parts):
                with ExitStack() as changed:
                    leave_to_torch(left, changed)  # workers inherit it when they are forked
                    federation = Federation(work, PFedLA(), available_cores())
                opened.callback(federation.close)
                contestants[left] = partial(federation.round, range(2) if quick else ids)
            took = in_turns(contestants, 1 if quick else 7)
        for left in (EVERYTHING, BETWEEN, *parts):
            whole = took[BETWEEN if left in parts else ""]
            rows.append(
                {
                    "setting": name,
                    "loops": kernels.level(),
                    "left to torch": left,
                    "without, s per round": round(took[left], 3),
                    "with, s per round": round(whole, 3),
                    "gain": round(took[left] / whole, 3),
                }
            )
    return rows


def leave_to_torch(what: str, changed: ExitStack) -> None:
    """Have torch do without a loop, or without all of them, until the changes are taken back."""
    if what == EVERYTHING:
        changed.enter_context(kernels.switch(kernels.OFF))
    elif what:
        changed.enter_context(patch.object(Chain, "fits", lambda *_: False))
    if what in BLOCKS:
        block, forward = BLOCKS[what]
        changed.enter_context(patch.object(block, "forward", forward))
