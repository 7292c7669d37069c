"""pFedLA-X: how much of its own layers a client serves is judged by data left out of the latest training.

This variant is ours. pFedLA judges a client's own layer by the very samples that trained it: what the layer remembers
of them counts in its favour, own weights go to 1, and learning from others ends. Here a part of the samples is left out
for some rounds, and judges the layers afterwards.

=============  ==============================================================================================
theta          θ_j, every client's latest model: `{layer: (N, values)}`, running statistics beside them
z, q           q_i^l = softmax_j(z_ij^l), the weights among the others j ≠ i that have trained before: `(N, L, N)`; z is
               climbed as pFedLA's α is, within ±5, and who has not trained stands at the others' mean
m              m_i^l = Σ_j q_ij^l θ_j^l, the others' mixture: what the server sends
b              b_i^l, a logit a layer, kept by the client as `"#serve"`: `(n, L)`; σ is the logistic function
begun          m_i + σ(first)(θ_i - m_i), where training starts: an eighth of the client's own
served         m_i + σ(b_i)(θ_i - m_i), the personalized model
delta          Δ_i, a client's change: trained - begun
path           lr x local steps: Δ_i / path is minus the mean gradient along the way
fold           a K-th of a client's samples, left out of training for `hold` of its rounds; F_fold is their mean loss
=============  ==============================================================================================

Who has not trained yet has nothing of its own: it is served m_i, its first round starts there, and nobody learns from
it. With everybody in the first round that changes nothing, for all models are equal then. Who alone has trained is sent
nothing, and goes on alone. A client of so few samples that no fold can be left out trains on all of them, and what it
serves stays as mixed as at first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pfedla.algorithm import Algorithm, State
from pfedla.algorithms.pfedla import PATHS, Product, aggregate, bounds, centred, inner_products
from pfedla.layers import STATS, Layers, bank, change, kind_of, layer_of
from pfedla.settings import Count, NonNegative, Range
from pfedla.storage import zeros
from pfedla.training import Task
from pfedla.wire import Payload

__all__ = [
    "Judged",
    "Members",
    "Others",
    "PFedLAX",
    "all_teachers",
    "between",
    "climbed",
    "judged",
    "mean_of",
    "risen",
    "teachers",
    "weights_of_others",
]

SERVE, ROUNDS, HELD = "#serve", "#rounds", "#held"
LIMIT = 5.0  # of logits that move: shares stay within 0.7 % and 99.3 %, and a weight is at most e^10 times another


class Members(NamedTuple):
    """What the server keeps of every client: its model, whether it has trained, what it serves as last reported."""

    theta: Layers
    trained: Tensor  # (N,) bool
    serve: Tensor  # (N, L): σ(b), 0 before the first round

    def models(self, ids: Tensor) -> Layers:
        """Return these clients' models, copied."""
        return {key: rows[ids] for key, rows in self.theta.items()}


class Others(NamedTuple):
    """The server's state: its clients, and whom each of them learns from."""

    members: Members
    z: Tensor  # (N, L, N)


def teachers(candidates: Tensor, ids: Tensor, trained: Tensor) -> Tensor:
    """Say which of its candidates `(n, C)` a client learns from, `(n, 1, C)`: others that have trained.

    If none has, and neither has the client itself, it is all others, whose models are the common one.
    """
    others = candidates != ids[:, None]
    able = others & trained[candidates]
    first = ~able.any(1, keepdim=True) & ~trained[ids][:, None]
    return torch.where(first, others, able).unsqueeze(1)


def all_teachers(members: Members, ids: Tensor) -> Tensor:
    """Say from whom clients learn if everybody is a candidate: `(n, 1, N)`."""
    everybody = torch.arange(len(members.trained)).expand(len(ids), -1)
    return teachers(everybody, ids, members.trained)


def weights_of_others(z: Tensor, among: Tensor) -> Tensor:
    """q_ij^l = exp(z_ij^l) / Σ_k exp(z_ik^l) for j and k `among` the teachers, else 0: `(n, L, C)`."""
    return z.masked_fill(~among, -torch.inf).softmax(-1).masked_fill(~among, 0)


def mean_of(values: Tensor, among: Tensor) -> Tensor:
    """Return the teachers' mean, 0 if there are none: `(n, L, 1)`."""
    return (values * among).sum(-1, keepdim=True) / among.sum(-1, keepdim=True).clamp(min=1)


def risen(g: Tensor, bound: Tensor, path: Tensor, among: Tensor) -> Tensor:
    """Return <Δ_i^l, θ_j^l> / (lr x local steps) of the teachers j, less their mean: `(n, L, C)`.

    `g` are the inner products, and `bound (n, L)` is what they can be at most; the mean moves no softmax, and a
    difference that is rounding becomes 0.
    """
    rise = centred(torch.where(among, g, mean_of(g, among)), bound).masked_fill(~among, 0)
    return rise / path.to(g).view(-1, 1, 1)


