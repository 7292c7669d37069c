"""pFedMe: personalization with Moreau envelopes.

T. Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020.

=============  =========================================================================
own, theta     θ_i, a client's personal model, which never leaves it
w              w_i, a client's copy of the shared model w (the server's `theta`) during a round
lam            λ, the pull between θ_i and w_i
mu             μ, the pull of θ_i to 0, which the paper does not have and the authors' code does
k              K, steps on θ_i for each mini-batch
eta            η, the step of w_i: `training.lr`
beta           β, how far the server goes from w to the clients' mean
=============  =========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedla.algorithms.fedavg import FedAvg, SharedModel, weighted_mean
from pfedla.algorithms.fedprox import proximal_gradient
from pfedla.engine import FlatModel
from pfedla.layers import Layers, change, kind_of
from pfedla.settings import Count, NonNegative, Positive
from pfedla.training import Batches, Task, Training
from pfedla.wire import Payload

__all__ = ["PFedMe", "envelope_step", "proximal_step"]


def proximal_step(theta: Tensor, w: Tensor, gradient: Tensor, lr: float, lam: float, mu: float) -> None:
    """Move θ_i, in place, one gradient step down f_i(θ_i) + λ/2 |θ_i - w_i|² + μ/2 |θ_i|²."""
    theta.add_(gradient + proximal_gradient(theta, w, lam) + mu * theta, alpha=-lr)


def envelope_step(w: Tensor, theta: Tensor, eta: float, lam: float) -> Tensor:
    """Return w_i - η λ (w_i - θ_i): a step down the Moreau envelope, whose gradient is λ (w_i - θ_i(w_i))."""
    return w - eta * lam * (w - theta)


@dataclass(frozen=True)
class PFedMe(FedAvg):
    """pFedMe: personal models near the shared one, which follows them down their Moreau envelopes.

    A round uses the batches that FedAvg would, with `k` gradients on each: `k` times the gradients. Within a round
    θ_i goes on from batch to batch, from w at first. Running statistics are those of θ_i, the only model that sees
    data, and the server takes their mean whatever β. λ, K, β and μ are those of the authors' code, and `personal_lr` is
    that of its command for CIFAR-10. With the code's default, 0.09, λ `personal_lr` is above 1: steps on θ_i overshoot.
    """

    lam: NonNegative = 15.0
    k: Count = 5
    beta: Positive = 1.0
    personal_lr: Positive = 0.01
    mu: NonNegative = 0.001

    def check(self, training: Training, n: int) -> None:  # noqa: ARG002
        """Refuse momentum."""
        training.refuse_momentum("pFedMe")

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Alternate between steps on θ_i and on w_i; keep θ_i and send the change of w_i."""
        eta, decay, moved = task.training.lr, task.training.weight_decay, list[Layers]()

        def descend(_: int, model: FlatModel, batches: Batches) -> None:
            w, theta = model.weights.clone(), model.weights
            for x, y in batches:
                for _ in range(self.k):
                    gradient = model.backward(x, y).add_(theta, alpha=decay)
                    proximal_step(theta, w, gradient, self.personal_lr, self.lam, self.mu)
                w = envelope_step(w, theta, eta, self.lam)
            moved.append(model.layers(w))

        kept = task.each(received := got.fill(own), descend)
        trained = kept | {name: torch.cat([rows[name] for rows in moved]) for name in got.names}
        return kept, self.send(change(trained, received), examples=task.examples)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:  # noqa: ARG002
        """Return the personal model."""
        return dict(own)

    def update(self, state: SharedModel, ids: Tensor, got: Payload, upload: Payload) -> SharedModel:  # noqa: ARG002
        """Return (1 - β) w + β Σ_i m_i/M w_i, that is w moved by β times the mean change."""
        for key, delta in upload.layers.items():
            state.theta[key] += weighted_mean(delta, upload.examples) * (1 if kind_of(key) else self.beta)
        return state
