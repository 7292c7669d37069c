"""Clustered FedAvg, told the groups: one model for each group of clients, the average of its clients'.

An oracle: what could be had if somebody knew who belongs together, to hold methods against that have to find out. Ghosh
et al., "An efficient framework for clustered federated learning", NeurIPS 2020, average within clusters they learn.

=============  =========================================================================
theta          the groups' models, `(groups, values)`
group          the group of each client, `(N,)`
delta          Δθ_i, a client's change: trained - received
=============  =========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.algorithms.fedavg import weighted_mean
from pfedla.errors import ConfigError
from pfedla.layers import Layers, LayerSpec, bank
from pfedla.settings import Count
from pfedla.training import Training
from pfedla.wire import Payload

__all__ = ["Clustered", "Clusters", "group_of_each"]


class Clusters(NamedTuple):
    """The server's state: a model for each group, and who is in which."""

    theta: Layers
    group: Tensor


def group_of_each(groups: int | tuple[int, ...], n: int) -> Tensor:
    """Return the group of each of `n` clients, `(n,)`: as listed, or blocks of equal size, as splits form them."""
    if isinstance(groups, int):
        if groups > n:
            raise ConfigError(f"algorithm.groups = {groups} must be at most the number of clients, {n}")
        return torch.arange(n) * groups // n
    if len(groups) != n or min(groups) < 0 or max(groups) >= n:
        raise ConfigError(f"algorithm.groups must name a group from 0 to {n - 1} for each of the {n} clients")
    return torch.tensor(groups)


@dataclass(frozen=True)
class Clustered(Algorithm[Clusters]):
    """Clustered: FedAvg within groups of clients that it is told, an oracle.

    `groups` is their number, for blocks of clients of equal size one after another, or lists each client's.
    """

    groups: tuple[int, ...] | Count | None = None

    def for_model(self, spec: LayerSpec) -> Self:  # noqa: ARG002
        """Refuse to guess the groups."""
        self._told()
        return self

    def check(self, training: Training, n: int) -> None:  # noqa: ARG002
        """Refuse groups that so many clients cannot form."""
        group_of_each(self._told(), n)

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Clusters:  # noqa: ARG002
        """Start every group from the common model."""
        group = group_of_each(self._told(), n)
        return Clusters(bank(theta, int(group.max()) + 1), group)

    def download(self, state: Clusters, ids: Tensor) -> Payload:
        """Send everybody its group's model."""
        return self.send({key: rows[state.group[ids]] for key, rows in state.theta.items()})

    def update(self, state: Clusters, ids: Tensor, got: Payload, upload: Payload) -> Clusters:  # noqa: ARG002
        """Move each group's model by its clients' mean change; one of which nobody answered stays."""
        for group in state.group[ids].unique().tolist():
            here = state.group[ids] == group
            for key, delta in upload.layers.items():
                state.theta[key][group] += weighted_mean(delta[here], upload.examples[here])[0]
        return state

    def _told(self) -> int | tuple[int, ...]:
        if not self.groups:
            raise ConfigError("algorithm.groups must be given: how many groups of clients there are, or each client's")
        return self.groups
