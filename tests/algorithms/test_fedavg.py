from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pfedla.algorithms import FedAvg, Local
from pfedla.algorithms.fedavg import weighted_mean
from pfedla.fleet import Setting
from pfedla.training import Task


def test_weighted_mean_is_the_sum_of_shares() -> None:
    delta, examples = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 5])
    expected = np.zeros(4)
    for i in range(3):
        expected += int(examples[i]) / 8 * delta[i].numpy()
    np.testing.assert_allclose(weighted_mean(delta, examples)[0].numpy(), expected, rtol=1e-6)


def test_fedavg_becomes_the_weighted_mean_of_the_trained_models(
    setting: Callable[..., Setting], task_of: Callable[..., Task]
) -> None:
    made = setting(FedAvg())
    theta = made.spec.read(made.template)
    state = made.algorithm.init(theta, 3, torch.Generator())
    ids = torch.arange(3)
    own = {key: row.repeat(3, 1) for key, row in theta.items()}
    kept, upload = made.algorithm.train(own, made.algorithm.download(state, ids), task_of(made, [0, 1, 2]))
    state = made.algorithm.update(state, ids, upload)
    share = upload.examples / upload.examples.sum()
    for key, row in state.theta.items():
        torch.testing.assert_close(row, (share[:, None] * kept[key]).sum(0, keepdim=True), rtol=0, atol=1e-6)
    assert "bn#stats" in state.theta
    assert "bn#counters" not in state.theta


def test_local_sends_nothing(setting: Callable[..., Setting], task_of: Callable[..., Task]) -> None:
    made = setting(Local())
    theta = made.spec.read(made.template)
    got = made.algorithm.download(made.algorithm.init(theta, 3, torch.Generator()), torch.tensor([0]))
    kept, upload = made.algorithm.train(theta, got, task_of(made, [0]))
    for payload in (got, upload):
        assert not payload.layers
        assert payload.size().sum() == 0
    assert not torch.equal(kept["fc"], theta["fc"])