def climbed(z: Tensor, rise: Tensor, among: Tensor, eta: float) -> Tensor:
    """Return z_ij^l + η <Δ_i^l, θ_j^l> / (lr x local steps) of the teachers j, within ±5: `(n, L, C)`.

    Several that help as much end up even. Who is no teacher yet is neither praised nor blamed: it is at their mean.
    """
    raised = (z + eta * rise).clamp(-LIMIT, LIMIT)
    return torch.where(among, raised, mean_of(raised, among))


def between(share: Tensor, m: Layers, own: Layers, names: tuple[str, ...]) -> Layers:
    """m_i^l + s_i^l (θ_i^l - m_i^l), running statistics with their layer; `share` is s, `(n, L)`."""
    column = {key: names.index(layer_of(key)) for key in own if kind_of(key) in ("", STATS)}
    return own | {key: torch.lerp(m[key], own[key], share[:, [i]].to(own[key])) for key, i in column.items()}


def judged(logits: Tensor, gradient: Layers, own: Layers, m: Layers, names: tuple[str, ...], eta: float) -> Tensor:
    """Return b_i^l - η <∇F_fold^l, θ_i^l - m_i^l>, within ±5: `(n, L)`.

    With the gradient at the served model it is a step down the fold's loss in its share, but for the logistic
    function's slope.
    """
    slope = torch.stack([(gradient[name] * (own[name] - m[name])).sum(1) for name in names], dim=1)  # (n, L)
    return (logits - eta * slope.to(logits)).clamp(-LIMIT, LIMIT)


