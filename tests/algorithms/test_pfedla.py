"""pFedLA's round: the sign of its step, the order within a round, running statistics, and retained layers."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pfedla.algorithms import HeurPFedLA, PFedLA, PFedLAPeers
from pfedla.algorithms.hypernetwork import hypernetwork, hypernetwork_gradient
from pfedla.algorithms.pfedla import Clients, Hypernetworks
from pfedla.algorithms.pfedla_peers import PeerClients
from pfedla.errors import ConfigError
from pfedla.layers import Layers
from pfedla.wire import Payload
from tests.world import data, download, fleet_of, play, same, server_of, setting

N, NAMES = 5, ("a", "b")
SIZES = {"a": 6, "b": 3, "b#stats": 4}


def draw(rows: int, seed: int) -> Layers:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(rows, size, generator=generator) for key, size in SIZES.items()}


def started(algorithm: PFedLA, seed: int = 0) -> Clients:
    """Return a state whose clients hold different models."""
    state = algorithm.init(draw(1, 0), N, torch.Generator().manual_seed(seed))
    return state._replace(theta=draw(N, seed + 1))


def upload_of(delta: Layers) -> Payload:
    rows = len(delta["a"])
    return Payload.of(
        delta, torch.ones(rows, len(NAMES), dtype=torch.bool), NAMES, examples=torch.ones(rows, dtype=torch.int64)
    )


def step(algorithm: PFedLA, state: Clients, ids: Tensor, delta: Layers) -> Clients:
    return algorithm.update(state, ids, algorithm.download(state, ids), upload_of(delta))


def hyper(state: Clients) -> dict[str, Tensor]:
    return {**state.body.value, **state.heads.value}


# ---- the sign


def loss(theta_bar: Layers, target: Layers) -> Tensor:
    """Every client's loss: half the squared distance to its own target, `(clients,)`."""
    return sum(((theta_bar[name] - target[name]) ** 2).sum(1) / 2 for name in NAMES)  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("rule", "lr"), [("adam", 1e-3), ("sgd", 1e-2)])
def test_a_step_lowers_every_clients_loss(rule: Literal["adam", "sgd"], lr: float, seed: int) -> None:
    algorithm, target, ids = PFedLA(hyper_lr=lr, hyper_optimizer=rule, sources={}), draw(N, 99 + seed), torch.arange(N)
    state = started(algorithm, seed)
    theta = copy.deepcopy(state.theta)
    before = algorithm.download(state, ids).layers
    delta = {key: 0.1 * (target[key] - before[key]) for key in before}  # one gradient step
    state = step(algorithm, state, ids, delta)
    after = algorithm.download(state._replace(theta=theta), ids).layers  # the new weights on the old models
    assert (loss(after, target) < loss(before, target)).all()


def test_weight_moves_to_the_model_that_helps() -> None:
    algorithm = PFedLA(hyper_lr=5e-3, sources={})
    state = started(algorithm)
    theta = copy.deepcopy(state.theta)
    target = {key: rows[[3]] for key, rows in theta.items()}  # what client 0 needs is what client 3 has
    for _ in range(60):
        state = state._replace(theta=copy.deepcopy(theta))
        got = algorithm.download(state, torch.tensor([0])).layers
        state = step(algorithm, state, torch.tensor([0]), {k: target[k] - got[k] for k in got})
    assert (algorithm.diagnostics(state)["alpha"][0, :, 3] > 0.9).all()


# ---- the order within a round


def slow_update(algorithm: PFedLA, state: Clients, ids: list[int], delta: Layers) -> tuple[Layers, dict[str, Tensor]]:
    """Client by client, everything from the models as they were before the round; plain gradient steps."""
    new_theta = copy.deepcopy(state.theta)
    new_hyper = {name: x.clone() for name, x in hyper(state).items()}
    for row, i in enumerate(ids):
        heads_of = slice(i * len(NAMES), (i + 1) * len(NAMES))
        body = {name: x[i : i + 1] for name, x in state.body.value.items()}
        heads = {name: x[heads_of] for name, x in state.heads.value.items()}
        alpha = hypernetwork(body, heads)[0]
        g = torch.zeros(1, len(NAMES), N)
        for layer, name in enumerate(NAMES):
            for j in range(N):
                g[0, layer, j] = delta[name][row] @ state.theta[name][j]
        for key, layer in (("a", 0), ("b", 1), ("b#stats", 1)):
            theta_bar = sum(alpha[layer, j] * state.theta[key][j] for j in range(N))
            new_theta[key][i] = theta_bar + delta[key][row]
        to_body, to_heads = hypernetwork_gradient(body, heads, g)
        for name, step in to_body.items():
            new_hyper[name][i] += algorithm.hyper_lr * step[0]
        for name, step in to_heads.items():
            new_hyper[name][heads_of] += algorithm.hyper_lr * step
    return new_theta, new_hyper


