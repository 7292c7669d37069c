"""Aggregation by similarity, of layers or of whole models: the two sides of Figure 1 of the pFedLA paper.

Ma et al., "Layer-wised model aggregation for personalized federated learning", CVPR 2022, section 1.

The paper does not say which similarity. Ours: the cosine of what two clients learned since the common start θ_0.

=============  ==============================================================================================
theta          θ_j, every client's latest model: `{layer: (N, values)}`; start is θ_0, `(1, values)`
s              s_ij, the cosine of θ_i - θ_0 and θ_j - θ_0: `(n, L, N)`; 0 for a client that never trained
alpha          α_ij = softmax_j(s_ij / τ): `(n, L, N)`; τ is the temperature
=============  ==============================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.algorithms.pfedla import aggregate
from pfedla.layers import Layers, bank, kind_of
from pfedla.settings import Positive
from pfedla.training import Task
from pfedla.wire import Payload

__all__ = ["Bank", "SimilarityLayer", "SimilarityModel", "cosine", "inner"]


class Bank(NamedTuple):
    """The server's state: every client's model, and the common start."""

    theta: Layers
    start: Layers


def inner(state: Bank, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return <θ_i - θ_0, θ_j - θ_0> by layer, `(n, L, N)`, and the squares |θ_j - θ_0|², `(L, N)`."""
    learned = [(state.theta[name] - row).double() for name, row in state.start.items()]  # L of (N, values)
    products = torch.stack([rows[ids] @ rows.T for rows in learned], 1)
    return products, torch.stack([rows.square().sum(1) for rows in learned])


def cosine(products: Tensor, squares: Tensor, ids: Tensor) -> Tensor:
    """Return s_ij `(n, L, N)`; 0 where a vector is 0."""
    norms = (squares[:, ids].T.unsqueeze(-1) * squares).sqrt()  # (n, L, N)
    return torch.where(norms > 0, products / norms, 0.0)


@dataclass(frozen=True)
class SimilarityLayer(Algorithm[Bank]):
    """SimilarityLayer: each layer is a mixture of all clients', by the cosine similarity of what that layer learned."""

    temperature: Positive = 0.05  # ours: the own layer counts e²⁰ times as much as an orthogonal one
    renews_statistics: ClassVar[bool] = True

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Bank:  # noqa: ARG002
        """Start everybody from the common model."""
        return Bank(bank(theta, n), {key: row.clone() for key, row in theta.items() if not kind_of(key)})

    def weights(self, state: Bank, ids: Tensor) -> Tensor:
        """Return α_ij, layer by layer: `(n, L, N)`."""
        return (cosine(*inner(state, ids), ids) / self.temperature).softmax(-1)

    def download(self, state: Bank, ids: Tensor) -> Payload:
        """Send Σ_j α_ij θ_j, layer by layer."""
        return self.send(aggregate(self.weights(state, ids), state.theta, tuple(state.start)))

    def update(self, state: Bank, ids: Tensor, got: Payload, upload: Payload) -> Bank:
        """Keep what the clients trained."""
        for key, rows in state.theta.items():
            rows[ids] = got.layers[key] + upload.layers[key]
        return state

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:
        """Return the mixture; its running statistics are its own, as in pFedLA."""
        return task.normalized(got.fill(own))

    def diagnostics(self, state: Bank) -> dict[str, Tensor]:
        """Return the aggregation weights of all clients: α `(N, L, N)`."""
        return {"alpha": self.weights(state, torch.arange(len(next(iter(state.theta.values())))))}


@dataclass(frozen=True)
class SimilarityModel(SimilarityLayer):
    """SimilarityModel: each model is a mixture of all clients', by the cosine similarity of what the models learned."""

    def weights(self, state: Bank, ids: Tensor) -> Tensor:
        """Return α_ij of the whole models, the same for every layer: `(n, L, N)`."""
        products, squares = inner(state, ids)
        s = cosine(products.sum(1, keepdim=True), squares.sum(0, keepdim=True), ids)
        return (s / self.temperature).softmax(-1).expand_as(products)
