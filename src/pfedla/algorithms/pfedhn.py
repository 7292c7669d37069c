"""pFedHN: one hypernetwork on the server generates every client's parameters.

Shamsian et al., "Personalized federated learning using hypernetworks", ICML 2021.

=============  ===================================================================================
phi            φ, the hypernetwork h, `(1, ...)` each, and `"v"`, the embeddings v_i: `(N, embedding)`
theta, delta   θ_i = h(v_i; φ), what is generated, `{layer: (n, numbers)}`; Δθ_i: trained - received
=============  ===================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.algorithms.fedavg import weighted_mean
from pfedla.errors import require
from pfedla.layers import STATS, Layers, entry, kind_of, layer_of
from pfedla.optimizer import Rows
from pfedla.wire import Payload

__all__ = ["Hyper", "PFedHN", "generate", "hypernetwork_gradient"]


class Hyper(NamedTuple):
    """The server's state: the hypernetwork with embeddings, its momentum, and the mean running statistics."""

    phi: Rows
    velocity: Rows
    stats: Layers


def generate(phi: Rows) -> Layers:
    """θ_i = h(v_i; φ): linear layers with ReLU between them, then each layer's head."""
    h, depth = phi["v"] @ phi["weight0"][0] + phi["bias0"][0], 1  # (n, hidden)
    while f"weight{depth}" in phi:
        h, depth = h.relu() @ phi[f"weight{depth}"][0] + phi[f"bias{depth}"][0], depth + 1
    layers = [layer_of(key) for key in phi if kind_of(key) == "head"]
    return {layer: h @ phi[entry(layer, "head")][0] + phi[entry(layer, "bias")][0] for layer in layers}


def hypernetwork_gradient(phi: Rows, delta: Layers) -> Rows:
    """(∇ θ_i)^T Δθ_i with respect to v_i and, summed over the clients, φ: the way that lowers their losses."""
    phi = {key: x.detach().requires_grad_() for key, x in phi.items()}
    with torch.enable_grad():
        theta = generate(phi)
    gradient = torch.autograd.grad(list(theta.values()), list(phi.values()), [delta[layer] for layer in theta])
    return dict(zip(phi, gradient, strict=True))


@dataclass(frozen=True)
class PFedHN(Algorithm[Hyper]):
    """pFedHN: a hypernetwork on the server generates each client's model from an embedding of the client.

    Defaults of the authors' code, gradients clipped to norm 50 as there; embeddings have 1 + N/4 numbers. Ours: a round
    is one joint step on the sum over its clients (theirs, one client a step), heads start as the common model (bias)
    plus 0 (weight), and running statistics are averaged as in FedAvg.
    """

    hidden: int = 100
    hidden_layers: int = 3  # after the first, as the authors count
    hyper_lr: float = 0.01
    hyper_momentum: float = 0.9
    hyper_weight_decay: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        require("algorithm", self, hidden=self.hidden >= 1, hidden_layers=self.hidden_layers >= 0)
        require("algorithm", self, hyper_lr=0 < self.hyper_lr < math.inf, hyper_momentum=0 <= self.hyper_momentum < 1)
        require("algorithm", self, hyper_weight_decay=0 <= self.hyper_weight_decay < math.inf)

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Hyper:
        """Draw embeddings from N(0, 1) and hidden layers from U(±1/√fan-in); the heads give the common model."""
        phi = {"v": torch.empty(n, 1 + n // 4).normal_(generator=rng)}
        for i in range(1 + self.hidden_layers):
            width = self.hidden if i else phi["v"].shape[1]
            for name, rows in ((f"weight{i}", width), (f"bias{i}", 1)):
                phi[name] = torch.empty(1, rows, self.hidden).uniform_(-(width**-0.5), width**-0.5, generator=rng)
        for layer in [key for key in theta if not kind_of(key)]:
            phi[entry(layer, "head")] = torch.zeros(1, self.hidden, theta[layer].shape[1])
            phi[entry(layer, "bias")] = theta[layer].clone().unsqueeze(0)
        phi = {key: x.to(next(iter(theta.values()))) for key, x in phi.items()}
        stats = {key: row.clone() for key, row in theta.items() if kind_of(key) == STATS}
        return Hyper(phi, {key: torch.zeros_like(x) for key, x in phi.items()}, stats)

    def download(self, state: Hyper, ids: Tensor) -> Payload:
        """Send each client what the hypernetwork generates for it."""
        stats = {key: row.expand(len(ids), -1) for key, row in state.stats.items()}
        return self.send({**generate({**state.phi, "v": state.phi["v"][ids]}), **stats})

    def update(self, state: Hyper, ids: Tensor, upload: Payload) -> Hyper:
        """Take one step of SGD with momentum on φ and the clients' embeddings, along the clients' changes."""
        gradient = hypernetwork_gradient({**state.phi, "v": state.phi["v"][ids]}, upload.layers)
        scale = min(1, 50 / (1e-12 + float(torch.stack([g.norm() for g in gradient.values()]).norm())))
        for key, g in gradient.items():
            at = ids if key == "v" else torch.tensor([0])
            x, velocity = state.phi[key], state.velocity[key]
            velocity[at] = self.hyper_momentum * velocity[at] + scale * g - self.hyper_weight_decay * x[at]
            x[at] += self.hyper_lr * velocity[at]
        for key, row in state.stats.items():
            row += weighted_mean(upload.layers[key], upload.examples)
        return state
