from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, FedAvgFT
from pfedla.client import Setting
from pfedla.layers import LayerSpec
from pfedla.rounds import evaluate, run_round
from pfedla.training import Task, Training
from tests.world import data, download, fleet_of, same, server_of, setting, task_of, theta_of


@pytest.mark.parametrize(("finetune_epochs", "steps"), [(None, 2), (3, 3)])
def test_the_received_model_is_tuned_on_training_data(finetune_epochs: int | None, steps: int) -> None:
    """With one batch an epoch, an epoch is one step of softmax regression."""
    lr, template = 0.1, nn.Sequential(nn.Flatten(), nn.Linear(72, 3, bias=False))
    algorithm, training = FedAvgFT(finetune_epochs), Training(local_epochs=2, batch_size=100, lr=lr)
    made = Setting(template, LayerSpec.of(template), algorithm, training, seed=0)
    theta, got, task = theta_of(made), download(made, [1, 2]), task_of(made, [1, 2])
    found = algorithm.personalize({"1": torch.full((2, 216), 9.0)}, got, task)
    for row in range(2):
        x, y = (part.flatten(1).numpy() if part.dim() > 1 else part.numpy() for part in batch_of(task, row))
        w = theta["1"].reshape(3, 72).double().numpy()
        for _ in range(steps):
            p = np.exp(x @ w.T)
            p /= p.sum(1, keepdims=True)
            w = w - lr * (p - np.eye(3)[y]).T @ x / len(y)
        np.testing.assert_allclose(found["1"][row].numpy(), w.ravel(), atol=1e-5)


def batch_of(task: Task, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    return task.samples[row].take(slice(None), task.model.weights)


def test_its_rounds_are_those_of_fedavg() -> None:
    def rounds(algorithm: Algorithm[Any]) -> tuple[object, object]:
        made = setting(algorithm)
        server, fleet = server_of(made, 3), fleet_of(made, data(3))
        for ids in ([0, 1], [1, 2]):
            run_round(made.algorithm, server, fleet, ids)
            evaluate(made.algorithm, server.state, fleet, 3, server.t)
        return server.state, fleet.kept

    same(rounds(FedAvgFT(1)), rounds(FedAvg()))
