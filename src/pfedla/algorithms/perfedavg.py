"""Per-FedAvg: a shared model that is one gradient step away from everybody's own.

Fallah et al., "Personalized federated learning with theoretical guarantees: a model-agnostic meta-learning approach",
NeurIPS 2020.

=============  =========================================================================
w              w_i, a client's copy of the shared model w (the server's `theta`) during a round
alpha, beta    α, the step of the adaptation, inside; β, the step of w_i, outside
group          independent batches D, D', D'': for the adaptation, its gradient, and the Hessian's part
=============  =========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from torch import Tensor

from pfedla.algorithms.fedavg import FedAvg
from pfedla.engine import FlatModel
from pfedla.layers import Layers, change
from pfedla.settings import NonNegative, Positive
from pfedla.training import Batches, Task, Training
from pfedla.wire import Payload

__all__ = ["PerFedAvg", "grouped", "meta_gradient"]

Batch = tuple[Tensor, Tensor]
Gradient = Callable[[Tensor, Batch], Tensor]  # of weights and a batch


def meta_gradient(f: Gradient, w: Tensor, group: list[Batch], alpha: float, delta: float) -> Tensor:
    """Return ∇F_i(w) of F_i(w) = f_i(w - α ∇f_i(w)), from `f`, which is ∇f_i at given weights and batch.

    First-order, of two batches: u = ∇f_i(w - α ∇f_i(w; D); D'). Hessian-free, of three: u - α ∇²f_i(w; D'') u,
    with the product taken as [∇f_i(w + δ u; D'') - ∇f_i(w - δ u; D'')] / 2δ.
    """
    u = f(w - alpha * f(w, group[0]), group[1])
    if len(group) == 2:
        return u
    return u - alpha * (f(w + delta * u, group[2]) - f(w - delta * u, group[2])) / (2 * delta)


def grouped(batches: Batches, size: int) -> Iterator[list[Batch]]:
    """Yield batches in groups; an incomplete last group repeats its own."""
    while group := list(islice(batches, size)):
        yield (group * size)[:size]


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """Per-FedAvg: the shared model is trained to be good after one step on a client's data.

    A round uses the batches that FedAvg would, once (but see `grouped`): `fo` (first-order, the default, being cheaper)
    makes one outer step of two batches, with as many gradients as FedAvg in half the steps; `hf` (Hessian-free) one
    of three, with four gradients. α = 0.01 and δ = 0.001 are those of public implementations. Their β is 0.001; ours is
    `training.lr` unless given, the step of every other method.
    """

    variant: Literal["fo", "hf"] = "fo"
    alpha: NonNegative = 0.01
    beta: Positive | None = None
    delta: Positive = 1e-3

    def check(self, training: Training, n: int) -> None:  # noqa: ARG002
        """Refuse momentum."""
        training.refuse_momentum("Per-FedAvg")

    def groups(self, batches: Batches) -> Iterator[list[Batch]]:
        """Yield the batches of each step."""
        return grouped(batches, 2 if self.variant == "fo" else 3)

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Take steps w_i - β ∇F_i(w_i)."""

        def descend(_: int, model: FlatModel, batches: Batches) -> None:
            def gradient(w: Tensor, batch: Batch) -> Tensor:
                model.weights.copy_(w)
                return model.backward(*batch).add(w, alpha=task.training.weight_decay)

            w, beta = model.weights.clone(), self.beta or task.training.lr
            for group in self.groups(batches):
                w.add_(meta_gradient(gradient, w, group, self.alpha, self.delta), alpha=-beta)
            model.weights.copy_(w)

        trained = task.each(received := got.fill(own), descend)
        return trained, self.send(change(trained, received), examples=task.examples)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:
        """Return w - α ∇f_i(w; D): one step from the shared model, on one batch of training data."""

        def adapt(_: int, model: FlatModel, batches: Batches) -> None:
            gradient = model.backward(*next(batches)).add_(model.weights, alpha=task.training.weight_decay)
            model.weights.add_(gradient, alpha=-self.alpha)

        return task.each(got.fill(own), adapt, epochs=1, part="adapt")
