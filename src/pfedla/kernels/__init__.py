"""Compiled loops for small convolutions, batch norm, pooling and ReLU, and networks of them, with AVX2 or AVX-512.

They are there where GCC built the package. Where they are called, torch's operations that give the same but for
rounding stand beside them: they run on other machines and devices and in other precisions. Rounding goes by tiles of
8x8 values where kernels are 5x5: a huge value costs its whole tile digits, and NaN and infinity spread there.
`PFEDLA_KERNELS=off` in the environment switches the loops off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pfedla.errors import ConfigError

try:
    from pfedla.kernels import _compiled

    _levels = _compiled.levels()
except ImportError:  # built without it
    _levels = ()

__all__ = [
    "OFF",
    "Stages",
    "available",
    "choose",
    "conv2d",
    "conv_pool_relu",
    "level",
    "network_backward",
    "network_forward",
    "network_room",
    "norm_pool_relu",
    "switch",
]

OFF = "off"
VARIABLE = "PFEDLA_KERNELS"
Shape = tuple[int, int, int, int]  # images, height, width, channels
Stages = tuple[tuple[Any, ...], ...]  # of a network, each with its sizes and addresses

_level = OFF
_problem = ""  # with the variable in the environment


def available() -> tuple[str, ...]:
    """Return the instruction sets that there are loops for here, the best first; none where nothing was compiled."""
    return _levels


def level() -> str:
    """Return the instruction set in use, or `"off"`."""
    if _problem:
        raise ConfigError(_problem)
    return _level


def choose(name: str) -> None:
    """Use the loops for this instruction set from now on; `"off"` for none, `"auto"` for the best there are."""
    global _level
    if name == "auto":
        name = (*available(), OFF)[0]
    if name != OFF:
        if name not in available():
            raise ConfigError(f"{VARIABLE} = {name!r}: here it may be {', '.join(('auto', *available(), OFF))}")
        _compiled.use(name)
    _level = name


@contextmanager
def switch(name: str) -> Iterator[None]:
    """Use the loops for another instruction set, or `"off"`, for a while; worker processes are not told."""
    before = _level
    choose(name)
    try:
        yield
    finally:
        choose(before)


def norm_pool_relu(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, momentum: float | None, epsilon: float
) -> Tensor:
    """Return `relu(max_pool2d(batch_norm(x), 2))`, by the batch's statistics, which the running ones follow.

    Images are channels-last, their channels a multiple of 16. Without a momentum it goes by the running statistics, and
    has no gradient.
    """
    if momentum is None:
        out = _pooled(x)
        _compiled.norm_forward(
            x.data_ptr(), _shape(x), *_addresses(weight, bias, mean, variance), 0.0, epsilon, out.data_ptr(), 0, 0
        )
        return out
    apply: Callable[..., Tensor] = _NormPoolReLU.apply
    return apply(x, weight, bias, mean, variance, momentum, epsilon)


class _NormPoolReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        mean, variance, momentum, epsilon = rest
        out, best, saved = _pooled(x), _pooled(x), x.new_empty((2, x.shape[1]), dtype=torch.float64)
        _compiled.norm_forward(
            x.data_ptr(),
            _shape(x),
            *_addresses(weight, bias, mean, variance),
            momentum,
            epsilon,
            *_addresses(out, best, saved),
        )
        ctx.save_for_backward(x, weight, saved, out, best)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        found = torch.empty_like(x), torch.empty_like(others[0]), torch.empty_like(others[0])
        _compiled.norm_backward(x.data_ptr(), _shape(x), *_addresses(*others, grad, *found))
        return (*found, None, None, None, None)


def conv2d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `conv2d(x, weight, bias)`: stride 1, no padding.

    Images are channels-last. Output channels are a multiple of 16; so are input channels, if `x` needs a gradient.
    """
    apply: Callable[..., Tensor] = _Conv2d.apply
    return apply(x, weight, bias)


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out, weight = _convolved(x, weight), weight.contiguous()
        _compiled.conv_forward(x.data_ptr(), _sizes(x, weight), *_addresses(weight, bias, out))
        ctx.save_for_backward(x, weight, bias)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        return _gradients(_compiled.conv_backward, ctx.needs_input_grad[0], *ctx.saved_tensors, grad)


