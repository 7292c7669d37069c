"""Federated averaging, and training alone: two choices of which layers are shared.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.

=============  =========================================================================
theta          the shared model, `(1, numbers)`
delta          Δθ_i, a client's change: trained - received
m_i            a client's training examples; M their sum over the clients that answered
=============  =========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.layers import COUNTERS, Layers, kind_of
from pfedla.wire import Payload

__all__ = ["FedAvg", "Local", "SharedModel", "weighted_mean"]


class SharedModel(NamedTuple):
    """The server's state: one model."""

    theta: Layers


def weighted_mean(delta: Tensor, examples: Tensor) -> Tensor:
    """Return Σ_i m_i/M Δθ_i: `(1, numbers)`."""
    share = examples.to(delta) / examples.sum()  # (clients,)
    return (share @ delta).unsqueeze(0)


@dataclass(frozen=True)
class FedAvg(Algorithm[SharedModel]):
    """FedAvg: one model for everybody, the average of the clients' weighted by their examples."""

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> SharedModel:  # noqa: ARG002
        """Start from the common model."""
        return SharedModel({key: row.clone() for key, row in theta.items() if kind_of(key) != COUNTERS})

    def download(self, state: SharedModel, ids: Tensor) -> Payload:
        """Send the shared layers to everybody."""
        return self.send({key: row.expand(len(ids), -1) for key, row in state.theta.items()})

    def update(self, state: SharedModel, ids: Tensor, upload: Payload) -> SharedModel:  # noqa: ARG002
        """Move the shared layers by the clients' mean change."""
        for key, delta in upload.layers.items():
            state.theta[key] += weighted_mean(delta, upload.examples)
        return state


@dataclass(frozen=True)
class Local(FedAvg):
    """Local: every client trains alone; nothing is sent."""

    def shares(self, layer: str) -> bool:  # noqa: ARG002
        """Keep every layer at home."""
        return False
