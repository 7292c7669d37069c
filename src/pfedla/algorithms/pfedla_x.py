"""pFedLA-X: layers are weighed by data that did not train them, for the start of training and for service apart.

This variant is ours. pFedLA judges a client's own layer by the very samples that trained it: what the layer remembers
of them counts in its favour, own weights go to 1, and learning from others ends. Here a part of the samples is left out
for some rounds, and judges the layers afterwards.

=============  ==============================================================================================
theta          θ_j, every client's latest model: `{layer: (N, values)}`, running statistics beside them
z, q           q_i^l = softmax_{j≠i}(z_ij^l), the weights among the others: `(N, L, N)`; z is climbed as pFedLA's α is
m              m_i^l = Σ_{j≠i} q_ij^l θ_j^l, the others' mixture: what the server sends
a, b           a_i^l and b_i^l, two logits a layer, kept by the client as `"#start"` and `"#serve"`: `(n, L)`; σ is the
               logistic function
begun          m_i + σ(a_i)(θ_i - m_i), where training starts
served         m_i + σ(b_i)(θ_i - m_i), the personalized model
delta          Δ_i, a client's change: trained - begun
path           lr x local steps: Δ_i / path is minus the mean gradient along the way
fold           a K-th of a client's samples, left out of training for `hold` of its rounds; F_fold is their mean loss
=============  ==============================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.algorithms.pfedla import aggregate, centred, inner_products
from pfedla.layers import STATS, Layers, bank, change, kind_of, layer_of
from pfedla.settings import Count, NonNegative, Range
from pfedla.storage import zeros
from pfedla.training import Task
from pfedla.wire import Payload

__all__ = ["Others", "PFedLAX", "between", "climbed", "judged", "weights_of_others"]

START, SERVE, ROUNDS = "#start", "#serve", "#rounds"
LIMIT = 5.0  # of logits that are judged: shares stay within 0.7 % and 99.3 %


class Others(NamedTuple):
    """The server's state: every client's model, whom it learns from, and its shares as last reported."""

    theta: Layers
    z: Tensor  # (N, L, N); a client's own column is 0 and means nothing
    start: Tensor  # (N, L): σ(a)
    serve: Tensor  # (N, L): σ(b)


def weights_of_others(z: Tensor, ids: Tensor) -> Tensor:
    """q_ij^l = exp(z_ij^l) / Σ_{k≠i} exp(z_ik^l), and q_ii^l = 0: `(n, L, N)`; all 0 where there is nobody else."""
    if z.shape[-1] == 1:
        return torch.zeros_like(z)
    return z.scatter(-1, _own_column(z, ids), -torch.inf).softmax(-1)


def climbed(z: Tensor, g: Tensor, path: Tensor, ids: Tensor, eta: float) -> Tensor:
    """Return z_ij^l + η <Δ_i^l, θ_j^l> / (lr x local steps), less the mean over the others j: `(n, L, N)`.

    `g` are the inner products; the mean moves no softmax, and a difference that is rounding becomes 0.
    """
    own, others = _own_column(g, ids), max(g.shape[-1] - 1, 1)
    mean = (g.sum(-1, keepdim=True) - g.gather(-1, own)) / others
    return z + eta * centred(g.scatter(-1, own, mean)) / path.to(g).view(-1, 1, 1)


def between(share: Tensor, m: Layers, own: Layers, names: tuple[str, ...]) -> Layers:
    """m_i^l + s_i^l (θ_i^l - m_i^l), running statistics with their layer; `share` is s, `(n, L)`."""
    column = {key: names.index(layer_of(key)) for key in own if kind_of(key) in ("", STATS)}
    return own | {key: torch.lerp(m[key], own[key], share[:, [i]].to(own[key])) for key, i in column.items()}


def judged(logits: Tensor, gradient: Layers, own: Layers, m: Layers, names: tuple[str, ...], eta: float) -> Tensor:
    """Return a_i^l - η <∇F_fold^l, θ_i^l - m_i^l>, or b_i^l, within ±5: `(n, L)`.

    With the gradient at the served model it is a step down the fold's loss in its share, but for the logistic
    function's slope; with the gradient at the trained model, that of first-order MAML.
    """
    slope = torch.stack([(gradient[name] * (own[name] - m[name])).sum(1) for name in names], dim=1)  # (n, L)
    return (logits - eta * slope.to(logits)).clamp(-LIMIT, LIMIT)


@dataclass(frozen=True)
class PFedLAX(Algorithm[Others]):
    """pFedLA-X: each client mixes the others' layers with its own, by shares judged on samples left out of training.

    One of `folds` parts of a client's samples is left out for `hold` of its rounds. After the last of them it judges
    where training should start, once, and at the begin of the next round what should be served, `serve_steps` times.
    `eta_start = 0` and `eta_serve = 0` leave a logit at `first`; with both, nothing is left out of training. `eta = 0`
    weighs all others evenly. `logits = "one"` starts training at the served model.
    """

    folds: Annotated[int, Range(least=2)] = 5
    hold: Count = 2
    logits: Literal["two", "one"] = "two"
    first: Annotated[float, Range(least=-1000, most=1000)] = -2.0  # both logits before they are judged: a share of 0.12
    eta: NonNegative = 1.0
    eta_start: NonNegative = 5.0
    eta_serve: NonNegative = 1.0
    serve_steps: Count = 5

    @property
    def uploads_beside(self) -> tuple[str, ...]:
        """The path, and the shares, which the server shows."""
        return ("path", "start", "serve")

    # ---- on the server

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Others:  # noqa: ARG002
        """Give every client the common model, and even weights for the others."""
        layers = len(_names(theta))
        share = torch.full((n, layers), self.first).sigmoid()
        return Others(bank(theta, n), zeros((n, layers, n), share.dtype), share, share.clone())

    def download(self, state: Others, ids: Tensor) -> Payload:
        """Send m_i, the others' mixture; nothing to who is alone."""
        names, q = _names(state.theta), weights_of_others(state.z[ids], ids)  # (n, L, N)
        sent = torch.full((len(ids), len(names)), q.shape[-1] > 1)
        return Payload.of(aggregate(q, state.theta, names), sent, names)

    def update(self, state: Others, ids: Tensor, got: Payload, upload: Payload) -> Others:
        """Climb z by the previous round's θ; then take what the clients trained, begun + Δ."""
        theta, names, delta = state.theta, got.names, upload.layers
        own = {key: rows[ids] for key, rows in theta.items()}
        begun = between(upload.values["start"], got.fill(own), own, names)
        g = inner_products(delta, theta, names).to(state.z)  # (n, L, N)
        state.z[ids] = climbed(state.z[ids], g, upload.values["path"], ids, self.eta)
        state.start[ids], state.serve[ids] = (upload.values[name].to(state.z) for name in ("start", "serve"))
        for key, rows in theta.items():
            rows.index_copy_(0, ids, begun[key] + delta[key])
        return state

    def diagnostics(self, state: Others) -> dict[str, Tensor]:
        """Return what everybody's served layers are mixed from, α `(N, L, N)`, and own shares where training starts."""
        ids = torch.arange(len(state.z))
        alpha = weights_of_others(state.z, ids) * (1 - state.serve)[..., None]
        own = _own_column(alpha, ids)
        return {"alpha": alpha.scatter(-1, own, 1 - alpha.sum(-1, keepdim=True)), "start": state.start.clone()}

    # ---- on the client

    def enroll(self, theta: Layers) -> Layers:
        """Keep both logits beside the model, and how many rounds it took part in."""
        logits = torch.full_like(next(iter(theta.values()))[:, :1], self.first).repeat(1, len(_names(theta)))
        return theta | {START: logits, SERVE: logits.clone(), ROUNDS: torch.zeros(1, 1, dtype=torch.int64)}

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Judge b by the last fold if its time is over; train without this one; judge a by it if its time is over."""
        names, m, rounds = got.names, got.fill(own), own[ROUNDS]
        a, b, number = own[START], own[SERVE], (rounds // self.hold).flatten()  # of the fold, (n,)
        eta_start, eta_serve = self.eta_start * (self.logits == "two"), self.eta_serve
        judges = bool(got.sent.any()) and eta_start + eta_serve > 0
        due = (rounds > 0) & (rounds % self.hold == 0)  # θ_i was trained without the last fold `hold` times
        if judges and eta_serve and due.any():
            rest, fold = task.leave_out(self.folds, (number - 1).tolist())
            for _ in range(self.serve_steps):
                served = rest.normalized(between(b.sigmoid(), m, own, names))
                b = torch.where(due, judged(b, fold.gradient(served), own, m, names, eta_serve), b)
        rest, fold = task.leave_out(self.folds, number.tolist()) if judges else (task, task)
        share = (a if self.logits == "two" else b).sigmoid()
        begun = between(share, m, own, names)
        trained = rest.fit(begun)
        due = (rounds + 1) % self.hold == 0
        if judges and eta_start and due.any():
            a = torch.where(due, judged(a, fold.gradient(trained), own, m, names, eta_start), a)
        shares = {"start": share, "serve": b.sigmoid()}
        upload = self.send(change(trained, begun), examples=task.examples, path=rest.path, **shares)
        return trained | {START: a, SERVE: b, ROUNDS: rounds + 1}, upload

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:
        """Return the served model, the client's own if it is alone; a mixture's running statistics are its own."""
        if not got.sent.any():
            return own
        return task.normalized(between(own[SERVE].sigmoid(), got.fill(own), own, got.names))


def _names(theta: Layers) -> tuple[str, ...]:
    """Return the layers, in the model's order."""
    return tuple(key for key in theta if not kind_of(key))


def _own_column(weights: Tensor, ids: Tensor) -> Tensor:
    """Return where each client's own weights stand in `(n, L, N)`, as an index along the last axis: `(n, L, 1)`."""
    return ids.view(-1, 1, 1).expand(-1, weights.shape[1], 1)
