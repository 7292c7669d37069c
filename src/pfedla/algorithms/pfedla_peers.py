"""pFedLA for many clients: each learns from itself and from `m` candidates. This variant is ours.

With all N clients as candidates, pFedLA's heads hold N weights for each of N clients and a round reads all models. With
m candidates both grow linearly in N. Candidates are the clients whose updates resemble the client's own, judged by
sketches: short random projections, in which inner products are kept on average (Charikar, Chen & Farach-Colton, ICALP
2002). A sketch takes 4 kB per client, and no projection matrix is ever stored.

The equations are pFedLA's, with m + 1 columns in place of N:

=============  ==============================================================================================
candidates     whose models client i mixes, itself first (with m = N - 1 in order): `(n, m + 1)`
alpha, g       α_i and G_i on these: `(n, L, m + 1)`
=============  ==============================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pfedla import storage
from pfedla.algorithms.hypernetwork import hypernetwork
from pfedla.algorithms.pfedla import Clients, Hypernetworks, head_rows
from pfedla.layers import Layers
from pfedla.optimizer import TrainState
from pfedla.randomness import numpy_stream, stream
from pfedla.settings import Count
from pfedla.wire import Payload

__all__ = [
    "PFedLAPeers",
    "PeerClients",
    "Peers",
    "candidates_inner",
    "candidates_product",
    "choose",
    "current",
    "first_peers",
    "own_column",
    "refresh",
    "replace_columns",
    "sketch",
]

GATHERED = 2**14  # columns of the candidates' rows that are gathered at once
SKETCH = 1024  # values
PIECE = 2**6  # sketch lengths of an update that are projected at once
EXPLORED = 5  # one in so many candidates is drawn at random


class Peers(NamedTuple):
    """Every client's candidates, and what they are chosen by."""

    candidates: Tensor  # (N, m + 1) int64, as last chosen: in column 0 the client itself; all in order if m = N - 1
    sketches: Tensor  # (N, SKETCH): the mean of its updates' sketches over about one period of refreshing
    rounds: Tensor  # (N,) int64: how often each client took part
    seed: Tensor  # () int64: behind the projection and the random candidates


def first_peers(n: int, m: int, rng: torch.Generator) -> Peers:
    """Return random candidates for each of `n` clients, all models being equal as yet; or everybody, in order."""
    seed = torch.randint(2**31, (), generator=rng)
    if m == n - 1:
        everybody = torch.arange(n).repeat(n, 1)
        return Peers(everybody, storage.zeros((n, SKETCH)), torch.zeros(n, dtype=torch.int64), seed)
    draw = numpy_stream(int(seed), "candidates")
    others = np.stack([draw.choice(n - 1, m, replace=False, shuffle=False) for _ in range(n)])  # (n, m)
    own = np.arange(n)[:, None]
    candidates = np.concatenate([own, np.sort(others + (others >= own))], axis=1)
    return Peers(torch.from_numpy(candidates), storage.zeros((n, SKETCH)), torch.zeros(n, dtype=torch.int64), seed)


def current(peers: Peers, ids: Tensor) -> Tensor:
    """Return the candidates of the clients `ids`, `(n, m + 1)`.

    Nothing is known of a client that never took part: its candidates are drawn from those that did, as far as there are
    enough. Its first ones were drawn when all models were equal, and many of them may still be what they were then.
    """
    candidates, took_part, seed = peers.candidates[ids], peers.rounds > 0, int(peers.seed)
    if candidates.shape[1] == len(took_part):
        return candidates
    for row in (~took_part[ids]).nonzero().flatten().tolist() if took_part.any() else ():
        i = int(ids[row])
        chance = torch.rand(len(took_part), generator=stream(seed, "newcomer", i))
        candidates[row] = choose(i, candidates[row], chance, took_part, seed, 0)
    return candidates


def sketch(delta: Layers, names: tuple[str, ...], seed: int) -> Tensor:
    """Return short vectors `(n, SKETCH)` whose inner products are those of the updates, up to a few hundredths.

    Every layer is scaled to length 1 first, so that each has one voice: inner products are sums of the layers' cosines.
    Value k of a layer goes with a random sign to place k modulo SKETCH: values that meet there cancel on average.
    """
    total = torch.zeros(len(delta[names[0]]), SKETCH)
    for name in names:
        rows, signs = delta[name], stream(seed, "signs", name)
        length = rows.norm(dim=1, keepdim=True)
        part = torch.zeros_like(total)
        for piece in rows.split(PIECE * SKETCH, dim=1):
            sign = torch.randint(2, (piece.shape[1],), generator=signs, dtype=torch.int8) * 2 - 1
            signed = functional.pad(piece * sign, (0, -piece.shape[1] % SKETCH))
            part += signed.unflatten(1, (-1, SKETCH)).sum(1)
        total += torch.where(length > 0, part / length, 0.0)
    return total


