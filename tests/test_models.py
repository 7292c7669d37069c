from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pfedla.errors import ConfigError, ModelError
from pfedla.layers import LayerSpec
from pfedla.models import MLP, MODELS, LeNet, make_model


@pytest.mark.parametrize(
    ("shape", "parameters", "sizes"),
    [
        ((1, 28, 28), 85_822, {"conv1": 416, "conv2": 12_832, "fc1": 61_560, "fc2": 10_164, "fc3": 850}),
        ((3, 32, 32), 121_278, {"bn1": 32, "conv2": 12_832, "bn2": 64, "fc1": 96_120, "fc3": 850}),
    ],
)
def test_the_papers_networks_have_the_papers_sizes(
    shape: tuple[int, ...], parameters: int, sizes: dict[str, int]
) -> None:
    spec = LayerSpec.of(make_model("auto", shape, 10))
    assert spec.parameters == parameters
    assert {name: spec.size(name) for name in sizes} == sizes


def test_table_3s_megabytes_come_out() -> None:
    def mebibytes(transfers: list[int]) -> float:
        return round(sum(transfers) * 4 / 2**20, 2)

    spec = LayerSpec.of(make_model("lenet", (1, 28, 28), 10))
    full = [spec.parameters * 1500]
    assert mebibytes(full) == 491.08
    assert mebibytes([*full, -spec.size("fc3") * 750]) == 488.65
    assert mebibytes([*full, -spec.size("fc3") * 750, -spec.size("fc1") * 750]) == 312.52


def test_relu_after_pooling_is_the_same_function() -> None:
    model = LeNet((3, 16, 16), 4, batch_norm=True).eval()
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    h: Tensor = nn.functional.max_pool2d(model.bn1(model.conv1(x)).relu(), 2)
    h = nn.functional.max_pool2d(model.bn2(model.conv2(h)).relu(), 2)
    h = model.fc3(model.fc2(model.fc1(h.flatten(1)).relu()).relu())
    torch.testing.assert_close(model(x), h)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_logits(name: str) -> None:
    model = make_model(name, (1, 20, 17), 6)
    assert model(torch.zeros(2, 1, 20, 17)).shape == (2, 6)


def test_auto_takes_a_perceptron_for_what_is_no_image() -> None:
    assert isinstance(make_model("auto", (5,), 2), MLP)


def test_a_factory_can_be_named() -> None:
    assert isinstance(make_model("pfedla.models:MLP", (5,), 2), MLP)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lenett", "unknown model 'lenett': did you mean 'lenet'"),
        ("pfedla.nothing:f", "cannot import 'pfedla.nothing'"),
        ("pfedla.models:nothing", "module 'pfedla.models' has no 'nothing'"),
        ("pfedla.models:MODELS", "cannot be called"),
        ("operator:is_", "returned bool, not a torch.nn.Module"),
    ],
)
def test_models_that_do_not_exist_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_model(name, (5,), 2)


def test_images_too_small_for_lenet_are_refused() -> None:
    with pytest.raises(ModelError, match="at least 16x16"):
        make_model("lenet", (1, 8, 8), 2)
