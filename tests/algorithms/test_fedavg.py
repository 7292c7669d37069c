from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, Local
from pfedla.algorithms.fedavg import PersonalLayers, weighted_mean
from pfedla.layers import LayerSpec
from tests.world import download, play, same, server_of, setting, task_of, theta_of


def test_weighted_mean_is_the_sum_of_shares() -> None:
    delta, examples = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 5])
    expected = np.zeros(4)
    for i in range(3):
        expected += int(examples[i]) / 8 * delta[i].numpy()
    np.testing.assert_allclose(weighted_mean(delta, examples)[0].numpy(), expected, rtol=1e-6)


def test_fedavg_becomes_the_weighted_mean_of_the_trained_models() -> None:
    made = setting(FedAvg())
    theta, state, ids = theta_of(made), server_of(made, 3).state, torch.arange(3)
    own = {key: row.repeat(3, 1) for key, row in theta.items()}
    got = made.algorithm.download(state, ids)
    kept, upload = made.algorithm.train(own, got, task_of(made, [0, 1, 2]))
    state = made.algorithm.update(state, ids, got, upload)
    share = upload.examples / upload.examples.sum()
    for key, row in state.theta.items():
        torch.testing.assert_close(row, (share[:, None] * kept[key]).sum(0, keepdim=True), rtol=0, atol=1e-6)
    assert "bn#stats" in state.theta
    assert "bn#counters" not in state.theta


def test_local_sends_nothing() -> None:
    made = setting(Local())
    theta, got = theta_of(made), download(made, [0])
    kept, upload = made.algorithm.train(theta, got, task_of(made, [0]))
    for payload in (got, upload):
        assert not payload.layers
        assert payload.layer_bytes().sum() == 0
    assert (list(got.values), list(upload.values)) == ([], ["examples"])
    assert not torch.equal(kept["fc"], theta["fc"])


@dataclass(frozen=True)
class First(PersonalLayers):
    """Keeps the first `count` layers."""

    count: int = 0

    def stays(self, spec: LayerSpec) -> tuple[str, ...]:
        return spec.names[: self.count]


def test_shared_layers_are_averaged_and_personal_ones_stay() -> None:
    algorithm = First(personal=("body",))
    theta = {"body": torch.tensor([[7.0]]), "body#stats": torch.tensor([[8.0]]), "head": torch.tensor([[1.0, 2.0]])}
    state = algorithm.init(theta, 2, torch.Generator())
    delta = {"body": torch.ones(2, 1), "body#stats": torch.ones(2, 1), "head": torch.tensor([[1.0, 0.0], [4.0, 3.0]])}
    upload = algorithm.send(delta, examples=torch.tensor([1, 2]))
    assert list(upload.layers) == ["head"]
    ids = torch.tensor([0, 1])
    state = algorithm.update(state, ids, algorithm.download(state, ids), upload)
    got = algorithm.download(state, torch.tensor([1]))
    own = {"body": torch.tensor([[5.0]]), "body#stats": torch.tensor([[6.0]]), "head": torch.tensor([[9.0, 9.0]])}
    filled = got.fill(own)  # head: 1 + (1 * 1 + 2 * 4) / 3 and 2 + (1 * 0 + 2 * 3) / 3
    assert {key: rows.tolist() for key, rows in filled.items()} == {
        "body": [[5.0]],
        "body#stats": [[6.0]],
        "head": [[4.0, 4.0]],
    }


@pytest.mark.parametrize(("count", "special"), [(0, FedAvg()), (3, Local())])
def test_with_no_personal_layer_it_is_fedavg_and_with_all_of_them_local(count: int, special: Algorithm[Any]) -> None:
    rounds = [[0, 1], [1, 2], [0, 1, 2]]
    one, other = play(First(count), rounds), play(special, rounds)
    assert len(one.setting.spec.names) == 3
    same((one.state, one.own, one.personalized()), (other.state, other.own, other.personalized()))
