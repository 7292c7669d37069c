"""Pieces of networks that run faster than the operations they are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pfedla import kernels

__all__ = ["CHANNELS", "Conv2d", "ConvPoolReLU", "NormPoolReLU", "loops_for"]

CHANNELS = 16  # the loops take so many at once


class Conv2d(nn.Conv2d):
    """Convolution of images: on one core, with a stride of 1 and without padding, a compiled loop.

    It is torch's `Conv2d` with the same settings and parameters. Kernels of 5x5 go by tiles of 8x8 values, in which
    NaN and infinity may spread to outputs that they do not reach by torch. What the loops are not made for (other
    precisions, memory formats and devices, more than one thread) is left to torch.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `conv2d(x, weight, bias)`."""
        if torch.jit.is_scripting():
            out: Tensor = self._conv_forward(x, self.weight, self.bias)
            return out
        else:  # noqa: RET505 (what stands after a return would be compiled)
            return self._quick(x)

    @torch.jit.unused
    def _quick(self, x: Tensor) -> Tensor:
        if self.bias is None or not self._fits(x):
            return super().forward(x)
        return kernels.conv2d(x, self.weight, self.bias)

    def is_plain(self) -> bool:
        """Say whether there are loops for a convolution with these settings."""
        moves = self.stride == self.dilation == (1, 1) and self.padding in ("valid", (0, 0))
        return moves and self.groups == 1 and self.out_channels % CHANNELS == 0

    def _fits(self, x: Tensor) -> bool:
        """Say whether there are loops for images like these."""
        return (
            self.is_plain()
            and loops_for(x, self.weight)
            and x.shape[1] == self.in_channels
            and x.shape[2] >= self.kernel_size[0]
            and x.shape[3] >= self.kernel_size[1]
            and not (x.requires_grad and self.in_channels % CHANNELS)
        )


class ConvPoolReLU(Conv2d):
    """Convolution, 2x2 max-pooling and ReLU of images: on one core a compiled loop, of a few images at a time.

    It is a `Conv2d` with the same settings and parameters, whose output is pooled, then passed through ReLU: the same
    function as ReLU before pooling, on a quarter of the values. The convolution's own output is not kept. What the
    loops are not made for is left to torch.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `relu(max_pool2d(conv2d(x, weight, bias), 2))`."""
        if torch.jit.is_scripting():
            return functional.max_pool2d(self._conv_forward(x, self.weight, self.bias), 2).relu()
        else:  # noqa: RET505
            return self._quick(x)

    @torch.jit.unused
    def _quick(self, x: Tensor) -> Tensor:
        rows, columns = self.kernel_size
        if self.bias is None or not self._fits(x) or x.shape[2] <= rows or x.shape[3] <= columns:
            return functional.max_pool2d(super()._quick(x), 2).relu()
        return kernels.conv_pool_relu(x, self.weight, self.bias)


class NormPoolReLU(nn.BatchNorm2d):
    """Batch norm, 2x2 max-pooling and ReLU of images: on one core a compiled loop in three passes over the values.

    As operations of their own they take half the time of training a small network. It is a `BatchNorm2d` with the same
    settings, parameters and statistics, followed by pooling and ReLU. What the loops are not made for is left to torch.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `relu(max_pool2d(batch_norm(x), 2))`."""
        if torch.jit.is_scripting():  # TorchScript knows torch's own operations alone
            return functional.max_pool2d(self._normalized(x), 2).relu()
        else:  # noqa: RET505 (what stands after a return would be compiled)
            return self._quick(x)

    def _normalized(self, x: Tensor) -> Tensor:
        """Return what a `BatchNorm2d` makes of images, in words that TorchScript knows."""
        seen, follows = self.num_batches_tracked, 0.0 if self.momentum is None else self.momentum
        if self.training and seen is not None:
            seen.add_(1)
            if self.momentum is None:
                follows = 1.0 / float(seen)
        by_batch = self.training or self.running_mean is None
        mean, variance = self.running_mean, self.running_var
        return functional.batch_norm(x, mean, variance, self.weight, self.bias, by_batch, follows, self.eps)

    @torch.jit.unused
    def _quick(self, x: Tensor) -> Tensor:
        mean, variance, seen = self.running_mean, self.running_var, self.num_batches_tracked
        plain = self.affine and self.momentum is not None and self.weight.dtype == torch.float32
        if mean is None or variance is None or not (plain and self._fits(x)):
            return functional.max_pool2d(super().forward(x), 2).relu()
        if self.training and seen is not None:
            seen.add_(1)
        momentum = self.momentum if self.training else None
        return kernels.norm_pool_relu(x, self.weight, self.bias, mean, variance, momentum, self.eps)

    def _fits(self, x: Tensor) -> bool:
        """Say whether there are loops for images like these."""
        return (
            loops_for(x, x)
            and _pools(x)
            and x.shape[1] == self.num_features
            and (self.training or not torch.is_grad_enabled())
        )


def loops_for(x: Tensor, weight: Tensor) -> bool:
    """Say whether loops can run here, on tensors like these."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # which sees nothing of what is no operation of torch's
        and kernels.level() != kernels.OFF
        and x.dim() == 4
        and min(x.shape) > 0
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.is_contiguous(memory_format=torch.channels_last)
        and torch.get_num_threads() == 1
    )


def _pools(x: Tensor) -> bool:
    """Say whether the loops can pool images of this shape."""
    return x.shape[1] % CHANNELS == 0 and min(x.shape[2:]) > 1
