"""pFedLA and HeurpFedLA: layer-wise personalized aggregation, learned by one hypernetwork per client.

Ma et al., "Layer-wised model aggregation for personalized federated learning", CVPR 2022.

=============  ==============================================================================================
theta          θ, every client's latest model: `{layer: (N, values)}`, running statistics beside them
theta_bar      θ̄_i, the personalized models of Eq. 6: `{layer: (n, values)}`
delta          Δθ_i, a client's change: trained - received
body, heads    v_i and ψ_i, the hypernetworks (Eqs. 3-4 and the gradient of Eqs. 10-11 are in `hypernetwork.py`)
alpha          α_i, the aggregation weights: `(n, L, N)`, each row sums to 1
g              G_i[l, j] = <Δθ_i^l, θ_j^l>, `(n, L, N)`: all that Eqs. 10-11 need of the models
ids            the n clients at hand, of N; L is the number of layers
=============  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm, State
from pfedla.algorithms.hypernetwork import draw_hypernetworks, hypernetwork, hypernetwork_gradient
from pfedla.errors import ConfigError
from pfedla.layers import Layers, LayerSpec, bank, change, kind_of, layer_of
from pfedla.optimizer import Optimizer, Rows, TrainState
from pfedla.settings import Count, Positive, Range
from pfedla.training import Task
from pfedla.wire import Payload

__all__ = [
    "PATHS",
    "Clients",
    "HeurPFedLA",
    "Hypernetworks",
    "PFedLA",
    "aggregate",
    "bounds",
    "centred",
    "head_rows",
    "inner_products",
    "products",
    "retained",
]

Product = Callable[[Tensor, Tensor], Tensor]

PATHS = (1e-12, 1e12)  # lr x local steps
ROUNDING = 4  # times the machine's precision: inner products of equal vectors differ by less, relative to their bound


class Clients(NamedTuple):
    """The server's state: every client's model and hypernetwork."""

    theta: Layers
    body: TrainState
    heads: TrainState


def aggregate(alpha: Tensor, theta: Layers, names: tuple[str, ...], mix: Product = torch.matmul) -> Layers:
    """Eqs. 5-6: θ̄_i^l = Σ_j α_i^{l,j} θ_j^l, one matrix product per layer: `{entry: (n, values)}`.

    Running statistics ride along with their layer.
    """
    layer = {key: names.index(layer_of(key)) for key in theta}
    return {key: mix(alpha[:, layer[key]].contiguous().to(rows), rows) for key, rows in theta.items()}


def products(x: Tensor, rows: Tensor) -> Tensor:
    """Return <x_i, rows_j>, `(n, N)`; to the bit the same for all j if all rows are, as before the first round.

    A matrix product may round its columns differently, in large layers by more than `centred` takes for rounding.
    """
    g = x @ rows.T
    return g[:, :1].expand_as(g) if all(torch.equal(row, rows[0]) for row in rows[1:]) else g


def inner_products(delta: Layers, theta: Layers, names: tuple[str, ...], inner: Product = products) -> Tensor:
    """G_i[l, j] = <Δθ_i^l, θ_j^l> of the trained parameters alone: `(n, L, N)`."""
    return torch.stack([inner(delta[name], theta[name]) for name in names], dim=1)


def bounds(delta: Layers, theta: Layers, names: tuple[str, ...]) -> Tensor:
    """|Δθ_i^l| max_j |θ_j^l|, what G_i[l] can be at most, `(n, L)`: its rounding errors are in proportion to this.

    Of models that are all alike their mixtures will do as θ.
    """
    return torch.stack([delta[name].norm(dim=1) * theta[name].norm(dim=1).amax() for name in names], dim=1)


def centred(g: Tensor, bound: Tensor) -> Tensor:
    """Return G less its mean over the candidates, which moves no softmax.

    Where all candidates hold the same layer, as all do before the first round, what is left is rounding: it becomes 0,
    for Adam would make a whole step of it. `bound (n, L)` is what G can be at most, in the precision of its products.
    """
    left = g - g.mean(-1, keepdim=True)
    precision = max(torch.finfo(some.dtype).eps for some in (g, bound))
    rounding = ROUNDING * precision * bound.to(g).unsqueeze(-1)
    return left.masked_fill(left.abs().amax(-1, keepdim=True) <= rounding, 0)


def retained(alpha: Tensor, own: Tensor, k: int) -> Tensor:
    """Eq. 12: the k layers with the largest self-weights α_i^{l,i}, `(n, L)` bool; of equals the earlier one.

    `own (n,)` says which column is the client itself: its number, if everybody has a column.
    """
    self_weight = alpha[torch.arange(len(own)), :, own]  # (n, L)
    top = self_weight.argsort(dim=1, descending=True, stable=True)[:, :k]  # (n, k)
    return torch.zeros_like(self_weight, dtype=torch.bool).scatter_(1, top, True)


def head_rows(ids: Tensor, layers: int) -> Tensor:
    """Return where the heads of these clients stand: `(n, L)`."""
    return ids[:, None] * layers + torch.arange(layers)


@dataclass(frozen=True)
class Hypernetworks(Algorithm[State]):
    """Hypernetworks: what pFedLA and its variant with few candidates share, their settings and their steps."""

    retain: Annotated[int, Range(least=0)] = 0
    hyper_optimizer: Literal["sgd", "mean-sgd", "adam"] = "adam"
    hyper_lr: Positive | None = None  # 0.0003 for Adam, else 1
    embedding: Count = 100
    hidden: Count = 100
    renews_statistics: ClassVar[bool] = True
    starts_from_received: ClassVar[bool] = True

    @property
    def uploads_beside(self) -> tuple[str, ...]:
        """The path, for mean gradients."""
        return ("path",) if self.hyper_optimizer == "mean-sgd" else ()

    @property
    def value_ranges(self) -> dict[str, tuple[float, float]]:
        """A path has a length."""
        return {"path": PATHS}

    def for_model(self, spec: LayerSpec) -> Self:
        """Check the number of retained layers."""
        if self.retain > len(spec.names):
            raise ConfigError(
                f"algorithm.retain = {self.retain}: this model has {len(spec.names)} layers "
                f"({', '.join(spec.names)}), so it must be from 0 to {len(spec.names)}"
            )
        return self

    def draw(self, theta: Layers, n: int, columns: int, rng: torch.Generator) -> Clients:
        """Algorithm 1, line 1: one common model; an embedding and a hypernetwork drawn for each client."""
        body, heads = draw_hypernetworks(n, len(_names(theta)), columns, self.embedding, self.hidden, rng)
        return Clients(bank(theta, n), self._optimizer.init(body), self._optimizer.init(heads))

    def mixed(self, clients: Clients, ids: Tensor, own: Tensor, mix: Product = torch.matmul) -> Payload:
        """Algorithm 1, line 5, and Algorithm 2, lines 5-7: θ̄_i without the retained layers."""
        names, alpha = _names(clients.theta), hypernetwork(*_rows(clients, ids))  # (n, L, N)
        keep = retained(alpha, own, self.retain)  # (n, L)
        return Payload.of(aggregate(alpha, clients.theta, names, mix), ~keep, names)

    def step(self, clients: Clients, ids: Tensor, got: Payload, upload: Payload, **inner: Product) -> Clients:
        """Algorithm 1, lines 7-8, and Algorithm 2, lines 9-10: all from the previous round's θ, as if in parallel.

        Eqs. 10-11 move the hypernetworks up their gradient, with the whole Δθ: retained layers take the step, too.
        """
        (theta, body, heads), delta = clients, upload.layers
        received = got.fill({key: rows[ids] for key, rows in theta.items()}) if self.retain else got.layers
        g = inner_products(delta, theta, got.names, **inner).to(body.value["v"])  # (n, L, N)
        g = centred(g, bounds(delta, received, got.names))
        if self.hyper_optimizer == "mean-sgd":
            g /= upload.values["path"].to(g).view(-1, 1, 1)
        to_body, to_heads = hypernetwork_gradient(*_rows(clients, ids), g)
        self._optimizer.ascend(body, to_body, ids)
        self._optimizer.ascend(heads, to_heads, head_rows(ids, len(got.names)).flatten())
        for key, rows in theta.items():
            rows.index_copy_(0, ids, received[key] + delta[key])
        return clients

    def shown(self, alpha: Tensor, own: Tensor) -> dict[str, Tensor]:
        """Return all clients' weights and, if layers are retained, which."""
        return {"alpha": alpha} | ({"retained": retained(alpha, own, self.retain)} if self.retain else {})

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Algorithm 1, lines 9-14; the change goes up, and for mean gradients lr x local steps."""
        received = got.fill(own)
        trained = task.fit(received)
        path = {"path": task.path} if self.hyper_optimizer == "mean-sgd" else {}
        return trained, self.send(change(trained, received), examples=task.examples, **path)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:
        """Return θ̄_i, the retained layers filled in; a mixture's running statistics are its own."""
        return task.normalized(got.fill(own))

    @property
    def _optimizer(self) -> Optimizer:
        rule: Literal["adam", "sgd"] = "adam" if self.hyper_optimizer == "adam" else "sgd"
        return Optimizer(rule, self.hyper_lr or (3e-4 if rule == "adam" else 1.0))


