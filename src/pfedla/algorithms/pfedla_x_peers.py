"""pFedLA-X for many clients: each learns from itself and from `m` candidates. This variant is ours.

The equations are pFedLA-X's, with m + 1 columns in place of N; candidates are those of pFedLA-peers, chosen again from
time to time by how much their updates resemble the client's own.

=============  ==============================================================================================
candidates     whose models client i mixes, itself first (with m = N - 1 in order): `(n, m + 1)`
z, q, g        on these: `(n, L, m + 1)`
=============  ==============================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pfedla.algorithms.pfedla import bounds, inner_products
from pfedla.algorithms.pfedla_peers import (
    Peers,
    candidates_inner,
    candidates_product,
    current,
    first_peers,
    own_column,
    refresh,
)
from pfedla.algorithms.pfedla_x import Judged, Members, climbed, mean_of, risen, teachers, weights_of_others
from pfedla.layers import Layers, kind_of
from pfedla.settings import Count, NonNegative
from pfedla.storage import zeros
from pfedla.wire import Payload

__all__ = ["FewOthers", "PFedLAXPeers", "renewed"]


class FewOthers(NamedTuple):
    """The server's state: its clients, and whom each of them learns from."""

    members: Members
    z: Tensor  # (N, L, m + 1)
    peers: Peers


def renewed(z: Tensor, changed: Tensor, among: Tensor) -> Tensor:
    """Return z with the teachers' mean in the columns of new candidates, `changed (n, m + 1)`: `(n, L, m + 1)`.

    A new one starts with the geometric mean of their weights, neither praised nor blamed for its predecessor.
    """
    return torch.where(changed.unsqueeze(1), mean_of(z, among), z)


@dataclass(frozen=True)
class PFedLAXPeers(Judged[FewOthers]):
    """pFedLA-X-peers: pFedLA-X for many clients; each mixes its own layers with those of a few that resemble it.

    Each client has `peers` candidates, chosen again after `refresh` of its rounds; with as many as there are others, it
    is pFedLA-X but for rounding. State and a round's time grow linearly in the number of clients.
    """

    eta: NonNegative = 3.0
    peers: Count = 20
    refresh: Count = 10

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> FewOthers:
        """Give every client the common model, random candidates, and even weights for them."""
        layers, columns = sum(not kind_of(key) for key in theta), min(self.peers + 1, n)
        return FewOthers(self.enlist(theta, n), zeros((n, layers, columns)), first_peers(n, columns - 1, rng))

    def download(self, state: FewOthers, ids: Tensor) -> Payload:
        """Send m_i, mixed from the candidates' models."""
        candidates, among = _among(state, ids)
        q = weights_of_others(state.z[ids], among)
        return self.mixed(state.members, q, partial(candidates_product, candidates=candidates))

    def update(self, state: FewOthers, ids: Tensor, got: Payload, upload: Payload) -> FewOthers:
        """Climb z by the previous round's θ; replace candidates where it is time; take what the clients trained."""
        (candidates, among), delta = _among(state, ids), upload.layers
        inner = partial(candidates_inner, candidates=candidates)
        g = inner_products(delta, state.members.theta, got.names, inner).to(state.z)  # (n, L, m + 1)
        own = state.members.models(ids)
        m = got.fill(own)
        bound = bounds(delta, m, got.names)
        z = climbed(state.z[ids], risen(g, bound, upload.values["path"], among), among, self.eta)
        chosen = refresh(state.peers, ids, candidates, delta, got.names, self.refresh)  # (n, m + 1)
        state.z[ids] = renewed(z, chosen != candidates, among)
        state.peers.candidates[ids] = chosen
        self.take(state.members, ids, own, m, upload)
        return state

    def diagnostics(self, state: FewOthers) -> dict[str, Tensor]:
        """Return all clients' weights, α `(N, L, m + 1)`, and whose they are, `(N, m + 1)`."""
        ids = torch.arange(len(state.z))
        candidates, among = _among(state, ids)
        shown = self.shown(state.members, weights_of_others(state.z, among), own_column(candidates, ids))
        return {**shown, "candidates": candidates}


def _among(state: FewOthers, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clients' candidates, `(n, m + 1)`, and which of them they learn from, `(n, 1, m + 1)`."""
    candidates = current(state.peers, ids)
    return candidates, teachers(candidates, ids, state.members.trained)
