from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pfedla.errors import ConfigError, ModelError
from pfedla.layers import LayerSpec
from pfedla.models import MLP, MODELS, LeNet, check_model, make_model, seeded
from pfedla.objective import Classification, Objective, Regression
from pfedla.training import ClientData, Samples


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

    def block(x: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
        plain = nn.BatchNorm2d(norm.num_features).eval()
        plain.load_state_dict(norm.state_dict())
        return nn.functional.max_pool2d(plain(conv(x)).relu(), 2)

    assert isinstance(model.bn1, nn.BatchNorm2d)
    assert isinstance(model.bn2, nn.BatchNorm2d)
    h = block(block(x, model.conv1, model.bn1), model.conv2, model.bn2)
    h = model.fc3(model.fc2(model.fc1(h.flatten(1)).relu()).relu())
    torch.testing.assert_close(model(x), h)
    without = LeNet((3, 16, 16), 4, batch_norm=False).eval()
    h = x
    for conv in (without.conv1, without.conv2):
        h = nn.functional.max_pool2d(nn.functional.conv2d(h, conv.weight, conv.bias).relu(), 2)
    h = without.fc3(without.fc2(without.fc1(h.flatten(1)).relu()).relu())
    torch.testing.assert_close(without(x), h)


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


# ---- the first model


def test_the_seed_decides_the_first_model_and_nothing_else_is_touched() -> None:
    before = torch.random.get_rng_state()
    one, again, other = (seeded(lambda: nn.Linear(4, 3), seed) for seed in (1, 1, 2))
    assert isinstance(one, nn.Linear)
    assert isinstance(again, nn.Linear)
    assert isinstance(other, nn.Linear)
    assert torch.equal(one.weight, again.weight)
    assert not torch.equal(one.weight, other.weight)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_factory_must_return_a_module() -> None:
    with pytest.raises(ModelError, match=r"the model factory returned str, not a torch\.nn\.Module"):
        seeded(lambda: "model", 0)  # type: ignore[arg-type, return-value]


# ---- whether it fits


def federation(*targets: Tensor) -> dict[int, ClientData]:
    """Make clients with the same inputs and these targets, of whom the last sample is for the test."""

    def both(x: Tensor, y: Tensor) -> ClientData:
        return ClientData(Samples(x[:-1], y[:-1]), Samples(x[-1:], y[-1:]))

    return {client: both(torch.rand(len(y), 4), y) for client, y in enumerate(targets)}


LABELS = torch.tensor([0, 1, 2, 0])


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x), x)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("model", "objective", "targets", "message"),
    [
        (nn.Linear(4, 3), Classification(), [LABELS, LABELS + 1], "client 1: labels go from 1 to 3, but .* 3 outputs"),
        (nn.Linear(4, 3), Classification(), [torch.tensor([0, 1, 2, 3])], "client 0: labels go from 3 to 3"),
        (nn.Linear(5, 3), Classification(), [LABELS], r"does not take the data: a batch of shape \(2, 4\) \(torch.fl"),
        (Pair(4, 3), Classification(), [LABELS], "the model must return a tensor, not tuple"),
        (
            nn.Linear(4, 2),
            Regression(),
            [torch.rand(4)],
            r"client 0: regression cannot compare outputs",
        ),
    ],
)
def test_what_does_not_fit_the_data_is_refused_with_the_client(
    model: nn.Module, objective: Objective, targets: list[Tensor], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        check_model(model, objective, federation(*targets))


def test_what_fits_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    check_model(model, Classification(), federation(LABELS, LABELS[:2]))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    check_model(nn.Linear(4, 1).double(), Regression(), federation(torch.rand(4)))