def choose(i: int, current: Tensor, similar: Tensor, took_part: Tensor, seed: int, t: int) -> Tensor:
    """Return client i's next candidates, `(m + 1,)`: those that stay keep their column.

    Most are the clients most similar to it, `similar (N,)`; the rest is drawn at random, so that a client whose early
    updates misled can still be found. Clients that never took part hold the common initialisation: they come last.
    """
    n, m = len(similar), len(current) - 1
    chance = torch.rand(n, generator=stream(seed, "chance", i, t))
    last = torch.where(took_part, 0.0, 10.0)  # similarities and chances lie within [-1, 1]
    last[i] = torch.inf
    nearest = (similar - last).topk(m - m // EXPLORED).indices
    last[nearest] = torch.inf
    chosen = torch.cat([nearest, (chance - last).topk(m // EXPLORED).indices])
    stays = torch.isin(current, chosen)
    stays[0] = True
    new = chosen[~torch.isin(chosen, current)].sort().values
    return current.masked_scatter(~stays, new)


def refresh(peers: Peers, ids: Tensor, candidates: Tensor, delta: Layers, names: tuple[str, ...], every: int) -> Tensor:
    """Take this round's updates into the sketches; return what follows the clients' `candidates`: `(n, m + 1)`.

    A client's candidates are chosen anew in the first round it takes part in, and in each `every`-th after it.
    """
    seed = int(peers.seed)
    peers.rounds[ids] += 1
    share = 1 / peers.rounds[ids].clamp(max=every).unsqueeze(1)  # (n, 1)
    peers.sketches[ids] = peers.sketches[ids].lerp(sketch(delta, names, seed), share)
    chosen = candidates.clone()
    choice = candidates.shape[1] < len(peers.candidates)
    due = ((peers.rounds[ids] - 1) % every == 0).nonzero().flatten() if choice else ids[:0]
    if len(due):
        similar = functional.normalize(peers.sketches[ids[due]]) @ functional.normalize(peers.sketches).T  # (due, N)
        for row, near in zip(due.tolist(), similar, strict=True):
            i = int(ids[row])
            chosen[row] = choose(i, candidates[row], near, peers.rounds > 0, seed, int(peers.rounds[i]))
    return chosen


def replace_columns(heads: TrainState, rows: Tensor, changed: Tensor) -> None:
    """Start a client's heads `rows` afresh in the columns of new peers, `changed (m + 1,)`, in place.

    A new column is the mean of the peers' columns before it, so that the newcomer's weight starts as an average peer's
    (the geometric mean of theirs), neither praised nor blamed for its predecessor; Adam remembers nothing of it.
    """
    for name, value in heads.value.items():
        mine = value[rows]
        mine[..., changed] = mine[..., 1:].mean(-1, keepdim=True)
        value[rows] = mine
        for moments in (heads.first, heads.second):
            if name in moments:
                mine = moments[name][rows]
                mine[..., changed] = 0
                moments[name][rows] = mine


def own_column(candidates: Tensor, ids: Tensor) -> Tensor:
    """Return where each client stands among its candidates: `(n,)`."""
    return (candidates == ids[:, None]).int().argmax(1)


def candidates_product(weights: Tensor, rows: Tensor, candidates: Tensor) -> Tensor:
    """Return Σ_j weights_ij rows_j over the candidates j of each client i, `(n, values)`."""
    return functional.embedding_bag(candidates, rows, per_sample_weights=weights, mode="sum")


def candidates_inner(delta: Tensor, rows: Tensor, candidates: Tensor) -> Tensor:
    """Return <delta_i, rows_j> for the candidates j of each client i, gathering a piece of their rows at a time."""
    products = rows.new_zeros(candidates.shape)
    for piece, columns in zip(delta.split(GATHERED, 1), rows.split(GATHERED, 1), strict=True):
        for found, own, who in zip(products, piece, candidates, strict=True):
            found.addmv_(columns.index_select(0, who), own)
    return products


class PeerClients(NamedTuple):
    """The server's state: every client's model and hypernetwork, and its candidates."""

    clients: Clients
    peers: Peers


@dataclass(frozen=True)
class PFedLAPeers(Hypernetworks[PeerClients]):
    """pFedLA-peers: pFedLA for many clients; each mixes its own layers with those of a few that resemble it.

    Each client has `peers` candidates, chosen again after `refresh` of its rounds; with as many as there are others, it
    is pFedLA but for rounding. State and a round's time grow linearly in the number of clients. `retain=k` is
    HeurpFedLA.
    """

    peers: Count = 20
    refresh: Count = 10

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> PeerClients:
        """Give every client the common model, random candidates, and a weight for each of them."""
        columns = min(self.peers + 1, n)
        clients = self.draw(theta, n, columns, rng)
        return PeerClients(clients, first_peers(n, columns - 1, rng))

    def download(self, state: PeerClients, ids: Tensor) -> Payload:
        """Send θ̄_i, mixed from the candidates' models."""
        candidates = current(state.peers, ids)
        own = own_column(candidates, ids)
        return self.mixed(state.clients, ids, own, partial(candidates_product, candidates=candidates))

    def update(self, state: PeerClients, ids: Tensor, got: Payload, upload: Payload) -> PeerClients:
        """Take the clients' changes; replace candidates where it is time."""
        candidates = current(state.peers, ids)
        inner = partial(candidates_inner, candidates=candidates)
        self.step(state.clients, ids, got, upload, inner=inner)
        chosen = refresh(state.peers, ids, candidates, upload.layers, got.names, self.refresh)  # (n, m + 1)
        for rows, changed in zip(head_rows(ids, len(got.names)), chosen != candidates, strict=True):
            if changed.any():
                replace_columns(state.clients.heads, rows, changed)
        state.peers.candidates[ids] = chosen
        return state

    def known(self, state: PeerClients, ids: Tensor) -> Layers:
        """Return θ_i, the models that these clients trained last."""
        return {key: rows[ids] for key, rows in state.clients.theta.items()}

    def diagnostics(self, state: PeerClients) -> dict[str, Tensor]:
        """Return the aggregation weights of all clients, α `(N, L, m + 1)`, and whose they are, `(N, m + 1)`."""
        alpha = hypernetwork(state.clients.body.value, state.clients.heads.value)
        ids = torch.arange(len(alpha))
        candidates = current(state.peers, ids)
        return {**self.shown(alpha, own_column(candidates, ids)), "candidates": candidates}
