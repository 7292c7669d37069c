"""pFedLA and HeurpFedLA: layer-wise personalized aggregation, learned by one hypernetwork per client.

Ma et al., "Layer-wised model aggregation for personalized federated learning", CVPR 2022.

=============  ==============================================================================================
theta          θ, every client's latest model: `{layer: (N, numbers)}`, running statistics beside them
theta_bar      θ̄_i, the personalized models of Eq. 6: `{layer: (n, numbers)}`
delta          Δθ_i, a client's change: trained - received
body, heads    v_i and ψ_i: embedding and hidden layers by client `(N, ...)`, heads by client and layer `(N L, ...)`
alpha          α_i, the aggregation weights: `(n, L, N)`, each row sums to 1
g              G_i[l, j] = <Δθ_i^l, θ_j^l>, `(n, L, N)`: all that Eqs. 10-11 need of the models
ids            the n clients at hand, of N; L is the number of layers
=============  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pfedla.algorithm import RESOLVED, Algorithm
from pfedla.errors import ConfigError
from pfedla.layers import STATS, Layers, LayerSpec, bank, kind_of, layer_of
from pfedla.optimizer import Optimizer, Rows, Trained
from pfedla.wire import Payload

__all__ = [
    "Clients",
    "HeurPFedLA",
    "PFedLA",
    "aggregate",
    "hypernetwork",
    "hypernetwork_gradient",
    "inner_products",
    "retained",
]


BLOCK, WIDTH, PIECE = 32, 2**17, 2**10  # rows and columns of the bank that are worked on at once
PORTION = 2**21  # numbers of the hypernetworks that are worked on at once


class Clients(NamedTuple):
    """The server's state: every client's model and hypernetwork."""

    theta: Layers
    body: Trained
    heads: Trained


def hypernetwork(body: Rows, heads: Rows) -> Tensor:
    """Eqs. 3-4: α_i = HN_i(v_i; ψ_i), `(n, L, N)`; softmax makes each layer's weights sum to 1."""
    return _weights(_hidden(body)[1], heads)


def aggregate(alpha: Tensor, theta: Layers, names: tuple[str, ...], sources: Mapping[str, str]) -> Layers:
    """Eqs. 5-6: θ̄_i^l = Σ_j α_i^{l,j} θ_j^l, one matrix product a layer: `{entry: (n, numbers)}`.

    Running statistics ride along under the weights of the layer in `sources`, their own by default.
    """
    mixed_as = {key: sources.get(key, layer_of(key)) for key in theta}
    return {key: _product(alpha[:, names.index(mixed_as[key])].to(rows), rows) for key, rows in theta.items()}


def inner_products(delta: Layers, theta: Layers, names: tuple[str, ...]) -> Tensor:
    """G_i[l, j] = <Δθ_i^l, θ_j^l> of the trained parameters alone: `(n, L, N)`."""
    return torch.stack([_inner(delta[name], theta[name]) for name in names], dim=1)


def hypernetwork_gradient(body: Rows, heads: Rows, g: Tensor) -> tuple[Rows, Rows]:
    """Eqs. 10-11: (∇ θ̄_i)^T Δθ_i with respect to v_i and ψ_i, the direction that lowers client i's loss.

    Since θ̄_i is linear in α_i, this is the gradient of Σ α_i * G_i through the small hypernetwork, written out.
    """
    h1, h2 = _hidden(body)  # (n, 1, hidden)
    alpha = _weights(h2, heads)  # (n, L, N)
    logits = alpha * (g - (alpha * g).sum(-1, keepdim=True))  # of the softmax: (n, L, N)
    weight = heads["weight"].view(*logits.shape[:2], -1, logits.shape[-1])  # (n, L, hidden, N)
    back2 = torch.matmul(weight, logits.unsqueeze(-1)).sum(1).mT * (h2 > 0)  # (n, 1, hidden)
    back1 = torch.bmm(back2, body["weight2"].mT) * (h1 > 0)  # (n, 1, hidden)
    to_body = {
        "v": torch.bmm(back1, body["weight1"].mT),
        "weight1": body["v"].mT * back1,
        "bias1": back1,
        "weight2": h1.mT * back2,
        "bias2": back2,
    }
    return to_body, {"weight": (h2.mT.unsqueeze(1) * logits.unsqueeze(2)).flatten(0, 1), "bias": logits.flatten(0, 1)}


def _hidden(body: Rows) -> tuple[Tensor, Tensor]:
    """Return the two hidden layers of the hypernetworks: `(n, 1, hidden)` each."""
    h1 = torch.baddbmm(body["bias1"], body["v"], body["weight1"]).relu_()
    return h1, torch.baddbmm(body["bias2"], h1, body["weight2"]).relu_()


