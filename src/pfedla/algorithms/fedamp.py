"""FedAMP: federated attentive message passing; alike models attract each other.

Huang et al., "Personalized cross-silo federated learning on non-IID data", AAAI 2021.

=============  ================================================================================
w              w_j, every client's latest model: `(N, parameters)`
u, xi          u_i = Σ_j ξ_ij w_j, what the server passes to client i; ξ: `(n, N)`, rows sum to 1
alpha, sigma   α_k, the server's step in round k, lowered in stages; σ, how sharply ξ prefers alike models
=============  ================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.algorithms.fedprox import FedProx
from pfedla.errors import ConfigError
from pfedla.layers import Layers, bank, kind_of
from pfedla.settings import Count, Positive
from pfedla.training import Task
from pfedla.wire import Payload

__all__ = ["FedAMP", "Messages", "attention", "heuristic_attention"]


class Messages(NamedTuple):
    """The server's state: every client's model, and how many rounds were completed."""

    theta: Layers
    t: Tensor  # ()


def attention(w: Tensor, ids: Tensor, alpha: float, sigma: float) -> Tensor:
    """FedAMP: ξ_ij = α_k A'(|w_i - w_j|²), A(x) = 1 - exp(-x/σ), and ξ_ii what is left of 1: `(n, N)`."""
    square = torch.cdist(w[ids], w, compute_mode="donot_use_mm_for_euclid_dist").double().square()
    xi = (alpha / sigma * torch.exp(-square / sigma)).scatter_(1, ids[:, None], 0.0)
    return xi.scatter_(1, ids[:, None], 1 - xi.sum(1, keepdim=True))


def heuristic_attention(w: Tensor, ids: Tensor, sigma: float) -> Tensor:
    """HeurFedAMP: ξ_ii = 1/N, and ξ_ij = (1 - ξ_ii) softmax_j≠i(σ cos(w_i, w_j)): `(n, N)`."""
    unit: Tensor = w / w.norm(dim=1, keepdim=True)
    cosine = (unit[ids] @ unit.T).double().scatter_(1, ids[:, None], -torch.inf)
    return ((1 - 1 / len(w)) * (sigma * cosine).softmax(1)).scatter_(1, ids[:, None], 1 / len(w))


@dataclass(frozen=True)
class FedAMP(Algorithm[Messages]):
    """FedAMP: each client is drawn to a mixture of the models that are near its own.

    By default in the form that the paper proposes for deep networks, HeurFedAMP. σ = 25, ξ_ii = 1/N, α_1 = 10⁴, lowered
    tenfold every 30 rounds, λ = 1 and training from u_i are as in a public implementation (FLGo).
    """

    heuristic: bool = True
    alpha: Positive = 1e4
    alpha_decay: Positive = 0.1
    decay_every: Count = 30  # rounds
    lam: Positive = 1.0
    sigma: Positive = 25.0

    def step(self, t: int) -> float:
        """Return α_k of round `t`, counted from 1."""
        return self.alpha * self.alpha_decay ** ((t - 1) // self.decay_every)

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Messages:  # noqa: ARG002
        """Start everybody from the common model; refuse a step that would leave the mixture, ξ_ii < 0."""
        if not self.heuristic and (n - 1) * self.alpha > self.sigma:
            raise ConfigError(
                f"algorithm.alpha = {self.alpha:g} must be at most algorithm.sigma / (clients - 1), "
                f"{self.sigma / (n - 1):g}"
            )
        return Messages(bank(theta, n), torch.tensor(0))

    def download(self, state: Messages, ids: Tensor) -> Payload:
        """Send u_i = Σ_j ξ_ij w_j, running statistics in the same proportions, and α_k."""
        w, alpha = torch.cat([x for k, x in state.theta.items() if not kind_of(k)], 1), self.step(int(state.t) + 1)
        xi = heuristic_attention(w, ids, self.sigma) if self.heuristic else attention(w, ids, alpha, self.sigma)
        u = {key: xi.to(rows) @ rows for key, rows in state.theta.items()}
        return self.send(u, alpha=torch.full((len(ids),), alpha, dtype=torch.float64))

    def update(self, state: Messages, ids: Tensor, got: Payload, upload: Payload) -> Messages:
        """Keep what the clients trained."""
        for key, rows in state.theta.items():
            rows[ids] = got.layers[key] + upload.layers[key]
        return Messages(state.theta, state.t + 1)

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Lower F_i(w) + λ/(2α_k) |w - u_i|² by SGD from u_i: FedProx with μ = λ/α_k."""
        return FedProx(self.lam / float(got.values["alpha"][0])).train(own, got, task)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:  # noqa: ARG002
        """Return w_i, the client's own model: u_i only guides it."""
        return own
