from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pfedla.algorithm import Algorithm
from pfedla.algorithms import APFL, FedAvg, Local
from pfedla.algorithms.apfl import mix, next_alpha
from pfedla.errors import ConfigError
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.layers import Layers
from pfedla.ledger import Ledger
from pfedla.rounds import Server, run_round
from pfedla.training import Samples, Task

Play = Callable[..., tuple[object, Layers, Layers]]


@pytest.fixture
def play(setting: Callable[..., Setting], data: Callable[..., list[Samples]]) -> Play:
    """Play two rounds; return the server's state, the personalized models and what the clients keep."""

    def run(algorithm: Algorithm[Any], name: str) -> tuple[object, Layers, Layers]:
        made, samples = setting(algorithm, name, weight_decay=0.01), data(3)
        server = Server(made.algorithm.init(made.spec.read(made.template), 3, torch.Generator()))
        with SimulatedFleet(made, samples, samples, workers=0) as fleet:
            for ids in ([0, 1], [1, 2]):
                run_round(made.algorithm, server, fleet, Ledger(made.spec.names), ids)
            got = made.algorithm.download(server.state, torch.arange(3))
            personalized = fleet.personalize([0, 1, 2], got, server.t)
            return server.state, {key: personalized[key] for key in made.spec.slots}, fleet.own

    return run


def test_equations_by_hand() -> None:
    v, w, gradient = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0]), torch.tensor([0.5, 1.0])
    assert mix(0.25, v, w).tolist() == [2.5, -1.0]
    assert next_alpha(0.5, v, w, gradient, eta=0.1) == pytest.approx(0.5 - 0.1 * (-2 * 0.5 + 4 * 1))
    assert next_alpha(0.5, v, w, gradient, eta=1) == 0
    assert next_alpha(0.5, v, w, -gradient, eta=1) == 1


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_round_steps_both_models_on_the_same_batches(
    adaptive: bool, setting: Callable[..., Setting], task_of: Callable[..., Task], by_hand: Callable[..., Any]
) -> None:
    alpha, lr = 0.25, 0.1
    made = setting(APFL(alpha, adaptive), "mlp", lr=lr)
    theta = made.spec.read(made.template)
    own = made.algorithm.enroll({key: row + 0.1 for key, row in theta.items()})
    got = made.algorithm.download(made.algorithm.init(theta, 3, torch.Generator()), torch.tensor([1]))
    task = task_of(made, [1])
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
    if adaptive:
        assert float(kept["fc2#alpha"]) == pytest.approx(alpha, abs=1e-6)
    served = made.algorithm.personalize(kept, got, task)
    expected = alpha * v + (1 - alpha) * task.model.vector(theta).numpy()
    np.testing.assert_allclose(task.model.vector(served).numpy(), expected, atol=1e-6)


def test_all_weight_on_the_personal_part_is_local(play: Play, same: Callable[..., None]) -> None:
    same(play(APFL(alpha=1), "conv")[1], play(Local(), "conv")[1])


def test_no_weight_on_the_personal_part_is_fedavg(play: Play, same: Callable[..., None]) -> None:
    same(play(APFL(alpha=0), "mlp")[1], play(FedAvg(), "mlp")[1])
    shared, _, kept = play(APFL(alpha=0), "conv")
    expected, _, trained = play(FedAvg(), "conv")
    same(shared, expected)
    same({key: kept[key] for key in trained if key != "bn#stats"}, {k: trained[k] for k in trained if k != "bn#stats"})


def test_the_shared_model_is_fedavgs_whatever_the_weight(play: Play, same: Callable[..., None]) -> None:
    same(play(APFL(alpha=0.3, adaptive=True), "conv")[0], play(FedAvg(), "conv")[0])


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_a_weight_is_from_zero_to_one(alpha: float) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.alpha"):
        APFL(alpha)