def test_a_round_is_computed_from_the_models_before_it() -> None:
    algorithm, ids = PFedLA(hyper_lr=0.1, hyper_optimizer="sgd", sources={}), [0, 2, 3]
    state, delta = started(algorithm), draw(3, 50)
    theta, weights = slow_update(algorithm, copy.deepcopy(state), ids, delta)
    one_by_one = copy.deepcopy(state)
    for row, i in enumerate(ids):
        one_by_one = step(algorithm, one_by_one, torch.tensor([i]), {key: rows[[row]] for key, rows in delta.items()})
    state = step(algorithm, state, torch.tensor(ids), delta)
    same(state.theta, theta, atol=1e-5)
    same(hyper(state), weights, atol=1e-5)
    for found in (state, one_by_one):  # a client after another is something else: this test can tell
        close = all(torch.allclose(found.theta[key], theta[key], atol=1e-3) for key in theta)
        assert close == (found is state)
    assert any((hyper(one_by_one)[name] - weights[name]).abs().max() > 1e-3 for name in weights)


# ---- running statistics and counters


@pytest.mark.parametrize(("statistics", "layer"), [("own", "bn"), ("source", "conv")])
def test_statistics_are_mixed_by_the_weights_of_their_layer_or_of_its_source(
    statistics: Literal["own", "source"], layer: str
) -> None:
    made = setting(PFedLA(statistics=statistics))
    state = server_of(made, N).state
    state.theta["bn#stats"].copy_(torch.rand(N, 6, generator=torch.Generator().manual_seed(1)))
    ids = torch.tensor([1, 3])
    alpha = made.algorithm.diagnostics(state)["alpha"][ids, made.spec.names.index(layer)]
    got = made.algorithm.download(state, ids)
    torch.testing.assert_close(got.layers["bn#stats"], alpha @ state.theta["bn#stats"])


def test_statistics_behind_a_retained_layer_are_the_clients_own() -> None:
    algorithm = setting(PFedLA(retain=1)).algorithm
    theta = {"conv": torch.zeros(1, 2), "bn": torch.zeros(1, 2), "bn#stats": torch.zeros(1, 3), "fc": torch.zeros(1, 1)}
    state = algorithm.init(theta, N, torch.Generator().manual_seed(0))
    state.theta["bn#stats"].copy_(torch.arange(15.0).view(N, 3))
    state.heads.value["bias"].view(N, 3, N)[2, 0, 2] += 2  # client 2 retains conv
    got = algorithm.download(state, torch.tensor([2]))
    assert got.sent.tolist() == [[False, True, True]]
    assert torch.equal(got.layers["bn#stats"][0], state.theta["bn#stats"][2])


def test_statistics_do_not_enter_the_hypernetworks_step() -> None:
    algorithm, ids = PFedLA(hyper_optimizer="sgd", hyper_lr=0.1, sources={}), torch.tensor([1, 3])
    one, other = started(algorithm), started(algorithm)
    delta, strange = draw(2, 7), draw(2, 7)
    other.theta["b#stats"].mul_(100).add_(5)
    strange["b#stats"].mul_(-30)
    same(hyper(step(algorithm, one, ids, delta)), hyper(step(algorithm, other, ids, strange)))


def test_integer_counters_stay_with_their_client() -> None:
    rounds = [[0, 1], [1, 2], [1]]
    played = play(PFedLA(), rounds, fleet=lambda made, _: fleet_of(made, data(3, count=8)))
    assert "bn#counters" not in played.state.theta
    batches = [2 * 2, 2 * 2, 2 * 3]  # of 8, 9 and 10 samples; the ninth joins the batch before it
    times = [sum(i in ids for ids in rounds) for i in range(3)]
    assert played.own["bn#counters"][:, 0].tolist() == [b * k for b, k in zip(batches, times, strict=True)]


# ---- retained layers


