"""APFL: adaptive personalized federated learning, a mixture of a personal and the shared model.

Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", arXiv:2003.13461, 2020.

=============  =========================================================================
w              w_i, a client's copy of the shared model w (the server's `theta`), trained as by FedAvg
v              v_i, the personal part, kept as `"conv1#personal"`
own            v̄_i, the mixture after the latest local training
alpha          α_i, the weight of v_i in it: 1 is training alone, 0 is FedAvg
=============  =========================================================================
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from pfedla.algorithms.fedavg import FedAvg
from pfedla.engine import FlatModel
from pfedla.layers import Layers, change, entry, kind_of
from pfedla.settings import Share
from pfedla.training import Batches, Task, Training
from pfedla.wire import Payload

__all__ = ["APFL", "mix", "next_alpha"]

PERSONAL, ALPHA = "personal", "#alpha"


def mix(alpha: Tensor | float, v: Tensor, w: Tensor) -> Tensor:
    """Return v̄_i = α_i v_i + (1 - α_i) w_i."""
    return alpha * v + (1 - alpha) * w


def next_alpha(alpha: float, v: Tensor, w: Tensor, gradient: Tensor, eta: float) -> float:
    """Return α_i - η <v_i - w_i, ∇f_i(v̄_i)>, a gradient step on α_i, kept within [0, 1]."""
    return min(max(alpha - eta * float((v - w) @ gradient), 0.0), 1.0)


@dataclass(frozen=True)
class APFL(FedAvg):
    """APFL: each client mixes a personal model with the shared one, and trains its part for the mixture.

    A batch takes two gradients, of w_i and of the mixture: twice those of FedAvg. α = 0.5 and fixed is the default of
    the authors' code; `adaptive` starts from it and takes one step on α_i per round, on the first batch, as they do.
    The mixture's running statistics are those of its own passes over the client's data.
    """

    alpha: Share = 0.5
    adaptive: bool = False

    def check(self, training: Training, n: int) -> None:  # noqa: ARG002
        """Refuse momentum."""
        training.refuse_momentum("APFL")

    def enroll(self, theta: Layers) -> Layers:
        """Keep the personal part beside the mixture, and α_i if it is learned."""
        return theta | self._beside({key: row for key, row in theta.items() if not kind_of(key)}, self.alpha)

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Step w_i along ∇f_i(w_i) and v_i along α_i ∇f_i(v̄_i), on the same batches with the same random numbers."""
        lr, decay, received = task.training.lr, task.training.weight_decay, got.fill(own)
        model = task.model
        local = FlatModel(copy.deepcopy(model.module).train(), model.spec, model.objective, model.weights.device)
        trained, beside = list[Layers](), list[Layers]()

        def descend(row: int, model: FlatModel, batches: Batches) -> None:
            local.load(received, row)
            v, w, alpha = model.vector(own, row, PERSONAL), local.weights, float(self._alpha(own)[row])
            for step, (x, y) in enumerate(batches):
                model.weights.copy_(mix(alpha, v, w))
                with torch.random.fork_rng(devices=[]):
                    gradient = model.backward(x, y).add_(model.weights, alpha=decay)
                later = next_alpha(alpha, v, w, gradient, lr) if self.adaptive and step == 0 else alpha
                v.add_(gradient, alpha=-lr * alpha)
                w.add_(local.backward(x, y).add_(w, alpha=decay), alpha=-lr)
                alpha = later
            model.weights.copy_(mix(alpha, v, w))
            trained.append(local.read())
            beside.append(self._beside(model.layers(v), alpha))

        mixed = task.each(own, descend)
        moved, more = ({k: torch.cat([rows[k] for rows in parts]) for k in parts[0]} for parts in (trained, beside))
        return mixed | more, self.send(change(moved, received), examples=task.examples)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:  # noqa: ARG002
        """Return the mixture of the personal part and the shared model as it is now."""
        return own | {k: mix(self._alpha(own), own[entry(k, PERSONAL)], got.layers[k]) for k in got.names}

    def _beside(self, v: Layers, alpha: float) -> Layers:
        weight = torch.full_like(next(iter(v.values()))[:, :1], alpha)
        return {entry(name, PERSONAL): row for name, row in v.items()} | ({ALPHA: weight} if self.adaptive else {})

    def _alpha(self, own: Layers) -> Tensor:
        return own[ALPHA] if self.adaptive else torch.full_like(next(iter(own.values()))[:, :1], self.alpha)
