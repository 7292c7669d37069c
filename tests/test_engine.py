from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pfedla.engine import FlatModel
from pfedla.layers import Layers, LayerSpec
from pfedla.objective import Regression
from tests.world import net


def flat_of(module: nn.Module, **keywords: object) -> FlatModel:
    """Return a model on a copy of the module."""
    return FlatModel(copy.deepcopy(module), LayerSpec.of(module), **keywords)  # type: ignore[arg-type]


def varied(spec: LayerSpec, module: nn.Module) -> Layers:
    """Return layers in which every entry has values of its own."""
    return {key: rows + place + 1 for place, (key, rows) in enumerate(spec.read(module).items())}


@pytest.mark.parametrize(
    "make",
    [
        net,
        lambda: net().double(),
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3, affine=False), nn.Flatten(), nn.Linear(3 * 35, 3)),
    ],
)
def test_loading_and_reading_give_the_same_module(make: Callable[[], nn.Module]) -> None:
    module = make().eval()
    spec = LayerSpec.of(module)
    layers = varied(spec, module)
    spec.write(module, layers)
    flat = FlatModel(make(), spec)
    flat.load({key: torch.cat([torch.zeros_like(rows), rows]) for key, rows in layers.items()}, row=1)
    x = torch.rand(2, 2, 6, 6, dtype=spec.dtype)
    x = x.flatten(2) if isinstance(module, nn.Sequential) else x
    torch.testing.assert_close(flat.module.eval()(x), module(x))  # channels-last: another order of sums
    for key, tensor in module.state_dict().items():
        assert torch.equal(flat.module.state_dict()[key], tensor), key
    found = flat.read()
    assert list(found) == list(layers)
    for key, rows in found.items():
        assert rows.dtype == layers[key].dtype
        assert torch.equal(rows, layers[key])


def test_what_is_read_is_a_copy() -> None:
    flat = flat_of(net())
    before = flat.read()
    kept = copy.deepcopy(before)
    flat.weights.add_(1)
    flat.module.get_buffer("bn.running_mean").add_(1)
    for key, rows in before.items():
        assert torch.equal(rows, kept[key])
        assert torch.equal(flat.read()[key], rows) == (key == "bn#counters")


def test_a_model_starts_with_the_modules_own_values() -> None:
    module = net()
    for key, rows in LayerSpec.of(module).read(module).items():
        assert torch.equal(flat_of(module).read()[key], rows)


def test_the_gradient_of_a_tied_parameter_is_that_of_both_its_uses() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module.get_parameter("0.weight")
    flat = flat_of(module)
    flat.module(torch.ones(2, 3)).sum().backward()
    expected = copy.deepcopy(module)
    expected(torch.ones(2, 3)).sum().backward()
    torch.testing.assert_close(flat.gradient[:9].view(3, 3), expected.get_parameter("0.weight").grad)
    assert len(flat.weights) == 15


def test_frozen_parameters_take_no_step() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    spec, flat = LayerSpec.of(module), flat_of(module)
    flat.module(torch.ones(2, 3)).sum().backward()
    flat.weights.add_(flat.gradient, alpha=-1)
    assert list(flat.read()) == ["1"]
    built = spec.build(module, flat.read())
    assert torch.equal(built.get_parameter("0.weight"), module.get_parameter("0.weight"))
    assert not torch.equal(built.get_parameter("1.weight"), module.get_parameter("1.weight"))


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_steps_on_the_vector_are_steps_on_the_module(momentum: float, weight_decay: float) -> None:
    module = net()
    module.get_submodule("drop").eval()
    spec, flat = LayerSpec.of(module), flat_of(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay)
    velocity, x = torch.zeros_like(flat.weights), torch.rand(4, 2, 6, 6)
    for _ in range(3):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
        flat.gradient.zero_()
        flat.module(x).square().mean().backward()
        velocity = momentum * velocity + flat.gradient + weight_decay * flat.weights
        flat.weights.add_(velocity, alpha=-0.1)
    expected = spec.read(module)
    torch.testing.assert_close(flat.vector(expected), flat.weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flat.read()["bn#stats"], expected["bn#stats"], rtol=1e-4, atol=1e-5)
    back = flat.layers(flat.weights, "control")
    assert torch.equal(flat.vector(back, kind="control"), flat.weights)
    assert all(torch.equal(back[f"{name}#control"], flat.read()[name]) for name in spec.names)
    flat.weights.zero_()
    assert flat.vector(back, kind="control").any()
    memory = flat.weights.untyped_storage().data_ptr(), flat.gradient.untyped_storage().data_ptr()
    assert flat.module.get_parameter("conv.weight").is_contiguous(memory_format=torch.channels_last)
    for parameter in flat.module.parameters():
        assert parameter.grad is not None
        assert (parameter.untyped_storage().data_ptr(), parameter.grad.untyped_storage().data_ptr()) == memory


def test_a_mask_marks_the_values_of_its_layers() -> None:
    flat = flat_of(net())
    ones = {name: torch.full((1, flat.spec.size(name)), float(name in ("conv", "fc"))) for name in flat.spec.names}
    assert torch.equal(flat.mask(["fc", "conv"]), flat.vector(ones).bool())
    assert not flat.mask([]).any()


def expected_gradient(module: nn.Module, loss: Tensor) -> Tensor:
    flat = flat_of(module)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    for parameter, gradient in zip(flat.module.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(gradient)
    return flat.gradient


def test_backward_is_the_gradient_of_cross_entropy_by_default_and_tells_its_loss() -> None:
    module = net("mlp")
    flat, x, y = flat_of(module), torch.rand(5, 2, 6, 6), torch.tensor([0, 1, 2, 1, 0])
    assert math.isnan(flat.loss)
    for _ in range(2):  # the second time over the first one's gradient
        found = flat.backward(x, y)
    loss = functional.cross_entropy(module(x), y)
    assert found is flat.gradient
    torch.testing.assert_close(found, expected_gradient(module, loss))
    assert not flat.loss.requires_grad
    torch.testing.assert_close(flat.loss, loss.detach())
    flat.backward(x + 1, y)
    assert not torch.isclose(flat.loss, loss)


def test_backward_is_of_the_objective() -> None:
    module = net("mlp")
    flat, x, y = flat_of(module, objective=Regression()), torch.rand(5, 2, 6, 6), torch.rand(5, 3)
    loss = functional.mse_loss(module(x), y)
    torch.testing.assert_close(flat.backward(x, y), expected_gradient(module, loss))
    torch.testing.assert_close(flat.loss, loss.detach())
