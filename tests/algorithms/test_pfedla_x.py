"""pFedLA-X: its equations against plain numpy, its folds by recording who sees what, and its limits."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments.one_weight import OneWeight
from pfedla.algorithms import FedAvg, Local, PFedLAX, PFedLAXPeers
from pfedla.algorithms.pfedla_x import between, climbed, judged, risen, teachers, weights_of_others
from pfedla.algorithms.pfedla_x_hyper import PFedLAXHyper
from pfedla.client import Setting
from pfedla.codec import Codec
from pfedla.engine import FlatModel
from pfedla.layers import Layers, kind_of
from pfedla.record import RunRecord
from pfedla.rounds import run_round
from pfedla.training import ClientData, Samples, Task
from pfedla.wire import Payload
from tests.world import (
    Played,
    WireFleet,
    data,
    fleet_of,
    net,
    outcome_of,
    play,
    same,
    same_outcome,
    samples,
    server_of,
    setting,
    task_of,
    theta_of,
)

NAMES = ("one", "two")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# ---- equations


def everybody(ids: Tensor, n: int) -> Tensor:
    """Return that clients learn from all others: `(rows, 1, n)`."""
    return teachers(torch.arange(n).expand(len(ids), -1), ids, torch.ones(n, dtype=torch.bool))


def test_clients_learn_from_others_that_have_trained_and_from_all_if_nobody_has() -> None:
    candidates = torch.tensor([[0, 1, 2, 3], [2, 3, 1, 0], [3, 2, 1, 0]])
    for trained in ([1, 2], [2], [], [0, 1, 2, 3]):
        has = torch.tensor([j in trained for j in range(4)])
        found = teachers(candidates, torch.tensor([0, 2, 3]), has)
        assert found.shape == (3, 1, 4)
        for row, i in enumerate((0, 2, 3)):
            able = [j for j in (trained or range(4)) if j != i]  # of whom alone has trained: nobody
            assert found[row, 0].tolist() == [j in able for j in candidates[row].tolist()]
    assert teachers(torch.tensor([[0]]), torch.tensor([0]), torch.tensor([True])).tolist() == [[[False]]]


def test_weights_are_a_softmax_over_whom_a_client_learns_from() -> None:
    z, ids = drawn(2, 3, 4), torch.tensor([3, 1])
    for trained in ([0, 1, 2, 3], [0, 1], []):
        among = teachers(torch.arange(4).expand(2, -1), ids, torch.tensor([j in trained for j in range(4)]))
        q = weights_of_others(z, among)
        for row, i in enumerate(ids.tolist()):
            able = [j for j in trained if j != i] or [j for j in range(4) if j != i]
            for layer in range(3):
                total = sum(math.exp(float(z[row, layer, j])) for j in able)
                for j in range(4):
                    expected = math.exp(float(z[row, layer, j])) / total if j in able else 0.0
                    assert float(q[row, layer, j]) == pytest.approx(expected, rel=1e-12)
    alone, other = torch.tensor([0]), torch.tensor([1])
    assert torch.equal(weights_of_others(drawn(1, 3, 1), everybody(alone, 1)), torch.zeros(1, 3, 1).double())
    of_two = weights_of_others(drawn(1, 2, 2), everybody(other, 2))
    assert torch.equal(of_two, torch.tensor([[[1.0, 0], [1, 0]]]).double())


def test_logits_of_others_climb_the_mean_gradients_inner_products() -> None:
    z, g, path, ids = drawn(2, 3, 5), drawn(2, 3, 5, seed=1), torch.tensor([0.5, 2.0]), torch.tensor([2, 0])
    among = teachers(torch.arange(5).expand(2, -1), ids, torch.tensor([True, True, True, True, False]))
    bound = torch.full((2, 3), 9.0).double()
    rise = risen(g, bound, path, among)
    found = climbed(z, rise, among, eta=0.7)
    q = weights_of_others(found, among)
    for row, i in enumerate(ids.tolist()):
        able = [j for j in range(4) if j != i]  # the last has not trained
        for layer in range(3):
            raised = z[row, layer].numpy() + 0.7 * g[row, layer].numpy() / float(path[row])
            expected = np.where(np.isin(np.arange(5), able), np.exp(raised), 0)
            np.testing.assert_allclose(q[row, layer], expected / expected.sum(), rtol=1e-10)
            mean = float(g[row, layer, able].mean())
            np.testing.assert_allclose(
                found[row, layer, able] - z[row, layer, able],
                0.7 * (g[row, layer, able].numpy() - mean) / float(path[row]),
                rtol=1e-10,
            )
            for j in (i, 4):  # of whom nothing is learned, nothing is said
                assert float(found[row, layer, j]) == pytest.approx(float(found[row, layer, able].mean()), rel=1e-12)
    assert torch.equal(climbed(z, rise, among, eta=0.0)[among.expand_as(z)], z[among.expand_as(z)])


def test_logits_of_others_stay_within_5_so_that_several_that_help_end_up_even() -> None:
    z, among = torch.zeros(1, 1, 5), everybody(torch.tensor([0]), 5)
    rise = torch.tensor([[[0.0, 3, 1, -2, -2]]])
    for _ in range(20):
        z = climbed(z, rise, among, eta=0.7)
    assert z[0, 0, 1:].tolist() == [5, 5, -5, -5]
    back = climbed(z, -rise, among, eta=0.1)
    assert back[0, 0, 1:].tolist() == pytest.approx([4.7, 4.9, -4.8, -4.8])
    q = weights_of_others(z, among)[0, 0]
    assert q[1] == q[2]
    assert float(q[1] / q[3]) == pytest.approx(math.exp(10), rel=1e-5)


def test_who_begins_to_teach_is_weighed_as_the_mean_of_those_that_did_before() -> None:
    """However far apart they are: with one at 5 and two at -5, the mean of the logits is not 0."""
    trained = torch.tensor([True, True, True, True, False])
    ids = torch.tensor([0])
    among = teachers(torch.arange(5).expand(1, -1), ids, trained)
    z = climbed(torch.zeros(1, 1, 5), torch.tensor([[[0.0, 8, -4, -4, 0]]]), among, eta=10.0)
    q = weights_of_others(z, everybody(ids, 5))[0, 0]
    assert z[0, 0, 1:4].tolist() == [5, -5, -5]
    assert float(q[4]) == pytest.approx(float(q[1:4].log().mean().exp()), rel=1e-5)


def test_equal_others_are_not_told_apart_by_rounding() -> None:
    g = torch.full((1, 1, 5), 1e3) * (1 + 1e-7 * torch.tensor([0.0, 1, 0, 1, 0]))
    g[..., 2] = -1e6  # the client's own
    among = everybody(torch.tensor([2]), 5)
    assert torch.equal(risen(g, torch.full((1, 1), 1e3), torch.ones(1), among), torch.zeros(1, 1, 5))


def model(seed: int, rows: int = 2) -> Layers:
    return {
        "one": drawn(rows, 3, seed=seed),
        "one#stats": drawn(rows, 2, seed=seed + 50),
        "two": drawn(rows, 4, seed=seed + 90),
    }


def test_a_model_between_the_others_and_ones_own() -> None:
    m, own, share = (
        model(1),
        model(2) | {"one#counters": torch.tensor([[3], [4]])},
        torch.tensor([[0.1, 0.8], [0.0, 1.0]]),
    )
    found = between(share, m, own, NAMES)
    for key, layer in (("one", 0), ("one#stats", 0), ("two", 1)):
        for row in range(2):
            s = float(share[row, layer])
            expected = m[key][row].numpy() + s * (own[key][row].numpy() - m[key][row].numpy())
            np.testing.assert_allclose(found[key][row], expected, rtol=1e-6)
    assert torch.equal(found["one#counters"], own["one#counters"])
    assert torch.equal(found["one"][1], m["one"][1])
    assert torch.equal(found["two"][1], own["two"][1])


def test_logits_go_down_the_folds_loss_from_the_others_to_ones_own() -> None:
    logits, gradient, own, m = drawn(2, 2), model(3), model(4), model(5)
    found = judged(logits, gradient, own, m, NAMES, 0.3)
    for row in range(2):
        for layer, name in enumerate(NAMES):
            slope = sum(float(gradient[name][row, k] * (own[name][row, k] - m[name][row, k])) for k in range(3 + layer))
            assert float(found[row, layer]) == pytest.approx(float(logits[row, layer]) - 0.3 * slope, rel=1e-12)
    assert set(judged(logits, gradient, own, m, NAMES, 1e9).abs().flatten().tolist()) == {5.0}


def test_a_step_of_a_served_share_lowers_the_folds_loss() -> None:
    """∂F(m + s(θ - m))/∂s = <∇F, θ - m>: the slope is what finite differences give, layer by layer."""
    template = net("mlp").double()
    made = setting(PFedLAX(), "mlp")
    task = Task(FlatModel(copy.deepcopy(template), type(made.spec).of(template)), samples(1), [0], made.training, 0, 1)
    own = task.model.read()
    m = {key: rows + 0.3 * drawn(*rows.shape, seed=7) for key, rows in own.items()}

    def loss(share: Tensor) -> float:
        task.gradient(between(share, m, own, ("fc1", "fc2")))
        return float(task.model.loss)

    share, tiny = torch.tensor([[0.3, 0.6]], dtype=torch.float64), 1e-6
    moved = judged(
        torch.zeros(1, 2), task.gradient(between(share, m, own, ("fc1", "fc2"))), own, m, ("fc1", "fc2"), 1e-3
    )
    for layer in range(2):
        aside = torch.zeros_like(share)
        aside[0, layer] = tiny
        slope = (loss(share + aside) - loss(share - aside)) / (2 * tiny)
        assert float(moved[0, layer]) == pytest.approx(-1e-3 * slope, rel=1e-4)


def test_the_gradient_of_a_task_is_that_of_the_mean_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    made = setting(PFedLAX())
    theta = {key: rows.repeat(2, 1) for key, rows in theta_of(made).items()}
    task, seen = task_of(made, [1, 2]), list[bool]()
    task.model.module.register_forward_hook(lambda module, *_: seen.append(module.training))
    found = task.gradient(theta)
    for row in range(2):
        module = copy.deepcopy(made.template).eval()
        x, y = task.samples[row].take(slice(None), torch.empty(0))
        nn.functional.cross_entropy(module(x), y).backward()
        for name in ("conv", "bn", "fc"):
            part: Any = getattr(module, name)
            expected = {key: getattr(part, key).grad.flatten() for key in ("weight", "bias")}
            assert found[name].shape == (2, sum(map(len, expected.values())))
            np.testing.assert_allclose(
                found[name][row].sort().values, torch.cat(list(expected.values())).sort().values, atol=1e-6
            )
    assert seen == [False, False]  # neither dropout nor the batch's statistics
    monkeypatch.setattr("pfedla.training.EVALUATION_BATCH", 3)
    for key, rows in task.gradient(theta).items():
        torch.testing.assert_close(rows, found[key], rtol=1e-4, atol=1e-6)


# ---- a round, by hand


def test_two_rounds_are_the_equations_one_after_another() -> None:
    """The server's θ, z and the mixtures after rounds of everybody, from what clients kept and sent."""
    made, n = setting(PFedLAX(hold=1, eta=0.5), "mlp"), 3
    played = Played(made, server_of(made, n), fleet_of(made, data(n)), n)
    ids, names = torch.arange(n), made.spec.names
    z = np.zeros((n, len(names), n))
    for t in (1, 2, 3):
        theta = {key: rows.numpy().copy() for key, rows in played.state.members.theta.items()}
        before, sent = copy.deepcopy(played.own), made.algorithm.download(played.state, ids)
        run_round(made.algorithm, played.server, played.fleet, ids.tolist())
        for i in range(n):
            task = task_of(made, [i], t)
            for layer, name in enumerate(names):
                weight = np.exp(z[i, layer]) * (np.arange(n) != i)
                m = (weight / weight.sum()) @ theta[name]
                np.testing.assert_allclose(sent.layers[name][i], m, atol=1e-6)
                share = sigmoid(-2.0) if t > 1 else 0.0
                begun = m + share * (before[name][i].numpy() - m)
                delta = played.own[name][i].numpy() - begun
                rest, _ = task.leave_out(5, [t - 1])
                left = len(rest.samples[0])
                steps = left // 4 + (left % 4 > 1)  # in batches of 4; a single sample joins the batch before it
                path = 0.05 * 3 * steps  # 2 epochs x 5/4, to the nearest
                z[i, layer] += 0.5 * theta[name] @ delta / path
                np.testing.assert_allclose(played.state.members.theta[name][i], played.own[name][i], atol=1e-6)
        q = weights_of_others(played.state.z, everybody(ids, n))
        for i in range(n):
            expected = np.exp(z[i] - z[i].max(-1, keepdims=True)) * (np.arange(n) != i)
            np.testing.assert_allclose(q[i], expected / expected.sum(-1, keepdims=True), atol=2e-5)
    assert (
        float((q - weights_of_others(torch.zeros(n, 2, n), everybody(ids, n))).abs().max()) > 1e-4
    )  # something was learned


