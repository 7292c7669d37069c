from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pfedla.algorithms import FedAvg, PerFedAvg
from pfedla.algorithms.perfedavg import grouped, meta_gradient
from tests.world import by_hand, download, same, setting, task_of, theta_of


@pytest.mark.parametrize("batches", [2, 3])
def test_meta_gradient_of_quadratics(batches: int) -> None:
    """f(w; D) = w'Aw/2 - b'w has the gradient Aw - b and the Hessian A: everything is known by hand."""
    rng, alpha = np.random.default_rng(0), 0.1
    a, b, w = rng.normal(size=(3, 4, 4)), rng.normal(size=(3, 4)), rng.normal(size=4)
    a = a + a.transpose(0, 2, 1)
    adapted = w - alpha * (a[0] @ w - b[0])
    expected = a[1] @ adapted - b[1]
    if batches == 3:
        expected = (np.eye(4) - alpha * a[2]) @ expected
    group = [(torch.from_numpy(a[i]), torch.from_numpy(b[i])) for i in range(batches)]
    found = meta_gradient(lambda w, d: d[0] @ w - d[1], torch.from_numpy(w), group, alpha, 1e-3)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


def test_an_incomplete_group_repeats_its_own() -> None:
    batches = [(torch.tensor(i), torch.tensor(i)) for i in range(5)]

    def numbers(size: int, of: list[tuple[Tensor, Tensor]]) -> list[list[int]]:
        return [[int(x) for x, _ in group] for group in grouped(iter(of), size)]

    assert numbers(2, batches) == [[0, 1], [2, 3], [4, 4]]
    assert numbers(3, batches) == [[0, 1, 2], [3, 4, 3]]
    assert numbers(3, batches[:1]) == [[0, 0, 0]]


@pytest.mark.parametrize(("variant", "size", "beta"), [("fo", 2, None), ("fo", 2, 0.3), ("hf", 3, None)])
def test_a_round_takes_the_outer_steps_of_the_paper(variant: Any, size: int, beta: float | None) -> None:
    alpha, lr, delta, decay = 0.2, 0.1, 1e-2, 0.01
    made = setting(PerFedAvg(variant, alpha, beta, delta), "mlp", lr=lr, weight_decay=decay, local_epochs=3)
    theta, got, task = theta_of(made), download(made, [1]), task_of(made, [1])
    batches, gradient = by_hand(task, theta)
    assert len(batches) == 6  # three pairs, two triples

    def slope(w: np.ndarray, batch: object) -> np.ndarray:
        return np.asarray(gradient(w, batch) + decay * w)

    w = task.model.vector(theta).numpy()
    for start in range(0, len(batches), size):
        group = batches[start : start + size]
        u = slope(w - np.float32(alpha) * slope(w, group[0]), group[1])
        step = u
        if variant == "hf":
            d = np.float32(delta)
            step = u - alpha * (slope(w + d * u, group[2]) - slope(w - d * u, group[2])) / (2 * d)
        w = (w - (beta or lr) * step).astype(np.float32)
    kept, upload = made.algorithm.train(theta, got, task)
    np.testing.assert_allclose(task.model.vector(kept).numpy(), w, atol=1e-5)
    assert torch.equal(upload.layers["fc1"], kept["fc1"] - theta["fc1"])
    assert np.abs(w - task.model.vector(theta).numpy()).max() > 1e-2


def test_the_personalized_model_is_one_step_away() -> None:
    made = setting(PerFedAvg(alpha=0.2), "mlp", batch_size=100, weight_decay=0.1)
    theta, got, task = theta_of(made), download(made, [1]), task_of(made, [1])
    found = made.algorithm.personalize({key: torch.zeros_like(row) for key, row in theta.items()}, got, task)
    task.model.load(theta)
    x, y = task.samples[0].take(slice(None), task.model.weights)
    w = task.model.vector(theta).numpy()
    expected = w - 0.2 * (task.model.backward(x, y).numpy() + 0.1 * w)
    np.testing.assert_allclose(task.model.vector(found).numpy(), expected, atol=1e-6)
    plain = setting(PerFedAvg(alpha=0), "mlp")
    same(plain.algorithm.personalize(theta, got, task_of(plain, [1])), theta)


def test_without_adaptation_it_is_fedavg_on_every_second_batch() -> None:
    made, plain = setting(PerFedAvg(alpha=0), "mlp"), setting(FedAvg(), "mlp")
    theta, got = theta_of(made), download(made, [1])
    batches, gradient = by_hand(task_of(plain, [1]), theta)
    assert len(batches) == 4
    w = task_of(made, [1]).model.vector(theta).numpy()
    for batch in batches[1::2]:
        w = w - np.float32(made.training.lr) * gradient(w, batch)
    task = task_of(made, [1])
    np.testing.assert_allclose(task.model.vector(made.algorithm.train(theta, got, task)[0]).numpy(), w, atol=1e-6)
