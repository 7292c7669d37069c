"""Local SGD and evaluation: the only training loop."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfedla.engine import FlatModel
from pfedla.errors import ConfigError, RunError
from pfedla.layers import INSTANCE_NORMS, NORMS, STATS, Layers, kind_of
from pfedla.randomness import seed_of, stream
from pfedla.settings import Count, NonNegative, Positive, Range, Settings

__all__ = ["Adjust", "Batches", "ClientData", "Samples", "Scores", "Task", "Training", "are_pixels", "score"]

EVALUATION_BATCH = 250

Batches = Iterator[tuple[Tensor, Tensor]]
Adjust = Callable[[Tensor, Tensor], None]  # (weights, gradient) -> changes the gradient
Scores = dict[str, np.ndarray]  # {metric: (clients,)}


@dataclass(frozen=True)
class Training(Settings):
    """How a client trains: plain SGD, the paper's settings by default."""

    section: ClassVar[str] = "training"
    local_epochs: Count = 10
    batch_size: Count = 32
    lr: Positive = 0.01
    momentum: Annotated[float, Range(least=0, below=1)] = 0.0
    weight_decay: NonNegative = 0.0

    def refuse_momentum(self, method: str) -> None:
        """Refuse momentum, for a method whose equations are of plain steps."""
        if self.momentum:
            raise ConfigError(f"training.momentum = {self.momentum:g}: {method} takes plain steps; set it to 0")


class Samples:
    """A client's inputs and targets, resident in memory and quick to take batches from.

    Images of type uint8, of two dimensions and more, are taken for pixels: they stay so in memory and are scaled to
    [-1, 1] batch by batch. Rows of bytes are numbers. Other inputs, and targets, are used as they are, floating-point
    ones in single precision, whatever the model's.
    Four-dimensional inputs are kept channels-last.
    """

    def __init__(self, x: Tensor | np.ndarray, y: Tensor | np.ndarray) -> None:
        x, y = (part.float() if part.is_floating_point() else part for part in (_copied(x), _copied(y)))
        x = x.float() if x.dtype == torch.uint8 and not are_pixels(x) else x
        self._image = x.dim() == 4
        self._x = x.permute(0, 2, 3, 1).contiguous() if self._image else x.contiguous()
        self._y = (y if y.is_floating_point() else y.to(torch.int64)).contiguous()

    def __len__(self) -> int:
        return len(self._y)

    @property
    def targets(self) -> Tensor:
        """The targets of all samples."""
        return self._y

    def subset(self, index: Tensor) -> Samples:
        """Return some of the samples, copied, in this order."""
        part = copy.copy(self)
        part._x, part._y = self._x[index], self._y[index]
        return part

    def share(self) -> Samples:
        """Move to shared memory, so that processes read one copy."""
        self._x.share_memory_()
        self._y.share_memory_()
        return self

    def parts(self) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return its memory as it is, for `of_parts` in another process."""
        return self._x.numpy(), self._y.numpy(), self._image

    @classmethod
    def of_parts(cls, x: np.ndarray, y: np.ndarray, image: bool) -> Samples:
        """Return samples on this memory, without a copy; it may be read-only, for samples are never written."""
        samples = cls.__new__(cls)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            samples._x, samples._y = torch.from_numpy(x), torch.from_numpy(y)
        samples._image = image
        return samples

    def take(self, index: Tensor | slice, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch for a model whose parameters are `like` this: on its device, in its precision.

        The batch is a copy: a model may work in place on it.
        """
        x, y = (
            part[index] if isinstance(index, slice) else part.index_select(0, index)  # sample by sample, which is quick
            for part in (self._x, self._y)
        )
        y = y.to(like.device)
        if y.is_floating_point():
            y = y.to(like.dtype)
        x = x.to(like.device, copy=isinstance(index, slice))  # what a tensor picks is a copy already
        if x.dtype == torch.uint8:
            x = x.to(like.dtype).mul_(2 / 255).sub_(1)
        elif x.is_floating_point():
            x = x.to(like.dtype)
        return (x.permute(0, 3, 1, 2) if self._image else x), y