def test_who_trains_for_the_first_time_is_not_weighed_by_the_model_it_had_before() -> None:
    """All others' models are of this round; its own is the first one, which says nothing of it."""
    played = play(PFedLAX(), [[0, 1, 2]] * 3, 4, name="mlp")
    run_round(played.setting.algorithm, played.server, played.fleet, [0, 1, 2, 3])
    z = played.state.z
    for i in range(3):
        rest = [j for j in range(3) if j != i]
        assert not torch.allclose(z[i][:, rest], torch.zeros(2, 2), atol=1e-3)
        torch.testing.assert_close(z[i, :, 3], z[i][:, rest].mean(-1))


def test_one_weight_for_all_layers_climbs_by_their_sum() -> None:
    rounds = [[0, 1, 2, 3]] * 2  # in the first, all models are equal
    layerwise, whole = (
        play(method, rounds, 4, name="mlp").state.z for method in (PFedLAX(eta=0.01), OneWeight(eta=0.01))
    )
    others = everybody(torch.arange(4), 4).expand(-1, 2, -1)
    torch.testing.assert_close(whole[others], layerwise.sum(1, keepdim=True).expand(-1, 2, -1)[others])
    assert not torch.allclose(layerwise[:, 0], layerwise[:, 1], atol=1e-3)