def conv_pool_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `relu(max_pool2d(conv2d(x, weight, bias), 2))`: images and channels as for `conv2d`."""
    if not torch.is_grad_enabled():
        out, weight = _convolved(x, weight, pooled=True), weight.contiguous()
        _compiled.conv_pool_forward(x.data_ptr(), _sizes(x, weight), *_addresses(weight, bias, out), 0)
        return out
    apply: Callable[..., Tensor] = _ConvPoolReLU.apply
    return apply(x, weight, bias)


class _ConvPoolReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out, weight = _convolved(x, weight, pooled=True), weight.contiguous()
        won = torch.empty_like(out, dtype=torch.int32)
        _compiled.conv_pool_forward(x.data_ptr(), _sizes(x, weight), *_addresses(weight, bias, out, won))
        ctx.save_for_backward(x, weight, bias, won)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        return _gradients(_compiled.conv_pool_backward, ctx.needs_input_grad[0], *ctx.saved_tensors, grad)


def network_room(x: Tensor, blocks: Stages, layers: Stages) -> int:
    """Return how many numbers come between a network's inputs and outputs: the room that it needs."""
    return _compiled.network_room(_images(x), blocks, layers)


def network_forward(x: Tensor, blocks: Stages, layers: Stages, room: Tensor, outputs: Tensor) -> None:
    """Fill the outputs of a network in training: blocks like `conv_pool_relu` or `norm_pool_relu`, then linear layers.

    A block is (channels in and out, height and width of kernels, addresses of weights, bias and both gradients, norm);
    a norm, which may be empty, (addresses of weights, bias, mean, variance and both gradients, momentum, epsilon); a
    layer (values in and out, addresses as of a block). Images and kernels are channels-last.
    """
    _compiled.network_forward(x.data_ptr(), _images(x), blocks, layers, *_addresses(room, outputs))


def network_backward(x: Tensor, blocks: Stages, layers: Stages, room: Tensor, grad: Tensor) -> None:
    """Fill all gradients of a network from that of its outputs; `room` is as `network_forward` left it."""
    _compiled.network_backward(x.data_ptr(), _images(x), blocks, layers, *_addresses(room, grad))


def _images(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[2], x.shape[3]


def _gradients(
    loop: Callable[..., None], needs_x: bool, x: Tensor, weight: Tensor, bias: Tensor, *rest: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of a convolution, by a loop that is given `rest` beside its arguments: the last is grad."""
    grad = rest[-1].contiguous(memory_format=torch.channels_last)
    to_x = torch.empty_like(x) if needs_x else None
    to_weight, to_bias = torch.empty_like(weight), torch.empty_like(bias)
    loop(
        x.data_ptr(),
        _sizes(x, weight),
        *_addresses(weight, *rest[:-1], grad),
        0 if to_x is None else to_x.data_ptr(),
        *_addresses(to_weight, to_bias),
    )
    return to_x, to_weight, to_bias


def _convolved(x: Tensor, weight: Tensor, *, pooled: bool = False) -> Tensor:
    """Return room for what a convolution makes of images, and 2x2 pooling of that."""
    (n, _, h, w), (channels, _, rows, columns) = x.shape, weight.shape
    rows, columns = h - rows + 1, w - columns + 1
    return _room(x, n, channels, rows // 2, columns // 2) if pooled else _room(x, n, channels, rows, columns)


def _pooled(x: Tensor) -> Tensor:
    """Return room for what 2x2 pooling makes of images."""
    n, c, h, w = x.shape
    return _room(x, n, c, h // 2, w // 2)


def _room(x: Tensor, *shape: int) -> Tensor:
    """Return room for images like these, whatever torch's defaults are."""
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _shape(x: Tensor) -> Shape:
    n, c, h, w = x.shape
    return n, h, w, c


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    """Return the sizes of a convolution: of images, and its kernels' number, height and width."""
    channels, _, rows, columns = weight.shape
    return *_shape(x), channels, rows, columns


def _addresses(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in tensors)


try:
    choose(os.environ.get(VARIABLE, "auto"))
except ConfigError as _error:  # to be told when somebody asks, not in the middle of an import
    _problem = str(_error)
