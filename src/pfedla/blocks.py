"""Pieces of networks that run faster than the operations they are made of."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from pfedla import kernels

__all__ = ["norm_pool_relu"]

CHANNELS = 16  # the loops take so many at once


def norm_pool_relu(x: Tensor, norm: nn.Module | None = None) -> Tensor:
    """Return `relu(max_pool2d(norm(x), 2))`: for a batch norm on one core in three passes over the numbers.

    As its own operations, batch norm, pooling and ReLU take half the time of training a small network. ReLU follows the
    pooling here: the same function as before it, on a quarter of the numbers. What the loops are not made for (other
    norms, precisions and devices, more than one thread) is left to torch.
    """
    norm = None if isinstance(norm, nn.Identity) else norm
    fits = _fits(x)
    if fits and norm is None:
        return kernels.pool_relu(x)
    if norm is None or not (fits and _plain(norm, x.shape[1]) and (norm.training or not torch.is_grad_enabled())):
        return functional.max_pool2d(x if norm is None else norm(x), 2).relu()
    mean, variance, seen = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None
    assert variance is not None
    if norm.training and seen is not None:
        seen.add_(1)
    momentum = norm.momentum if norm.training else None
    return kernels.norm_pool_relu(x, norm.weight, norm.bias, mean, variance, momentum, norm.eps)


def _fits(x: Tensor) -> bool:
    """Say whether there are loops for images like these."""
    return (
        kernels.level() != kernels.OFF
        and x.dim() == 4
        and x.shape[1] % CHANNELS == 0
        and min(x.shape) > 0
        and min(x.shape[2:]) > 1
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.is_contiguous(memory_format=torch.channels_last)
        and torch.get_num_threads() == 1
        and not torch.compiler.is_compiling()
    )


def _plain(norm: nn.Module, channels: int) -> TypeGuard[nn.BatchNorm2d]:
    """Say whether this is torch's batch norm as it comes, for so many channels, which nobody listens to."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.num_features == channels
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and norm.weight.dtype == torch.float32
        and not (norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks)
    )
