from __future__ import annotations

import numpy as np
import pytest
import torch

from pfedla.algorithms import FedALA, FedAvg
from pfedla.algorithms.fedala import LEARNED, local_aggregation, weight_step
from pfedla.client import Setting
from pfedla.errors import ConfigError
from pfedla.layers import Layers
from pfedla.wire import Payload
from tests.world import play, same, setting, task_of, theta_of


def test_a_step_on_the_weights_and_the_aggregation() -> None:
    own, theta = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([3.0, 0.0, 1.0, 2.0])
    w, gradient = torch.tensor([0.5, 0.5, 0.5, 0.9]), torch.tensor([0.1, 0.1, 0.1, -1.0])
    expected_w, expected = np.zeros(4), np.zeros(4)
    for k in range(4):
        step = float(w[k]) - 0.5 * float(gradient[k]) * float(theta[k] - own[k])
        expected_w[k] = min(max(step, 0), 1)
        expected[k] = float(own[k]) + float(theta[k] - own[k]) * expected_w[k]
    stepped = weight_step(w, gradient, own, theta, 0.5)
    np.testing.assert_allclose(stepped, expected_w, rtol=1e-6)
    np.testing.assert_allclose(stepped, [0.4, 0.55, 0.5, 1.0], rtol=1e-6)
    np.testing.assert_allclose(local_aggregation(own, theta, stepped), expected, rtol=1e-6)


def met(made: Setting, spread: float = 0.3) -> tuple[Layers, Payload]:
    """Return what a client keeps after it trained once, and another model that it receives."""
    theta = theta_of(made)
    draw = torch.Generator().manual_seed(2)
    shared = {k: r + spread * torch.randn(r.shape, generator=draw) for k, r in theta.items() if r.is_floating_point()}
    shared = {key: rows.abs() if key.endswith("#stats") else rows for key, rows in shared.items()}
    return made.algorithm.enroll(theta), made.algorithm.send(shared)


def test_the_lower_layers_are_the_shared_ones_and_the_last_lies_between() -> None:
    made = setting(FedALA())
    own, got = met(made)
    model, task = made.algorithm.personalize(own, got, task_of(made, [3])), task_of(made, [3])
    for key in ("conv", "bn", "bn#stats"):
        assert torch.equal(model[key], got.layers[key])
    low, high = torch.minimum(own["fc"], got.layers["fc"]), torch.maximum(own["fc"], got.layers["fc"])
    assert ((low <= model["fc"]) & (model["fc"] <= high)).all()
    assert not torch.equal(model["fc"], got.layers["fc"])
    kept, upload = made.algorithm.train(own, got, task)
    w = kept["fc#weights"]
    assert w.shape == own["fc"].shape
    assert 0 <= float(w.min()) < float(w.max()) <= 1
    assert (own[LEARNED].tolist(), kept[LEARNED].tolist()) == ([[False]], [[True]])
    assert torch.equal(model["fc"], local_aggregation(own["fc"], got.layers["fc"], w))
    assert torch.equal(upload.layers["fc"], kept["fc"] - got.layers["fc"])


def test_one_batch_of_weight_learning_is_one_step_along_the_gradient() -> None:
    made = setting(FedALA(p=2, s=1.0, eta=0.3, start_epochs=1), "mlp", batch_size=100)
    own, got = met(made)
    task = task_of(made, [0])
    kept, _ = made.algorithm.train(own, got, task)
    task.model.load(got.layers)
    gradient = task.model.backward(*task.samples[0].take(slice(None), task.model.weights))
    before, theirs = task.model.vector(own), task.model.vector(got.layers)
    expected = np.clip(1 - 0.3 * gradient.numpy() * (theirs - before).numpy(), 0, 1)
    learned = kept["fc1#weights"][0]
    np.testing.assert_allclose(learned, expected, rtol=1e-4, atol=1e-6)
    assert learned.min() < 1


@pytest.mark.parametrize(("started", "threshold", "epochs"), [(False, 1e9, 11), (False, 1e-9, 30), (True, 1e-9, 1)])
def test_the_first_time_the_weights_are_learned_until_they_settle(started: bool, threshold: float, epochs: int) -> None:
    made = setting(FedALA(s=0.5, threshold=threshold, start_epochs=30))
    own, got = met(made)
    task, seen = task_of(made, [3]), list[int]()
    task.model.module.register_forward_hook(lambda _, x, __: seen.append(len(x[0])))
    own[LEARNED][0] = started
    made.algorithm.personalize(own, got, task)
    assert sum(seen) == epochs * 5  # half of the 10 samples an epoch


def test_only_who_took_part_has_learned_its_weights() -> None:
    played = play(FedALA(start_epochs=1), [[0, 1], [1]])
    assert played.own[LEARNED].flatten().tolist() == [False, True, False]  # in the first round, Θ was everybody's own


def test_nothing_is_learned_from_the_clients_own_model() -> None:
    made = setting(FedALA())
    own, got = met(made, spread=0.0)
    kept, _ = made.algorithm.train(own, got, task_of(made, [0]))
    for key in ("fc#weights", LEARNED):
        assert torch.equal(kept[key], own[key])


def test_with_weights_that_stay_1_it_is_fedavg() -> None:
    uploads: list[Payload] = []
    for algorithm in (FedALA(eta=1e-30, start_epochs=2), FedAvg()):
        made = setting(algorithm)
        got = met(setting(FedALA()))[1]
        own = made.algorithm.enroll(theta_of(made))
        uploads.append(made.algorithm.train(own, got, task_of(made, [2]))[1])
    same(uploads[0], uploads[1])


def test_a_model_of_fewer_than_p_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.p = 4: this model has 3 layers"):
        setting(FedALA(p=4))
    assert FedALA(p=3).enroll(theta_of(setting(FedALA())))["conv#weights"].shape[1] == setting(FedALA()).spec.parameters