def test_retained_layers_and_their_statistics_are_not_downloaded() -> None:
    algorithm = HeurPFedLA(retain=1, sources={})
    state, ids = started(algorithm), torch.arange(N)
    state.heads.value["bias"].view(N, 2, N)[:, 1] += 50 * torch.eye(N)  # layer b is each client's own
    got = algorithm.download(state, ids)
    assert got.sent.tolist() == [[True, False]] * N
    assert list(got.layers) == ["a"]


def test_retained_layers_take_no_hypernetwork_step() -> None:
    algorithm, ids = HeurPFedLA(retain=1, sources={}), torch.tensor([0, 2])
    state = started(algorithm)
    bias = state.heads.value["bias"].view(N, 2, N)
    bias[0, 0, 0] += 2  # client 0 retains layer a, client 2 layer b; both still mix them
    bias[2, 1, 2] += 2
    keep, move = [0, 5], [1, 4]
    before = copy.deepcopy(state.heads)
    for seed in (1, 2):
        state = step(algorithm, state, ids, draw(2, seed))
    for part in ("value", "first", "second"):
        for name, rows in getattr(state.heads, part).items():
            assert torch.equal(rows[keep], getattr(before, part)[name][keep])
            assert not torch.equal(rows[move], getattr(before, part)[name][move])
    assert state.heads.steps.tolist() == [0, 2, 0, 0, 2, 0, 0, 0, 0, 0]


def test_retained_layers_do_not_move_the_embedding() -> None:
    algorithm, ids = HeurPFedLA(retain=1, sources={}), torch.tensor([0])
    one = started(algorithm)
    one.heads.value["bias"].view(N, 2, N)[0, 0, 0] += 2  # client 0 retains layer a
    other, delta, strange = copy.deepcopy(one), draw(1, 1), draw(1, 1)
    strange["a"].mul_(-9)
    same(
        step(algorithm, one, ids, delta).body,
        step(algorithm, other, ids, strange).body,
    )


def test_a_retained_layer_on_the_server_follows_the_clients_own() -> None:
    algorithm = HeurPFedLA(retain=1, sources={})
    state = started(algorithm)
    state.heads.value["bias"].view(N, 2, N)[0, 1, 0] += 2  # client 0 retains layer b, and still mixes it
    before, delta = copy.deepcopy(state.theta), draw(1, 1)
    state = step(algorithm, state, torch.tensor([0]), delta)
    for key in ("b", "b#stats"):
        torch.testing.assert_close(state.theta[key][0], before[key][0] + delta[key][0])


# ---- settings


@pytest.mark.parametrize("kind", [PFedLA, HeurPFedLA, PFedLAPeers])
def test_the_number_of_retained_layers_is_checked_against_the_model(kind: type[Hypernetworks[Any]]) -> None:
    with pytest.raises(ConfigError, match=r"retain = 4.* 3 layers \(conv, bn, fc\), so it must be from 0 to 3"):
        setting(kind(retain=4))
    assert not download(setting(kind(retain=3)), [0]).sent.any()


def test_the_first_weights_differ_by_client_and_layer_and_the_first_models_are_equal() -> None:
    algorithm = PFedLA()
    state = algorithm.init(draw(1, 0), N, torch.Generator().manual_seed(0))
    alpha = algorithm.diagnostics(state)["alpha"]
    assert alpha.flatten(0, 1).unique(dim=0).shape == (N * len(NAMES), N)
    for rows in state.theta.values():
        assert rows.unique(dim=0).shape[0] == 1


@pytest.mark.parametrize("algorithm", [PFedLA(sources={}), PFedLAPeers(peers=2, sources={})])
def test_a_model_of_double_precision_is_mixed_and_updated(algorithm: Hypernetworks[Any]) -> None:
    theta, ids = draw(1, 0), torch.tensor([0, 3])
    state = algorithm.init({key: row.double() for key, row in theta.items()}, N, torch.Generator())
    got = algorithm.download(state, ids)
    assert got.layers["a"].dtype == torch.float64
    state = algorithm.update(state, ids, got, upload_of({key: row.double() for key, row in draw(2, 1).items()}))
    clients: Clients = state.clients if isinstance(state, PeerClients) else state
    torch.testing.assert_close(clients.theta["a"][0], (theta["a"] + draw(2, 1)["a"])[0].double())  # all began alike
    assert clients.heads.steps.view(N, -1).sum(1).tolist() == [2, 0, 0, 2, 0]
