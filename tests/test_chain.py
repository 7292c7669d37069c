"""Training steps through a whole network by compiled loops: as module by module, with every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pfedla import kernels
from pfedla.blocks import NormPoolReLU
from pfedla.chain import Chain
from pfedla.engine import FlatModel
from pfedla.layers import LayerSpec
from pfedla.models import LeNet, make_model, seeded
from pfedla.objective import Classification

NETWORKS = [
    ("lenet-bn", (3, 32, 32), 10),
    ("lenet", (1, 28, 28), 10),
    ("lenet-bn", (3, 33, 29), 100),  # a pixel that no window covers
    ("lenet", (2, 16, 19), 3),
]


def flat(
    name: str = "lenet-bn",
    shape: tuple[int, ...] = (3, 32, 32),
    classes: int = 10,
    dtype: torch.dtype = torch.float32,
) -> FlatModel:
    module = seeded(lambda: make_model(name, shape, classes), 0).to(dtype).train()
    return FlatModel(module, LayerSpec.of(module))


def batch(n: int, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(n)
    x = torch.randn(n, *shape, generator=random).to(memory_format=torch.channels_last)
    return x, torch.randint(0, classes, (n,), generator=random)


def steps(model: FlatModel) -> list[Tensor]:
    """Have the model count the batches that go through its chain."""
    seen: list[Tensor] = []
    chain = model._chain
    assert chain is not None
    forward = chain.forward
    chain.forward = lambda x: (seen.append(x), forward(x))[1]  # type: ignore[method-assign, func-returns-value]
    return seen


def agree(one: Tensor, other: Tensor) -> None:
    assert (one.double() - other).abs().max() < 3e-5 * other.abs().max()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("name", "shape", "classes"), NETWORKS)
def test_gradients_losses_and_statistics_are_those_of_torch_in_double_precision(
    name: str, shape: tuple[int, ...], classes: int
) -> None:
    model, exact = flat(name, shape, classes), flat(name, shape, classes, torch.float64)
    seen = steps(model)
    sizes = (2, 32, 5, 33, 12)  # the room grows, and is too large for what comes then
    for n in sizes:
        x, y = batch(n, shape, classes)
        model.gradient.fill_(torch.nan)
        agree(model.backward(x, y), exact.backward(x.double(), y))
        agree(model.loss, exact.loss)
    assert len(seen) == len(sizes)
    for one, other in zip(model.module.buffers(), exact.module.buffers(), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("level")
def test_a_single_image_is_a_batch() -> None:
    model, exact = flat("lenet", (1, 28, 28)), flat("lenet", (1, 28, 28), dtype=torch.float64)
    x, y = batch(1, (1, 28, 28))
    seen = steps(model)
    agree(model.backward(x, y), exact.backward(x.double(), y))
    assert seen


@pytest.mark.usefixtures("level")
def test_steps_lead_where_they_lead_module_by_module() -> None:
    one, other = flat(), flat()
    other._chain = None
    for n in range(2, 12):
        for model in (one, other):
            model.weights.add_(model.backward(*batch(n)), alpha=-0.05)
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-3, atol=1e-5)
    assert not torch.equal(one.weights, flat().weights)


@pytest.mark.usefixtures("level")
def test_any_objective_is_differentiated() -> None:
    class Halves(Classification):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return super().loss(outputs, targets) / 2 + outputs.square().mean()

    one, other = flat(), flat()
    one.objective = other.objective = Halves()
    other._chain = None
    torch.testing.assert_close(one.backward(*batch(6)), other.backward(*batch(6)), rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("level")
def test_a_loss_without_the_outputs_has_no_gradient() -> None:
    class Constant(Classification):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return torch.ones((), requires_grad=True) * 2

    model = flat()
    model.objective = Constant()
    model.gradient.fill_(3)
    assert not model.backward(*batch(4)).any()


@pytest.mark.usefixtures("level")
def test_nan_in_an_image_is_seen_in_the_gradient() -> None:
    model = flat("lenet", (1, 28, 28))
    x, y = batch(4, (1, 28, 28))
    x[2, 0, 5, 5] = torch.nan
    assert model.backward(x, y).isnan().any()
    assert model.backward(*batch(4, (1, 28, 28))).isfinite().all()  # nothing is left of it


@pytest.mark.usefixtures("level")
def test_a_loss_may_work_in_place() -> None:
    class Shifting(Classification):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            outputs.sub_(outputs.detach().logsumexp(1, keepdim=True))
            return super().loss(outputs, targets)

    one, other = flat(), flat()
    one.objective = Shifting()
    torch.testing.assert_close(one.backward(*batch(4)), other.backward(*batch(4)), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", ["lenet", "lenet-bn"])
def test_torchs_default_precision_does_not_matter(name: str) -> None:
    model, other = flat(name), flat(name)
    other._chain = None
    x, y = batch(6)
    expected, by_modules = model.backward(x, y).clone(), other.backward(x, y).clone()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found, once_more = model.backward(x, y), other.backward(x, y)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(once_more, by_modules)


def eval_norm(model: FlatModel) -> None:
    next(m for m in model.module.modules() if isinstance(m, NormPoolReLU)).eval()


def averaging(model: FlatModel) -> None:
    next(m for m in model.module.modules() if isinstance(m, NormPoolReLU)).momentum = None


def hooked(model: FlatModel) -> None:
    model.module.get_submodule("fc2").register_forward_hook(lambda *_: None)


def hooked_before(model: FlatModel) -> None:
    model.module.get_submodule("conv1").register_forward_pre_hook(lambda _, x: (2 * x[0],))


def hooked_outside(model: FlatModel) -> None:
    model.module.register_forward_hook(lambda _, __, outputs: outputs * 3)


def hooked_backward(model: FlatModel) -> None:
    model.module.get_submodule("fc1").register_full_backward_hook(lambda *_: None)


def hooked_parameter(model: FlatModel) -> None:
    model.module.get_parameter("fc1.weight").register_hook(lambda gradient: 2 * gradient)


def called_otherwise(model: FlatModel) -> None:
    part = model.module.get_submodule("fc2")
    forward = part.forward
    part.forward = lambda x: 2 * forward(x)


def frozen(model: FlatModel) -> None:
    model.module.get_submodule("fc1").requires_grad_(False)


def elsewhere(model: FlatModel) -> None:
    for values in model.module.parameters():
        values.grad = torch.zeros_like(values)


def without_mean(model: FlatModel) -> None:
    norm = next(m for m in model.module.modules() if isinstance(m, NormPoolReLU))
    norm.running_mean = norm.running_var = None


def in_service(model: FlatModel) -> None:
    model.module.eval()


CHANGES = [
    averaging,
    called_otherwise,
    elsewhere,
    eval_norm,
    frozen,
    hooked,
    hooked_backward,
    hooked_before,
    hooked_outside,
    hooked_parameter,
    in_service,
    without_mean,
]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_are_asked_for_something_else_are_called(change: Callable[[FlatModel], None]) -> None:
    model, other = flat(), flat()
    other._chain = None
    seen = steps(model)
    for one in (model, other):
        one.gradient.fill_(7)
        change(one)
    torch.testing.assert_close(model.backward(*batch(6)), other.backward(*batch(6)))
    for left, right in zip(model.module.buffers(), other.module.buffers(), strict=True):
        torch.testing.assert_close(left, right)
    assert not seen


@pytest.mark.usefixtures("level")
def test_hooks_of_all_modules_are_called() -> None:
    model = flat()
    seen = steps(model)
    called: list[nn.Module] = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    try:
        model.backward(*batch(4))
    finally:
        hook.remove()
    assert called
    assert not seen


@pytest.mark.usefixtures("level")
def test_other_images_threads_and_levels_are_left_to_the_modules() -> None:
    model = flat()
    x, y = batch(6)
    seen = steps(model)
    model.backward(x.contiguous(), y)
    with kernels.switch(kernels.OFF):
        model.backward(x, y)
    torch.set_num_threads(2)
    try:
        model.backward(x, y)
    finally:
        torch.set_num_threads(1)
    model.backward(x.clone().requires_grad_(), y)
    assert not seen
    model.backward(x, y)
    assert seen


@pytest.mark.usefixtures("level")
def test_images_of_another_size_are_refused_as_by_the_modules() -> None:
    model = flat()
    seen = steps(model)
    for shape in ((3, 36, 32), (1, 32, 32), (3, 8, 8)):
        with pytest.raises((RuntimeError, ValueError)):
            model.backward(*batch(4, shape))
    assert not seen


class Shifted(LeNet):
    """Not what its modules make of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_what_computes_something_else_is_no_chain() -> None:
    module = Shifted((3, 32, 32), 10, batch_norm=True)
    assert module.chain() is None
    assert FlatModel(module, LayerSpec.of(module))._chain is None