def are_pixels(x: Any) -> bool:
    """Say whether inputs, an array or a tensor, are images of bytes: rows of bytes are codes, flags and the like."""
    return x.dtype in (torch.uint8, np.dtype(np.uint8)) and x.ndim > 2


def _copied(values: Tensor | np.ndarray) -> Tensor:
    """Return a copy on the CPU: the caller's memory stays the caller's."""
    if isinstance(values, Tensor):
        return values.detach().to("cpu", copy=True)
    kind = values.dtype.newbyteorder("=")
    if kind.kind == "u" and kind.itemsize > 1:
        kind = np.dtype(np.int64)  # torch computes with no other unsigned numbers than bytes
    elif kind.kind == "f" and kind.itemsize > 8:
        kind = np.dtype(np.float64)
    return torch.tensor(np.ascontiguousarray(values, dtype=kind))


class ClientData(NamedTuple):
    """A client's samples."""

    train: Samples
    test: Samples


class Task:
    """What clients can do with their training data. An algorithm's client half is written against it.

    One row per client: `ids[row]` is the client, `samples[row]` its data. `seed`, the round and the client
    decide every random number; `called` gives a client's name, for messages.
    """

    def __init__(
        self,
        model: FlatModel,
        samples: Sequence[Samples],
        ids: Sequence[int],
        training: Training,
        seed: int,
        t: int,
        called: Callable[[int], str] = "client {}".format,
    ) -> None:
        self.model = model
        self.samples = samples
        self.ids = ids
        self.training = training
        self.seed = seed
        self.t = t
        self.called = called

    @property
    def examples(self) -> Tensor:
        """The number of training examples of each client: `(clients,)`."""
        return torch.tensor([len(samples) for samples in self.samples], dtype=torch.int64)

    @property
    def path(self) -> Tensor:
        """How far a gradient of length 1 takes each client in a round of `fit`, `(clients,)`: lr x local steps.

        A round's change divided by it is minus the mean gradient along the way. With momentum m, which starts at rest
        in each round, the k-th of T steps goes (1 - m^k) / (1 - m) as far.
        """
        lr, m = self.training.lr, self.training.momentum
        epochs, size = self.training.local_epochs, self.training.batch_size
        steps = torch.tensor(
            [len(_sizes(len(samples), size)) * epochs for samples in self.samples], dtype=torch.float64
        )
        return lr / (1 - m) * (steps - m * (1 - m**steps) / (1 - m))

    def split(self, share: float, *key: str | int) -> tuple[Task, Task]:
        """Return the task on a random share of each client's samples, and on the rest.

        Seed, key and client alone decide which. There is one sample at least in both, and in the rest as many as a
        model is trained on at the least: if needed, the same.
        """
        parts: tuple[list[Samples], list[Samples]] = [], []
        for samples, client in zip(self.samples, self.ids, strict=True):
            order = torch.randperm(len(samples), generator=stream(self.seed, *key, client))
            cut = max(1, round(share * len(order)))
            parts[0].append(samples.subset(order[:cut]))
            parts[1].append(samples.subset(order[cut:] if len(order) - cut >= self._least() else order))
        first, rest = (
            Task(self.model, part, self.ids, self.training, self.seed, self.t, self.called) for part in parts
        )
        return first, rest

    def leave_out(self, folds: int, which: Sequence[int]) -> tuple[Task, Task]:
        """Return the task without one of each client's folds, and on that fold alone; `which` goes round and round.

        Seed and client alone decide the folds, as many as `folds` or samples. What is left is trained on for
        folds / (folds - 1) times the epochs, to the nearest: about as many samples are seen. Clients whose samples are
        too few for that are refused (`has_folds`).
        """
        if not self.has_folds(folds):
            raise ValueError(f"{folds} folds need more samples than {min(map(len, self.samples))}")
        parts: tuple[list[Samples], list[Samples]] = [], []
        for samples, client, fold in zip(self.samples, self.ids, which, strict=True):
            order = torch.randperm(len(samples), generator=stream(self.seed, "folds", client))
            pieces = list(order.tensor_split(min(folds, len(order))))
            left_out = pieces.pop(fold % len(pieces))
            parts[0].append(samples.subset(torch.cat(pieces)))
            parts[1].append(samples.subset(left_out))
        longer = replace(self.training, local_epochs=int(self.training.local_epochs * folds / (folds - 1) + 0.5))
        without = Task(self.model, parts[0], self.ids, longer, self.seed, self.t, self.called)
        return without, Task(self.model, parts[1], self.ids, self.training, self.seed, self.t, self.called)

    def has_folds(self, folds: int) -> bool:
        """Say whether any of a client's folds can be left out, and enough is left to train on."""
        largest = (-(-len(samples) // min(folds, len(samples))) for samples in self.samples)
        return all(len(samples) - fold >= self._least() for samples, fold in zip(self.samples, largest, strict=True))

    def _least(self) -> int:
        """Return how many samples a model is trained on at the least: a norm needs two for their spread."""
        return 1 + any(isinstance(module, NORMS) for module in self.model.module.modules())

    def gradient(self, layers: Layers) -> Layers:
        """Return the gradient of each client's mean loss over all its samples, of models as they are in service."""
        rows = []
        for row, samples in enumerate(self.samples):
            self.model.load(layers, row)
            self.model.module.eval()
            total = torch.zeros_like(self.model.weights)
            for index in torch.arange(len(samples)).split(_sizes(len(samples), EVALUATION_BATCH)):
                batch = samples.take(index, self.model.weights)
                total.add_(self.model.backward(*batch), alpha=len(index) / len(samples))
            rows.append(self.model.layers(total))
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}

    def fit(
        self,
        start: Layers,
        *,
        only: Collection[str] | None = None,
        adjust: Callable[[int], Adjust] | None = None,
        epochs: int | None = None,
        part: str = "",
    ) -> Layers:
        """Train each client's row by local SGD and return the trained rows; `start` is left alone.

        Parameters
        ----------
        start
            The models to begin with.
        only
            The layers to train; all by default.
        adjust
            `adjust(row)` returns a function of the weights and their gradient, called before every step, that may
            change the gradient in place: a proximal pull, a control variate.
        epochs
            Passes over the data, `training.local_epochs` by default.
        part
            Names this training among several of one round, so that each draws batches of its own.
        """
        training = self.training

        def descend(row: int, model: FlatModel, batches: Batches) -> None:
            change = adjust(row) if adjust else None
            frozen = None if only is None else model.mask(set(self.model.spec.names) - set(only))
            velocity = torch.zeros_like(model.weights) if training.momentum else None
            for x, y in batches:
                step = model.backward(x, y)
                if change:
                    change(model.weights, step)
                if training.weight_decay:
                    step.add_(model.weights, alpha=training.weight_decay)
                if frozen is not None:
                    step.masked_fill_(frozen, 0)
                if velocity is not None:
                    step = velocity.mul_(training.momentum).add_(step)
                model.weights.add_(step, alpha=-training.lr)

        return self.each(start, descend, epochs=epochs, part=part)

    def each(
        self,
        start: Layers,
        work: Callable[[int, FlatModel, Batches], None],
        *,
        epochs: int | None = None,
        part: str = "",
    ) -> Layers:
        """Load each row into the model, let `work(row, model, batches)` change its weights, and return the rows.

        `fit` is made of this; a method whose steps are no plain SGD writes its own `work`.
        """
        rows = []
        for row, client in enumerate(self.ids):
            self.model.load(start, row)
            self.model.module.train()
            with torch.random.fork_rng(devices=[]):  # dropout and the like draw from the global generator
                torch.manual_seed(seed_of(self.seed, "model" + part, self.t, client))
                work(row, self.model, self._batches(row, epochs or self.training.local_epochs, part))
            if not torch.isfinite(self.model.weights).all():
                raise RunError(
                    f"training diverged at {self.called(client)} in round {self.t}: its parameters are no longer "
                    f"finite. Lower training.lr (now {self.training.lr:g}) or the method's own steps and strengths, or "
                    "scale the inputs"
                )
            rows.append(self.model.read())
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}

    @torch.no_grad()
    def normalized(self, layers: Layers) -> Layers:
        """Return each row with the running statistics that its norms have on the client's training samples.

        It takes one pass forward, in which nothing else changes; without such norms, no pass. More samples than fit
        into a batch are shuffled: statistics are means over batches, and those of one class would be far from all's.
        """
        module = self.model.module
        norms = [norm for norm in module.modules() if isinstance(norm, NORMS) and norm.running_mean is not None]
        if not norms:
            return layers
        momenta, rows = [norm.momentum for norm in norms], []
        try:
            for row, samples in enumerate(self.samples):
                self.model.load(layers, row)
                module.eval()
                for norm in norms:
                    norm.reset_running_stats()
                    norm.train()
                for seen, index in enumerate(self._parts(row), 1):
                    for norm in norms:  # the mean over batches, which only batch norm takes None for
                        norm.momentum = 1 / seen if isinstance(norm, INSTANCE_NORMS) else None
                    module(samples.take(index, self.model.weights)[0])
                rows.append(self.model.read())
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        statistics = [key for key in layers if kind_of(key) == STATS]
        return layers | {key: torch.cat([row[key] for row in rows]) for key in statistics}

    def _parts(self, row: int) -> Sequence[Tensor]:
        """Return a client's samples in batches of equal size, to be passed forward; in any order if there are several.

        Seed and client alone decide which.
        """
        count = len(self.samples[row])
        if count <= EVALUATION_BATCH:
            return [torch.arange(count)]
        order = torch.randperm(count, generator=stream(self.seed, "statistics", self.ids[row]))
        return order.tensor_split(-(-count // EVALUATION_BATCH))

    def _batches(self, row: int, epochs: int, part: str) -> Batches:
        """Yield every sample once per epoch, in an order fixed by seed, round and client."""
        samples, size = self.samples[row], self.training.batch_size
        generator = stream(self.seed, "batches" + part, self.t, self.ids[row])
        for _ in range(epochs):
            for index in torch.randperm(len(samples), generator=generator).split(_sizes(len(samples), size)):
                yield samples.take(index, self.model.weights)


def _sizes(samples: int, size: int) -> list[int]:
    """Return the sizes of an epoch's batches; a single sample joins the batch before it, for batch norm's sake."""
    sizes = [size] * (samples // size) + [samples % size] * (samples % size > 0)
    if size > 1 and len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [size + 1]
    return sizes


@torch.inference_mode()
def score(
    model: FlatModel, layers: Layers, samples: Sequence[Samples], train: Sequence[Samples] | None = None
) -> Scores:
    """Return the metrics of each row of `layers` on its client's samples; NaN without samples.

    With the clients' training samples, the objective's controls are among them.
    """
    objective, scores = model.objective, list[dict[str, float]]()
    for row, test in enumerate(samples):
        prior = objective.prior(train[row].targets) if train else None
        model.load(layers, row)
        model.module.eval()
        sums: dict[str, list[float]] = {}
        for start in range(0, len(test), EVALUATION_BATCH):
            x, y = test.take(slice(start, start + EVALUATION_BATCH), model.weights)
            outputs = model.module(x)
            found = objective.measure(outputs, y)
            if prior is not None:
                found |= objective.controls(outputs, y, prior.to(y.device))
            for metric, ratio in found.items():
                total = sums.setdefault(metric, [0.0, 0.0])
                total[:] = (so_far + float(part) for so_far, part in zip(total, ratio, strict=True))
        means = {metric: above / below if below else math.nan for metric, (above, below) in sums.items()}
        scores.append(objective.finish(means) if means else {})
    metrics = dict.fromkeys([objective.headline, *(metric for means in scores for metric in means), "loss"])
    return {metric: np.array([means.get(metric, math.nan) for means in scores]) for metric in metrics}
