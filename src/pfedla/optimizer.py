"""Gradient steps on some rows of stacked parameters.

A server holds small networks for many clients, stacked on a leading axis, and in a round only some rows take a
step. Adam's moments and step counts are kept by row: a row that rests keeps its memory, untouched by the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedla.errors import ConfigError

__all__ = ["Optimizer", "Rows", "Trained"]

Rows = dict[str, Tensor]  # {name: (rows, ...)}


class Trained(NamedTuple):
    """Stacked parameters and what their optimizer remembers of each row."""

    value: Rows
    first: Rows
    second: Rows
    steps: Tensor  # (rows,)

    def rows(self, index: Tensor) -> Rows:
        """Return the parameters of some rows, copied."""
        return {name: value[index] for name, value in self.value.items()}


@dataclass(frozen=True)
class Optimizer:
    """How rows take steps: plain gradient steps, or Adam (Kingma & Ba, ICLR 2015).

    Adam's step does not depend on the gradient's scale: `epsilon` is far below any gradient met in practice.
    """

    rule: Literal["adam", "sgd"]
    lr: float
    decay: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-12

    def __post_init__(self) -> None:
        """Refuse what cannot be stepped with."""
        if self.rule not in ("adam", "sgd"):
            raise ConfigError(f"{self.rule!r} is no optimizer: choose adam or sgd")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"an optimizer's learning rate must be above 0 and finite, not {self.lr:g}")

    def init(self, value: Rows) -> Trained:
        """Return parameters before their first step."""
        zeros = [{k: torch.zeros_like(p) for k, p in value.items()} if self.rule == "adam" else {} for _ in "12"]
        return Trained(value, zeros[0], zeros[1], torch.zeros(len(next(iter(value.values()))), dtype=torch.int64))

    def ascend(self, trained: Trained, direction: Rows, rows: Tensor) -> None:
        """Move `rows` along `direction`, which has one row for each of them, in place."""
        trained.steps[rows] += 1
        t = trained.steps[rows].to(torch.float64)  # (n,)
        for name, g in direction.items():
            if self.rule == "adam":
                g = self._scaled(g, trained.first[name], trained.second[name], rows, t)
            trained.value[name].index_add_(0, rows, g, alpha=self.lr)

    def _scaled(self, g: Tensor, first: Tensor, second: Tensor, rows: Tensor, t: Tensor) -> Tensor:
        shape = (-1, *[1] * (g.dim() - 1))
        first[rows] = mean = first[rows].lerp_(g, 1 - self.decay[0])
        second[rows] = square = second[rows].lerp_(g.square(), 1 - self.decay[1])
        mean = mean / (1 - self.decay[0] ** t).to(g).view(shape)
        square = square / (1 - self.decay[1] ** t).to(g).view(shape)
        return mean / square.sqrt_().add_(self.epsilon)
