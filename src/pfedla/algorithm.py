"""The protocol behind every method: five functions, no loop.

A round is `download -> train at the clients -> update`; an evaluation is `personalize`. The same object runs
both halves, in the simulator and on a device. A complete method, averaging with one shared model::

    class State(NamedTuple):
        theta: Layers  # (1, numbers)

    @dataclass(frozen=True)
    class Average(Algorithm[State]):
        def init(self, theta, n, rng):
            return State(theta)

        def download(self, state, ids):
            return self.send({key: row.expand(len(ids), -1) for key, row in state.theta.items()})

        def update(self, state, ids, got, upload):
            return State({key: row + upload.layers[key].mean(0) for key, row in state.theta.items()})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pfedla.layers import Layers, LayerSpec, change, kind_of
from pfedla.training import Task
from pfedla.wire import Payload

__all__ = ["RESOLVED", "Algorithm", "State"]

State = TypeVar("State")
RESOLVED = {"resolved": True}  # metadata of a field that `for_model` fills in and configuration does not show


@dataclass(frozen=True)
class Algorithm(ABC, Generic[State]):
    """A federated method: hyperparameters, and functions from state to state.

    State is a NamedTuple of tensors (and dictionaries of them). `update` may consume the state it is given;
    every other method leaves its arguments alone. `ids` are the clients behind the rows, without order.
    """

    def for_model(self, spec: LayerSpec) -> Algorithm[State]:  # noqa: ARG002
        """Return the algorithm with its settings resolved for a model (name patterns, say), or refuse them."""
        return self

    # ---- on the server

    @abstractmethod
    def init(self, theta: Layers, n: int, rng: torch.Generator) -> State:
        """Return the first state for `n` clients that start from the common model `theta`, `(1, numbers)`."""

    @abstractmethod
    def download(self, state: State, ids: Tensor) -> Payload:
        """Return what the server would send these clients now. Pure: call it as often as you like."""

    @abstractmethod
    def update(self, state: State, ids: Tensor, got: Payload, upload: Payload) -> State:
        """Return the next state, from what the clients `ids` got and what they sent back.

        Clients that dropped out are in none of the three. `got` is what `download` returned before they trained.
        """

    def inspect(self, state: State) -> dict[str, Tensor]:  # noqa: ARG002
        """Return what a researcher may want to watch over the rounds, by name."""
        return {}

    # ---- on the client

    def enroll(self, theta: Layers) -> Layers:
        """Return what a client keeps before its first round: by default the common model `theta`, `(1, numbers)`.

        A method that keeps more adds entries of its own kinds, `"conv1#control"`; `train` returns the same entries.
        """
        return theta

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Train locally; return what the client keeps and what it sends.

        What it keeps holds, under the layers' plain names, the client's model after local training.
        By default: SGD from what was received (else the client's own), and the change goes up.
        """
        received = got.fill(own)
        trained = task.fit(received)
        return trained, self.send(change(trained, received), task.examples)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:  # noqa: ARG002
        """Return the model that is scored and served: by default what was received, else the client's own."""
        return got.fill(own)

    # ---- on both

    def shares(self, layer: str) -> bool:  # noqa: ARG002
        """Say whether a layer ever leaves the client; it decides what `send` puts on the wire."""
        return True

    def send(self, layers: Layers, examples: Tensor | None = None) -> Payload:
        """Return a payload of all shared layers, in every row."""
        names = [key for key in layers if not kind_of(key)]
        rows = len(next(iter(layers.values())))
        sent = torch.tensor([[self.shares(name) for name in names]] * rows)  # (clients, layers)
        return Payload.of(layers, sent, names, examples)
