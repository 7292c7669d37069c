from __future__ import annotations

import numpy as np
import pytest
import torch

from pfedla.algorithms import FedAvg, FedProx
from pfedla.algorithms.fedprox import proximal_gradient
from tests.world import play, same, setting, task_of, theta_of


def test_the_proximal_gradient_is_the_slope_of_the_proximal_term() -> None:
    w, w_t, mu, h = np.array([1.0, -2.0]), np.array([0.5, 1.0]), 0.3, 1e-6
    expected = np.zeros(2)
    for i in range(2):
        up, down = w + h * np.eye(2)[i], w - h * np.eye(2)[i]
        expected[i] = (mu / 2 * ((up - w_t) ** 2).sum() - mu / 2 * ((down - w_t) ** 2).sum()) / (2 * h)
    found = proximal_gradient(torch.from_numpy(w), torch.from_numpy(w_t), mu).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(found, [0.15, -0.9])


def test_the_second_step_is_pulled_back_to_the_received_model() -> None:
    """With one batch an epoch: w_1 = w_0 - lr g(w_0) and w_2 = w_1 - lr (g(w_1) + mu (w_1 - w_0))."""
    lr, mu, ids = 0.05, 0.7, [0, 2]
    trained = {}
    for algorithm, epochs in ((FedAvg(), 1), (FedAvg(), 2), (FedProx(mu), 2)):
        made = setting(algorithm, "mlp", lr=lr, local_epochs=epochs, batch_size=100)
        received = {key: torch.cat([row, 1.5 * row]) for key, row in theta_of(made).items()}
        own = {key: torch.zeros_like(rows) for key, rows in received.items()}  # not what is pulled to
        kept, upload = made.algorithm.train(own, made.algorithm.send(received), task_of(made, ids))
        assert torch.equal(upload.layers["fc1"], kept["fc1"] - received["fc1"])
        trained[type(algorithm), epochs] = kept
    for key, w_0 in received.items():
        w_1, plain, found = (trained[k][key].numpy() for k in ((FedAvg, 1), (FedAvg, 2), (FedProx, 2)))
        expected = plain - lr * mu * (w_1 - w_0.numpy())
        np.testing.assert_allclose(found, expected, atol=1e-7)
        assert np.abs(found - plain).max() > 1e-4


def test_without_a_pull_it_is_fedavg() -> None:
    free, pulled, averaged = (play(method, momentum=0.5) for method in (FedProx(mu=0), FedProx(), FedAvg()))
    same((free.state, free.own), (averaged.state, averaged.own))
    with pytest.raises(AssertionError):
        same(pulled.state, averaged.state)
