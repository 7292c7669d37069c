"""Convolutions, alone and with pooling and ReLU, and batch norm with these: as torch's operations, with gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pfedla import kernels
from pfedla.blocks import Conv2d, ConvPoolReLU, NormPoolReLU
from pfedla.engine import FlatModel
from pfedla.layers import LayerSpec
from pfedla.models import make_model, seeded
from pfedla.training import Samples, Task, Training, score

LEVELS = kernels.available()
SHAPES = [(5, 16, 8, 8), (2, 32, 9, 7), (1, 48, 2, 3), (32, 16, 28, 28)]


def images(*shape: int) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 3 + 5
    return x.to(memory_format=torch.channels_last)


def block(channels: int) -> NormPoolReLU:
    """Return a block with scales of both signs, and a channel that it makes constant."""
    found = NormPoolReLU(channels)
    with torch.no_grad():
        found.weight.copy_(torch.linspace(-1, 2, channels) + 0.013)
        found.weight[1] = 0
        found.bias.copy_(torch.linspace(1, -1, channels))
    return found


def norm(channels: int) -> nn.BatchNorm2d:
    """Return torch's batch norm with the same parameters."""
    found = nn.BatchNorm2d(channels)
    found.load_state_dict(block(channels).state_dict())
    return found


def by_torch(x: Tensor, norm: nn.Module) -> Tensor:
    return functional.max_pool2d(norm(x), 2).relu()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("shape", SHAPES)
def test_in_training_output_gradients_and_statistics_are_those_of_torch_in_double_precision(
    shape: tuple[int, int, int, int],
) -> None:
    ours, exact = block(shape[1]), norm(shape[1]).double()
    x = images(*shape).requires_grad_()
    y = x.detach().double().requires_grad_()
    for _ in range(2):  # running statistics move twice
        found, wanted = ours(x), by_torch(y, exact)
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


CONVOLUTIONS = [  # images, channels in and out, height, width, height and width of kernels
    (32, 3, 16, 12, 14, 5, 5),
    (13, 16, 32, 14, 14, 5, 5),
    (1, 32, 48, 3, 9, 3, 2),
    (7, 1, 16, 8, 5, 2, 5),
    (2, 48, 16, 1, 1, 1, 1),
    (25, 16, 16, 4, 30, 1, 7),
    (3, 32, 16, 8, 8, 5, 5),  # one tile; then tiles that reach beyond the image, strips of one and of many tiles
    (2, 16, 48, 9, 11, 5, 5),
    (1, 48, 16, 13, 10, 5, 5),
    (2, 16, 16, 8, 108, 5, 5),
    (7, 2, 16, 17, 15, 5, 5),
    (2, 17, 16, 12, 8, 5, 5),
    (3, 16, 16, 7, 9, 5, 5),  # too small for tiles, or of other kernels
    (2, 16, 16, 10, 10, 5, 3),
    (2, 16, 16, 10, 10, 3, 5),
]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("sizes", CONVOLUTIONS)
def test_convolutions_and_their_gradients_are_those_of_torch_in_double_precision(sizes: tuple[int, ...]) -> None:
    n, before, after, height, width, rows, columns = sizes
    ours = Conv2d(before, after, (rows, columns))
    exact = nn.Conv2d(before, after, (rows, columns)).double()
    exact.load_state_dict(ours.state_dict())
    x = images(n, before, height, width).requires_grad_(before % 16 == 0)
    y = x.detach().double().requires_grad_(x.requires_grad)
    found, wanted = ours(x), exact(y)
    assert type(found.grad_fn).__name__ == "_Conv2dBackward"
    assert found.is_contiguous(memory_format=torch.channels_last)
    out = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    found.backward(out)
    wanted.backward(out.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
    if x.requires_grad:
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-4)
    for name, value in exact.named_parameters():
        mine = ours.get_parameter(name).grad
        assert mine is not None
        assert value.grad is not None
        torch.testing.assert_close(mine.double(), value.grad, rtol=1e-5, atol=2e-5 * float(value.grad.abs().max()))


POOLED = [sizes for sizes in CONVOLUTIONS if sizes[3] > sizes[5] and sizes[4] > sizes[6]]