@dataclass(frozen=True)
class PFedLA(Hypernetworks[Clients]):
    """pFedLA: each client's model mixes all clients' layers, with weights learned layer by layer.

    `retain=k` is HeurpFedLA: the k layers with the largest self-weights stay at the client.

    `hyper_optimizer` is the hypernetworks' step. `"sgd"` with `hyper_lr=1` is Eqs. 10-11 as printed. `"mean-sgd"` puts
    the clients' mean gradients in place of their changes: Δθ_i / (lr x local steps), so that the step does not depend
    on how long or how fast clients train. `"adam"` does not depend on the gradient's scale at all.
    """

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Clients:
        """Give every client the common model, and a weight for everybody."""
        return self.draw(theta, n, n, rng)

    def download(self, state: Clients, ids: Tensor) -> Payload:
        """Send θ̄_i."""
        return self.mixed(state, ids, own=ids)

    def update(self, state: Clients, ids: Tensor, got: Payload, upload: Payload) -> Clients:
        """Take the clients' changes."""
        return self.step(state, ids, got, upload)

    def known(self, state: Clients, ids: Tensor) -> Layers:
        """Return θ_i, the models that these clients trained last."""
        return {key: rows[ids] for key, rows in state.theta.items()}

    def admit(self, state: Clients, rng: torch.Generator) -> Clients:
        """Give the newcomer the mean model, and a hypernetwork with equal weights on everybody.

        The others' weights on it start as the geometric mean of their weights: their ratios stay what they are.
        """
        theta, names = state.theta, _names(state.theta)
        n = len(theta[names[0]])
        body, heads = draw_hypernetworks(1, len(names), n + 1, self.embedding, self.hidden, rng)
        heads["bias"] -= hypernetwork(body, heads)[0].log()  # a constant for each layer is left, which moves no softmax
        return Clients(
            {key: torch.cat([rows, rows.mean(0, keepdim=True)]) for key, rows in theta.items()},
            _appended(state.body, self._optimizer.init(body)),
            _appended(_widened(state.heads), self._optimizer.init(heads)),
        )

    def attract(self, state: Clients, client: int, downhill: Layers, step: float, *, by_layer: bool) -> Clients:
        """Raise the logits of clients whose layers lie downhill, the highest by `step` more than the mean."""
        names = _names(state.theta)
        g = centred(inner_products(downhill, state.theta, names), bounds(downhill, state.theta, names))[0]  # (L, N)
        most = g.abs().amax(-1, keepdim=True) if by_layer else g.abs().max()
        rows = head_rows(torch.tensor([client]), len(names)).flatten()
        state.heads.value["bias"][rows] += (step * g / most).nan_to_num(0).to(state.heads.value["bias"])
        return state

    def diagnostics(self, state: Clients) -> dict[str, Tensor]:
        """Return the aggregation weights of all clients, α `(N, L, N)`, and which layers stay at them, `(N, L)`."""
        alpha = hypernetwork(state.body.value, state.heads.value)
        return self.shown(alpha, torch.arange(len(alpha)))


