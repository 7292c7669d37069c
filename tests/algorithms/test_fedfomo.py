from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pfedla.algorithms import FedFomo, Local
from pfedla.algorithms.fedfomo import HELD_OUT, choose, first_order_gains, weights_of
from pfedla.layers import COUNTERS, kind_of
from pfedla.rounds import run_round
from pfedla.training import ClientData, score
from tests.world import data, download, fleet_of, play, same, server_of, setting, task_of, theta_of


def test_weights_are_what_is_gained_by_distance() -> None:
    theta = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    loss = torch.tensor([2.0, 1.0, 3.0, 1.2, 2.0], dtype=torch.float64)
    expected = np.zeros(4)
    for j in range(1, 5):
        distance = np.sqrt(((theta[j] - theta[0]).numpy() ** 2).sum())
        expected[j - 1] = (loss[0] - loss[j]).item() / distance if distance else 0
    assert expected[:3].tolist() == pytest.approx([1 / 5, -1, 0.8 / 2])
    gains = first_order_gains(loss, theta)
    np.testing.assert_allclose(gains, expected / np.abs(expected).sum(), rtol=1e-7)
    np.testing.assert_allclose(weights_of(gains), [1 / 3, 0, 2 / 3, 0], rtol=1e-7)
    assert weights_of(first_order_gains(-loss, theta))[1] == 1  # of the others, none would then do better
    assert not first_order_gains(torch.zeros(5, dtype=torch.float64), theta).any()
    assert not weights_of(torch.tensor([-0.5, 0.0, -0.5])).any()
    strange = first_order_gains(torch.tensor([2.0, torch.nan, torch.inf, 1.0, 2.0]), theta)
    assert weights_of(strange).tolist() == [0, 0, 1, 0]


def test_candidates_are_the_nearest_unless_explored() -> None:
    affinity = torch.tensor([0.0, 0.3, 1.0, 0.0, 0.2, 0.0])
    draws = [choose(affinity, 4, 0.0, torch.Generator().manual_seed(seed)) for seed in range(40)]
    assert all(draw[:3] == [2, 1, 4] for draw in draws)
    assert {draw[3] for draw in draws} == {0, 3, 5}  # equals in random order
    explored = [choose(affinity, 6, 1.0, torch.Generator().manual_seed(seed)) for seed in range(200)]
    assert all(sorted(draw) == list(range(6)) for draw in explored)  # nobody twice
    assert {draw[0] for draw in explored} == set(range(6))
    first = [choose(affinity, 1, 0.3, torch.Generator().manual_seed(seed))[0] for seed in range(400)]
    assert 0.7 < np.mean([client == 2 for client in first]) < 0.8  # 0.7, and a sixth of 0.3


def test_exploration_ends() -> None:
    algorithm = FedFomo(models=2, epsilon=1.0, epsilon_decay=0.25)
    state = server_of(setting(algorithm), 7).state
    everybody, dearest = torch.arange(7), [(i + 2) % 7 for i in range(7)]
    state.affinity[everybody, dearest] = 1.0
    assert algorithm.candidates(state, everybody)[:, 0].tolist() != dearest
    assert algorithm.candidates(state._replace(t=torch.tensor(4)), everybody)[:, 0].tolist() == dearest
    assert int(play(algorithm, [[0, 1], [2], [0]]).state.t) == 3  # rounds are counted


def test_nobody_is_sent_its_own_model() -> None:
    algorithm = FedFomo(epsilon=1.0, epsilon_decay=0.0)
    state, firsts = server_of(setting(algorithm), 7).state, set()
    for t in range(20):
        for i, chosen in enumerate(algorithm.candidates(state._replace(t=torch.tensor(t)), torch.arange(7)).tolist()):
            assert i not in chosen
            assert len(set(chosen)) == 4
            firsts.add((i, chosen[0]))
    assert len(firsts) > 35  # of 42: each round explores anew


def test_training_sees_nothing_that_is_held_out() -> None:
    made = setting(FedFomo(held_out=0.3), "mlp", local_epochs=1)
    trained_on, weighed_on = list[Tensor](), list[Tensor]()
    for t in (1, 2):
        task = task_of(made, [6], t=t)
        task.model.module.register_forward_hook(
            lambda module, x, _: (trained_on if module.training else weighed_on).extend(x[0])
        )
        made.algorithm.train(made.enroll().own, download(made, [6], n=7), task)
    seen, held = ({tuple(x.flatten().tolist()) for x in xs} for xs in (trained_on, weighed_on))
    assert (len(seen), len(held), len(seen | held)) == (9, 4, 13)  # in both rounds the same


