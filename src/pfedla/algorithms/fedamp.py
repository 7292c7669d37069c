"""FedAMP: federated attentive message passing; alike models attract each other.

Huang et al., "Personalized cross-silo federated learning on non-IID data", AAAI 2021.

=============  ================================================================================
w              w_j, every client's latest model: `(N, parameters)`
u, xi          u_i = Σ_j ξ_ij w_j, what the server passes to client i; ξ: `(n, N)`, rows sum to 1
alpha, sigma   α_k, the server's step in round k, lowered in stages; σ, how sharply ξ prefers alike models;
               of HeurFedAMP σ_i, by default one over the standard deviation of client i's cosines
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
from pfedla.training import Task, Training
from pfedla.wire import Payload

__all__ = ["FedAMP", "Messages", "attention", "heuristic_attention"]


ROUNDING = 1e-12  # of cosines in double precision: models that differ by no more are alike


class Messages(NamedTuple):
    """The server's state: every client's model, and how many rounds were completed."""

    theta: Layers
    t: Tensor  # ()


def attention(w: Tensor, ids: Tensor, alpha: float, sigma: float) -> Tensor:
    """FedAMP: ξ_ij = α_k A'(|w_i - w_j|²), A(x) = 1 - exp(-x/σ), and ξ_ii what is left of 1: `(n, N)`."""
    square = torch.cdist(w[ids], w, compute_mode="donot_use_mm_for_euclid_dist").double().square()
    xi = (alpha / sigma * torch.exp(-square / sigma)).scatter_(1, ids[:, None], 0.0)
    return xi.scatter_(1, ids[:, None], 1 - xi.sum(1, keepdim=True))


def heuristic_attention(w: Tensor, ids: Tensor, sigma: float | None = None) -> Tensor:
    """HeurFedAMP: ξ_ii = 1/N, and ξ_ij = (1 - ξ_ii) softmax_j≠i(σ cos(w_i, w_j)): `(n, N)`.

    Without σ it is σ_i = 1 / std_j≠i(cos(w_i, w_j)): whatever the cosines' scale, one standard deviation is a factor e.
    """
    unit: Tensor = w.double() / w.double().norm(dim=1, keepdim=True)
    cosine, own = unit[ids] @ unit.T, ids[:, None]
    mean = (cosine.sum(1, keepdim=True) - 1) / max(len(w) - 1, 1)  # of the others: the own cosine is 1
    spread = (cosine - mean).scatter_(1, own, 0.0).square().sum(1, keepdim=True).div(max(len(w) - 1, 1)).sqrt()
    scale = torch.where(spread > ROUNDING, 1 / spread, 0.0) if sigma is None else sigma
    logits = ((cosine - mean) * scale).scatter_(1, own, -torch.inf)
    return ((1 - 1 / len(w)) * logits.softmax(1)).scatter_(1, own, 1 / len(w))


@dataclass(frozen=True)
class FedAMP(Algorithm[Messages]):
    """FedAMP: each client is drawn to a mixture of the models that are near its own.

    By default in the form that the paper proposes for deep networks, HeurFedAMP. ξ_ii = 1/N, α_1 = 10⁴, lowered tenfold
    every 30 rounds, λ = 1 and training from u_i are as in a public implementation (FLGo). Its σ = 25 does nothing here:
    models that train from mixtures of each other have cosines of 0.99 and more, and get even weights. `sigma` is
    therefore the cosines' own scale unless it is given; FedAMP itself, `heuristic=False`, needs it.
    """

    heuristic: bool = True
    alpha: Positive = 1e4
    alpha_decay: Positive = 0.1
    decay_every: Count = 30  # rounds
    lam: Positive = 1.0
    sigma: Positive | None = None

    def step(self, t: int) -> float:
        """Return α_k of round `t`, counted from 1."""
        return self.alpha * self.alpha_decay ** ((t - 1) // self.decay_every)

    def check(self, training: Training, n: int) -> None:  # noqa: ARG002
        """Refuse a step that would leave the mixture, ξ_ii < 0."""
        if not self.heuristic and (n - 1) * self.alpha > self._sigma:
            raise ConfigError(
                f"algorithm.alpha = {self.alpha:g} must be at most algorithm.sigma / (clients - 1), "
                f"{self._sigma / (n - 1):g}"
            )

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Messages:  # noqa: ARG002
        """Start everybody from the common model."""
        return Messages(bank(theta, n), torch.tensor(0))

    def download(self, state: Messages, ids: Tensor) -> Payload:
        """Send u_i = Σ_j ξ_ij w_j, running statistics in the same proportions, and α_k."""
        w, alpha = torch.cat([x for k, x in state.theta.items() if not kind_of(k)], 1), self.step(int(state.t) + 1)
        xi = heuristic_attention(w, ids, self.sigma) if self.heuristic else attention(w, ids, alpha, self._sigma)
        u = {key: xi.to(rows) @ rows for key, rows in state.theta.items()}
        return self.send(u, alpha=torch.full((len(ids),), alpha, dtype=torch.float64))

    def update(self, state: Messages, ids: Tensor, got: Payload, upload: Payload) -> Messages:
        """Keep what the clients trained."""
        for key, rows in state.theta.items():
            rows[ids] = got.layers[key] + upload.layers[key]
        return Messages(state.theta, state.t + 1)

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Lower F_i(w) + λ/(2α_k) |w - u_i|² by SGD from u_i: FedProx with μ = λ/α_k.

        As α_k falls, a step along that pull would one day overshoot u_i: it goes to u_i at the most, μ ≤ 1/lr.
        """
        alpha, most = float(got.values["alpha"][0]), 1 / task.training.lr
        mu = self.lam / alpha if alpha * most > self.lam else most
        return FedProx(mu).train(own, got, task)

    @property
    def _sigma(self) -> float:
        if self.sigma is None:
            raise ConfigError("algorithm.sigma must be given for FedAMP itself, of the size of squared distances")
        return self.sigma

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:  # noqa: ARG002
        """Return w_i, the client's own model: u_i only guides it."""
        return own
