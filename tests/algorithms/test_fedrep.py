from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pfedla.algorithms import FedAvg, FedRep
from pfedla.client import Setting
from pfedla.errors import ConfigError
from pfedla.layers import Layers
from pfedla.training import Task
from pfedla.wire import Payload
from tests.world import download, play, same, setting, task_of, theta_of

LR = 0.05


class Perceptron:
    """The tiny perceptron in slow, obvious numpy: full-batch steps on the head (fc2) or on the body (fc1)."""

    def __init__(self, theta: Layers, task: Task, row: int) -> None:
        x, y = task.samples[row].take(slice(None), task.model.weights)
        self.x, self.y = x.flatten(1).double().numpy(), np.eye(3)[y.numpy()]
        fc1, fc2 = theta["fc1"][0].double().numpy(), theta["fc2"][0].double().numpy()
        self.w1, self.b1 = fc1[:360].reshape(5, 72).copy(), fc1[360:].copy()
        self.w2, self.b2 = fc2[:15].reshape(3, 5).copy(), fc2[15:].copy()

    def step(self, layer: str) -> None:
        z = self.x @ self.w1.T + self.b1
        h = np.maximum(z, 0)
        p = np.exp(h @ self.w2.T + self.b2)
        error = (p / p.sum(1, keepdims=True) - self.y) / len(self.y)
        back = (error @ self.w2) * (z > 0)
        if layer == "fc2":
            self.w2 -= LR * error.T @ h
            self.b2 -= LR * error.sum(0)
        else:
            self.w1 -= LR * back.T @ self.x
            self.b1 -= LR * back.sum(0)

    def layers(self) -> dict[str, np.ndarray]:
        return {"fc1": np.append(self.w1, self.b1), "fc2": np.append(self.w2, self.b2)}


def start(made: Setting, ids: list[int]) -> tuple[Layers, Layers, Payload]:
    """Return the common model, heads of the clients' own, and what they receive."""
    theta = theta_of(made)
    return theta, {key: row.repeat(len(ids), 1) for key, row in theta.items()}, download(made, ids)


@pytest.mark.parametrize(
    ("algorithm", "head_steps", "body_steps"),
    [(FedRep(), 4, 1), (FedRep(body_epochs=3), 2, 3), (FedRep(head_epochs=1), 1, 1), (FedRep((), 6, 2), 6, 2)],
)
def test_the_head_is_trained_on_the_received_body_then_the_body_on_that_head(
    algorithm: FedRep, head_steps: int, body_steps: int
) -> None:
    made, ids = setting(algorithm, "mlp", local_epochs=5, batch_size=100, lr=LR), [1, 4]
    task, (theta, own, got) = task_of(made, ids), start(made, ids)
    assert list(got.layers) == ["fc1"]
    own["fc1"] += 1  # the received body counts, not the client's old one
    kept, upload = made.algorithm.train(own, got, task)
    personalized = made.algorithm.personalize(own, got, task)
    for row in range(2):
        slow = Perceptron(theta, task, row)
        for _ in range(head_steps):
            slow.step("fc2")
        for key, expected in slow.layers().items():
            np.testing.assert_allclose(personalized[key][row].numpy(), expected, atol=1e-6)
        for _ in range(body_steps):
            slow.step("fc1")
        for key, expected in slow.layers().items():
            np.testing.assert_allclose(kept[key][row].numpy(), expected, atol=1e-6)
    assert list(upload.layers) == ["fc1"]
    assert torch.equal(upload.layers["fc1"], kept["fc1"] - theta["fc1"])


def test_what_is_frozen_keeps_its_running_statistics() -> None:
    made = setting(FedRep(), local_epochs=4, batch_size=100)
    _, own, got = start(made, [0])
    personalized = made.algorithm.personalize(own, got, task_of(made, [0]))
    assert all(torch.equal(personalized[key], own[key]) == (key != "fc") for key in own)
    kept, upload = made.algorithm.train(own, got, task_of(made, [0]))
    assert kept["bn#counters"].tolist() == [[1]]  # one batch: the epoch of the body, not the three of the head
    assert {"bn", "bn#stats", "conv"} == set(upload.layers)


def test_without_a_head_it_is_fedavg_for_the_bodys_epochs() -> None:
    def theta(algorithm: FedAvg, epochs: int) -> Layers:
        made = setting(algorithm, "mlp", local_epochs=epochs, batch_size=100)
        shared: Layers = play(replace(made, algorithm=algorithm)).state.theta
        return shared

    found = theta(FedRep(body_epochs=2, personal=()), 5)
    same(found, theta(FedAvg(), 2), atol=1e-6)
    with pytest.raises(AssertionError):
        same(found, theta(FedAvg(), 3), atol=1e-6)


def test_local_epochs_are_shared_between_head_and_body_or_refused() -> None:
    short = setting(FedRep(), local_epochs=1)
    _, own, got = start(short, [0])
    with pytest.raises(ConfigError, match=r"training.local_epochs = 1 leaves none for FedRep's head"):
        short.algorithm.check(short.training, 4)
    chosen = setting(FedRep(head_epochs=1), local_epochs=1)
    chosen.algorithm.train(own, got, task_of(chosen, [0]))
