"""Gradient steps on some rows of stacked parameters.

A server holds small networks for many clients, stacked on a leading axis, and in a round only some rows take a
step. Adam's moments and step counts are kept by row: a row that rests keeps its memory, untouched by the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from pfedla import storage

__all__ = ["Optimizer", "Rows", "TrainState"]

Rows = dict[str, Tensor]  # {name: (rows, ...)}


class TrainState(NamedTuple):
    """Stacked parameters and what their optimizer remembers of each row."""

    value: Rows
    first: Rows
    second: Rows
    steps: Tensor  # (rows,)

    def rows(self, index: Tensor) -> Rows:
        """Return the parameters of some rows: views of neighbours, copies of others."""
        first, count = int(index[0]), len(index)
        if torch.equal(index, torch.arange(first, first + count)):
            return {name: value[first : first + count] for name, value in self.value.items()}
        return {name: value.index_select(0, index) for name, value in self.value.items()}


@dataclass(frozen=True)
class Optimizer:
    """How rows take steps: plain gradient steps, or Adam (Kingma & Ba, ICLR 2015).

    Adam's step does not depend on the gradient's scale: `epsilon` is far below any gradient met in practice.
    """

    rule: Literal["adam", "sgd"]
    lr: float
    decay: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-12

    def init(self, value: Rows) -> TrainState:
        """Return parameters before their first step."""
        zeros = [
            {k: storage.zeros(p.shape, p.dtype) for k, p in value.items()} if self.rule == "adam" else {} for _ in "12"
        ]
        return TrainState(value, zeros[0], zeros[1], torch.zeros(len(next(iter(value.values()))), dtype=torch.int64))

    def ascend(self, state: TrainState, direction: Rows, rows: Tensor) -> None:
        """Move `rows` along `direction`, which has one row for each of them, in place."""
        if not len(rows):
            return
        if self.rule == "adam":
            self._adam(state, direction, rows)
        else:
            for name, g in direction.items():
                state.value[name].index_add_(0, rows, g, alpha=self.lr)
        state.steps[rows] += 1

    def _adam(self, state: TrainState, direction: Rows, rows: Tensor) -> None:
        """Step in one pass over value, gradient and moments, which are views of their rows and not copies of them."""
        parts = list(_runs(rows.tolist(), state.steps[rows].tolist()))

        def views(stacked: Rows) -> list[Tensor]:
            return [stacked[name][row : row + size] for row, _, size, _ in parts for name in direction]

        adam(
            views(state.value),
            [direction[name][place : place + size] for _, place, size, _ in parts for name in direction],
            views(state.first),
            views(state.second),
            [],
            [torch.tensor(float(steps)) for *_, steps in parts for _ in direction],  # taken so far; it adds this one
            fused=True,
            amsgrad=False,
            beta1=self.decay[0],
            beta2=self.decay[1],
            lr=self.lr,
            weight_decay=0.0,
            eps=self.epsilon,
            maximize=True,
        )


def _runs(rows: list[int], steps: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs of neighbouring rows that took as many steps: first row, its place, how many, steps taken."""
    start = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1 or steps[place] != steps[start]:
            yield rows[start], start, place - start, steps[start]
            start = place
