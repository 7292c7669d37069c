"""FedALA: each client learns, number by number, how much of the shared model's last layers to take.

Zhang et al., "FedALA: adaptive local aggregation for personalized federated learning", AAAI 2023.

=============  ==================================================================================
theta          Θ, the shared model the client received; own is Θ_i, its model of the last time
w              W_i in [0, 1], of the last p layers; the client keeps it as `"layer#weights"`
eta            η, the learning rate of W_i
s              the share of the client's training data on which W_i is learned, drawn each round
=============  ==================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pfedla.algorithm import RESOLVED
from pfedla.algorithms.fedavg import FedAvg
from pfedla.errors import ConfigError, require
from pfedla.layers import FlatModel, Layers, LayerSpec, change, entry
from pfedla.training import Batches, Task
from pfedla.wire import Payload

__all__ = ["FedALA", "local_aggregation", "weight_step"]

RECENT = 10  # epochs whose losses decide that W_i has settled: the authors' num_pre_loss


def local_aggregation(own: Tensor, theta: Tensor, w: Tensor) -> Tensor:
    """Θ_i + (Θ - Θ_i) ⊙ W_i: all of Θ where W_i is 1, none where it is 0."""
    return torch.lerp(own, theta, w)


def weight_step(w: Tensor, gradient: Tensor, own: Tensor, theta: Tensor, eta: float) -> Tensor:
    """Return W_i - η ∇L ⊙ (Θ - Θ_i), kept in [0, 1]; ∇L is the loss's gradient at the aggregated model."""
    return (w - eta * gradient * (theta - own)).clamp(0, 1)


@dataclass(frozen=True)
class FedALA(FedAvg):
    """FedALA: FedAvg whose last layers are mixed into the client's own by weights learned before each training.

    Defaults of the paper: p = 1 layer, s = 80 %, η = 1. Weights start at 1; the first time they are trained until the
    losses of the last 10 epochs deviate by less than `threshold` (0.01 by the notes to the authors' code), at most
    `start_epochs` (our bound), later for one epoch. We take an epoch's mean loss. Statistics are the shared model's.
    """

    p: int = 1
    s: float = 0.8
    eta: float = 1.0
    threshold: float = 0.01
    start_epochs: int = 50
    adaptive: tuple[str, ...] = field(default=(), metadata=RESOLVED)

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        require("algorithm", self, p=self.p >= 1, s=0 < self.s <= 1, eta=0 < self.eta < math.inf)
        require("algorithm", self, threshold=self.threshold > 0, start_epochs=self.start_epochs >= 1)

    def for_model(self, spec: LayerSpec) -> Self:
        """Settle which layers are the last p."""
        if self.p > len(spec.names):
            raise ConfigError(f"algorithm.p = {self.p}: this model has {len(spec.names)} layers")
        return replace(self, adaptive=spec.names[-self.p :])

    def enroll(self, theta: Layers) -> Layers:
        """Keep the weights, all 1, and whether they were ever learned."""
        ones = {entry(layer, "weights"): torch.ones_like(theta[layer]) for layer in self.adaptive}
        return {**theta, **ones, entry(self.adaptive[0], "started"): torch.zeros(1, 1)}

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Aggregate locally, then train; the change against what was received goes up."""
        start, kept = self.adapt(own, got, task)
        trained = task.fit(start)
        return {**trained, **kept}, self.send(change(trained, got.fill(trained)), task.examples)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:
        """Return the locally aggregated model, as the authors score it."""
        return self.adapt(own, got, task)[0]

    def adapt(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Layers]:
        """Learn W_i; return the aggregated models, and W_i with its mark. Nothing is learned while Θ is Θ_i."""
        flag, names = entry(self.adaptive[0], "started"), [entry(layer, "weights") for layer in self.adaptive]
        kept = {key: own[key].clone() for key in (flag, *names)}
        received = got.fill({key: rows for key, rows in own.items() if key not in kept})
        drawn, _ = task.split(self.s, "aggregation", task.t)

        def learn(row: int, model: FlatModel, batches: Batches) -> None:
            if torch.equal(model.vector(own, row), model.vector(received, row)):
                return
            mask = model.mask(self.adaptive)
            mine, theta = model.vector(own, row)[mask], model.vector(received, row)[mask]
            w = torch.cat([kept[name][row] for name in names]).to(theta)
            losses, epoch, seen = list[float](), 0.0, 0
            for x, y in batches:
                model.weights[mask] = local_aggregation(mine, theta, w)
                model.gradient.zero_()
                loss = functional.cross_entropy(model.module(x), y)
                loss.backward()
                w = weight_step(w, model.gradient[mask], mine, theta, self.eta)
                epoch, seen = epoch + float(loss.detach()) * len(y), seen + len(y)
                if seen == len(drawn.samples[row]):
                    losses, epoch, seen = [*losses, epoch / seen], 0.0, 0
                    if kept[flag][row] or (len(losses) > RECENT and np.std(losses[-RECENT:]) < self.threshold):
                        break
            for name, part in zip(names, w.split([kept[name].shape[1] for name in names]), strict=True):
                kept[name][row] = part
            kept[flag][row] = 1

        drawn.each(received, learn, epochs=self.start_epochs, part="aggregation")
        mixed = {k: local_aggregation(own[k], received[k], kept[entry(k, "weights")]) for k in self.adaptive}
        return {**received, **mixed}, kept