def test_service_is_judged_at_the_served_model_when_a_folds_rounds_are_over() -> None:
    made = setting(PFedLAX(hold=2, serve_steps=3), "mlp")
    played = play(made, [[0, 1, 2]] * 1)
    for t in (2, 3):
        own, sent = copy.deepcopy(played.own), made.algorithm.download(played.state, torch.arange(3))
        run_round(made.algorithm, played.server, played.fleet, [0, 1, 2])
        for i in range(3):
            mine, m, task = {k: x[[i]] for k, x in own.items()}, sent.rows([i]).layers, task_of(made, [i], t)
            kept = {k: x[[i]] for k, x in played.own.items()}
            _, fold = task.leave_out(5, [0])
            if t == 2:  # the first fold's second round
                assert torch.equal(kept["#serve"], mine["#serve"])
            else:  # the round after
                b = mine["#serve"]
                for _ in range(3):
                    served = between(b.sigmoid(), m, mine, made.spec.names)
                    b = judged(b, fold.gradient(served), mine, m, made.spec.names, 1.0)
                same(kept["#serve"], b, atol=1e-6)
                assert not torch.equal(kept["#serve"], mine["#serve"])


def test_diagnostics_are_what_the_served_models_are_mixed_from() -> None:
    played = play(PFedLAX(hold=1), [[0, 1, 2]] * 4, name="mlp")
    shown, served = played.setting.algorithm.diagnostics(played.state), played.personalized()
    alpha = shown["alpha"]
    torch.testing.assert_close(alpha.sum(-1), torch.ones(3, 2))
    torch.testing.assert_close(alpha[torch.arange(3), :, torch.arange(3)], played.own["#serve"].sigmoid())
    for layer, name in enumerate(played.setting.spec.names):
        torch.testing.assert_close(served[name], alpha[:, layer] @ played.state.members.theta[name])


