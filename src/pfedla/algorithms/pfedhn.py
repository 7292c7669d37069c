"""pFedHN: one hypernetwork on the server generates every client's parameters.

Shamsian et al., "Personalized federated learning using hypernetworks", ICML 2021.

=============  ===================================================================================
phi            φ, the hypernetwork h, `(1, ...)` each, and `"v"`, the embeddings v_i: `(N, embedding)`
theta, delta   θ_i = h(v_i; φ), what is generated, `{layer: (n, values)}`; Δθ_i: trained - received
=============  ===================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.algorithms.fedavg import weighted_mean
from pfedla.layers import STATS, Layers, entry, kind_of, layer_of
from pfedla.optimizer import Rows
from pfedla.settings import Count, NonNegative, Positive, Range
from pfedla.wire import Payload

__all__ = ["Hyper", "PFedHN", "generate", "hypernetwork_gradient"]


class Hyper(NamedTuple):
    """The server's state: the hypernetwork with embeddings, its momentum, and the mean running statistics."""

    phi: Rows
    velocity: Rows
    stats: Layers


def generate(phi: Rows) -> Layers:
    """θ_i = h(v_i; φ): linear layers, whose last rows are biases, with ReLU between them, then each layer's head."""
    h, depth = phi["v"] @ phi["hidden0"][0, :-1] + phi["hidden0"][0, -1], 1  # (n, hidden)
    while f"hidden{depth}" in phi:
        h, depth = h.relu() @ phi[f"hidden{depth}"][0, :-1] + phi[f"hidden{depth}"][0, -1], depth + 1
    return {layer_of(key): h @ x[0, :-1] + x[0, -1] for key, x in phi.items() if kind_of(key) == "head"}


def hypernetwork_gradient(phi: Rows, delta: Layers) -> Rows:
    """(∇ θ_i)^T Δθ_i with respect to v_i and, summed over the clients, φ: the way that lowers their losses."""
    phi = {key: x.detach().requires_grad_() for key, x in phi.items()}
    with torch.enable_grad():
        value = torch.stack([(theta * delta[layer]).sum() for layer, theta in generate(phi).items()]).sum()
    return dict(zip(phi, torch.autograd.grad(value, list(phi.values())), strict=True))


@dataclass(frozen=True)
class PFedHN(Algorithm[Hyper]):
    """pFedHN: a hypernetwork on the server generates each client's model from an embedding of the client.

    Defaults of the authors' code. Ours: one joint step per round, on the sum over its clients; statistics as in FedAvg.
    """

    hidden: Count = 100
    hidden_layers: Annotated[int, Range(least=0)] = 3  # after the first, as the authors count
    hyper_lr: Positive = 0.01
    hyper_momentum: Annotated[float, Range(least=0, below=1)] = 0.9
    hyper_weight_decay: NonNegative = 1e-3

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Hyper:
        """Draw embeddings from N(0, 1) and hidden layers from U(±1/√fan-in); the heads give the common model."""
        phi = {"v": torch.empty(n, 1 + n // 4).normal_(generator=rng)}
        for i, width in enumerate([1 + n // 4] + [self.hidden] * self.hidden_layers):
            hidden = torch.empty(1, width + 1, self.hidden)  # the last row is the bias
            phi[f"hidden{i}"] = hidden.uniform_(-(width**-0.5), width**-0.5, generator=rng)
        heads = {entry(key, "head"): row for key, row in theta.items() if not kind_of(key)}
        phi |= {k: torch.cat([x.new_zeros(self.hidden, x.shape[1]), x]).unsqueeze(0) for k, x in heads.items()}
        phi = {key: x.to(next(iter(theta.values()))) for key, x in phi.items()}
        stats = {key: row.clone() for key, row in theta.items() if kind_of(key) == STATS}
        return Hyper(phi, {key: torch.zeros_like(x) for key, x in phi.items()}, stats)

    def download(self, state: Hyper, ids: Tensor) -> Payload:
        """Send each client what the hypernetwork generates for it."""
        stats = {key: row.expand(len(ids), -1) for key, row in state.stats.items()}
        return self.send({**generate({**state.phi, "v": state.phi["v"][ids]}), **stats})

    def update(self, state: Hyper, ids: Tensor, got: Payload, upload: Payload) -> Hyper:  # noqa: ARG002
        """Take one step of SGD with momentum on φ and the clients' embeddings, along the clients' changes."""
        gradient = hypernetwork_gradient({**state.phi, "v": state.phi["v"][ids]}, upload.layers)
        scale = min(1, 50 / (1e-12 + float(torch.stack([g.norm() for g in gradient.values()]).norm())))
        for key, g in gradient.items():
            x, velocity, at = state.phi[key], state.velocity[key], ids if key == "v" else torch.tensor([0])
            velocity[at] = self.hyper_momentum * velocity[at] + scale * g - self.hyper_weight_decay * x[at]
            x[at] += self.hyper_lr * velocity[at]
        for key, row in state.stats.items():
            row += weighted_mean(upload.layers[key], upload.examples)
        return state
