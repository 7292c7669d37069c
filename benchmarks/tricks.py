"""What each trick of the training loop is worth: the time without it over the time with it, on one core.

The work is one client's: 420 images of 3x32x32, LeNet with batch norm, mini-batches of 32. Variants take turns, and
their medians are compared.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import work
from benchmarks.measuring import Row, fresh, in_turns, seconds
from pfedla import kernels
from pfedla.engine import FlatModel
from pfedla.layers import LayerSpec
from pfedla.models import LeNet
from pfedla.pool import keep_freed_memory
from pfedla.randomness import stream
from pfedla.training import Samples, Task, Training, score

IMAGES, BATCH, LR, CLASSES = 420, 32, 0.01, 10
LAST = torch.channels_last

__all__ = ["measure"]

Step = Callable[[], object]


def epoch_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Train for an epoch as one would write it."""
    model.train()
    for index in torch.randperm(len(y)).split(BATCH):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()


def by_hand(kind: type[nn.Module] = LeNet, channels_last: bool = True, **options: bool) -> Step:
    """Return a step that trains for an epoch by hand."""
    model: nn.Module = kind((3, 32, 32), CLASSES, batch_norm=True)
    x, y = images()
    if channels_last:
        model, x = model.to(memory_format=LAST), x.contiguous(memory_format=LAST)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, **options)
    return lambda: epoch_by_hand(model, optimizer, x, y)


def without_loops(step: Step) -> Step:
    """Return the same step, done by torch's operations alone."""

    def run() -> None:
        with kernels.switch(kernels.OFF):
            step()

    return run


def compiled() -> Step:
    """Return the same with torch.compile, which makes loops of its own."""
    model = LeNet((3, 32, 32), CLASSES, batch_norm=True).to(memory_format=LAST)  # type: ignore[call-overload]
    x, y = images()
    x = x.contiguous(memory_format=LAST)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    fast: Any = torch.compile(model)
    return lambda: epoch_by_hand(fast, optimizer, x, y)


def images() -> tuple[Tensor, Tensor]:
    """Return random images and labels."""
    generator = stream(0, "benchmark")
    x = torch.randint(0, 256, (IMAGES, 3, 32, 32), generator=generator)
    return x.float().div(127.5).sub(1), torch.randint(0, CLASSES, (IMAGES,), generator=generator)


class Ours:
    """Our training loop, and parts of it."""

    def __init__(self) -> None:
        module = LeNet((3, 32, 32), CLASSES, batch_norm=True)
        self.spec = LayerSpec.of(module)
        self.layers = self.spec.read(module)
        self.model = FlatModel(copy.deepcopy(module), self.spec)
        self.module = module
        x, y = images()
        self.samples = Samples(x.add(1).mul(127.5).round().to(torch.uint8), y)
        self.floats = Samples(x, y)

    def epoch(self, samples: Samples) -> None:
        """Train for an epoch."""
        training = Training(local_epochs=1, batch_size=BATCH, lr=LR)
        Task(self.model, [samples], [0], training, seed=0, t=1).fit(self.layers)

    def load_state_dict(self) -> None:
        """Load parameters as one would by hand."""
        self.module.load_state_dict(self.spec.build(self.module, self.layers).state_dict())


def cases() -> dict[str, tuple[Step, Step]]:
    """Return each trick: without it, and with it."""
    ours = Ours()
    order, size = stream(0, "order"), (10, IMAGES)
    permutations = torch.stack([torch.randperm(IMAGES) for _ in range(size[0])])
    return {
        "channels-last": (by_hand(channels_last=False), by_hand()),
        "ReLU after the pooling": (by_hand(work.LeNet), without_loops(by_hand())),
        "compiled loops": (without_loops(by_hand()), by_hand()),
        "SGD over a list of tensors (foreach)": (by_hand(foreach=False), by_hand(foreach=True)),
        "fused SGD": (by_hand(foreach=False), by_hand(fused=True)),
        "one flat vector, our whole loop": (by_hand(), lambda: ours.epoch(ours.samples)),
        "pixels kept as bytes": (lambda: ours.epoch(ours.floats), lambda: ours.epoch(ours.samples)),
        "permutations drawn beforehand": (
            lambda: [torch.randperm(IMAGES, generator=order).split(BATCH) for _ in range(size[0])],
            lambda: [row.split(BATCH) for row in permutations],
        ),
        "parameters copied in place": (ours.load_state_dict, lambda: ours.model.load(ours.layers)),
        "evaluation in batches of 250": (
            lambda: score_in(ours, BATCH),
            lambda: score(ours.model, ours.layers, [ours.samples]),
        ),
    }


@torch.inference_mode()
def score_in(ours: Ours, batch: int) -> None:
    """Score in batches of another size."""
    ours.model.load(ours.layers)
    ours.model.module.eval()
    for start in range(0, IMAGES, batch):
        x, y = ours.samples.take(slice(start, start + batch), ours.model.weights)
        logits = ours.model.module(x)
        float((logits.argmax(1) == y).sum())
        float(functional.cross_entropy(logits, y, reduction="sum"))


def epoch_in_new_process(keep: bool) -> float:
    """Return the median CPU seconds of an epoch; called in a new process, which keeps freed memory or not."""
    torch.set_num_threads(1)
    if keep:
        keep_freed_memory()
    step, took = by_hand(), list[float]()
    for _ in range(7):
        start = time.process_time()
        step()
        took.append(time.process_time() - start)
    return statistics.median(took[1:])


def measure(quick: bool) -> list[Row]:
    """Return the milliseconds of each trick, without and with it, and their ratio."""
    before, repeats = torch.get_num_threads(), 1 if quick else 11
    torch.set_num_threads(1)
    memory = [[fresh(epoch_in_new_process, keep) for keep in (False, True)] for _ in range(1 if quick else 5)]
    found = {"freed memory is kept, in a new process": tuple(map(statistics.median, zip(*memory, strict=True)))}
    keep_freed_memory()  # from here on, as in a run
    for name, (without, with_it) in cases().items():
        took = in_turns({"without": without, "with": with_it}, repeats)
        found[name] = took["without"], took["with"]
    if not quick:
        fast = compiled()
        name = f"torch.compile, after {seconds(fast):.0f} s of compiling"
        took = in_turns({"without": by_hand(), "with": fast}, repeats)
        found[name] = took["without"], took["with"]
    torch.set_num_threads(before)
    return [
        {"trick": name, "without, ms": round(1e3 * a, 2), "with, ms": round(1e3 * b, 2), "gain": round(a / b, 3)}
        for name, (a, b) in found.items()
    ]
