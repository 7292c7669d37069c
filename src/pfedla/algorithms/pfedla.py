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
candidates     whose models client i mixes, `(n, m + 1)`, itself first, if not everybody's: then α and G have the
               columns of the candidates, m + 1 in place of N
=============  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pfedla import kernels
from pfedla.algorithm import RESOLVED, Algorithm
from pfedla.algorithms.peers import Peers, current, first_peers, refresh, replace_columns
from pfedla.errors import ConfigError
from pfedla.layers import STATS, Layers, LayerSpec, bank, kind_of, layer_of
from pfedla.optimizer import Optimizer, Rows, Trained
from pfedla.products import candidates_inner, candidates_product, inner, product, write_sum
from pfedla.storage import stack
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


PORTION = 2**20  # numbers of the hypernetworks that are worked on at once


class Clients(NamedTuple):
    """The server's state: every client's model and hypernetwork."""

    theta: Layers
    body: Trained
    heads: Trained
    peers: Peers | tuple[()] = ()  # empty if everybody is everybody's candidate


def hypernetwork(body: Rows, heads: Rows) -> Tensor:
    """Eqs. 3-4: α_i = HN_i(v_i; ψ_i), `(n, L, N)`; softmax makes each layer's weights sum to 1."""
    return _weights(_hidden(body)[1], heads)


def aggregate(
    alpha: Tensor, theta: Layers, names: tuple[str, ...], sources: Mapping[str, str], candidates: Tensor | None = None
) -> Layers:
    """Eqs. 5-6: θ̄_i^l = Σ_j α_i^{l,j} θ_j^l, one matrix product a layer: `{entry: (n, numbers)}`.

    Running statistics ride along under the weights of the layer in `sources`, their own by default.
    """
    weights = [alpha[:, names.index(sources.get(key, layer_of(key)))].to(rows) for key, rows in theta.items()]  # (n, N)
    if candidates is None:
        return dict(zip(theta, product(weights, [*theta.values()]), strict=True))
    rows = theta.values()
    return {key: candidates_product(w, x, candidates) for key, w, x in zip(theta, weights, rows, strict=True)}


def inner_products(delta: Layers, theta: Layers, names: tuple[str, ...], candidates: Tensor | None = None) -> Tensor:
    """G_i[l, j] = <Δθ_i^l, θ_j^l> of the trained parameters alone: `(n, L, N)`."""
    changes, banks = [delta[name] for name in names], [theta[name] for name in names]
    if candidates is None:
        return torch.stack(inner(changes, banks), dim=1)
    pairs = zip(changes, banks, strict=True)
    return torch.stack([candidates_inner(change, rows, candidates) for change, rows in pairs], dim=1)


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


def retained(alpha: Tensor, own: Tensor, k: int) -> Tensor:
    """Eq. 12: the k layers with the largest self-weights α_i^{l,i}, `(n, L)` bool; of equals the earlier one.

    `own (n,)` says which column is the client itself: its number, if everybody has a column.
    """
    self_weight = alpha[torch.arange(len(own)), :, own]  # (n, L)
    top = self_weight.argsort(dim=1, descending=True, stable=True)[:, :k]  # (n, k)
    return torch.zeros_like(self_weight, dtype=torch.bool).scatter_(1, top, True)