def pooled(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Do what `ConvPoolReLU` does, by torch, with ReLU before pooling."""
    return functional.max_pool2d(functional.conv2d(x, conv.weight, conv.bias).relu(), 2)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("sizes", [*POOLED, (3, 16, 16, 8, 9, 4, 4), (2, 3, 32, 28, 28, 5, 5), (5, 16, 16, 4, 7, 3, 1)])
def test_pooled_convolutions_and_their_gradients_are_those_of_torch_in_double_precision(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)  # one without values that only rounding tells apart
    n, before, after, height, width, *rest = sizes
    ours = ConvPoolReLU(before, after, (rest[0], rest[1]))
    exact = nn.Conv2d(before, after, (rest[0], rest[1])).double()
    exact.load_state_dict(ours.state_dict())
    x = (images(n, before, height, width) - 5).requires_grad_(before % 16 == 0)
    y = x.detach().double().requires_grad_(x.requires_grad)
    found, wanted = ours(x), pooled(y, exact)
    assert type(found.grad_fn).__name__ == "_ConvPoolReLUBackward"
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert 0.01 < float((found == 0).float().mean()) < 0.95  # ReLU lets some pass
    out = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    found.backward(out)
    wanted.backward(out.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
    pairs = [*zip(ours.parameters(), exact.parameters(), strict=True), *([(x, y)] if x.requires_grad else [])]
    for mine, theirs in pairs:
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(
            mine.grad.double(), theirs.grad, rtol=1e-4, atol=2e-5 * float(theirs.grad.abs().max())
        )
    with torch.inference_mode():  # where nothing is noted for a gradient
        assert torch.equal(ours(x.detach()), found)


@pytest.mark.usefixtures("level")
def test_pooled_convolutions_take_equal_and_strange_values_as_torch_does() -> None:
    """Channels pass through as they are, but for their bias: the loop sees what pooling sees."""
    values = images(2, 16, 5, 4)
    values[1, :, :2] = 1.0  # windows of equal values: the first gets the gradient
    values[0, 4, :2, :2] = -1.0
    values[0, 3, :2, :2] = 0.0
    conv = ConvPoolReLU(16, 16, 1)
    with torch.no_grad():
        conv.weight.copy_(torch.eye(16)[:, :, None, None])
        conv.get_parameter("bias").zero_()[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    x, y = values.clone().requires_grad_(), values.clone().requires_grad_()
    found, wanted = conv(x), pooled(y, conv)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    gradients = []
    for out in (found, wanted):
        conv.zero_grad()
        out.sum().backward()
        gradients.append([parameter.grad for parameter in conv.parameters()])
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("before", "after", "side"), [(3, 16, 32), (16, 32, 14), (16, 32, 12)])
def test_tiles_cost_little_precision(before: int, after: int, side: int) -> None:
    """Errors of the networks' convolutions and of their gradients are a few millionths, as root mean squares."""
    torch.manual_seed(0)
    ours, x = Conv2d(before, after, 5), images(32, before, side, side) - 5
    exact = nn.Conv2d(before, after, 5).double()
    exact.load_state_dict(ours.state_dict())
    y = x.double().requires_grad_(before == 16)
    x.requires_grad_(before == 16)
    out = torch.randn(32, after, side - 4, side - 4)
    found, wanted = ours(x), exact(y)
    found.backward(out)
    wanted.backward(out.double())
    pairs = [(found, wanted), *((a.grad, b.grad) for a, b in zip(ours.parameters(), exact.parameters(), strict=True))]
    for mine, theirs in [*pairs, *([(x.grad, y.grad)] if before == 16 else [])]:
        assert mine is not None
        assert theirs is not None
        error = (mine.double() - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
        assert error < 5e-6


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("kind", [Conv2d, ConvPoolReLU])
def test_kernels_may_lie_in_memory_as_they_like(kind: type[Conv2d]) -> None:
    torch.manual_seed(0)
    for before, after in ((3, 16), (16, 32), (64, 64)):
        conv, x = kind(before, after, 5), images(2, before, 9, 9)
        wanted = conv(x)
        conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.testing.assert_close(conv(x), wanted)
        with torch.no_grad():
            torch.testing.assert_close(conv(x), wanted)


@pytest.mark.usefixtures("level")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [True, False])
def test_blocks_can_be_traced(grad: bool) -> None:
    for some in (Conv2d(16, 16, 3), ConvPoolReLU(16, 16, 3), block(16).eval()):
        x = images(2, 16, 8, 8)
        with torch.set_grad_enabled(grad):
            traced = torch.jit.trace(some, x)
            torch.testing.assert_close(traced(x + 1), some(x + 1))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("side", [3, 5])
def test_convolutions_change_none_of_their_arguments_and_repeat_to_the_bit(side: int) -> None:
    ours, x = Conv2d(16, 32, side), images(9, 16, 10, 10)
    before, found = [value.clone() for value in (x, *ours.parameters())], []
    for _ in range(2):
        ours.zero_grad()
        y = ours(x)
        y.square().sum().backward()
        found.append([y.detach(), *(value.grad for value in ours.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert all(torch.equal(*pair) for pair in zip(before, (x, *ours.parameters()), strict=True))
    assert all(torch.equal(ours(image[None]), out[None]) for image, out in zip(x, y, strict=True))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("kind", [Conv2d, ConvPoolReLU])
def test_nan_stays_with_its_image_and_its_call(kind: type[Conv2d]) -> None:
    """It spreads in its tiles, which tells that there are tiles, and no further."""
    ours, clean = kind(16, 16, 5), images(3, 16, 16, 16)
    spoilt = clean.clone()
    spoilt[1, 3, 9, 9] = torch.nan

    def run(x: Tensor, bad_gradient: bool) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = ours(x)
        out = torch.ones_like(y)
        if bad_gradient:
            out[1, 3, 2, 2] = torch.nan
        y.backward(out)
        assert x.grad is not None
        return y.detach(), x.grad

    wanted = run(clean, False)
    for x, bad_gradient in ((spoilt, False), (clean, True)):
        found = run(x, bad_gradient)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine[[0, 2]], theirs[[0, 2]])
        assert all(torch.equal(*pair) for pair in zip(run(clean, False), wanted, strict=True))
    reached = ours(spoilt)[1].isnan().sum()  # by torch, 25 pixels, or 9 windows
    assert reached == 16 * (64 if kind is Conv2d else 16)


@pytest.mark.usefixtures("level")
def test_equal_values_in_a_window_get_the_gradient_once() -> None:
    x, y = (torch.ones(4, 16, 4, 4).to(memory_format=torch.channels_last).requires_grad_() for _ in range(2))
    ours, theirs = block(16), norm(16)
    ours(x).sum().backward()
    by_torch(y, theirs).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-2)  # the scale is 1 / sqrt(epsilon)


@pytest.mark.usefixtures("level")
def test_evaluation_goes_by_the_running_statistics_and_leaves_them_alone() -> None:
    ours, before = block(32), norm(32)
    ours(images(8, 32, 6, 6))
    ours.eval()
    before.load_state_dict(ours.state_dict())
    before.eval()
    x = images(3, 32, 11, 5)
    with torch.inference_mode():
        found = ours(x)
    torch.testing.assert_close(found, by_torch(x, before), rtol=1e-5, atol=1e-5)
    for name, value in before.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


@pytest.mark.usefixtures("level")
def test_nan_is_not_swallowed() -> None:
    x = images(2, 16, 4, 4)
    x[1, 3, 2, 3] = torch.nan
    found = block(16)(x)
    assert found[1, 3, 1, 1].isnan()
    assert found.isnan().sum() == found[:, 3].numel()


@pytest.mark.usefixtures("level")
def test_a_mean_far_from_zero_costs_no_precision() -> None:
    x = images(8, 16, 8, 8) * 1e-2 + 1000
    torch.testing.assert_close(block(16)(x), by_torch(x.double(), norm(16).double()).float(), rtol=1e-3, atol=5e-3)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 28, 28)), ("lenet-bn", (3, 32, 32))])
