from __future__ import annotations

import pytest
import torch
from torch import nn

from pfedla.algorithms import FedBN
from pfedla.errors import ModelError
from pfedla.layers import LayerSpec
from tests.world import net, setting, shared_and_own


def test_norms_stay_with_their_statistics_and_the_rest_is_averaged() -> None:
    shared, personalized, own = shared_and_own(FedBN())
    assert shared == {"conv", "fc"}
    for key in ("bn", "bn#stats"):
        assert torch.equal(personalized[key], own[key])
        assert len(own[key].unique(dim=0)) == 3


def test_the_norms_are_found_whatever_their_names() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Conv1d(3, 3, 1), nn.InstanceNorm1d(3, affine=True))
    assert FedBN().for_model(LayerSpec.of(model)).personal == ("1", "3")


def test_a_model_without_norms_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no batch or instance norm .* \(its layers: fc1, fc2\)"):
        setting(FedBN(), "mlp")
    with pytest.raises(ModelError, match="take it out of its group"):
        FedBN().for_model(LayerSpec.of(net("conv"), {"block": ["conv", "bn"]}))