@dataclass(frozen=True)
class PFedLA(Algorithm[Clients]):
    """pFedLA: each client's model mixes all clients' layers, with weights learned layer by layer.

    `retain=k` is HeurpFedLA: the k layers with the largest self-weights stay at the client.

    `statistics` says under which weights a batch norm's running mean and variance are mixed: those of the layer
    whose output they describe (`"source"`), or the batch norm's own (`"own"`). They belong to that output: once a
    convolution is a client's own, foreign statistics behind it normalise numbers that never occur.

    `peers=m` is ours: each client mixes its own layers with those of m others whose updates resemble its own, chosen
    again after `refresh` of its rounds, so that the state and a round's time grow linearly in the number of clients.
    """

    retain: int = 0
    hyper_lr: float = 1e-3
    hyper_optimizer: Literal["adam", "sgd"] = "adam"
    embedding: int = 100
    hidden: int = 100
    statistics: Literal["source", "own"] = "source"
    peers: int | None = None  # candidates of each client; None or 0 for everybody
    refresh: int = 10  # rounds of a client's participation between choices of its candidates
    sources: dict[str, str] = field(default_factory=dict, hash=False, metadata=RESOLVED)  # statistics entry -> layer

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        try:
            Optimizer(self.hyper_optimizer, self.hyper_lr)
        except ConfigError as error:
            raise ConfigError(f"algorithm.hyper_optimizer and algorithm.hyper_lr: {error}") from None
        if (self.peers or 0) < 0:
            raise ConfigError(f"algorithm.peers = {self.peers} must be at least 1, or 0 for everybody")
        for name in ("embedding", "hidden", "refresh"):
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
        columns = min(self.peers + 1, n) if self.peers else n

        def uniform(*shape: int, fan_in: int) -> Tensor:
            bound, rows = fan_in**-0.5, shape[0] // n
            pieces = (torch.empty(rows, *shape[1:]).uniform_(-bound, bound, generator=rng) for _ in range(n))
            return stack(pieces, shape)

        body = {
            "v": torch.empty(n, 1, self.embedding).normal_(generator=rng),
            "weight1": uniform(n, self.embedding, self.hidden, fan_in=self.embedding),
            "bias1": uniform(n, 1, self.hidden, fan_in=self.embedding),
            "weight2": uniform(n, self.hidden, self.hidden, fan_in=self.hidden),
            "bias2": uniform(n, 1, self.hidden, fan_in=self.hidden),
        }
        heads = {
            "weight": uniform(n * layers, self.hidden, columns, fan_in=self.hidden),
            "bias": uniform(n * layers, columns, fan_in=self.hidden),
        }
        peers = first_peers(n, columns - 1, rng) if columns < n else ()
        return Clients(bank(theta, n), self._optimizer.init(body), self._optimizer.init(heads), peers)

    def download(self, state: Clients, ids: Tensor) -> Payload:
        """Algorithm 1, line 5, and Algorithm 2, lines 5-7: θ̄_i without the retained layers."""
        names = _names(state.theta)
        alpha = _weights_of(state, ids)  # (n, L, N)
        own = torch.zeros_like(ids) if state.peers else ids  # (n,)
        keep = retained(alpha, own, self.retain)  # (n, L)
        if self.retain:  # statistics that ride under a retained layer's weights stay the client's, too
            alone = functional.one_hot(own, alpha.shape[-1]).to(alpha).unsqueeze(1)  # (n, 1, N)
            alpha = torch.where(keep.unsqueeze(-1), alone, alpha)
        theta_bar = aggregate(alpha, state.theta, names, self.sources, _candidates(state, ids))
        return Payload.of(theta_bar, ~keep, names)

    def update(self, state: Clients, ids: Tensor, got: Payload, upload: Payload) -> Clients:
        """Algorithm 1, lines 7-8: all from the previous round's θ, as if the clients came in parallel."""
        theta, body, heads, peers = state
        names, delta, candidates = _names(theta), upload.layers, _candidates(state, ids)
        g = inner_products(delta, theta, names, candidates).to(body.value["v"])  # (n, L, N)
        self._step(state, ids, g, got.sent)
        received = got.fill({key: rows[ids] for key, rows in theta.items()}) if self.retain else got.layers
        write_sum([*theta.values()], ids, [received[key] for key in theta], [delta[key] for key in theta])
        if peers and candidates is not None:
            chosen = refresh(peers, ids, candidates, delta, names, self.refresh)  # (n, m + 1)
            for i, changed in zip(ids.tolist(), chosen != candidates, strict=True):
                if changed.any():
                    replace_columns(heads, _head_rows(torch.tensor([i]), len(names))[0], changed)
            peers.candidates[ids] = chosen
        return state

    def inspect(self, state: Clients) -> dict[str, Tensor]:
        """Return the aggregation weights of all clients: α `(N, L, N)`, or `(N, L, m + 1)` and the candidates."""
        alpha = hypernetwork(state.body.value, state.heads.value)
        everybody = torch.arange(len(state.body.steps))
        return {"alpha": alpha, "candidates": current(state.peers, everybody)} if state.peers else {"alpha": alpha}

    def _step(self, state: Clients, ids: Tensor, g: Tensor, sent: Tensor) -> None:
        """Eqs. 10-11: move the hypernetworks up their gradient; the heads of retained layers take no step."""
        (_, body, heads, _), optimizer = state, self._optimizer
        moving = [(*ours.values(), *theirs.values()) for ours, theirs in zip(body[:3], heads[:3], strict=True)]
        if optimizer.rule == "adam" and kernels.usable(g, *(x for part in moving for x in part)):
            numbers = optimizer.lr, *optimizer.decay, optimizer.epsilon
            kernels.climb(moving, (body.steps, heads.steps), numbers, ids, g, sent)
            return
        g = g.masked_fill(~sent.unsqueeze(-1), 0)
        for some in _portions(state, ids):
            rows, taken = _head_rows(ids[some], sent.shape[1]), sent[some]  # (n, L)
            to_body, to_heads = hypernetwork_gradient(*_rows(state, ids[some]), g[some])
            if not taken.all():
                to_heads = {name: x[taken.flatten()] for name, x in to_heads.items()}
            optimizer.ascend(body, to_body, ids[some])
            optimizer.ascend(heads, to_heads, rows[taken])

    @property
    def _optimizer(self) -> Optimizer:
        return Optimizer(self.hyper_optimizer, self.hyper_lr)


