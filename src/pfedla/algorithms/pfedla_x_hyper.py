"""pFedLA-X whose weights among the others come from the paper's hypernetworks: a part of its ablation.

q_i = HN_i(v_i; ψ_i) in place of softmax(z_i), with the columns of those that a client does not learn from left out, and
Eqs. 10-11 on Δ_i / (lr x local steps) in place of the step of z; nothing holds their logits within ±5. All else is
pFedLA-X's. It has no name of its own: `pfedla compare -a pfedla.algorithms.pfedla_x_hyper:PFedLAXHyper`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedla.algorithms.hypernetwork import draw_hypernetworks, hypernetwork, hypernetwork_gradient
from pfedla.algorithms.pfedla import bounds, head_rows, inner_products
from pfedla.algorithms.pfedla_x import Judged, Members, all_teachers, risen
from pfedla.layers import Layers, kind_of
from pfedla.optimizer import Optimizer, Rows, TrainState
from pfedla.settings import Count, Positive
from pfedla.wire import Payload

__all__ = ["HyperOthers", "PFedLAXHyper"]

NEVER = -1e30  # a logit whose weight is 0


class HyperOthers(NamedTuple):
    """The server's state: its clients, and the hypernetworks that weigh the others for each of them."""

    members: Members
    body: TrainState
    heads: TrainState


@dataclass(frozen=True)
class PFedLAXHyper(Judged[HyperOthers]):
    """pFedLA-X with hypernetworks in place of free logits. Their step is pFedLA's, on mean gradients."""

    hyper_optimizer: Literal["sgd", "adam"] = "adam"
    hyper_lr: Positive | None = None  # 0.0003 for Adam, else 1
    embedding: Count = 100
    hidden: Count = 100

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> HyperOthers:
        """Give every client the common model, and draw an embedding and a hypernetwork for it."""
        layers = sum(not kind_of(key) for key in theta)
        drawn = draw_hypernetworks(n, layers, n, self.embedding, self.hidden, rng)
        return HyperOthers(self.enlist(theta, n), *(self._optimizer.init(part) for part in drawn))

    def download(self, state: HyperOthers, ids: Tensor) -> Payload:
        """Send m_i."""
        return self.mixed(state.members, _weights(state, ids))

    def update(self, state: HyperOthers, ids: Tensor, got: Payload, upload: Payload) -> HyperOthers:
        """Eqs. 10-11 by the previous round's θ; then take what the clients trained."""
        g = inner_products(upload.layers, state.members.theta, got.names).to(state.members.serve)  # (n, L, N)
        own, among = state.members.models(ids), all_teachers(state.members, ids)
        m = got.fill(own)
        bound = bounds(upload.layers, m, got.names)
        rise = risen(g, bound, upload.values["path"], among)
        to_body, to_heads = hypernetwork_gradient(*_rows(state, ids), rise)
        self._optimizer.ascend(state.body, to_body, ids)
        self._optimizer.ascend(state.heads, to_heads, head_rows(ids, len(got.names)).flatten())
        self.take(state.members, ids, own, m, upload)
        return state

    def diagnostics(self, state: HyperOthers) -> dict[str, Tensor]:
        """Return all clients' weights."""
        ids = torch.arange(len(state.members.trained))
        return self.shown(state.members, _weights(state, ids), ids)

    @property
    def _optimizer(self) -> Optimizer:
        return Optimizer(self.hyper_optimizer, self.hyper_lr or (3e-4 if self.hyper_optimizer == "adam" else 1.0))


def _rows(state: HyperOthers, ids: Tensor) -> tuple[Rows, Rows]:
    """Return the clients' hypernetworks, which give no weight to those that a client does not learn from."""
    layers, among = state.members.serve.shape[1], all_teachers(state.members, ids)
    heads = state.heads.rows(head_rows(ids, layers).flatten())
    never = ~among.expand(-1, layers, -1).flatten(0, 1)  # (n L, N)
    return state.body.rows(ids), heads | {"bias": heads["bias"].masked_fill(never, NEVER)}


def _weights(state: HyperOthers, ids: Tensor) -> Tensor:
    """Return q, `(n, L, N)`."""
    return hypernetwork(*_rows(state, ids)).masked_fill(~all_teachers(state.members, ids), 0)
