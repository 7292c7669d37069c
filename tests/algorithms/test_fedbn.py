from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from pfedla.algorithms import FedBN
from pfedla.errors import ModelError
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.layers import LayerSpec
from pfedla.ledger import Ledger
from pfedla.rounds import Server, run_round
from pfedla.training import Samples


def test_norms_stay_with_their_statistics_and_the_rest_is_averaged(
    setting: Callable[..., Setting], data: Callable[..., list[Samples]]
) -> None:
    made, samples = setting(FedBN()), data(3)
    theta = made.spec.read(made.template)
    server = Server(made.algorithm.init(theta, 3, torch.Generator()))
    with SimulatedFleet(made, samples, samples, workers=0) as fleet:
        run_round(made.algorithm, server, fleet, Ledger(made.spec.names), [0, 1, 2])
        got = made.algorithm.download(server.state, torch.arange(3))
        personalized = fleet.personalize([0, 1, 2], got, 1)
    assert set(got.layers) == {"conv", "fc"}
    for key in ("conv", "fc"):
        expected = np.zeros(theta[key].shape[1])
        for client in range(3):
            expected += len(samples[client]) / sum(map(len, samples)) * fleet.own[key][client].numpy()
        for client in range(3):
            np.testing.assert_allclose(personalized[key][client].numpy(), expected, atol=1e-6)
    for key in ("bn", "bn#stats"):
        assert torch.equal(personalized[key], fleet.own[key])
        assert len(fleet.own[key].unique(dim=0)) == 3


def test_the_norms_are_found_whatever_their_names() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Conv1d(3, 3, 1), nn.InstanceNorm1d(3, affine=True))
    assert FedBN().for_model(LayerSpec.of(model)).personal == ("1", "3")


def test_a_model_without_norms_is_refused(setting: Callable[..., Setting], net: Callable[[str], nn.Module]) -> None:
    with pytest.raises(ModelError, match=r"no batch or instance norm .* \(its layers: fc1, fc2\)"):
        setting(FedBN(), "mlp")
    with pytest.raises(ModelError, match="take it out of its group"):
        FedBN().for_model(LayerSpec.of(net("conv"), {"block": ["conv", "bn"]}))
