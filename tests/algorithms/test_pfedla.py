"""pFedLA's round: the sign of its step, the order within a round, running statistics, and retained layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from experiments.updated_first import UpdatedFirst
from pfedla.algorithm import Algorithm
from pfedla.algorithms import HeurPFedLA, PFedLA, PFedLAPeers, SimilarityLayer, SimilarityModel
from pfedla.algorithms.hypernetwork import hypernetwork, hypernetwork_gradient
from pfedla.algorithms.pfedla import Clients, Hypernetworks, bounds, centred, inner_products, products
from pfedla.algorithms.pfedla_peers import PeerClients
from pfedla.errors import ConfigError
from pfedla.layers import Layers
from pfedla.wire import Payload
from tests.world import data, download, fleet_of, play, same, server_of, setting, task_of

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
    algorithm, target, ids = PFedLA(hyper_lr=lr, hyper_optimizer=rule), draw(N, 99 + seed), torch.arange(N)
    state = started(algorithm, seed)
    theta = copy.deepcopy(state.theta)
    before = algorithm.download(state, ids).layers
    delta = {key: 0.1 * (target[key] - before[key]) for key in before}  # one gradient step
    state = step(algorithm, state, ids, delta)
    after = algorithm.download(state._replace(theta=theta), ids).layers  # the new weights on the old models
    assert (loss(after, target) < loss(before, target)).all()


def test_weight_moves_to_the_model_that_helps() -> None:
    algorithm = PFedLA(hyper_lr=5e-3)
    state = started(algorithm)
    theta = copy.deepcopy(state.theta)
    target = {key: rows[[3]] for key, rows in theta.items()}  # what client 0 needs is what client 3 has
    for _ in range(60):
        state = state._replace(theta=copy.deepcopy(theta))
        got = algorithm.download(state, torch.tensor([0])).layers
        state = step(algorithm, state, torch.tensor([0]), {k: target[k] - got[k] for k in got})
    assert (algorithm.diagnostics(state)["alpha"][0, :, 3] > 0.9).all()


# ---- the order within a round


def slow_update(lr: float, state: Clients, ids: list[int], delta: Layers) -> tuple[Layers, dict[str, Tensor]]:
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
            new_hyper[name][i] += lr * step[0]
        for name, step in to_heads.items():
            new_hyper[name][heads_of] += lr * step
    return new_theta, new_hyper


def test_a_round_is_computed_from_the_models_before_it() -> None:
    algorithm, ids = PFedLA(hyper_lr=0.1, hyper_optimizer="sgd"), [0, 2, 3]
    state, delta = started(algorithm), draw(3, 50)
    theta, weights = slow_update(0.1, copy.deepcopy(state), ids, delta)
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


@pytest.mark.parametrize("kind", [PFedLA, HeurPFedLA, PFedLAPeers, SimilarityLayer, SimilarityModel])
def test_the_mixture_is_served_with_its_own_statistics_on_the_clients_training_data(
    kind: Callable[[], Algorithm[Any]],
) -> None:
    made = setting(kind())
    state, ids, task = server_of(made, N).state, [1, 3], task_of(made, [1, 3], clients=N)
    theta: Layers = (state.clients if isinstance(state, PeerClients) else state).theta
    for rows in theta.values():
        rows.copy_(torch.rand(rows.shape, generator=torch.Generator().manual_seed(1)))
    got = made.algorithm.download(state, torch.tensor(ids))
    own = {key: row.repeat(2, 1) for key, row in made.enroll().own.items()}
    served = made.algorithm.personalize(own, got, task)
    for row, samples in enumerate(task.samples):
        module = copy.deepcopy(made.template)
        made.spec.write(module, got.fill(own), row)
        x, _ = samples.take(slice(None), torch.zeros(1))
        inputs = module.get_submodule("conv")(x)
        mean, variance = inputs.mean((0, 2, 3)), inputs.var((0, 2, 3), correction=1)
        torch.testing.assert_close(served["bn#stats"][row], torch.cat([mean, variance]).detach(), atol=1e-5, rtol=1e-4)
    for key in served.keys() - {"bn#stats"}:
        assert torch.equal(served[key], got.fill(own)[key]), key


def test_statistics_do_not_enter_the_hypernetworks_step() -> None:
    algorithm, ids = PFedLA(hyper_optimizer="sgd", hyper_lr=0.1), torch.tensor([1, 3])
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
    algorithm = HeurPFedLA(retain=1)
    state, ids = started(algorithm), torch.arange(N)
    state.heads.value["bias"].view(N, 2, N)[:, 1] += 50 * torch.eye(N)  # layer b is each client's own
    got = algorithm.download(state, ids)
    assert got.sent.tolist() == [[True, False]] * N
    assert list(got.layers) == ["a"]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_retained_layers_take_the_step_of_the_whole_change(rule: Literal["adam", "sgd"], k: int) -> None:
    """Algorithm 2, line 10: hypernetworks move as they would if nothing were retained."""
    algorithm, ids = HeurPFedLA(retain=k, hyper_optimizer=rule, hyper_lr=0.01), torch.tensor([0, 2])
    state = started(algorithm)
    bias = state.heads.value["bias"].view(N, 2, N)
    bias[0, 0, 0] += 2  # client 0 retains layer a, client 2 layer b; both still mix them
    bias[2, 1, 2] += 2
    without, delta = copy.deepcopy(state), draw(2, 1)
    before = copy.deepcopy(state.heads.value)
    one = step(algorithm, state, ids, delta)
    other = step(replace(algorithm, retain=0), without, ids, delta)
    same((one.body, one.heads), (other.body, other.heads))
    for name, rows in one.heads.value.items():
        for head in (0, 1, 4, 5):  # both heads of clients 0 and 2
            assert not torch.equal(rows[head], before[name][head])


def test_diagnostics_tell_which_layers_are_retained() -> None:
    for algorithm in (HeurPFedLA(retain=1), PFedLA()):
        state = started(algorithm)
        state.heads.value["bias"].view(N, 2, N)[:, 1] += 50 * torch.eye(N)
        found = algorithm.diagnostics(state).get("retained")
        assert (found is None) == (not algorithm.retain)
        assert found is None or found.tolist() == [[False, True]] * N


# ---- before the models differ


@pytest.mark.parametrize("algorithm", [PFedLA(hyper_optimizer="adam"), PFedLAPeers(peers=2, hyper_optimizer="adam")])
def test_models_that_are_all_alike_move_no_weight(algorithm: Hypernetworks[Any]) -> None:
    """Inner products of one vector with equal ones differ in their last digits: Adam must not make a step of them."""
    n, ids = 7, torch.arange(7)
    generator = torch.Generator().manual_seed(0)
    theta = {"a": torch.randn(1, 5003, generator=generator), "b": torch.randn(1, 61, generator=generator)}
    state = algorithm.init(theta, n, torch.Generator().manual_seed(0))
    delta = {key: 0.1 * torch.randn(n, row.shape[1], generator=generator) for key, row in theta.items()}
    got = algorithm.download(state, ids)
    clients: Clients = state.clients if isinstance(state, PeerClients) else state
    before = copy.deepcopy(clients.body)
    algorithm.update(state, ids, got, upload_of(delta))
    same(clients.body.value, before.value)
    same((clients.body.first, clients.body.second), (before.first, before.second))
    assert not any(x.any() for x in (*clients.heads.first.values(), *clients.heads.second.values()))
    algorithm.update(state, ids, got, upload_of(delta))  # now they differ
    assert (clients.body.value["v"] - before.value["v"]).abs().amax((1, 2)).min() > 1e-4


def test_rounding_is_taken_for_nothing_and_small_differences_are_not() -> None:
    g = torch.tensor([[[5.0, 5.0, 5.0]], [[5.0, 5.0 + 4e-6, 5.0]], [[5.0, 5.01, 5.0]], [[0.0, 0.0, 0.0]]])
    expected = torch.zeros_like(g)
    expected[2, 0] = torch.tensor([-0.01 / 3, 0.02 / 3, -0.01 / 3])
    found = centred(g, torch.full((4, 1), 6.0))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert not found[[0, 1, 3]].any()
    layers = torch.tensor([[[9e6, 9e6, 9e6], [0.0, 1.0, 2.0]]])  # of a large layer and a small one, each by itself
    assert centred(layers, torch.tensor([[9e6, 2.0]])).tolist() == [[[0, 0, 0], [-1, 0, 1]]]
    half = centred(g, torch.full((4, 1), 6.0, dtype=torch.float16))  # products of half precision, kept in single
    assert not half[2].any()


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [61, 850, 12_832, 61_560])
def test_products_with_equal_models_differ_by_rounding_however_small_they_are(size: int, kind: torch.dtype) -> None:
    """Of many draws, some with changes nearly orthogonal to the model: there rounding is large beside the product.

    Whether products with equal rows are rounded alike depends on the processor, so they are added up in other orders,
    too.
    """
    largest = 0.0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        theta = torch.randn(1, size, generator=generator, dtype=kind).repeat(9, 1)
        delta = 1e-3 * torch.randn(6, size, generator=generator, dtype=kind)
        delta[::2] -= theta[:1] * (delta[::2] @ theta[0] / theta[0].square().sum())[:, None]
        bound = bounds({"a": delta}, {"a": theta[:2]}, ("a",))
        assert not centred(inner_products({"a": delta}, {"a": theta}, ("a",)), bound).any()
        orders = [torch.randperm(size, generator=generator) for _ in theta]
        g = torch.stack([delta[:, order] @ theta[0, order] for order in orders], -1)[:, None]
        assert not centred(g, bound).any()
        left = (g - g.mean(-1, keepdim=True)).abs().amax(-1)
        largest = max(largest, float((left / g.abs().amax(-1)).max() / torch.finfo(kind).eps))
        theta[4] += 0.01 * delta[0]  # a hundredth of a client's change is no rounding
        found = centred(inner_products({"a": delta}, {"a": theta}, ("a",)), bounds({"a": delta}, {"a": theta}, ("a",)))
        assert int(found[0, 0].argmax()) == 4
    assert largest > 2**10  # so that the products' own sizes would not do


def test_products_with_models_that_are_all_alike_are_alike_to_the_bit() -> None:
    """However a matrix product rounds its columns: in layers of a million values by more than the bound allows for."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(1, 1_000_000, generator=generator).repeat(10, 1)
    delta = 1e-3 * torch.randn(10, 1_000_000, generator=generator) - 2e-3 * rows[0]  # as with weight decay
    g = products(delta, rows)
    assert torch.equal(g, g[:, :1].expand_as(g))
    torch.testing.assert_close(g, delta @ rows.T, rtol=1e-4, atol=0)
    rows[9, 7] += 1
    assert torch.equal(products(delta, rows), delta @ rows.T)


