"""Batch norm, pooling and ReLU in one: the same as torch's operations, with the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pfedla import kernels
from pfedla.blocks import norm_pool_relu

LEVELS = kernels.available()
SHAPES = [(5, 16, 8, 8), (2, 32, 9, 7), (1, 48, 2, 3), (32, 16, 28, 28)]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    with kernels.switch(request.param):
        yield


def images(*shape: int) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 3 + 5
    return x.to(memory_format=torch.channels_last)


def norm(channels: int) -> nn.BatchNorm2d:
    """Return a batch norm with scales of both signs, and a channel that it makes constant."""
    found = nn.BatchNorm2d(channels)
    with torch.no_grad():
        found.weight.copy_(torch.linspace(-1, 2, channels) + 0.013)
        found.weight[1] = 0
        found.bias.copy_(torch.linspace(1, -1, channels))
    return found


def by_torch(x: Tensor, norm: nn.Module | None) -> Tensor:
    return functional.max_pool2d(norm(x) if norm else x, 2).relu()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("shape", SHAPES)
def test_in_training_output_gradients_and_statistics_are_those_of_torch_in_double_precision(
    shape: tuple[int, int, int, int],
) -> None:
    ours, exact = norm(shape[1]), norm(shape[1]).double()
    x = images(*shape).requires_grad_()
    y = x.detach().double().requires_grad_()
    for _ in range(2):  # running statistics move twice
        found, wanted = norm_pool_relu(x, ours), by_torch(y, exact)
    assert type(found.grad_fn).__name__ == "_NormPoolReLUBackward"
    out = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    found.backward(out)
    wanted.backward(out.double())
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-5)
    for name in ("weight", "bias"):
        mine, theirs = getattr(ours, name).grad, getattr(exact, name).grad
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)
    for name, value in exact.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name).double(), value.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_norm_it_is_torchs_to_the_bit(shape: tuple[int, int, int, int]) -> None:
    x = (images(*shape) - 5).round().requires_grad_()  # many are equal: the first of a window counts
    y = x.detach().clone().requires_grad_()
    found, wanted = norm_pool_relu(x), by_torch(y, None)
    out = torch.randn_like(wanted)
    found.backward(out)
    wanted.backward(out)
    assert torch.equal(found, wanted)
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)


@pytest.mark.usefixtures("level")
def test_equal_numbers_in_a_window_get_the_gradient_once() -> None:
    x, y = (torch.ones(4, 16, 4, 4).to(memory_format=torch.channels_last).requires_grad_() for _ in range(2))
    ours, theirs = norm(16), norm(16)
    norm_pool_relu(x, ours).sum().backward()
    by_torch(y, theirs).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-2)  # the scale is 1 / sqrt(epsilon)


@pytest.mark.usefixtures("level")
def test_evaluation_goes_by_the_running_statistics_and_leaves_them_alone() -> None:
    ours = norm(32)
    norm_pool_relu(images(8, 32, 6, 6), ours)
    ours.eval()
    before, x = copy.deepcopy(ours), images(3, 32, 11, 5)
    with torch.inference_mode():
        found = norm_pool_relu(x, ours)
    torch.testing.assert_close(found, by_torch(x, before), rtol=1e-5, atol=1e-5)
    for name, value in before.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_number_that_is_none_is_not_swallowed(batch_norm: bool) -> None:
    x = images(2, 16, 4, 4)
    x[1, 3, 2, 3] = torch.nan
    found = norm_pool_relu(x, norm(16) if batch_norm else None)
    assert found[1, 3, 1, 1].isnan()
    assert found.isnan().sum() == (found[:, 3].numel() if batch_norm else 1)


@pytest.mark.usefixtures("level")
def test_a_mean_far_from_zero_costs_no_precision() -> None:
    x = images(8, 16, 8, 8) * 1e-2 + 1000
    torch.testing.assert_close(
        norm_pool_relu(x, norm(16)), by_torch(x.double(), norm(16).double()).float(), rtol=1e-3, atol=5e-3
    )


def loops_run(x: Tensor, norm: nn.Module | None) -> bool:
    called = []

    def loop(x: Tensor, *_: object) -> Tensor:
        called.append(True)
        return by_torch(x, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "norm_pool_relu", loop)
        patch.setattr(kernels, "pool_relu", loop)
        norm_pool_relu(x, norm)
    return bool(called)


def test_what_the_loops_are_not_made_for_is_left_to_torch() -> None:
    here, x = bool(LEVELS), images(4, 16, 6, 6)
    assert loops_run(x, None) is here
    assert loops_run(x, nn.Identity()) is here
    assert loops_run(x, norm(16)) is here
    assert not loops_run(x[:, :8].contiguous(memory_format=torch.channels_last), norm(8))
    assert not loops_run(x.double(), norm(16).double())
    assert not loops_run(x.contiguous(), norm(16))
    assert not loops_run(x, norm(16).eval())  # with gradients
    assert not loops_run(x, nn.BatchNorm2d(16, affine=False))
    assert not loops_run(x, nn.BatchNorm2d(16, momentum=None))
    assert not loops_run(x, nn.BatchNorm2d(16, track_running_stats=False))
    assert not loops_run(x, nn.GroupNorm(4, 16))
    heard = norm(16)
    heard.register_forward_hook(lambda *_: None)
    assert not loops_run(x, heard)
    with kernels.switch(kernels.OFF):
        assert not loops_run(x, norm(16))
    torch.set_num_threads(2)
    try:
        assert not loops_run(x, norm(16))
    finally:
        torch.set_num_threads(1)
