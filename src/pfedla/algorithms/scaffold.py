"""SCAFFOLD: federated averaging whose clients correct their drift with control variates.

Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020.

==============  =========================================================================
theta, trained  x, the shared model, `(1, values)`; y_i, a client's after K local steps of η_l = `training.lr`
control         c, the server's control variate, `(1, values)`; a client keeps its own, c_i, as `"conv1#control"`
server_lr, n    η_g, the server's step; N, the number of all clients, of which those in S answered
==============  =========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.layers import Layers, bank, change, entry, kind_of, layer_of
from pfedla.settings import Positive
from pfedla.training import Adjust, Task, Training
from pfedla.wire import Payload

__all__ = ["Controlled", "Scaffold", "next_control"]

CONTROL = "control"


class Controlled(NamedTuple):
    """The server's state: one model and its control variate, for `n` clients."""

    theta: Layers
    control: Layers
    n: Tensor


def next_control(mine: Layers, server: Layers, x: Layers, y: Layers, steps: Tensor, lr: float) -> Layers:
    """Option II of Algorithm 1: c_i+ = c_i - c + (x - y_i) / (K η_l); `steps` is K, `(clients, 1)`."""
    return {k: c_i - server[k] + (x[layer_of(k)] - y[layer_of(k)]) / (steps * lr).to(c_i) for k, c_i in mine.items()}


@dataclass(frozen=True)
class Scaffold(Algorithm[Controlled]):
    """SCAFFOLD: one model for everybody; control variates keep the clients' steps from drifting apart.

    Controls double the traffic. Means over clients are unweighted, as in the paper: then c is the mean of all c_i, and
    the clients' corrections cancel. η_g = 1 is what the paper's experiments use.
    """

    server_lr: Positive = 1.0

    def check(self, training: Training, n: int) -> None:  # noqa: ARG002
        """Refuse momentum."""
        training.refuse_momentum("SCAFFOLD")

    @property
    def uploads_beside(self) -> tuple[str, ...]:
        """The controls' changes."""
        return (CONTROL,)

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Controlled:  # noqa: ARG002
        """Start from the common model and controls of zero."""
        control = {key: row for key, row in self.enroll(theta).items() if kind_of(key) == CONTROL}
        return Controlled(bank(theta, 1), control, torch.tensor(n))

    def download(self, state: Controlled, ids: Tensor) -> Payload:
        """Send x and c to everybody."""
        return self.send({key: row.expand(len(ids), -1) for key, row in {**state.theta, **state.control}.items()})

    def update(self, state: Controlled, ids: Tensor, got: Payload, upload: Payload) -> Controlled:  # noqa: ARG002
        """Return x + η_g/|S| Σ_i Δy_i and c + 1/N Σ_i Δc_i; running statistics take the plain mean."""
        for key, row in state.theta.items():
            row += upload.layers[key].mean(0) * (1 if kind_of(key) else self.server_lr)
        for key, row in state.control.items():
            row += upload.layers[key].sum(0) / state.n
        return state

    def enroll(self, theta: Layers) -> Layers:
        """Keep a control variate, zero at first, beside the model."""
        return theta | {entry(key, CONTROL): torch.zeros_like(row) for key, row in theta.items() if not kind_of(key)}

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Take steps along g_i(y_i) - c_i + c; then find the client's next control variate."""
        received, steps = got.fill(own), torch.zeros(len(task.ids), 1, dtype=torch.float64)

        def adjust(row: int) -> Adjust:
            c_i, c = (task.model.vector(layers, row, CONTROL) for layers in (own, got.layers))

            def correct(y: Tensor, gradient: Tensor) -> None:  # noqa: ARG001
                gradient.add_(c - c_i)
                steps[row] += 1

            return correct

        trained, mine = task.fit(received, adjust=adjust), {k: c for k, c in own.items() if kind_of(k) == CONTROL}
        control = next_control(mine, got.layers, received, trained, steps, task.training.lr)
        moved = {key: rows - mine[key] for key, rows in control.items()}
        return trained | control, self.send(change(trained, received) | moved, examples=task.examples)