def _weights(h: Tensor, heads: Rows) -> Tensor:
    """Return what the heads make of the last hidden layer: `(n, L, N)`."""
    weight, bias = (heads[name].unflatten(0, (len(h), -1)) for name in ("weight", "bias"))
    return torch.matmul(h.unsqueeze(1), weight).squeeze(2).add_(bias).softmax(-1)


def retained(alpha: Tensor, ids: Tensor, k: int) -> Tensor:
    """Eq. 12: the k layers with the largest self-weights α_i^{l,i}, `(n, L)` bool; of equals the earlier one."""
    self_weight = alpha[torch.arange(len(ids)), :, ids]  # (n, L)
    top = self_weight.argsort(dim=1, descending=True, stable=True)[:, :k]  # (n, k)
    return torch.zeros_like(self_weight, dtype=torch.bool).scatter_(1, top, True)


@dataclass(frozen=True)
class PFedLA(Algorithm[Clients]):
    """pFedLA: each client's model mixes all clients' layers, with weights learned layer by layer.

    `retain=k` is HeurpFedLA: the k layers with the largest self-weights stay at the client.

    `statistics` says under which weights a batch norm's running mean and variance are mixed: those of the layer
    whose output they describe (`"source"`), or the batch norm's own (`"own"`). They belong to that output: once a
    convolution is a client's own, foreign statistics behind it normalise numbers that never occur.
    """

    retain: int = 0
    hyper_lr: float = 1e-3
    hyper_optimizer: Literal["adam", "sgd"] = "adam"
    embedding: int = 100
    hidden: int = 100
    statistics: Literal["source", "own"] = "source"
    sources: dict[str, str] = field(default_factory=dict, hash=False, metadata=RESOLVED)  # statistics entry -> layer

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        try:
            Optimizer(self.hyper_optimizer, self.hyper_lr)
        except ConfigError as error:
            raise ConfigError(f"algorithm.hyper_optimizer and algorithm.hyper_lr: {error}") from None
        for name in ("embedding", "hidden"):
            if getattr(self, name) < 1:
                raise ConfigError(f"algorithm.{name} = {getattr(self, name)} must be at least 1")

    def for_model(self, spec: LayerSpec) -> PFedLA:
        """Check the number of retained layers, and settle whose weights the running statistics take."""
        if not 0 <= self.retain <= len(spec.names):
            raise ConfigError(
                f"algorithm.retain = {self.retain}: this model has {len(spec.names)} layers "
                f"({', '.join(spec.names)}), so it must be from 0 to {len(spec.names)}"
            )
        if self.statistics == "own":
            return self
        stats = [key for key in spec.slots if kind_of(key) == STATS]
        return replace(self, sources={key: spec.source(layer_of(key)) for key in stats})

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Clients:
        """Algorithm 1, line 1: one common model; embeddings and hypernetworks drawn for each client."""
        layers = sum(not kind_of(key) for key in theta)

        def uniform(*shape: int, fan_in: int) -> Tensor:
            return torch.empty(shape).uniform_(-(fan_in**-0.5), fan_in**-0.5, generator=rng)

        body = {
            "v": torch.empty(n, 1, self.embedding).normal_(generator=rng),
            "weight1": uniform(n, self.embedding, self.hidden, fan_in=self.embedding),
            "bias1": uniform(n, 1, self.hidden, fan_in=self.embedding),
            "weight2": uniform(n, self.hidden, self.hidden, fan_in=self.hidden),
            "bias2": uniform(n, 1, self.hidden, fan_in=self.hidden),
        }
        heads = {
            "weight": uniform(n * layers, self.hidden, n, fan_in=self.hidden),
            "bias": uniform(n * layers, n, fan_in=self.hidden),
        }
        return Clients(bank(theta, n), self._optimizer.init(body), self._optimizer.init(heads))

    def download(self, state: Clients, ids: Tensor) -> Payload:
        """Algorithm 1, line 5, and Algorithm 2, lines 5-7: θ̄_i without the retained layers."""
        names = _names(state.theta)
        alpha, keep = self._weigh(state, ids)
        return Payload.of(aggregate(alpha, state.theta, names, self.sources), ~keep, names)

    def update(self, state: Clients, ids: Tensor, upload: Payload) -> Clients:
        """Algorithm 1, lines 7-8: all from the previous round's θ, as if the clients came in parallel."""
        theta, body, heads = state
        names = _names(theta)
        alpha, keep = self._weigh(state, ids)
        g = inner_products(upload.layers, theta, names).masked_fill_(keep.unsqueeze(-1), 0)  # (n, L, N)
        for some in _portions(ids, body, heads):  # retained layers take no step
            rows = _head_rows(ids[some], len(names))  # (n, L)
            sent = ~keep[some]
            to_body, to_heads = hypernetwork_gradient(body.rows(ids[some]), heads.rows(rows.flatten()), g[some])
            if not sent.all():
                to_heads = {name: x[sent.flatten()] for name, x in to_heads.items()}
            self._optimizer.ascend(body, to_body, ids[some])
            self._optimizer.ascend(heads, to_heads, rows[sent])
        for key, columns in _tiles(theta):
            there = {key: theta[key][:, columns]}
            received = aggregate(alpha, there, names, self.sources)[key]
            if self.retain:
                kept = keep[:, names.index(layer_of(key))]  # (n,)
                received[kept] = there[key][ids[kept]]
            there[key].index_copy_(0, ids, received.add_(upload.layers[key][:, columns]))
        return state

    def inspect(self, state: Clients) -> dict[str, Tensor]:
        """Return the aggregation weights of all clients: α `(N, L, N)`."""
        return {"alpha": hypernetwork(state.body.value, state.heads.value)}

    def _weigh(self, state: Clients, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return α_i, all on oneself in the retained layers, and which layers those are: `(n, L, N)`, `(n, L)`."""
        layers = len(_names(state.theta))
        alpha = torch.cat(
            [
                hypernetwork(state.body.rows(ids[some]), state.heads.rows(_head_rows(ids[some], layers).flatten()))
                for some in _portions(ids, state.body, state.heads)
            ]
        )
        keep = retained(alpha, ids, self.retain)  # (n, L)
        own = functional.one_hot(ids, alpha.shape[-1]).to(alpha).unsqueeze(1)  # (n, 1, N)
        return torch.where(keep.unsqueeze(-1), own, alpha) if self.retain else alpha, keep

    @property
    def _optimizer(self) -> Optimizer:
        return Optimizer(self.hyper_optimizer, self.hyper_lr)


def _names(theta: Layers) -> tuple[str, ...]:
    """Return the layers, in the model's order."""
    return tuple(key for key in theta if not kind_of(key))


def _portions(ids: Tensor, body: Trained, heads: Trained) -> list[slice]:
    """Return the clients in portions whose hypernetworks lie in the processor's cache while they are worked on."""
    numbers = sum(x.numel() for x in (*body.value.values(), *heads.value.values())) // len(body.steps)
    count = max(1, PORTION // numbers)
    return [slice(start, start + count) for start in range(0, len(ids), count)]


def _tiles(theta: Layers) -> Iterator[tuple[str, slice]]:
    """Yield every entry's numbers in pieces, so that what is computed for them at once stays small."""
    for key, rows in theta.items():
        for start in range(0, rows.shape[1], WIDTH):
            yield key, slice(start, start + WIDTH)


def _product(weights: Tensor, rows: Tensor) -> Tensor:
    """Return `weights @ rows`; a thin product is summed up in blocks of rows, in the order in which they lie in memory.

    A matrix library would gather columns from all rows first, which takes longer than the product itself.
    """
    if len(weights) > BLOCK or len(rows) <= BLOCK:
        return weights @ rows
    product = torch.empty(len(weights), rows.shape[1], dtype=rows.dtype)
    for out, columns in zip(product.split(WIDTH, 1), rows.split(WIDTH, 1), strict=True):
        first, *rest = zip(weights.split(BLOCK, 1), columns.split(BLOCK), strict=True)
        torch.mm(*first, out=out)
        for weight, block in rest:
            out.addmm_(weight, block)
    return product


def _inner(delta: Tensor, rows: Tensor) -> Tensor:
    """Return `delta @ rows.T`; long thin rows are multiplied piece by piece, each while it lies in the cache."""
    if len(delta) > BLOCK or rows.shape[1] < 2 * PIECE:
        return delta @ rows.T
    whole = rows.shape[1] - rows.shape[1] % PIECE
    pieces = delta[:, :whole].unflatten(1, (-1, PIECE)).transpose(0, 1)  # (pieces, n, PIECE)
    products = [
        torch.bmm(pieces, block[:, :whole].unflatten(1, (-1, PIECE)).permute(1, 2, 0)).sum(0)
        for block in rows.split(BLOCK)
    ]
    return torch.cat(products, 1).addmm_(delta[:, whole:], rows[:, whole:].T)


def _head_rows(ids: Tensor, layers: int) -> Tensor:
    """Return where the heads of these clients stand: `(n, L)`."""
    return ids[:, None] * layers + torch.arange(layers)


@dataclass(frozen=True)
class HeurPFedLA(PFedLA):
    """HeurpFedLA: pFedLA whose k most personal layers stay at the client and need no download."""

    retain: int = 1