def test_networks_train_and_score_as_without_the_loops(name: str, shape: tuple[int, int, int]) -> None:
    """In a model whose kernels lie in one vector, as they do in every run."""
    rng = np.random.default_rng(0)
    some = Samples(rng.integers(0, 256, (40, *shape), np.uint8), rng.integers(0, 10, 40))
    found = []
    for level in (kernels.level(), kernels.OFF):
        module = seeded(lambda: make_model(name, shape, 10), 0)
        model = FlatModel(module, LayerSpec.of(module))
        with kernels.switch(level):
            task = Task(model, [some], [0], Training(local_epochs=2, lr=0.05), 0, 1)
            trained = task.fit(model.read())
            found.append((trained, score(model, trained, [some])["loss"], task.gradient(trained)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert 2 < float(found[0][1][0]) < 2.5


def loop_runs(x: Tensor, block: nn.Module) -> bool:
    called = []

    def loop(x: Tensor, *_: object) -> Tensor:
        called.append(True)
        return x

    with pytest.MonkeyPatch.context() as patch:
        for name in ("norm_pool_relu", "conv_pool_relu", "conv2d"):
            patch.setattr(kernels, name, loop)
        block(x)
    return bool(called)


def test_what_the_loop_is_not_made_for_is_left_to_torch() -> None:
    x = images(4, 16, 6, 6)
    assert loop_runs(x, block(16)) is bool(LEVELS)
    assert not loop_runs(x[:, :8].contiguous(memory_format=torch.channels_last), block(8))
    assert not loop_runs(x.double(), block(16).double())
    assert not loop_runs(x.contiguous(), block(16))
    assert not loop_runs(x, NormPoolReLU(16).eval())  # with gradients
    assert not loop_runs(x, NormPoolReLU(16, affine=False))
    assert not loop_runs(x, NormPoolReLU(16, momentum=None))
    assert not loop_runs(x, NormPoolReLU(16, track_running_stats=False))
    with kernels.switch(kernels.OFF):
        assert not loop_runs(x, block(16))
    torch.set_num_threads(2)
    try:
        assert not loop_runs(x, block(16))
    finally:
        torch.set_num_threads(1)


def test_convolutions_that_the_loop_is_not_made_for_are_left_to_torch() -> None:
    x = images(4, 16, 6, 6)
    assert loop_runs(x, Conv2d(16, 32, 3)) is bool(LEVELS)
    assert loop_runs(x, Conv2d(16, 32, 3, padding="valid")) is bool(LEVELS)
    assert loop_runs(x[:, :3].contiguous(memory_format=torch.channels_last), Conv2d(3, 16, 5)) is bool(LEVELS)
    narrow = x[:, :3].contiguous(memory_format=torch.channels_last).requires_grad_()
    assert not loop_runs(narrow, Conv2d(3, 16, 5))
    assert not loop_runs(x.contiguous(), Conv2d(16, 32, 3))
    assert not loop_runs(x.double(), Conv2d(16, 32, 3).double())
    assert not loop_runs(x[0], Conv2d(16, 32, 3))
    assert not loop_runs(x, Conv2d(16, 24, 3))
    for settings in ({"stride": 2}, {"padding": 1}, {"dilation": 2}, {"groups": 2}, {"bias": False}):
        assert not loop_runs(x, Conv2d(16, 32, 3, **settings))
    with kernels.switch(kernels.OFF):
        assert not loop_runs(x, Conv2d(16, 32, 3))
        assert not loop_runs(x, ConvPoolReLU(16, 32, 3))


def test_pooled_convolutions_that_the_loop_is_not_made_for_are_left_to_torch() -> None:
    for x, settings in (
        (images(4, 16, 6, 6), {}),
        (images(4, 16, 3, 6), {}),  # nothing is left to pool
        (images(4, 16, 6, 6), {"stride": 2}),
        (images(4, 16, 6, 6), {"bias": False}),
        (images(4, 16, 6, 6).contiguous(), {}),
    ):
        conv = ConvPoolReLU(16, 32, 3, **settings)
        whole = functional.conv2d(x, conv.weight, conv.bias, conv.stride)
        if min(whole.shape[2:]) > 1:
            torch.testing.assert_close(conv(x), functional.max_pool2d(whole, 2).relu(), rtol=1e-4, atol=1e-4)
        else:
            with pytest.raises(RuntimeError):
                conv(x)
    assert loop_runs(images(4, 16, 6, 6), ConvPoolReLU(16, 32, 3)) is bool(LEVELS)


def test_images_that_a_convolution_cannot_take_are_refused_as_by_torch() -> None:
    for x in (images(4, 16, 2, 6), images(4, 32, 6, 6)):
        with pytest.raises(RuntimeError):
            Conv2d(16, 32, 3)(x)


@pytest.mark.parametrize("settings", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}])
def test_every_setting_of_a_batch_norm_works(settings: dict[str, bool | None]) -> None:
    x = images(4, 16, 6, 6)
    ours, theirs = NormPoolReLU(16, **settings), nn.BatchNorm2d(16, **settings)  # type: ignore[arg-type]
    for _ in range(2):
        torch.testing.assert_close(ours(x), by_torch(x, theirs))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


def test_hooks_hear_the_block_as_any_module() -> None:
    heard: list[torch.Size] = []
    ours = block(16)
    ours.register_forward_hook(lambda _, __, out: heard.append(out.shape))
    ours(images(4, 16, 6, 6))
    assert heard == [(4, 16, 3, 3)]


def test_the_block_is_a_norm_layer_of_its_model() -> None:
    spec = LayerSpec.of(nn.Sequential(nn.Conv2d(3, 16, 3), block(16)))
    assert spec.norms == {"1"}
