"""The protocol behind every method: five functions, no loop.

A round is `download -> train at the clients -> update`; an evaluation is `personalize`. The same object runs
both halves, in the simulator and on a device. A complete method, averaging with one shared model::

    class State(NamedTuple):
        theta: Layers  # (1, values)

    @dataclass(frozen=True)
    class Average(Algorithm[State]):
        def init(self, theta, n, rng):
            return State(bank(theta, 1))  # one row of all that travels

        def download(self, state, ids):
            return self.send({key: row.expand(len(ids), -1) for key, row in state.theta.items()})

        def update(self, state, ids, got, upload):
            return State({key: row + upload.layers[key].mean(0) for key, row in state.theta.items()})

A method that sends a value beside the layers names it, `self.send(layers, strength=state.strength[ids])`, and the other
side reads `got.values["strength"]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from pfedla.errors import ConfigError
from pfedla.layers import Layers, LayerSpec, change, kind_of
from pfedla.settings import Settings
from pfedla.training import Task, Training
from pfedla.wire import Payload

__all__ = ["Algorithm", "State"]

State = TypeVar("State")
T = TypeVar("T")


@dataclass(frozen=True)
class Algorithm(Settings, ABC, Generic[State]):
    """A federated method: hyperparameters, and functions from state to state.

    State is a NamedTuple of tensors (and dictionaries of them). `update` may consume the state it is given;
    every other method leaves its arguments alone. `ids` are the clients behind the rows, without order.
    """

    section: ClassVar[str] = "algorithm"
    uploads_changes: ClassVar[bool] = True  # False: clients send models, which a codec must not take for changes
    renews_statistics: ClassVar[bool] = False  # True: running statistics are found anew at the client, none is needed

    def for_model(self, spec: LayerSpec) -> Algorithm[State]:  # noqa: ARG002
        """Return the algorithm with its settings resolved for a model (name patterns, say), or refuse them.

        What is to be resolved is a field with `metadata=RESOLVED`, None until then, and read through `resolved`.
        """
        return self

    def check(self, training: Training, n: int) -> None:
        """Refuse settings that do not go with how clients train, or with how many they are, before any work."""

    def resolved(self, value: T | None) -> T:
        """Return a field that `for_model` fills in; refuse a method that has not met its model."""
        if value is None:
            raise ConfigError(f"{type(self).__name__} does not know its model yet: use what for_model(spec) returns")
        return value

    # ---- on the server

    @abstractmethod
    def init(self, theta: Layers, n: int, rng: torch.Generator) -> State:
        """Return the first state for `n` clients that start from the common model `theta`, `(1, values)`."""

    @abstractmethod
    def download(self, state: State, ids: Tensor) -> Payload:
        """Return what the server would send these clients now. Pure: call it as often as you like."""

    @abstractmethod
    def update(self, state: State, ids: Tensor, got: Payload, upload: Payload) -> State:
        """Return the next state, from what the clients `ids` got and what they sent back.

        Clients that dropped out are in none of the three. `got` is what `download` returned before they trained, as
        the clients unpacked it.
        """

    def known(self, state: State, ids: Tensor) -> Layers:  # noqa: ARG002
        """Return what the server knows of the models that these clients keep, for those that lost theirs.

        By default nothing: what such a client is not sent, it begins anew.
        """
        return {}

    def admit(self, state: State, rng: torch.Generator) -> State:  # noqa: ARG002
        """Return the state with one more client, numbered last; what it holds of the others is as it was.

        By default nobody is admitted.
        """
        raise ConfigError(f"{type(self).__name__} has no place for a client that joins later")

    def attract(self, state: State, client: int, downhill: Layers, step: float, *, by_layer: bool) -> State:  # noqa: ARG002
        """Let the direction in which a newcomer's loss falls, from the model it is served, say from whom it learns.

        `step` is how far at most, in each layer by itself (`by_layer`) or in the one that matters most. By default
        nothing changes: there is nothing to choose.
        """
        return state

    def diagnostics(self, state: State) -> dict[str, Tensor]:  # noqa: ARG002
        """Return diagnostics to be recorded over the rounds, by name; weights are `alpha`."""
        return {}

    # ---- on the client

    def enroll(self, theta: Layers) -> Layers:
        """Return what a client keeps before its first round: by default the common model `theta`, `(1, values)`.

        A method that keeps more adds entries of its own kinds, `"conv1#control"`, or values, `"#alpha"`; `train`
        returns the same entries.
        """
        return theta

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Train locally; return what the client keeps and what it sends.

        What it keeps holds, under the layers' plain names, the client's model after local training.
        By default: SGD from what was received (else the client's own), and the change goes up.
        """
        received = got.fill(own)
        trained = task.fit(received)
        return trained, self.send(change(trained, received), examples=task.examples)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:  # noqa: ARG002
        """Return the model that is scored and served: by default what was received, else the client's own."""
        return got.fill(own)

    # ---- on both

    def shares(self, layer: str) -> bool:  # noqa: ARG002
        """Say whether a layer ever leaves the client; it decides what `send` puts on the wire."""
        return True

    def uploads(self, layer: str) -> bool:
        """Say whether every client sends this layer up; an upload without it is refused. By default what is shared."""
        return self.shares(layer)

    @property
    def starts_from_received(self) -> bool:
        """Whether training starts from what was received, as by default: then the server knows where a change leads."""
        return type(self).train is Algorithm.train

    @property
    def uploads_beside(self) -> tuple[str, ...]:
        """The values, and kinds of entries, that clients send up beside changes, statistics and examples."""
        return ()

    @property
    def value_ranges(self) -> dict[str, tuple[float, float]]:
        """The least and the most that values in an upload may be, by name; others are refused."""
        return {}

    @property
    def tells_steps(self) -> bool:
        """Whether uploads may tell how many steps a client took; so does, if nothing else is said, all beside them."""
        return bool(self.uploads_beside)

    def send(self, layers: Layers, **values: Tensor) -> Payload:
        """Return a payload of all shared layers and of named values `(clients, ...)`, in every row."""
        names = [key for key in layers if not kind_of(key)]
        rows = len(next(iter(layers.values())))
        sent = torch.tensor([[self.shares(name) for name in names]] * rows)  # (clients, layers)
        return Payload.of(layers, sent, names, **values)
