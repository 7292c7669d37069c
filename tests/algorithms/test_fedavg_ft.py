from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, FedAvgFT
from pfedla.errors import ConfigError
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.layers import LayerSpec
from pfedla.ledger import Ledger
from pfedla.rounds import Server, run_round
from pfedla.training import Samples, Task, Training


@pytest.mark.parametrize(("finetune_epochs", "steps"), [(None, 2), (3, 3)])
def test_the_received_model_is_tuned_on_training_data(
    finetune_epochs: int | None, steps: int, task_of: Callable[..., Task]
) -> None:
    """With one batch an epoch, an epoch is one step of softmax regression."""
    lr, template = 0.1, nn.Sequential(nn.Flatten(), nn.Linear(72, 3, bias=False))
    algorithm, training = FedAvgFT(finetune_epochs), Training(local_epochs=2, batch_size=100, lr=lr)
    made = Setting(template, LayerSpec.of(template), algorithm, training, seed=0)
    theta, task = made.spec.read(template), task_of(made, [1, 2])
    got = algorithm.download(algorithm.init(theta, 3, torch.Generator()), torch.tensor([1, 2]))
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


def test_its_rounds_are_those_of_fedavg(
    setting: Callable[..., Setting], data: Callable[..., list[Samples]], same: Callable[..., None]
) -> None:
    def play(algorithm: Algorithm[Any]) -> tuple[object, object]:
        made, samples = setting(algorithm), data(3)
        server = Server(made.algorithm.init(made.spec.read(made.template), 3, torch.Generator()))
        with SimulatedFleet(made, samples, samples, workers=0) as fleet:
            for ids in ([0, 1], [1, 2]):
                run_round(made.algorithm, server, fleet, Ledger(made.spec.names), ids)
                got = made.algorithm.download(server.state, torch.arange(3))
                fleet.evaluate([0, 1, 2], got, server.t)
            return server.state, fleet.own

    same(play(FedAvgFT(1)), play(FedAvg()))


def test_tuning_takes_an_epoch_at_least() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.finetune_epochs = 0 must be at least 1"):
        FedAvgFT(0)