def test_the_served_models_statistics_are_those_of_the_clients_training_samples() -> None:
    played = play(PFedLAX(), [[0, 1, 2]] * 3)  # with a batch norm
    made, served = played.setting, played.personalized()
    sent = made.algorithm.download(played.state, torch.arange(3))
    for i in range(3):
        own = {key: rows[[i]] for key, rows in played.own.items()}
        mixed = between(own["#serve"].sigmoid(), sent.rows([i]).layers, own, made.spec.names)
        expected = task_of(made, [i], 3).normalized(mixed)
        statistics = [key for key in expected if kind_of(key) == "stats"]
        assert statistics
        for key in statistics:
            assert torch.equal(served[key][[i]], expected[key])
            assert not torch.allclose(mixed[key], expected[key], atol=1e-3)


# ---- folds


class Marked(nn.Module):
    """A linear model that notes which samples it is given, by the mark in their first value, and what for."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.seen: list[tuple[str, list[int]]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(("train" if self.training else "judge", (x[:, 0] * 1000).round().int().tolist()))
        out: Tensor = self.fc(x)
        return out


def marked(count: int) -> Samples:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 3)).astype(np.float32)
    x[:, 0] = np.arange(count) / 1000
    return Samples(x, (x[:, 1] > 0).astype(np.int64))


@pytest.mark.parametrize(("hold", "folds", "count"), [(2, 5, 23), (1, 3, 9), (3, 4, 4), (2, 10, 6)])
def test_a_fold_judges_only_what_was_not_trained_on_it_in_its_rounds(hold: int, folds: int, count: int) -> None:
    """With rounds that the client misses between its own: they count for nothing."""
    made = setting(PFedLAX(hold=hold, folds=folds), "mlp")
    template = Marked()
    made = Setting(template, type(made.spec).of(template), made.algorithm, made.training, 0)
    clients = {i: ClientData(marked(count), marked(count)) for i in range(3)}
    fleet = WireFleet(made, clients)
    played = Played(made, server_of(made, 3), fleet, 3)
    module: Any = fleet.devices[0].runtime.model.module
    log = list[tuple[set[int], set[int]]]()  # of each of client 0's rounds: who judged, and who trained
    used = min(folds, count)
    while len(log) < hold * (used + 1) + 1:
        ids = [[1, 2], [0, 1], [0, 2], [1]][played.server.t % 4]
        module.seen.clear()
        run_round(made.algorithm, played.server, fleet, ids)
        if 0 in ids:
            kinds = [kind for kind, _ in module.seen]
            first = kinds.index("train")
            assert set(kinds[first:]) == {"train"}
            parts = module.seen[:first], module.seen[first:]
            before, during = ({mark for _, some in part for mark in some} for part in parts)
            log.append((before, during))
    judges = list[set[int]]()
    for own, (serving, trained) in enumerate(log):
        assert set(range(count)) - trained
        assert bool(serving) == (own > 0 and own % hold == 0)
        assert not serving & set().union(*(during for _, during in log[own - hold : own]))  # of the rounds before
        judges += [serving] if serving else []
    assert set().union(*judges[:used]) == set(range(count))
    assert sum(map(len, judges[:used])) == count  # each sample judges once,
    assert judges[used] == judges[0]  # round and round


def test_a_fold_judges_models_whose_statistics_are_those_of_the_rest() -> None:
    """Running statistics are recomputed without the fold, or a part of it would be in what it judges."""

    class Normed(Marked):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            kind = "train" if self.training else "normalize" if self.norm.training else "judge"
            self.seen.append((kind, (x[:, 0] * 1000).round().int().tolist()))
            out: Tensor = self.fc(self.norm(x))
            return out

    template = Normed()
    made = setting(PFedLAX(hold=1, serve_steps=2), "mlp")
    made = Setting(template, type(made.spec).of(template), made.algorithm, made.training, 0)
    fleet = WireFleet(made, {i: ClientData(marked(11), marked(11)) for i in range(2)})
    played = Played(made, server_of(made, 2), fleet, 2)
    module: Any = fleet.devices[0].runtime.model.module
    left_out = set[int]()
    for t in range(4):
        module.seen.clear()
        run_round(made.algorithm, played.server, fleet, [0, 1])
        kinds = [kind for kind, _ in module.seen]
        before = module.seen[: kinds.index("train")]
        assert [kind for kind, _ in before] == ["normalize", "judge"] * 2 * (t > 0)
        for kind, some in before:
            assert set(some) == (left_out if kind == "judge" else set(range(11)) - left_out)
        left_out = set(range(11)) - {mark for kind, some in module.seen if kind == "train" for mark in some}
        assert left_out


@pytest.mark.parametrize("count", [2, 3, 7, 12])
def test_folds_of_few_samples(count: int) -> None:
    made = setting(PFedLAX(), "mlp")
    task = Task(FlatModel(copy.deepcopy(made.template), made.spec), [marked(count)], [4], made.training, 0, 1)
    pairs = [task.leave_out(5, [which]) for which in range(10)]
    for rest, fold in pairs:
        left, judge = (
            set((part.samples[0].take(slice(None), torch.empty(0))[0][:, 0] * 1000).round().tolist())
            for part in (rest, fold)
        )
        assert judge
        assert left | judge == set(range(count))
        assert not left & judge
    sizes = [len(fold.samples[0]) for _, fold in pairs[:5]]
    assert max(sizes) - min(sizes) <= 1
    assert task.training.local_epochs == 2


@pytest.mark.parametrize(("name", "least"), [("mlp", 2), ("conv", 3)])
def test_who_has_too_few_samples_for_folds_trains_on_all_and_keeps_its_first_shares(name: str, least: int) -> None:
    """A fold that was trained on would praise what the layer remembers of it. A norm is trained on two at the least."""
    for count in range(1, least + 1):
        clients = data(3)
        clients[0] = clients[0]._replace(train=clients[0].train.subset(torch.arange(count)))
        made = setting(PFedLAX(hold=1), name)
        played = Played(made, server_of(made, 3), fleet_of(made, clients), 3)
        for _ in range(4):
            run_round(made.algorithm, played.server, played.fleet, [0, 1, 2])
        judged_by = played.own["#held"].flatten().tolist()
        assert judged_by == [4 * (count == least), 4, 4]
        moved = (played.own["#serve"] != -2).any(1)
        assert moved.tolist() == [count == least, True, True]
    made = setting(PFedLAX(), "mlp")
    task = Task(FlatModel(copy.deepcopy(made.template), made.spec), [marked(1)], [4], made.training, 0, 1)
    with pytest.raises(ValueError, match="5 folds need more samples than 1"):
        task.leave_out(5, [0])


@pytest.mark.parametrize(
    ("epochs", "folds", "longer"),
    [(10, 5, 13), (10, 3, 15), (10, 10, 11), (10, 2, 20), (1, 5, 1), (2, 5, 3), (1, 2, 2)],
)
def test_as_many_samples_are_seen_as_without_folds_to_the_nearest_epoch(epochs: int, folds: int, longer: int) -> None:
    made = setting(PFedLAX(), "mlp", local_epochs=epochs)
    task = Task(FlatModel(copy.deepcopy(made.template), made.spec), [marked(120)], [0], made.training, 0, 1)
    rest, fold = task.leave_out(folds, [1])
    left = 120 - 120 // folds
    assert (rest.training.local_epochs, len(rest.samples[0]), fold.training.local_epochs) == (longer, left, epochs)
    assert abs(longer * left - epochs * 120) <= left / 2
    assert float(rest.path[0]) == pytest.approx(0.05 * longer * left / 4)  # in batches of 4


# ---- settings, and what they are for


def test_the_defaults_are_the_settings_that_were_measured() -> None:
    assert PFedLAX() == PFedLAX(folds=5, hold=2, first=-2.0, eta_serve=1.0, serve_steps=5, eta=3.0)
    assert PFedLAXPeers() == PFedLAXPeers(5, 2, -2.0, 1.0, 5, 3.0, peers=20, refresh=10)
    rounds, given = [[0, 1, 2]] * 3, PFedLAXHyper(hyper_optimizer="adam", hyper_lr=3e-4, embedding=100, hidden=100)
    same(*(play(method, rounds, name="mlp").state for method in (PFedLAXHyper(), given)))
    given = PFedLAXHyper(hyper_optimizer="sgd", hyper_lr=1.0)
    same(*(play(method, rounds, name="mlp").state for method in (PFedLAXHyper(hyper_optimizer="sgd"), given)))


def test_shares_that_are_not_judged_stay_and_nothing_is_left_out() -> None:
    for eta, moves in ((1.0, True), (0.0, False)):
        own = play(PFedLAX(hold=1, eta_serve=eta), [[0, 1, 2]] * 3, name="mlp").own
        assert bool((own["#serve"] != -2).any()) == moves
        assert own["#held"].flatten().tolist() == [3 * moves] * 3
    made = setting(PFedLAX(eta_serve=0), "mlp")
    task, seen = task_of(made, [2]), list[int]()
    task.model.module.register_forward_hook(lambda _, x, __: seen.append(len(x[0])))
    made.algorithm.train(made.enroll().own, made.algorithm.download(server_of(made, 3).state, torch.tensor([2])), task)
    assert sum(seen) == 2 * len(task.samples[0])


def test_others_weigh_alike_if_that_is_not_learned() -> None:
    for eta, even in ((0.0, True), (1.0, False)):
        state = play(PFedLAX(eta=eta), [[0, 1, 2, 3]] * 3, 4, name="mlp").state
        q = weights_of_others(state.z, everybody(torch.arange(4), 4))
        assert torch.allclose(q[0, :, 1:], torch.full((2, 3), 1 / 3)) == even


# ---- limits


def fixed(first: float) -> PFedLAX:
    return PFedLAX(first=first, eta_serve=0)


def parameters(layers: Layers) -> Layers:
    return {key: rows for key, rows in layers.items() if not kind_of(key)}


def test_all_of_ones_own_is_local_training_to_the_bit() -> None:
    rounds = [[0, 1, 2], [1, 2], [0, 2], [0, 1, 2]]
    mine, local = (play(algorithm, rounds) for algorithm in (fixed(200.0), Local()))
    same({key: mine.own[key] for key in local.own}, local.own)
    same(parameters(mine.personalized()), parameters(local.personalized()))


def test_nothing_of_ones_own_is_the_others_mixture_to_the_bit() -> None:
    mine = play(fixed(-200.0), [[0, 1, 2]] * 3)
    made, ids = mine.setting, torch.arange(3)
    sent = made.algorithm.download(mine.state, ids)
    same(parameters(mine.personalized()), parameters(sent.layers))
    task = task_of(made, [1], 4)
    kept, upload = made.algorithm.train({k: x[[1]] for k, x in mine.own.items()}, sent.rows([1]), task)
    same(
        {key: kept[key] for key in made.spec.slots},
        task_of(made, [1], 4).fit(sent.rows([1]).fill({k: x[[1]] for k, x in mine.own.items()})),
    )
    same({key: kept[key] - sent.layers[key][[1]] for key in upload.layers}, upload.layers)
    even = play(PFedLAX(first=-200.0, eta_serve=0, eta=0.0), [[0, 1, 2]])
    for name in even.setting.spec.names:  # the mean of the two others
        expected = (even.own[name].sum(0) - even.own[name]) / 2
        np.testing.assert_allclose(even.personalized()[name], expected, atol=1e-6)


def test_who_is_alone_is_local_to_the_bit_and_is_sent_nothing() -> None:
    mine, local = (play(algorithm, [[0]] * 5, 1) for algorithm in (PFedLAX(), Local()))
    same({key: mine.own[key] for key in local.own}, local.own)
    same(mine.personalized(), local.personalized())
    assert mine.server.ledger.down == 0
    assert mine.setting.algorithm.diagnostics(mine.state)["alpha"].tolist() == [[[1.0]] * 3]


def test_who_alone_has_trained_goes_on_alone_until_another_has() -> None:
    """It is not drawn back to the first model, which the others still have."""
    played = play(PFedLAX(), [[0]], 3)
    before, made = copy.deepcopy(played.own), played.setting
    down = played.server.ledger.down
    run_round(made.algorithm, played.server, played.fleet, [0])
    assert played.server.ledger.down == down  # nothing more was sent
    rest, _ = task_of(made, [0], 2).leave_out(5, [0])
    trained = rest.fit({key: before[key][:1] for key in made.spec.slots})
    same({key: played.own[key][:1] for key in made.spec.slots}, trained)
    alpha = made.algorithm.diagnostics(played.state)["alpha"]
    assert torch.equal(alpha[0], torch.tensor([1.0, 0, 0]).expand(3, 3))
    for ids in ([0], [1], [0, 1], [0, 1]):
        run_round(made.algorithm, played.server, played.fleet, ids)
    assert played.own["#held"].flatten().tolist() == [5, 3, 0]
    assert (played.own["#serve"][0] != -2).any()


def test_who_was_alone_is_judged_by_folds_left_out_since_another_joined() -> None:
    """A fold of the lone rounds, in which nothing was left out, would praise what it had trained."""
    made = setting(PFedLAX(hold=2), "mlp")
    played = Played(made, server_of(made, 1), fleet_of(made, data(1)), 1)
    for _ in range(2):
        run_round(made.algorithm, played.server, played.fleet, [0])
    own = {key: rows[:1] for key, rows in played.own.items()}
    assert own["#rounds"].tolist() == [[2]]
    m = {key: rows + 0.1 * drawn(*rows.shape).to(rows) for key, rows in theta_of(made).items()}
    got = Payload.of(m, torch.ones(1, 2, dtype=torch.bool), made.spec.names)
    for t, moved in enumerate((False, False, True), start=3):
        own, _ = made.algorithm.train(own, got, task_of(made, [0], t))
        assert bool((own["#serve"] != -2).any()) == moved


def test_of_two_each_has_the_other() -> None:
    played = play(PFedLAX(), [[0, 1]] * 5, 2)
    sent = played.setting.algorithm.download(played.state, torch.tensor([0, 1]))
    same(sent.layers, {key: rows.flip(0) for key, rows in played.state.members.theta.items()})
    assert (played.own["#serve"] != -2).any()


# ---- clients that come later, and those that lost what was theirs


def test_who_has_not_trained_teaches_nobody_and_begins_with_the_others() -> None:
    """In a first round that starts from what the others trained, whatever logits say of an own model there is not."""
    played = play(PFedLAX(hold=1, first=1.0), [[0, 1], [1]], 4)
    made, ids = played.setting, torch.arange(4)
    sent = made.algorithm.download(played.state, ids)
    alpha = made.algorithm.diagnostics(played.state)["alpha"]
    assert (alpha[:, :, 2:] == 0).all()
    for i, teacher in ((0, 1), (1, 0)):
        same(sent.rows([i]).layers, {key: rows[[teacher]] for key, rows in played.state.members.theta.items()})
    torch.testing.assert_close(alpha[2:, :, :2].sum(-1), torch.ones(2, 3))
    served = played.personalized()
    for name in made.spec.names:
        assert torch.equal(served[name][2:], sent.layers[name][2:])
        assert not torch.equal(served[name][:2], sent.layers[name][:2])
    task, own = task_of(made, [2], 3), made.enroll().own
    kept, upload = made.algorithm.train(own, sent.rows([2]), task)
    assert upload.values["start"].tolist() == [0]
    assert torch.equal(kept["#serve"], own["#serve"])  # there was nothing to judge
    rest, _ = task.leave_out(5, [0])
    trained = rest.fit(sent.rows([2]).fill(own))
    same({key: kept[key] for key in made.spec.slots}, trained)


@pytest.mark.parametrize("name", ["conv", "mlp"])
def test_the_server_knows_the_models_of_clients_that_came_late_or_forgot(name: str) -> None:
    made, n = setting(PFedLAX(hold=1), name), 4
    played = Played(made, server_of(made, n), fleet_of(made, data(n)), n)
    fleet: Any = played.fleet
    for t, ids in enumerate([[0, 1], [0, 1, 2], [1, 2], [0, 1, 2, 3], [1, 3]]):
        if t == 4:  # a disk broke
            first = made.enroll()
            for key, rows in fleet.kept.own.items():
                rows[1] = first.own[key][0]
        run_round(made.algorithm, played.server, fleet, ids)
        for key, rows in played.state.members.theta.items():
            torch.testing.assert_close(rows[ids], played.own[key][ids], atol=1e-6, rtol=1e-5)
    assert played.own["#rounds"].flatten().tolist() == [3, 1, 3, 2]


def test_a_client_that_trained_alone_and_forgot_is_told_what_the_server_knows() -> None:
    made, n = setting(PFedLAX(), "mlp"), 2
    played = Played(made, server_of(made, n), fleet_of(made, data(n)), n)
    fleet: Any = played.fleet
    for _ in range(3):
        run_round(made.algorithm, played.server, fleet, [0])
    first = made.enroll()
    for key, rows in fleet.kept.own.items():
        rows[0] = first.own[key][0]
    fleet.forgot = {0}
    run_round(made.algorithm, played.server, fleet, [0])
    for key, rows in played.state.members.theta.items():
        torch.testing.assert_close(rows[0], played.own[key][0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "codec", [Codec("int8", "int8"), Codec("int4", "int8"), Codec("random-k", "int8", 0.1)], ids=str
)
def test_nothing_that_a_codec_loses_is_lost_for_good(codec: Codec) -> None:
    """What arrived in all rounds and what a client owes add up to its changes, whatever its own share at the start."""
    made, arrived = dict[int, list[Layers]](), dict[int, list[Layers]]()

    @dataclass(frozen=True)
    class Watched(PFedLAX):
        def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
            kept, upload = super().train(own, got, task)
            made.setdefault(task.ids[0], []).append({key: rows[0].clone() for key, rows in upload.layers.items()})
            return kept, upload

        def update(self, state: Any, ids: Tensor, got: Payload, upload: Payload) -> Any:
            for row, client in enumerate(ids.tolist()):
                found = {key: rows[row].clone() for key, rows in upload.layers.items()}
                arrived.setdefault(client, []).append(found)
            return super().update(state, ids, got, upload)

    played = play(setting(Watched(), "mlp", codec=codec), [[0, 1, 2], [0, 2]] * 10)
    fleet: Any = played.fleet
    for name in played.setting.spec.names:
        assert fleet.kept.owed[name].any()
        for client in range(3):
            sums = [torch.stack([one[name] for one in some[client]]).sum(0) for some in (made, arrived)]
            torch.testing.assert_close(sums[1] + fleet.kept.owed[name][client], sums[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("up", ["int8", "int4"])
def test_with_codecs_the_server_stays_near_the_clients_models(up: Any) -> None:
    codec = Codec(up=up, down="int8")
    played, plain = (play(setting(PFedLAX(), "mlp", codec=c), [[0, 1, 2], [0, 2]] * 10) for c in (codec, None))
    for name in played.setting.spec.names:
        moved = (plain.own[name] - theta_of(plain.setting)[name]).norm()
        apart = (played.state.members.theta[name] - played.own[name]).norm()
        assert 0 < apart < 0.05 * moved


def test_a_newcomer_has_the_mean_model_and_is_weighed_as_the_mean_of_the_others() -> None:
    played = play(PFedLAX(), [[0, 1, 2]] * 3)
    algorithm, ids = played.setting.algorithm, torch.arange(4)
    others = everybody(torch.arange(3), 3)
    played.state.z[:] = played.state.z.where(~others, (played.state.z + 1).clamp(max=3))  # whose mean is not 0
    before = copy.deepcopy(played.state)
    q = weights_of_others(before.z, others)
    state = algorithm.admit(played.state, torch.Generator())
    for key, rows in before.members.theta.items():
        assert torch.equal(state.members.theta[key][:3], rows)
        torch.testing.assert_close(state.members.theta[key][3], rows.mean(0))
    shown = algorithm.diagnostics(state)
    assert (shown["alpha"][:3, :, 3] == 0).all()
    torch.testing.assert_close(shown["alpha"][3], torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]).expand(3, 4))
    torch.testing.assert_close(shown["alpha"][:3, :, :3], algorithm.diagnostics(before)["alpha"])
    state.members.trained[3] = True
    wider = weights_of_others(state.z, everybody(ids, 4))[:3]
    torch.testing.assert_close(wider[..., :3] / wider[..., :3].sum(-1, keepdim=True), q)
    for i in range(3):
        rest = [j for j in range(3) if j != i]
        torch.testing.assert_close(wider[i, :, 3], wider[i][:, rest].log().mean(-1).exp())


def test_a_newcomers_gradient_raises_whoever_lies_downhill_by_at_most_a_step() -> None:
    played = play(PFedLAX(), [[0, 1, 2]] * 3)
    algorithm, ids = played.setting.algorithm, torch.tensor([3])
    state = algorithm.admit(played.state, torch.Generator())
    before, theta = state.z.clone(), state.members.theta
    downhill = {key: theta[key][1:2] - theta[key][3:] for key in theta}  # from the mean lies client 1
    state = algorithm.attract(state, 3, downhill, 0.5, by_layer=False)
    risen = state.z[3] - before[3]
    assert (risen[:, :3].argmax(-1) == 1).all()
    assert float(risen.abs().max()) == pytest.approx(0.5, rel=1e-4)
    torch.testing.assert_close(risen[:, :3].sum(-1), torch.zeros(3), atol=1e-5, rtol=0)
    largest = risen.abs().amax(-1)
    assert int((largest > 0.49).sum()) == 1  # of all layers together: others say less
    assert torch.equal(state.z[:3], before[:3])
    after = state.z.clone()
    assert torch.equal(algorithm.attract(state, 3, downhill, 4.0, by_layer=True).z, after)
    far = algorithm.attract(copy.deepcopy(state), 3, downhill, 99.0, by_layer=False)
    assert float(far.z[3].abs().max()) == 5
    for rows in theta.values():  # where all models are the same, nothing lies anywhere
        rows[:] = rows[:1].clone()
    assert torch.equal(algorithm.attract(state, 3, downhill, 0.5, by_layer=False).z[ids], after[ids])


# ---- in use


def test_a_client_counts_its_own_rounds() -> None:
    played = play(PFedLAX(), [[0, 1], [1, 2], [1]])
    assert played.own["#rounds"].flatten().tolist() == [1, 3, 1]


def test_what_is_sent_beside_the_model_is_a_value_a_layer_and_two_more() -> None:
    played = play(PFedLAX(), [[0, 1, 2]])
    layers = len(played.setting.spec.names)
    mine, fedavg = played.server.ledger, play(FedAvg(), [[0, 1, 2]]).server.ledger
    assert (mine.down, mine.up) == (fedavg.down, fedavg.up)
    lines = mine.arrays()
    assert lines["up:#serve"].tolist() == [4 * layers] * 3
    assert lines["up:#start"].tolist() == [4] * 3
    values = {key for key in lines if key.startswith("up:#")}
    assert values == {"up:#examples", "up:#path", "up:#serve", "up:#start"}


def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.t == 3:
            raise KeyboardInterrupt

    whole, made = outcome_of(PFedLAX()), setting(PFedLAX())
    record = RunRecord.create(tmp_path / "run", "", {})
    with pytest.raises(KeyboardInterrupt):
        outcome_of(made, record, stop)
    record.release()
    same_outcome(outcome_of(made, RunRecord.resume(tmp_path / "run")), whole)


@pytest.mark.slow
def test_groups_of_twins_learn_from_their_twins() -> None:
    """Clients in two groups with opposite labels: each one's mixture of others comes from its own group."""
    made, n = setting(PFedLAX(), "mlp", local_epochs=4), 6
    rng, clients = np.random.default_rng(0), dict[int, ClientData]()
    for i in range(n):
        y = rng.integers(0, 2, 40)
        x = rng.normal(size=(40, 2, 6, 6)) + (2 * y - 1)[:, None, None, None]
        own = Samples(x, y if i < 3 else 1 - y)
        clients[i] = ClientData(own, own)
    played = Played(made, server_of(made, n), fleet_of(made, clients), n)
    for _ in range(12):
        run_round(made.algorithm, played.server, played.fleet, list(range(n)))
    q = weights_of_others(played.state.z, everybody(torch.arange(n), n))[:, 0].view(
        2, 3, 2, 3
    )  # of the first layer, by group
    own_group = float(q[0, :, 0].sum() + q[1, :, 1].sum()) / 6
    assert own_group > 0.7  # of 1; by chance 2 in 5
