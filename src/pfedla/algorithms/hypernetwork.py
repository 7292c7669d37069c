"""The hypernetworks of pFedLA: one small network per client turns its embedding into aggregation weights.

Ma et al., "Layer-wised model aggregation for personalized federated learning", CVPR 2022, Eqs. 3-4 and 10-11.

=============  ==============================================================================================
body           v_i, the embedding, and the hidden layers of HN_i, by client: `(n, ...)`
heads          a linear head of HN_i for each layer, by client and layer: `(n L, ...)`
alpha          α_i, the aggregation weights: `(n, L, N)`, each row sums to 1
g              G_i[l, j] = <Δθ_i^l, θ_j^l>, `(n, L, N)`
=============  ==============================================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfedla.optimizer import Rows
from pfedla.storage import stack

__all__ = ["draw_hypernetworks", "hypernetwork", "hypernetwork_gradient"]


def hypernetwork(body: Rows, heads: Rows) -> Tensor:
    """Eqs. 3-4: α_i = HN_i(v_i; ψ_i), `(n, L, N)`; softmax makes each layer's weights sum to 1."""
    return _weights(_hidden(body)[1], heads)


def hypernetwork_gradient(body: Rows, heads: Rows, g: Tensor) -> tuple[Rows, Rows]:
    """Eqs. 10-11: (∇ θ̄_i)^T Δθ_i with respect to v_i and ψ_i, the direction that lowers client i's loss.

    Since θ̄_i is linear in α_i, this is the gradient of Σ α_i * G_i through the small hypernetwork, written out.
    """
    h1, h2 = _hidden(body)  # (n, 1, hidden)
    alpha = _weights(h2, heads)  # (n, L, N)
    logits = alpha * (g - (alpha * g).sum(-1, keepdim=True))  # of the softmax: (n, L, N)
    weight = heads["weight"].view(*logits.shape[:2], -1, logits.shape[-1])  # (n, L, hidden, N)
    back2 = torch.matmul(weight, logits.unsqueeze(-1)).sum(1).mT * (h2 > 0)  # (n, 1, hidden)
    back1 = torch.bmm(back2, body["weight2"].mT) * (h1 > 0)  # (n, 1, hidden)
    to_body = {
        "v": torch.bmm(back1, body["weight1"].mT),
        "weight1": body["v"].mT * back1,
        "bias1": back1,
        "weight2": h1.mT * back2,
        "bias2": back2,
    }
    return to_body, {"weight": (h2.mT.unsqueeze(1) * logits.unsqueeze(2)).flatten(0, 1), "bias": logits.flatten(0, 1)}


def draw_hypernetworks(
    n: int, layers: int, columns: int, embedding: int, hidden: int, rng: torch.Generator
) -> tuple[Rows, Rows]:
    """Return bodies and heads of `n` clients: embeddings from N(0, 1), weights and biases from U(±1/√fan-in)."""

    def uniform(*shape: int, fan_in: int) -> Tensor:
        bound, rows = fan_in**-0.5, shape[0] // n
        pieces = (torch.empty(rows, *shape[1:]).uniform_(-bound, bound, generator=rng) for _ in range(n))
        return stack(pieces, shape)

    body = {
        "v": torch.empty(n, 1, embedding).normal_(generator=rng),
        "weight1": uniform(n, embedding, hidden, fan_in=embedding),
        "bias1": uniform(n, 1, hidden, fan_in=embedding),
        "weight2": uniform(n, hidden, hidden, fan_in=hidden),
        "bias2": uniform(n, 1, hidden, fan_in=hidden),
    }
    heads = {
        "weight": uniform(n * layers, hidden, columns, fan_in=hidden),
        "bias": uniform(n * layers, columns, fan_in=hidden),
    }
    return body, heads


def _hidden(body: Rows) -> tuple[Tensor, Tensor]:
    """Return the two hidden layers of the hypernetworks: `(n, 1, hidden)` each."""
    h1 = torch.baddbmm(body["bias1"], body["v"], body["weight1"]).relu_()
    return h1, torch.baddbmm(body["bias2"], h1, body["weight2"]).relu_()


def _weights(h: Tensor, heads: Rows) -> Tensor:
    """Return what the heads make of the last hidden layer: `(n, L, N)`."""
    weight, bias = (heads[name].unflatten(0, (len(h), -1)) for name in ("weight", "bias"))
    return torch.matmul(h.unsqueeze(1), weight).squeeze(2).add_(bias).softmax(-1)
