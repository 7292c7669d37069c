"""FedAMP: federated attentive message passing; alike models attract each other.

Huang et al., "Personalized cross-silo federated learning on non-IID data", AAAI 2021.

=============  ================================================================================
theta          w_j, every client's latest model: `{layer: (N, numbers)}`
u              u_i, what the server passes to client i: a mixture of all models, near alike ones
xi             ξ_ij, its weights: `(n, N)`, each row sums to 1
alpha          α_k, the server's step in round k; large at first, lowered in stages
=============  ================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.algorithms.fedprox import FedProx
from pfedla.errors import ConfigError
from pfedla.layers import Layers, bank, kind_of
from pfedla.training import Task
from pfedla.wire import Payload

__all__ = ["FedAMP", "Messages", "attention"]


class Messages(NamedTuple):
    """The server's state: every client's model, and how many rounds were completed."""

    theta: Layers
    t: Tensor  # ()


def attention(theta: Layers, ids: Tensor, alpha: float, sigma: float) -> Tensor:
    """Return ξ_ij = α_k A'(|w_i - w_j|²), A(x) = 1 - exp(-x/σ), and ξ_ii what is left of 1: `(n, N)`."""
    w = torch.cat([rows for key, rows in theta.items() if not kind_of(key)], 1)  # (N, parameters)
    square = torch.cdist(w[ids], w, compute_mode="donot_use_mm_for_euclid_dist").double().square()
    xi = alpha / sigma * torch.exp(-square / sigma)  # (n, N)
    xi.scatter_(1, ids[:, None], 0.0)
    return xi.scatter_(1, ids[:, None], 1 - xi.sum(1, keepdim=True))


@dataclass(frozen=True)
class FedAMP(Algorithm[Messages]):
    """FedAMP: each client is drawn to a mixture of the models that are near its own.

    α_1 = 10⁴, lowered tenfold every 30 rounds, λ = 1 and training from u_i are as in a public implementation (FLGo).
    σ is our choice: 10⁶ leaves a client some weight of its own with up to 100 clients.
    """

    alpha: float = 1e4
    alpha_decay: float = 0.1
    decay_every: int = 30  # rounds
    lam: float = 1.0
    sigma: float = 1e6

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        for name in ("alpha", "alpha_decay", "decay_every", "lam", "sigma"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"algorithm.{name} = {getattr(self, name)} must be above 0 and finite")

    def step(self, t: int) -> float:
        """Return α_k of round `t`, counted from 1."""
        return self.alpha * self.alpha_decay ** ((t - 1) // self.decay_every)

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Messages:  # noqa: ARG002
        """Start everybody from the common model; refuse a step that would leave the mixture."""
        if self.alpha / self.sigma * (n - 1) > 1:
            most = self.sigma / (n - 1)
            raise ConfigError(f"algorithm.alpha = {self.alpha:g}: with {n} clients it is at most {most:g}, or ξ_ii < 0")
        return Messages(bank(theta, n), torch.tensor(0))

    def download(self, state: Messages, ids: Tensor) -> Payload:
        """Send u_i = Σ_j ξ_ij w_j, running statistics in the same proportions."""
        xi = attention(state.theta, ids, self.step(int(state.t) + 1), self.sigma)
        return self.send({key: xi.to(rows) @ rows for key, rows in state.theta.items()})

    def update(self, state: Messages, ids: Tensor, upload: Payload) -> Messages:
        """Keep what the clients trained."""
        u = self.download(state, ids).layers
        for key, rows in state.theta.items():
            rows[ids] = u[key] + upload.layers[key]
        return Messages(state.theta, state.t + 1)

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Lower F_i(w) + λ/(2α_k) |w - u_i|² by SGD from u_i: FedProx with μ = λ/α_k."""
        return FedProx(self.lam / self.step(task.t)).train(own, got, task)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:  # noqa: ARG002
        """Return w_i, the client's own model: u_i only guides it."""
        return own