def test_the_bound_of_a_product_is_that_of_cauchy_and_schwarz() -> None:
    delta, theta = draw(2, 1), draw(3, 2)
    for i in range(2):
        for layer, name in enumerate(NAMES):
            most = max(math.sqrt(sum(float(x) ** 2 for x in row)) for row in theta[name])
            size = math.sqrt(sum(float(x) ** 2 for x in delta[name][i]))
            assert float(bounds(delta, theta, NAMES)[i, layer]) == pytest.approx(size * most, rel=1e-5)


# ---- mean gradients


def test_the_mean_gradients_step_is_that_of_the_change_over_its_path() -> None:
    ids, path = torch.tensor([1, 3]), torch.tensor([0.5, 2.0], dtype=torch.float64)
    plain = PFedLA(hyper_optimizer="sgd", hyper_lr=0.3)
    one, other, delta = started(plain), started(plain), draw(2, 7)
    scaled = {key: rows / path.float()[:, None] for key, rows in delta.items()}
    expected = hyper(step(plain, one, ids, scaled))
    mean = PFedLA(hyper_optimizer="mean-sgd", hyper_lr=0.3)
    upload = upload_of(delta)
    found = mean.update(other, ids, mean.download(other, ids), upload._replace(values=upload.values | {"path": path}))
    same(hyper(found), expected, atol=1e-6)


