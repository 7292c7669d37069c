"""Federated averaging, of all layers, of some, or of none.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.

=============  =========================================================================
theta          the shared model, `(1, values)`
delta          Δθ_i, a client's change: trained - received
m_i            a client's training examples; M their sum over the clients that answered
=============  =========================================================================
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.layers import Layers, LayerSpec, bank
from pfedla.settings import RESOLVED
from pfedla.wire import Payload

__all__ = ["FedAvg", "Local", "PersonalLayers", "SharedModel", "weighted_mean"]


class SharedModel(NamedTuple):
    """The server's state: one model."""

    theta: Layers


def weighted_mean(delta: Tensor, examples: Tensor) -> Tensor:
    """Return Σ_i m_i/M Δθ_i: `(1, values)`."""
    share = examples.to(delta) / examples.sum()  # (clients,)
    return (share @ delta).unsqueeze(0)


@dataclass(frozen=True)
class FedAvg(Algorithm[SharedModel]):
    """FedAvg: one model for everybody, the average of the clients' weighted by their examples."""

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> SharedModel:  # noqa: ARG002
        """Start from the common model."""
        return SharedModel(bank(theta, 1))

    def download(self, state: SharedModel, ids: Tensor) -> Payload:
        """Send the shared layers to everybody."""
        return self.send({key: row.expand(len(ids), -1) for key, row in state.theta.items()})

    def update(self, state: SharedModel, ids: Tensor, got: Payload, upload: Payload) -> SharedModel:  # noqa: ARG002
        """Move the shared layers by the clients' mean change."""
        for key, delta in upload.layers.items():
            state.theta[key] += weighted_mean(delta, upload.examples)
        return state

    def admit(self, state: SharedModel, rng: torch.Generator) -> SharedModel:  # noqa: ARG002
        """Have the newcomer share the model."""
        return state


@dataclass(frozen=True)
class Local(FedAvg):
    """Local: every client trains alone; nothing is sent."""

    def shares(self, layer: str) -> bool:  # noqa: ARG002
        """Keep every layer at home."""
        return False


@dataclass(frozen=True)
class PersonalLayers(FedAvg):
    """PersonalLayers: FedAvg of some layers; the others, running statistics included, never leave the client."""

    personal: tuple[str, ...] | None = field(default=None, kw_only=True, metadata=RESOLVED)

    @abstractmethod
    def stays(self, spec: LayerSpec) -> tuple[str, ...]:
        """Return the layers of a model that stay at the client, or refuse the model."""

    def for_model(self, spec: LayerSpec) -> Self:
        """Settle which layers are personal."""
        return replace(self, personal=self.stays(spec))

    def shares(self, layer: str) -> bool:
        """Keep the personal layers at home."""
        return layer not in self.resolved(self.personal)
