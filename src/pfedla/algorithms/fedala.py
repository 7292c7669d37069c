"""FedALA: each client learns, number by number, how much of the shared model's last layers to take.

Zhang et al., "FedALA: adaptive local aggregation for personalized federated learning", AAAI 2023.

=============  =======================================================================================
own, theta     Θ_i, the client's model of the last time; Θ, the shared model it received
w, eta, s      W_i in [0, 1], of the last p layers; its learning rate; the share of data it is learned on
=============  =======================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pfedla.algorithms.fedavg import FedAvg
from pfedla.errors import require
from pfedla.layers import FlatModel, Layers, change, entry, kind_of
from pfedla.training import Batches, Task
from pfedla.wire import Payload

__all__ = ["FedALA", "local_aggregation", "weight_step"]


def local_aggregation(own: Tensor, theta: Tensor, w: Tensor) -> Tensor:
    """Θ_i + (Θ - Θ_i) ⊙ W_i: all of Θ where W_i is 1, none where it is 0."""
    return torch.lerp(own, theta, w)


def weight_step(w: Tensor, gradient: Tensor, own: Tensor, theta: Tensor, eta: float) -> Tensor:
    """Return W_i - η ∇L ⊙ (Θ - Θ_i), kept in [0, 1]; ∇L is the loss's gradient at the aggregated model."""
    return (w - eta * gradient * (theta - own)).clamp(0, 1)


@dataclass(frozen=True)
class FedALA(FedAvg):
    """FedALA: FedAvg whose last layers are mixed into the client's own by weights learned before each training.

    Defaults of the authors' code. W_i starts at 1; the first time it is learned until the mean losses of the last 10
    epochs deviate by less than `threshold`, for at most `start_epochs` (our bound), later for one epoch.
    """

    p: int = 1
    s: float = 0.8
    eta: float = 1.0
    threshold: float = 0.1
    start_epochs: int = 50

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        require("algorithm", self, p=self.p >= 1, s=0 < self.s <= 1, eta=0 < self.eta < math.inf)
        require("algorithm", self, threshold=self.threshold > 0, start_epochs=self.start_epochs >= 1)

    def enroll(self, theta: Layers) -> Layers:
        """Keep W_i, all 1, and behind it 0: it was never learned. Refuse a model of fewer than p layers."""
        last = [key for key in theta if not kind_of(key)][-self.p :]
        require("algorithm", self, p=self.p == len(last))
        ones = torch.ones_like(torch.cat([theta[layer] for layer in last], 1))
        return theta | {entry(last[0], "weights"): functional.pad(ones, (0, 1))}

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Aggregate locally, then train; the change against what was received goes up."""
        start, weights = self.adapt(own, got, task)
        trained = task.fit(start)
        return trained | weights, self.send(change(trained, got.fill(trained)), task.examples)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:
        """Return the locally aggregated model, as the authors score it."""
        return self.adapt(own, got, task)[0]

    def adapt(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Layers]:
        """Learn W_i; return the aggregated models, and W_i. Nothing is learned while Θ is Θ_i."""
        last, received, (drawn, _) = got.names[-self.p :], got.fill(own), task.split(self.s, "aggregation", task.t)
        weights = {entry(last[0], "weights"): (kept := own[entry(last[0], "weights")].clone())}

        def learn(row: int, model: FlatModel, batches: Batches) -> None:
            if torch.equal(model.vector(own, row), model.weights):
                return
            mask, losses, size = model.mask(last), list[float](), len(drawn.samples[row])
            mine, theta, w = model.vector(own, row)[mask], model.weights[mask], kept[row, :-1].to(model.weights)
            for x, y in batches:
                model.weights[mask] = local_aggregation(mine, theta, w)
                model.gradient.zero_()
                loss = functional.cross_entropy(model.module(x), y)
                loss.backward()
                w = weight_step(w, model.gradient[mask], mine, theta, self.eta)
                losses += [float(loss.detach())] * len(y)
                mean = torch.tensor(losses[: len(losses) // size * size]).view(-1, size).mean(1)  # (complete epochs,)
                if (len(mean) > 10 and mean[-10:].std(correction=0) < self.threshold) or (len(mean) and kept[row, -1]):
                    break
            model.weights[mask] = local_aggregation(mine, theta, w)
            kept[row, :-1], kept[row, -1] = w, 1

        mixed = drawn.each(received, learn, epochs=self.start_epochs, part="aggregation")
        return {key: mixed[key] if key in last else received[key] for key in mixed}, weights