def test_clients_send_the_length_of_their_path() -> None:
    training: dict[str, Any] = {"local_epochs": 3, "batch_size": 4, "lr": 0.02, "momentum": 0.5}
    made = setting(PFedLA(hyper_optimizer="mean-sgd"), **training)
    task = task_of(made, [0, 1])
    batches = [-(-len(samples) // 4) - (len(samples) % 4 == 1) for samples in task.samples]
    own = {key: row.repeat(2, 1) for key, row in made.enroll().own.items()}
    _, upload = made.algorithm.train(own, download(made, [0, 1]), task)
    steps = [[0.02 * (1 + 0.5 * sum(0.5**i for i in range(k))) for k in range(3 * count)] for count in batches]
    assert upload.values["path"].tolist() == pytest.approx(list(map(sum, steps)))  # the k-th goes by k momenta
    assert "path" not in setting(PFedLA(), **training).algorithm.train(own, download(made, [0, 1]), task)[1].values


def test_a_retained_layer_on_the_server_follows_the_clients_own() -> None:
    algorithm = HeurPFedLA(retain=1)
    state = started(algorithm)
    for client in (3, 1):  # they retain layer b, and still mix it
        state.heads.value["bias"].view(N, 2, N)[client, 1, client] += 2
    before, delta = copy.deepcopy(state.theta), draw(2, 1)
    state = step(algorithm, state, torch.tensor([3, 1]), delta)
    for key in ("b", "b#stats"):
        torch.testing.assert_close(state.theta[key][[3, 1]], before[key][[3, 1]] + delta[key])


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


@pytest.mark.parametrize("algorithm", [PFedLA(), PFedLAPeers(peers=2)])
def test_a_model_of_double_precision_is_mixed_and_updated(algorithm: Hypernetworks[Any]) -> None:
    theta, ids = draw(1, 0), torch.tensor([0, 3])
    state = algorithm.init({key: row.double() for key, row in theta.items()}, N, torch.Generator())
    got = algorithm.download(state, ids)
    assert got.layers["a"].dtype == torch.float64
    state = algorithm.update(state, ids, got, upload_of({key: row.double() for key, row in draw(2, 1).items()}))
    clients: Clients = state.clients if isinstance(state, PeerClients) else state
    torch.testing.assert_close(clients.theta["a"][0], (theta["a"] + draw(2, 1)["a"])[0].double())  # all began alike
    assert clients.heads.steps.view(N, -1).sum(1).tolist() == [2, 0, 0, 2, 0]


def test_the_printed_order_of_lines_takes_the_models_after_the_round() -> None:
    ids, delta = torch.tensor([1, 3]), draw(2, 7)
    plain, printed = PFedLA(hyper_optimizer="sgd"), UpdatedFirst(hyper_optimizer="sgd")
    before = started(plain)
    after = before._replace(theta=copy.deepcopy(before.theta))
    got = plain.download(before, ids).layers
    for key, rows in after.theta.items():
        rows[ids] = got[key] + delta[key]
    g = torch.stack([delta[name] @ after.theta[name].T for name in NAMES], 1)
    networks = before.body.rows(ids), before.heads.rows(torch.tensor([2, 3, 6, 7]))
    to_body, _ = hypernetwork_gradient(*networks, g)
    expected = before.body.value["v"][ids] + to_body["v"]
    one, other = (step(method, copy.deepcopy(before), ids, delta) for method in (plain, printed))
    same(one.theta, other.theta)
    torch.testing.assert_close(other.body.value["v"][ids], expected, atol=1e-5, rtol=1e-4)
    assert (one.body.value["v"][ids] - expected).abs().max() > 1e-3
    with pytest.raises(NotImplementedError):
        step(UpdatedFirst(retain=1), before, ids, delta)