def _names(theta: Layers) -> tuple[str, ...]:
    """Return the layers, in the model's order."""
    return tuple(key for key in theta if not kind_of(key))


def _candidates(state: Clients, ids: Tensor) -> Tensor | None:
    """Return whose models these clients mix, `(n, m + 1)`; None for everybody's."""
    return current(state.peers, ids) if state.peers else None


def _networks(state: Clients) -> tuple[Tensor, ...]:
    """Return the parameters of all clients' hypernetworks."""
    return (*state.body.value.values(), *state.heads.value.values())


def _weights_of(state: Clients, ids: Tensor) -> Tensor:
    """Return α of these clients, `(n, L, N)`."""
    networks = _networks(state)
    if kernels.usable(*networks):
        return kernels.forward(networks, len(_names(state.theta)), ids)
    return torch.cat([hypernetwork(*_rows(state, ids[some])) for some in _portions(state, ids)])


def _portions(state: Clients, ids: Tensor) -> list[slice]:
    """Return the clients in portions whose hypernetworks lie in the processor's cache while they are worked on."""
    count = max(1, PORTION * len(state.body.steps) // sum(x.numel() for x in _networks(state)))
    return [slice(start, start + count) for start in range(0, len(ids), count)]


def _rows(state: Clients, ids: Tensor) -> tuple[Rows, Rows]:
    """Return the hypernetworks of these clients."""
    return state.body.rows(ids), state.heads.rows(_head_rows(ids, len(_names(state.theta))).flatten())


def _head_rows(ids: Tensor, layers: int) -> Tensor:
    """Return where the heads of these clients stand: `(n, L)`."""
    return ids[:, None] * layers + torch.arange(layers)


@dataclass(frozen=True)
class HeurPFedLA(PFedLA):
    """HeurpFedLA: pFedLA whose k most personal layers stay at the client and need no download."""

    retain: int = 1
