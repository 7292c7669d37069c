from __future__ import annotations

import numpy as np
import pytest
import torch

from pfedla.algorithms import FedAvg, PFedMe
from pfedla.algorithms.fedavg import SharedModel
from pfedla.algorithms.pfedme import envelope_step, proximal_step
from pfedla.wire import Payload
from tests.world import by_hand, download, same, setting, task_of, theta_of


def test_steps_by_hand() -> None:
    theta, w, gradient = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 3.0]), torch.tensor([4.0, -2.0])
    proximal_step(theta, w, gradient, lr=0.1, lam=10, mu=0.5)  # [1 - 0.1 (4 + 10 + 0.5), 2 - 0.1 (-2 - 10 + 1)]
    np.testing.assert_allclose(theta, [-0.45, 3.1], rtol=1e-6)
    np.testing.assert_allclose(envelope_step(w, theta, eta=0.05, lam=10), [-0.225, 3.05], rtol=1e-6)


def test_many_steps_end_at_the_proximal_point() -> None:
    """For f(theta) = (theta - 3)²/2 and w = 1, theta(w) = (3 + λ w)/(1 + λ)."""
    theta, w, lam = torch.tensor([8.0]), torch.tensor([1.0]), 4.0
    for _ in range(200):
        proximal_step(theta, w, theta - 3, lr=0.1, lam=lam, mu=0)
    assert float(theta) == pytest.approx((3 + lam) / (1 + lam))


def test_a_round_is_the_algorithm_of_the_paper() -> None:
    lam, k, personal_lr, lr, decay, mu = 3.0, 2, 0.1, 0.2, 0.01, 0.05
    made = setting(PFedMe(lam, k, personal_lr=personal_lr, mu=mu), "mlp", lr=lr, weight_decay=decay)
    start, got, task = theta_of(made), download(made, [1]), task_of(made, [1])
    batches, gradient = by_hand(task, start)
    w = theta = task.model.vector(start).numpy().astype(np.float64)
    for batch in batches:
        for _ in range(k):
            slope = gradient(theta.astype(np.float32), batch) + decay * theta
            theta = theta - personal_lr * (slope + lam * (theta - w) + mu * theta)
        w = w - lr * lam * (w - theta)
    own = {key: torch.zeros_like(row) for key, row in start.items()}  # a round starts from what was received
    kept, upload = made.algorithm.train(own, got, task)
    np.testing.assert_allclose(task.model.vector(kept).numpy(), theta, atol=1e-5)
    change = w - task.model.vector(start).numpy()
    np.testing.assert_allclose(task.model.vector(upload.layers).numpy(), change, atol=1e-5)
    assert min(np.abs(change).max(), np.abs(w - theta).max()) > 1e-3
    assert made.algorithm.personalize(kept, got, task)["fc1"] is kept["fc1"]


def test_the_server_mixes_with_beta() -> None:
    """From w = 1, with the clients' w_i = 2 and 5 with 1 and 2 examples: mean 4, so (1 - 0.5) 1 + 0.5 4 = 2.5."""
    state = SharedModel({"fc": torch.tensor([[1.0]]), "fc#stats": torch.tensor([[1.0]])})
    delta = {"fc": torch.tensor([[1.0], [4.0]]), "fc#stats": torch.tensor([[1.0], [4.0]])}
    upload = Payload.of(delta, torch.ones(2, 1, dtype=torch.bool), ["fc"], examples=torch.tensor([1, 2]))
    algorithm, ids = PFedMe(beta=0.5), torch.tensor([0, 1])
    theta = algorithm.update(state, ids, algorithm.download(state, ids), upload).theta
    assert float(theta["fc"]) == pytest.approx(2.5)
    assert float(theta["fc#stats"]) == pytest.approx(4)  # statistics are averaged, whatever beta


def test_without_a_pull_the_shared_model_rests_and_the_personal_one_is_plain_sgd() -> None:
    made, plain = setting(PFedMe(lam=0, k=1, personal_lr=0.05, mu=0)), setting(FedAvg(), lr=0.05)
    ids, got = [1, 2], download(made, [1, 2])
    own = {key: row.repeat(2, 1) for key, row in theta_of(made).items()}
    kept, upload = made.algorithm.train(own, got, task_of(made, ids))
    same(kept, plain.algorithm.train(own, got, task_of(plain, ids))[0])
    assert not any(upload.layers[name].any() for name in upload.names)
