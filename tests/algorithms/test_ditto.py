from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pfedla.algorithms import Ditto, FedAvg, Local
from pfedla.algorithms.ditto import pull
from tests.world import by_hand, download, play, same, setting, task_of, theta_of


def test_the_pull_points_from_the_shared_to_the_personal_model() -> None:
    gradient = torch.tensor([1.0, 1.0])
    pull(torch.tensor([0.0, 3.0]), 0.5)(torch.tensor([2.0, 2.0]), gradient)
    assert gradient.tolist() == [2.0, 0.5]


def test_the_personal_model_is_trained_from_itself_towards_what_was_received() -> None:
    lam, lr = 2.0, 0.1
    made = setting(Ditto(lam), "mlp", lr=lr)
    theta = theta_of(made)
    own = {key: row + 0.1 for key, row in theta.items()}
    got, task = download(made, [1]), task_of(made, [1])
    batches, gradient = by_hand(task, theta)
    w, v = (task.model.vector(layers).numpy() for layers in (theta, own))
    for batch in batches:
        v = v - np.float32(lr) * (gradient(v, batch) + np.float32(lam) * (v - w))
    kept, _ = made.algorithm.train(own, got, task)
    np.testing.assert_allclose(task.model.vector(kept).numpy(), v, atol=1e-6)
    assert made.algorithm.personalize(kept, got, task)["fc1"] is kept["fc1"]


@pytest.mark.parametrize("training", [{}, {"momentum": 0.5, "weight_decay": 0.01}])
def test_without_a_pull_it_is_local_beside_fedavg(training: dict[str, Any]) -> None:
    alone = play(Ditto(lam=0), **training)
    same(alone.state, play(FedAvg(), **training).state)
    same(alone.personalized(), play(Local(), **training).personalized())
    pulled = play(Ditto(lam=1), **training)
    same(pulled.state, alone.state)  # the pull never reaches the shared model
    with pytest.raises(AssertionError):
        same(pulled.personalized(), alone.personalized())
