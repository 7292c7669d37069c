"""FedALA: each client learns, number by number, how much of the shared model's last layers to take.

Zhang et al., "FedALA: adaptive local aggregation for personalized federated learning", AAAI 2023.

=============  =======================================================================================
own, theta     Θ_i, the client's model of the last time; Θ, the shared model it received
w, eta, s      W_i in [0, 1], of the last p layers; its learning rate; the share of data it is learned on
=============  =======================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import torch
from torch import Tensor

from pfedla.algorithms.fedavg import FedAvg
from pfedla.engine import FlatModel
from pfedla.errors import ConfigError
from pfedla.layers import Layers, LayerSpec, change, entry, kind_of
from pfedla.settings import Count, Positive, Range
from pfedla.training import Batches, Task
from pfedla.wire import Payload

__all__ = ["FedALA", "local_aggregation", "weight_step"]

LEARNED = "#learned"  # whether a client has learned W_i before


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

    p: Count = 1
    s: Annotated[float, Range(above=0, most=1)] = 0.8
    eta: Positive = 1.0
    threshold: Positive = 0.1
    start_epochs: Count = 50

    def for_model(self, spec: LayerSpec) -> Self:
        """Refuse a model of fewer than p layers."""
        if self.p > len(spec.names):
            raise ConfigError(f"algorithm.p = {self.p}: this model has {len(spec.names)} layers")
        return self

    def enroll(self, theta: Layers) -> Layers:
        """Keep W_i, all 1, and that it was never learned."""
        names = [key for key in theta if not kind_of(key)]
        ones = torch.ones_like(torch.cat([theta[layer] for layer in names[-self.p :]], 1))
        return theta | {entry(names[-self.p], "weights"): ones, LEARNED: torch.tensor([[False]])}

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Aggregate locally, then train; the change against what was received goes up."""
        start, weights = self.adapt(own, got, task)
        trained = task.fit(start)
        return trained | weights, self.send(change(trained, got.fill(trained)), examples=task.examples)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:
        """Return the locally aggregated model, as the authors score it."""
        return self.adapt(own, got, task)[0]

    def adapt(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Layers]:
        """Learn W_i; return the aggregated models, and W_i. Nothing is learned while Θ is Θ_i."""
        last, received, (drawn, _) = got.names[-self.p :], got.fill(own), task.split(self.s, "aggregation", task.t)
        kept, learned = own[entry(last[0], "weights")].clone(), own[LEARNED].clone()

        def learn(row: int, model: FlatModel, batches: Batches) -> None:
            if torch.equal(model.vector(own, row), model.weights):
                return
            mask, losses, size = model.mask(last), list[float](), len(drawn.samples[row])
            mine, theta, w = model.vector(own, row)[mask], model.weights[mask], kept[row].to(model.weights)
            for x, y in batches:
                model.weights[mask] = local_aggregation(mine, theta, w)
                w = weight_step(w, model.backward(x, y)[mask], mine, theta, self.eta)
                losses += [float(model.loss)] * len(y)
                mean = torch.tensor(losses[: len(losses) // size * size]).view(-1, size).mean(1)  # (complete epochs,)
                if (len(mean) > 10 and mean[-10:].std(correction=0) < self.threshold) or (len(mean) and learned[row]):
                    break
            model.weights[mask] = local_aggregation(mine, theta, w)
            kept[row], learned[row] = w, True

        mixed = drawn.each(received, learn, epochs=self.start_epochs, part="aggregation")
        model = {key: mixed[key] if key in last else received[key] for key in mixed}
        return model, {entry(last[0], "weights"): kept, LEARNED: learned}
