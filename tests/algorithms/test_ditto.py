from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pfedla.algorithm import Algorithm
from pfedla.algorithms import Ditto, FedAvg, Local
from pfedla.algorithms.ditto import pull
from pfedla.errors import ConfigError
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.layers import Layers
from pfedla.ledger import Ledger
from pfedla.rounds import Server, run_round
from pfedla.training import Samples, Task


def test_the_pull_points_from_the_shared_to_the_personal_model() -> None:
    gradient = torch.tensor([1.0, 1.0])
    pull(torch.tensor([0.0, 3.0]), 0.5)(torch.tensor([2.0, 2.0]), gradient)
    assert gradient.tolist() == [2.0, 0.5]


def test_the_personal_model_is_trained_from_itself_towards_what_was_received(
    setting: Callable[..., Setting], task_of: Callable[..., Task], by_hand: Callable[..., Any]
) -> None:
    lam, lr = 2.0, 0.1
    made = setting(Ditto(lam), "mlp", lr=lr)
    theta = made.spec.read(made.template)
    own = {key: row + 0.1 for key, row in theta.items()}
    got = made.algorithm.download(made.algorithm.init(theta, 3, torch.Generator()), torch.tensor([1]))
    task = task_of(made, [1])
    batches, gradient = by_hand(task, theta)
    w, v = (task.model.vector(layers).numpy() for layers in (theta, own))
    for batch in batches:
        v = v - np.float32(lr) * (gradient(v, batch) + np.float32(lam) * (v - w))
    kept, _ = made.algorithm.train(own, got, task)
    np.testing.assert_allclose(task.model.vector(kept).numpy(), v, atol=1e-6)
    assert made.algorithm.personalize(kept, got, task)["fc1"] is kept["fc1"]


@pytest.mark.parametrize("training", [{}, {"momentum": 0.5, "weight_decay": 0.01}])
def test_without_a_pull_it_is_local_beside_fedavg(
    training: dict[str, float],
    setting: Callable[..., Setting],
    data: Callable[..., list[Samples]],
    same: Callable[..., None],
) -> None:
    def play(algorithm: Algorithm[Any]) -> tuple[object, Layers]:
        made, samples = setting(algorithm, **training), data(3)
        server = Server(made.algorithm.init(made.spec.read(made.template), 3, torch.Generator()))
        with SimulatedFleet(made, samples, samples, workers=0) as fleet:
            for ids in ([0, 1], [1, 2]):
                run_round(made.algorithm, server, fleet, Ledger(made.spec.names), ids)
            personalized = fleet.personalize(
                [0, 1, 2], made.algorithm.download(server.state, torch.arange(3)), server.t
            )
            return server.state, personalized

    shared, personal = play(Ditto(lam=0))
    same(shared, play(FedAvg())[0])
    same(personal, play(Local())[1])
    pulled_shared, pulled = play(Ditto(lam=1))
    same(pulled_shared, shared)  # the pull never reaches the shared model
    with pytest.raises(AssertionError):
        same(pulled, personal)


@pytest.mark.parametrize("lam", [-0.1, math.inf, math.nan])
def test_a_pull_must_be_a_number_from_zero(lam: float) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.lam"):
        Ditto(lam)
