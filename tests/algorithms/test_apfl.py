from __future__ import annotations

import numpy as np
import pytest
import torch

from pfedla.algorithms import APFL, FedAvg, Local
from pfedla.algorithms.apfl import mix, next_alpha
from pfedla.layers import Layers
from tests.world import Played, by_hand, download, play, same, setting, task_of, theta_of


def served(played: Played) -> Layers:
    """Return the personalized models alone, without what APFL keeps beside them."""
    models = played.personalized()
    return {key: models[key] for key in played.setting.spec.slots}


def test_equations_by_hand() -> None:
    v, w, gradient = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0]), torch.tensor([0.5, 1.0])
    assert mix(0.25, v, w).tolist() == [2.5, -1.0]
    assert next_alpha(0.5, v, w, gradient, eta=0.1) == pytest.approx(0.5 - 0.1 * (-2 * 0.5 + 4 * 1))
    assert next_alpha(0.5, v, w, gradient, eta=1) == 0
    assert next_alpha(0.5, v, w, -gradient, eta=1) == 1


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_round_steps_both_models_on_the_same_batches(adaptive: bool) -> None:
    alpha, lr = 0.25, 0.1
    made = setting(APFL(alpha, adaptive), "mlp", lr=lr)
    theta = theta_of(made)
    own = made.algorithm.enroll({key: row + 0.1 for key, row in theta.items()})
    got, task = download(made, [1]), task_of(made, [1])
    batches, gradient = by_hand(task, theta)
    w, v = task.model.vector(theta).numpy(), task.model.vector(own, kind="personal").numpy()
    for step, batch in enumerate(batches):
        g = gradient((alpha * v + (1 - alpha) * w).astype(np.float32), batch)
        slope = float((v - w) @ g)
        v, w = v - np.float32(lr * alpha) * g, w - np.float32(lr) * gradient(w, batch)
        if adaptive and step == 0:
            alpha -= lr * slope
    assert adaptive == (abs(alpha - 0.25) > 1e-3)
    kept, upload = made.algorithm.train(own, got, task)
    np.testing.assert_allclose(task.model.vector(kept, kind="personal").numpy(), v, atol=1e-6)
    np.testing.assert_allclose(task.model.vector(kept).numpy(), alpha * v + (1 - alpha) * w, atol=1e-6)
    np.testing.assert_allclose(
        task.model.vector(upload.layers).numpy(), w - task.model.vector(theta).numpy(), atol=1e-6
    )
    assert kept.keys() == own.keys()
    assert ("#alpha" in kept) == adaptive
    if adaptive:
        assert kept["#alpha"].shape == (1, 1)
        assert float(kept["#alpha"]) == pytest.approx(alpha, abs=1e-6)
    found = made.algorithm.personalize(kept, got, task)
    expected = alpha * v + (1 - alpha) * task.model.vector(theta).numpy()
    np.testing.assert_allclose(task.model.vector(found).numpy(), expected, atol=1e-6)


def test_all_weight_on_the_personal_part_is_local() -> None:
    same(served(play(APFL(alpha=1), weight_decay=0.01)), served(play(Local(), weight_decay=0.01)))


def test_no_weight_on_the_personal_part_is_fedavg() -> None:
    flat, plain = (play(method, name="mlp", weight_decay=0.01) for method in (APFL(alpha=0), FedAvg()))
    same(served(flat), served(plain))
    mixed, averaged = (play(method, weight_decay=0.01) for method in (APFL(alpha=0), FedAvg()))
    same(mixed.state, averaged.state)
    keys = [key for key in averaged.own if key != "bn#stats"]
    same({key: mixed.own[key] for key in keys}, {key: averaged.own[key] for key in keys})


def test_the_shared_model_is_fedavgs_whatever_the_weight() -> None:
    mixed, averaged = (play(method, weight_decay=0.01) for method in (APFL(alpha=0.3, adaptive=True), FedAvg()))
    same(mixed.state, averaged.state)


def test_the_weights_that_clients_learn_are_their_own_and_never_sent() -> None:
    played = play(APFL(alpha=0.3, adaptive=True), [[0, 1], [0, 1]], lr=0.1)
    learned = played.own["#alpha"][:, 0].tolist()
    assert learned[2] == pytest.approx(0.3)  # never took part
    assert len({round(alpha, 4) for alpha in learned}) == 3
    assert {key for key in played.server.ledger.arrays() if "#" in key} == {"up:#examples"}