@dataclass(frozen=True)
class HeurPFedLA(PFedLA):
    """HeurpFedLA: pFedLA whose k most personal layers stay at the client and need no download."""

    retain: Annotated[int, Range(least=0)] = 1


def _names(theta: Layers) -> tuple[str, ...]:
    """Return the layers, in the model's order."""
    return tuple(key for key in theta if not kind_of(key))


def _rows(clients: Clients, ids: Tensor) -> tuple[Rows, Rows]:
    """Return the hypernetworks of these clients."""
    return clients.body.rows(ids), clients.heads.rows(head_rows(ids, len(_names(clients.theta))).flatten())


def _widened(heads: TrainState) -> TrainState:
    """Return heads with one more column, whose logit is the mean of the others'; its memory is empty."""
    value = {name: torch.cat([x, x.mean(-1, keepdim=True)], -1) for name, x in heads.value.items()}
    first, second = (
        {name: torch.cat([x, torch.zeros_like(x[..., :1])], -1) for name, x in part.items()}
        for part in (heads.first, heads.second)
    )
    return TrainState(value, first, second, heads.steps)


def _appended(some: TrainState, more: TrainState) -> TrainState:
    """Return rows and further rows."""
    value, first, second = (
        {name: torch.cat([x, y[name]]) for name, x in part.items()} for part, y in zip(some[:3], more[:3], strict=True)
    )
    return TrainState(value, first, second, torch.cat([some.steps, more.steps]))
