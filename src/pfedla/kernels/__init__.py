"""Compiled inner loops, for processors with AVX2 or AVX-512, where the package was built with GCC.

Where a loop is called, torch's operations that give the same but for rounding stand beside it: they run on other
machines and devices and in other precisions. `PFEDLA_KERNELS=off` in the environment switches the loops off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
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
    "FEW",
    "OFF",
    "available",
    "choose",
    "climb",
    "forward",
    "inner",
    "level",
    "norm_pool_relu",
    "pool_relu",
    "product",
    "switch",
    "usable",
    "write_sum",
]

OFF = "off"
FEW = 32  # clients beside a bank, for which its memory sets the pace; beyond, a matrix library is faster
VARIABLE = "PFEDLA_KERNELS"
Shape = tuple[int, int, int, int]  # images, height, width, channels

_level = OFF


def available() -> tuple[str, ...]:
    """Return the instruction sets that there are loops for here, the best first; none where nothing was compiled."""
    return _levels


def level() -> str:
    """Return the instruction set in use, or `"off"`."""
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


def usable(*tensors: Tensor) -> bool:
    """Say whether the loops are in use and can work on these: numbers of single precision in memory, without gaps."""
    return _level != OFF and all(
        x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() for x in tensors
    )


# ---- products with a bank of models, several layers at once


def product(weights: Sequence[Tensor], banks: Sequence[Tensor]) -> list[Tensor]:
    """Return `weights @ rows` of each layer: `(n, numbers)`."""
    _check(all(w.shape == (len(weights[0]), len(rows)) for w, rows in zip(weights, banks, strict=True)))
    out = [rows.new_empty(len(some), rows.shape[1]) for some, rows in zip(weights, banks, strict=True)]
    _compiled.product(_layers(banks, weights, out), len(weights[0]), torch.get_num_threads())
    return out


def inner(delta: Sequence[Tensor], banks: Sequence[Tensor]) -> list[Tensor]:
    """Return `delta @ rows.T` of each layer: `(n, N)`; n is `FEW` at most."""
    _check(len(delta[0]) <= FEW)
    _check(all(x.shape == (len(delta[0]), rows.shape[1]) for x, rows in zip(delta, banks, strict=True)))
    out = [rows.new_empty(len(some), len(rows)) for some, rows in zip(delta, banks, strict=True)]
    _compiled.inner(_layers(banks, delta, out), len(delta[0]), torch.get_num_threads())
    return out


def write_sum(banks: Sequence[Tensor], ids: Tensor, one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    """Write `one + other` into the rows `ids` of each layer's bank."""
    ids = _rows_of(banks[0], ids)
    for rows, *parts in zip(banks, one, other, strict=True):
        _check(len(rows) == len(banks[0]) and all(x.shape == (len(ids), rows.shape[1]) for x in parts))
    _compiled.write_sum(_layers(banks, one, other), ids.data_ptr(), len(ids), torch.get_num_threads())


def _layers(*parts: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple((*_addresses(*layer), *layer[0].shape) for layer in zip(*parts, strict=True))


# ---- hypernetworks


def forward(networks: tuple[Tensor, ...], layers: int, ids: Tensor) -> Tensor:
    """Return the aggregation weights of some clients: `(n, layers, columns)`.

    `networks` are all clients' parameters: v, weight1, bias1, weight2, bias2 and the heads' weight and bias.
    """
    ids, sizes = _rows_of(networks[0], ids), _sizes(networks, layers)
    alpha = torch.empty(len(ids), layers, sizes[-1])
    _compiled.forward(
        _addresses(*networks) * 3, sizes, ids.data_ptr(), len(ids), alpha.data_ptr(), torch.get_num_threads()
    )
    return alpha


def climb(
    moving: Sequence[tuple[Tensor, ...]],
    steps: tuple[Tensor, Tensor],
    adam: tuple[float, float, float, float],
    ids: Tensor,
    g: Tensor,
    sent: Tensor,
) -> None:
    """Take a step of Adam in some clients' hypernetworks, up along the gradient of Σ α * g over the layers sent.

    `moving` are the parameters as `forward` takes them and, in the same order, their first and second moments; `steps`
    counts the steps of bodies and heads; `adam` is its rate, its two decays and its epsilon.
    """
    ids, g, sent, sizes = _rows_of(steps[0], ids), g.contiguous(), sent.contiguous(), _sizes(moving[0], g.shape[1])
    _check(g.shape == (len(ids), sizes[0], sizes[-1]) and sent.shape == g.shape[:2] and sent.dtype == torch.bool)
    _compiled.climb(
        tuple(x.data_ptr() for part in moving for x in part),
        sizes,
        *_addresses(*steps),
        adam,
        ids.data_ptr(),
        len(ids),
        *_addresses(g, sent),
        torch.get_num_threads(),
    )


# ---- batch norm, pooling and ReLU of images, channels-last, whose channels are a multiple of 16


def norm_pool_relu(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, momentum: float | None, epsilon: float
) -> Tensor:
    """Return `relu(max_pool2d(batch_norm(x), 2))`, by the batch's statistics, which the running ones follow.

    Without a momentum it goes by the running statistics, and has no gradient.
    """
    if momentum is None:
        out = _pooled(x)
        _compiled.norm_forward(
            x.data_ptr(), _shape(x), *_addresses(weight, bias, mean, variance), 0.0, epsilon, out.data_ptr(), 0, 0
        )
        return out
    apply: Callable[..., Tensor] = _NormPoolReLU.apply
    return apply(x, weight, bias, mean, variance, momentum, epsilon)


def pool_relu(x: Tensor) -> Tensor:
    """Return `relu(max_pool2d(x, 2))`."""
    apply: Callable[[Tensor], Tensor] = _PoolReLU.apply
    return apply(x)


class _NormPoolReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        mean, variance, momentum, epsilon = rest
        out, best, saved = _pooled(x), _pooled(x), torch.empty(2, x.shape[1], dtype=torch.float64)
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


class _PoolReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = _pooled(x)
        _compiled.pool_forward(x.data_ptr(), _shape(x), out.data_ptr())
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        grad, found = grad.contiguous(memory_format=torch.channels_last), torch.empty_like(x)
        _compiled.pool_backward(x.data_ptr(), _shape(x), *_addresses(out, grad, found))
        return found


def _pooled(x: Tensor) -> Tensor:
    """Return room for what 2x2 pooling makes of images."""
    n, c, h, w = x.shape
    return torch.empty((n, c, h // 2, w // 2), memory_format=torch.channels_last)


def _shape(x: Tensor) -> Shape:
    n, c, h, w = x.shape
    return n, h, w, c


def _sizes(networks: tuple[Tensor, ...], layers: int) -> Shape:
    """Return the numbers of layers, of an embedding, of hidden units and of a head's columns."""
    weight1, weight = networks[1], networks[5]
    return layers, weight1.shape[1], weight1.shape[2], weight.shape[2]


def _rows_of(bank: Tensor, ids: Tensor) -> Tensor:
    """Return row numbers as the loops read them; refuse those that there are not."""
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < len(bank)):
        raise IndexError(f"rows {ids.tolist()} of {len(bank)}")
    return ids.to("cpu", torch.int64).contiguous()


def _check(fits: bool) -> None:
    """Refuse sizes with which a loop would leave its memory."""
    if not fits:
        raise ValueError("these sizes do not belong together")


def _addresses(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in tensors)


choose(os.environ.get(VARIABLE, "auto"))