def linear_of_another_kind(module: LeNet) -> None:
    class Scaled(nn.Linear):
        pass

    module.fc2 = Scaled(120, 84)


def shared(module: LeNet) -> None:
    module.conv1.bias = module.bn1.get_parameter("bias")
    module.more = nn.Parameter(torch.ones(16))  # as many values as if nothing were shared


def no_bias(module: LeNet) -> None:
    module.fc1 = nn.Linear(800, 120, bias=False)


def strided(module: LeNet) -> None:
    module.conv1.stride = (2, 2)


def another_norm(module: LeNet) -> None:
    module.bn1 = nn.BatchNorm2d(16)  # type: ignore[assignment]


def with_more(module: LeNet) -> None:
    module.more = nn.Linear(3, 3)


def without_statistics(module: LeNet) -> None:
    module.bn2 = NormPoolReLU(32, track_running_stats=False)


@pytest.mark.parametrize(
    "change", [linear_of_another_kind, no_bias, shared, strided, another_norm, with_more, without_statistics]
)
def test_a_network_with_other_parts_is_left_to_its_modules(change: Callable[[LeNet], None]) -> None:
    module = LeNet((3, 32, 32), 10, batch_norm=True)
    change(module)
    assert FlatModel(module, LayerSpec.of(module))._chain is None


def test_gradients_that_are_missing_or_lie_otherwise_are_not_written() -> None:
    module = LeNet((3, 32, 32), 10, batch_norm=True)
    missing = module.chain()
    for values in module.parameters():
        values.grad = torch.zeros_like(values)
    with_channels_first = module.chain()
    assert missing is not None
    assert with_channels_first is not None
    assert not missing.regular
    assert not with_channels_first.regular
    assert flat()._chain is not None


@pytest.mark.parametrize("blocks", [True, False])
def test_half_a_chain_is_none(blocks: bool) -> None:
    whole = flat()._chain
    assert whole is not None
    assert whole.regular
    half = Chain(whole.blocks, ()) if blocks else Chain((), whole.layers)
    assert not half.regular