@dataclass(frozen=True)
class Judged(Algorithm[State]):
    """Judged shares: what pFedLA-X and its variants have in common. They differ in how the others are weighed."""

    folds: Annotated[int, Range(least=2)] = 5
    hold: Count = 2
    first: Annotated[float, Range(least=-1000, most=1000)] = -2.0  # of training's start, and b at first: 0.12
    eta_serve: NonNegative = 1.0
    serve_steps: Count = 5

    @property
    def uploads_beside(self) -> tuple[str, ...]:
        """The path, the share that training started with, and those served, which the server shows."""
        return ("path", "start", "serve")

    @property
    def value_ranges(self) -> dict[str, tuple[float, float]]:
        """Shares are shares, and a path has a length: others would carry a client's model, or turn steps round."""
        return {"path": PATHS, "start": (0.0, 1.0), "serve": (0.0, 1.0)}

    # ---- on the server

    def enlist(self, theta: Layers, n: int) -> Members:
        """Give every client the common model."""
        layers = len(_names(theta))
        return Members(bank(theta, n), torch.zeros(n, dtype=torch.bool), torch.zeros(n, layers))

    def mixed(self, members: Members, q: Tensor, mix: Product = torch.matmul) -> Payload:
        """Return m_i, the others' mixture; nothing for who has no teachers."""
        names = _names(members.theta)
        return Payload.of(aggregate(q, members.theta, names, mix), q.any(-1), names)

    def take(self, members: Members, ids: Tensor, own: Layers, m: Layers, upload: Payload) -> None:
        """Take what the clients trained, begun + Δ, and what they serve, in place; `own` and `m` are as they began."""
        names = _names(members.theta)
        begun = between(upload.values["start"][:, None].expand(-1, len(names)), m, own, names)
        for key, rows in members.theta.items():
            rows.index_copy_(0, ids, begun[key] + upload.layers[key])
        members.trained[ids] = True
        members.serve[ids] = upload.values["serve"].to(members.serve)

    def known(self, state: State, ids: Tensor) -> Layers:
        """Return θ_i: one that learns from nobody goes on from it, wherever it lost its own."""
        members: Members = state.members  # type: ignore[attr-defined]  # which the states of all variants have
        return members.models(ids)

    def shown(self, members: Members, q: Tensor, own: Tensor) -> dict[str, Tensor]:
        """Return what served layers are mixed from, α `(N, L, C)`; `own (N,)` says which column is its own."""
        alpha = q * (1 - members.serve)[..., None]
        column = own.view(-1, 1, 1).expand(-1, alpha.shape[1], 1)
        return {"alpha": alpha.scatter(-1, column, 1 - alpha.sum(-1, keepdim=True))}

    # ---- on the client

    def enroll(self, theta: Layers) -> Layers:
        """Keep b beside the model, how many rounds it took part in, and in how many a fold was left out."""
        b = torch.full_like(next(iter(theta.values()))[:, :1], self.first).repeat(1, len(_names(theta)))
        return theta | {SERVE: b, **{name: torch.zeros(1, 1, dtype=torch.int64) for name in (ROUNDS, HELD)}}

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Judge b by the last fold if its time is over, then train without this one."""
        names, m, rounds, held = got.names, got.fill(own), own[ROUNDS], own[HELD]
        mine, b = _own_or(m, own), own[SERVE]
        joined = bool(got.sent.any() or held.any())  # who is alone trains on all that it has
        judges = joined and self.eta_serve > 0 and task.has_folds(self.folds)
        fold = (held // self.hold).flatten()  # its number, (n,)
        due = (held > 0) & (held % self.hold == 0)  # θ_i was trained without the last fold `hold` times
        if judges and due.any():
            rest, last = task.leave_out(self.folds, (fold - 1).tolist())
            for _ in range(self.serve_steps):
                served = rest.normalized(between(b.sigmoid(), m, mine, names))
                b = torch.where(due, judged(b, last.gradient(served), mine, m, names, self.eta_serve), b)
        rest = task.leave_out(self.folds, fold.tolist())[0] if judges else task
        share = torch.full_like(b[:, 0], self.first).sigmoid() * (rounds[:, 0] > 0)
        begun = between(share[:, None].expand_as(b), m, mine, names)
        trained = rest.fit(begun)
        shares = {"start": share, "serve": b.sigmoid()}
        upload = self.send(change(trained, begun), examples=task.examples, path=rest.path, **shares)
        return trained | {SERVE: b, ROUNDS: rounds + 1, HELD: held + judges}, upload

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:
        """Return the served model, the client's own if nothing was sent; a mixture's running statistics are its own."""
        if not got.sent.any():
            return own
        m = got.fill(own)
        return task.normalized(between(own[SERVE].sigmoid(), m, _own_or(m, own), got.names))


@dataclass(frozen=True)
class PFedLAX(Judged[Others]):
    """pFedLA-X: each client mixes the others' layers with its own, by shares judged on samples left out of training.

    One of `folds` parts of a client's samples is left out for `hold` of its rounds; then, as the next round begins, it
    judges in `serve_steps` steps what should be served. With `eta_serve = 0` nothing is judged or left out, with
    `eta = 0` all others weigh the same.
    """

    eta: NonNegative = 3.0

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Others:  # noqa: ARG002
        """Give every client the common model, and even weights for the others."""
        return Others(self.enlist(theta, n), zeros((n, len(_names(theta)), n)))

    def download(self, state: Others, ids: Tensor) -> Payload:
        """Send m_i."""
        return self.mixed(state.members, weights_of_others(state.z[ids], all_teachers(state.members, ids)))

    def update(self, state: Others, ids: Tensor, got: Payload, upload: Payload) -> Others:
        """Climb z by the previous round's θ; then take what the clients trained."""
        g = inner_products(upload.layers, state.members.theta, got.names).to(state.z)  # (n, L, N)
        own, among = state.members.models(ids), all_teachers(state.members, ids)
        m = got.fill(own)
        bound = bounds(upload.layers, m, got.names)
        state.z[ids] = climbed(state.z[ids], risen(g, bound, upload.values["path"], among), among, self.eta)
        self.take(state.members, ids, own, m, upload)
        return state

    def admit(self, state: Others, rng: torch.Generator) -> Others:  # noqa: ARG002
        """Give the newcomer the mean model and even weights; others weigh it, once it has trained, as their mean."""
        theta = {key: torch.cat([rows, rows.mean(0, keepdim=True)]) for key, rows in state.members.theta.items()}
        _, trained, serve = state.members
        mean = mean_of(state.z, all_teachers(state.members, torch.arange(len(trained))))
        z = functional.pad(torch.cat([state.z, mean], -1), (0, 0, 0, 0, 0, 1))
        return Others(Members(theta, functional.pad(trained, (0, 1)), functional.pad(serve, (0, 0, 0, 1))), z)

    def attract(self, state: Others, client: int, downhill: Layers, step: float, *, by_layer: bool) -> Others:
        """Raise the logits of others whose layers lie downhill, the highest by `step` more than the mean.

        After rounds of its own, which ask `by_layer`, nothing more: they moved its logits, and folds judge its shares.
        """
        if not by_layer:
            names, ids = _names(state.members.theta), torch.tensor([client])
            theta, among = state.members.theta, all_teachers(state.members, ids)
            g, bound = inner_products(downhill, theta, names).to(state.z), bounds(downhill, theta, names)
            rise = risen(g, bound, torch.ones(1), among)  # (1, L, N)
            state.z[ids] = climbed(state.z[ids], (rise / rise.abs().max()).nan_to_num(0), among, step)
        return state

    def diagnostics(self, state: Others) -> dict[str, Tensor]:
        """Return all clients' weights."""
        ids = torch.arange(len(state.z))
        return self.shown(state.members, weights_of_others(state.z, all_teachers(state.members, ids)), ids)


def _names(theta: Layers) -> tuple[str, ...]:
    """Return the layers, in the model's order."""
    return tuple(key for key in theta if not kind_of(key))


def _own_or(m: Layers, own: Layers) -> Layers:
    """Return the clients' own models, and m for those that have not trained yet."""
    return own | {
        key: torch.where(own[ROUNDS] > 0, rows, m[key]) for key, rows in own.items() if kind_of(key) in ("", STATS)
    }