def test_the_mixture_of_candidates_and_the_affinities() -> None:
    algorithm = FedFomo(models=3, epsilon=0.0)
    made = setting(algorithm, local_epochs=3)
    theta, state, ids = theta_of(made), server_of(made, 3).state, torch.arange(3)
    own = {key: row.repeat(3, 1) for key, row in made.enroll().own.items()}
    task = task_of(made, [0, 1, 2])
    got = algorithm.download(state, ids)
    own, upload = algorithm.train(own, got, task)
    assert not upload.values["gains"].any()  # all models are one: no gain
    state = algorithm.update(state, ids, got, upload)
    assert not state.affinity.any()
    state.affinity[:] = 10 + torch.arange(9.0).view(3, 3)  # of earlier rounds
    past = state.affinity.numpy().copy()
    got, chosen = algorithm.download(state, ids), algorithm.candidates(state, ids)
    mixture, (_, upload) = algorithm.personalize(own, got, task), algorithm.train(own, got, task)
    after = algorithm.update(state._replace(theta={k: x.clone() for k, x in state.theta.items()}), ids, got, upload)
    for i in range(3):
        held_out = [task.split(0.2, *HELD_OUT)[0].samples[i]]
        before = score(task.model, theta, held_out)["loss"][0]
        gains = np.zeros(3)
        for j in range(3):
            model = {key: own[key][[j]] for key in theta}
            distance = np.sqrt(sum(float((own[name][j] - theta[name][0]).square().sum()) for name in made.spec.names))
            gains[j] = (before - score(task.model, model, held_out)["loss"][0]) / distance
        gains /= np.abs(gains).sum()
        w = np.maximum(gains, 0) / np.maximum(gains, 0).sum()
        np.testing.assert_allclose(upload.values["gains"][i], gains[chosen[i]], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(after.affinity[i], past[i] + gains * (1 - np.eye(3)[i]), rtol=1e-4, atol=1e-5)
        for key in (key for key in theta if kind_of(key) != COUNTERS):
            np.testing.assert_allclose(mixture[key][i], w @ own[key].numpy(), rtol=1e-4, atol=1e-6)


def test_the_model_that_training_starts_from_is_what_the_next_gains_are_measured_from() -> None:
    algorithm = FedFomo(models=3)
    made = setting(algorithm, "mlp", local_epochs=3)
    ids, task = torch.arange(3), task_of(made, [0, 1, 2])
    own = {key: row.repeat(3, 1) for key, row in made.enroll().own.items()}
    own, upload = algorithm.train(own, got := algorithm.download(server_of(made, 3).state, ids), task)
    state = algorithm.update(server_of(made, 3).state, ids, got, upload)
    got = algorithm.download(state, ids)
    mixture, (kept, _) = algorithm.personalize(own, got, task), algorithm.train(own, got, task)
    for name in made.spec.names:
        assert torch.equal(kept[f"{name}#previous"], mixture[name])
        assert not torch.equal(kept[f"{name}#previous"], own[name])


def test_a_client_whose_candidates_all_do_worse_keeps_its_own_model() -> None:
    made = setting(FedFomo(models=3), "mlp")
    state = server_of(made, 3).state
    state.theta["fc2"][:, -1] += 50  # of the candidates: the bias of a class that client 0 does not have
    own = made.enroll().own
    got = made.algorithm.download(state, torch.tensor([0]))
    mixture, gains = FedFomo(models=3).mix(own, got, task_of(made, [0]))
    assert (gains[0, 1:] < 0).all()
    same(mixture, {key: own[key] for key in mixture})


def test_candidates_are_counted_by_the_ledger() -> None:
    made = setting(FedFomo(models=4), "mlp")
    size = download(made, [5], n=7).layer_bytes()[0]
    assert size.tolist() == [3 * 4 * made.spec.size(name) for name in made.spec.names]


def test_a_client_without_others_trains_locally() -> None:
    held_out = task_of(setting(Local()), [0], clients=1).split(0.2, *HELD_OUT)[1].samples[0]
    rounds = [[0], [0], [0]]
    one = play(FedFomo(), rounds, n=1)
    other = play(Local(), rounds, n=1, fleet=lambda made, _: fleet_of(made, {0: ClientData(held_out, held_out)}))
    same({key: one.own[key] for key in other.own}, other.own)


def test_the_ledger_names_the_gains_that_are_sent() -> None:
    played = play(FedFomo(models=3), [[0, 1], [2]])
    assert played.server.ledger.arrays()["up:#gains"].tolist() == [8, 8, 8]  # of two candidates each, float32


def test_a_candidate_that_does_worse_is_demoted_below_one_that_was_never_asked_for() -> None:
    algorithm = FedFomo(models=2, epsilon=0.0)
    made = setting(algorithm, "mlp", local_epochs=3)
    server, fleet = server_of(made, 3), fleet_of(made, data(3))
    for _ in range(2):
        run_round(made.algorithm, server, fleet, [0, 1, 2])
    state = server.state
    state.affinity.zero_()
    state.affinity[0, 1] = 0.2  # so that client 0 asks for client 1, whose model is now a bad one
    state.theta["fc2"][1, -1] += 50  # the bias of a class that client 0 does not have
    assert algorithm.candidates(state, torch.tensor([0])).tolist() == [[1]]
    run_round(made.algorithm, server, fleet, [0])
    assert server.state.affinity[0, 1] < 0 == server.state.affinity[0, 2]
    assert algorithm.candidates(server.state, torch.tensor([0])).tolist() == [[2]]
