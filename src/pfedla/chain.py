"""Networks that are chains of blocks and linear layers: compiled loops take a training step through all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pfedla import kernels
from pfedla.blocks import CHANNELS, Conv2d, ConvPoolReLU, NormPoolReLU, loops_for

__all__ = ["Chain", "Chained", "called_by_others"]

OF_ALL_MODULES = tuple(f"_global_{when}_hooks" for when in ("forward", "forward_pre", "backward", "backward_pre"))


class Chained(ABC):
    """A module that is a chain."""

    @abstractmethod
    def chain(self) -> Chain | None:
        """Return its modules in the order of their work; None if it does something else."""


class Chain:
    """Blocks of convolution, batch norm or none, 2x2 max-pooling and ReLU; then linear layers with ReLU between them.

    Module by module, a step of a small network spends much of its time between them. `forward` and `backward` give what
    the modules would in training, but for rounding, if the chain is `regular`, which is asked once, and `fits`, which
    is asked for every batch. Settings of modules have to stay as they are.
    """

    def __init__(self, blocks: Sequence[tuple[nn.Conv2d, nn.Module]], layers: Sequence[nn.Linear]) -> None:
        self.blocks = tuple(blocks)
        self.layers = tuple(layers)
        self.modules = (*(module for block in blocks for module in block), *layers)
        self.parameters = [parameter for module in self.modules for parameter in module.parameters()]
        self._gradients = [parameter.grad for parameter in self.parameters]
        self._norms = [norm for _, norm in blocks if isinstance(norm, NormPoolReLU)]
        self._room = torch.empty(0)  # for what comes between; kept, because memory is slow when it is fresh
        self._network: tuple[kernels.Stages, kernels.Stages] = (), ()

    @property
    def regular(self) -> bool:
        """Whether there are loops for modules with these settings, whose values and gradients lie like theirs."""
        return (
            bool(self.blocks and self.layers)
            and all(_is_block(conv, norm) for conv, norm in self.blocks)
            and all(type(layer) is nn.Linear for layer in self.layers)
            and all(module.bias is not None for module in (*(conv for conv, _ in self.blocks), *self.layers))
            and all(map(_lies_well, (*self.parameters, *self._gradients)))
            and len(set(self.parameters)) == len(self.parameters)  # none is shared
        )

    def fits(self, x: Tensor) -> bool:
        """Say whether a regular chain can be given images like these, as it stands now."""
        return (
            loops_for(x, self.parameters[0])
            and not x.requires_grad
            and not called_by_others(*self.modules)
            and all(map(_as_it_was, self.parameters, self._gradients))
            and all(
                norm.training and norm.momentum is not None and norm.running_mean is not None for norm in self._norms
            )
            and self._takes(*x.shape[1:])
        )

    def _takes(self, channels: int, height: int, width: int) -> bool:
        """Say whether images of this shape go through all modules."""
        for conv, _ in self.blocks:
            if conv.in_channels != channels:
                return False
            channels, (rows, columns) = conv.out_channels, conv.kernel_size
            height, width = (height - rows + 1) // 2, (width - columns + 1) // 2
        values = channels * height * width if min(height, width) > 0 else 0
        for layer in self.layers:
            if layer.in_features != values or values < CHANNELS:
                return False
            values = layer.out_features
        return True

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for a batch; batch norm's statistics follow it."""
        for norm in self._norms:
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
        self._network = (
            tuple((c.in_channels, c.out_channels, *c.kernel_size, *_of(c), _of_norm(norm)) for c, norm in self.blocks),
            tuple((layer.in_features, layer.out_features, *_of(layer)) for layer in self.layers),
        )
        if len(self._room) < (needed := kernels.network_room(x, *self._network)):
            self._room = x.new_empty(needed)
        outputs = x.new_empty(len(x), self.layers[-1].out_features)
        kernels.network_forward(x, *self._network, self._room, outputs)
        return outputs

    def backward(self, x: Tensor, grad: Tensor) -> None:
        """Write all parameters' `.grad`, from that of the outputs for the batch that `forward` was just given."""
        kernels.network_backward(x, *self._network, self._room, grad.contiguous())


def _of(module: nn.Module) -> tuple[int, ...]:
    """Return where a module's weights and bias lie, and their gradients."""
    weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
    assert weight.grad is not None and bias.grad is not None  # noqa: PT018 (a regular chain has them)
    return weight.data_ptr(), bias.data_ptr(), weight.grad.data_ptr(), bias.grad.data_ptr()


def _of_norm(norm: nn.Module) -> tuple[float, ...]:
    """Return the same of batch norm, with its statistics and settings; nothing if there is none."""
    if not isinstance(norm, NormPoolReLU):
        return ()
    assert norm.running_mean is not None and norm.running_var is not None and norm.momentum is not None  # noqa: PT018
    weight, bias, *gradients = _of(norm)
    statistics = norm.running_mean.data_ptr(), norm.running_var.data_ptr()
    return weight, bias, *statistics, *gradients, norm.momentum, norm.eps


def called_by_others(*modules: nn.Module) -> bool:
    """Say whether something else than a module's own `forward` is to be called with it, or instead of it."""
    return any(getattr(nn.modules.module, name, None) for name in OF_ALL_MODULES) or any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        for module in modules
    )


def _as_it_was(parameter: nn.Parameter, gradient: Tensor | None) -> bool:
    """Say whether a parameter's gradient, and nothing else, is still to be put where it was when the chain was made."""
    watched = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return parameter.grad is gradient and parameter.requires_grad and not watched


def _is_block(conv: nn.Module, norm: nn.Module) -> bool:
    """Say whether there are loops for these two together."""
    if type(conv) is ConvPoolReLU:
        return conv.is_plain() and type(norm) is nn.Identity
    return (
        type(conv) is Conv2d
        and conv.is_plain()
        and type(norm) is NormPoolReLU
        and norm.num_features == conv.out_channels
        and norm.affine
        and norm.running_mean is not None
    )


def _lies_well(values: Tensor | None) -> bool:
    """Say whether values lie where the loops can work on them, kernels with their channels last."""
    if values is None or values.dtype != torch.float32 or values.device.type != "cpu":
        return False
    return values.is_contiguous(memory_format=torch.channels_last if values.dim() == 4 else torch.contiguous_format)
