"""Sites in this process: a grid that hands every message, as bytes, to the app of the node it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tomli_w
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from pfedla.algorithm import Algorithm
from pfedla.codec import Codec
from pfedla.config import Experiment
from pfedla.flower import client_app
from pfedla.rounds import Schedule
from pfedla.training import Training

CODE = """
from tests import world


def model():
    return world.net({net!r})


def data(site):
    client = int(site.removeprefix("site-"))
    train, test = world.samples({n})[client], world.samples({n}, seed={test_seed})[client]
    return tuple(part for samples in (train, test) for part in arrays(samples))


def arrays(samples):
    x, y, image = samples.parts()
    return x.transpose(0, 3, 1, 2) if image else x, y
"""

Filter = Callable[[Message, Message], Message | None]  # (question, answer) -> what comes back, None if nothing does


def names(n: int) -> list[str]:
    return [f"site-{client}" for client in range(n)]


def deployment(
    folder: Path,
    algorithm: Algorithm[Any],
    n: int,
    *,
    net: str = "conv",
    test_seed: int = 0,
    schedule: Schedule | None = None,
    training: Training | None = None,
    codec: Codec | None = None,
    **deploy: Any,
) -> Path:
    """Write a deployment of the tests' tiny world: what `tests.world` simulates."""
    folder.mkdir(parents=True, exist_ok=True)
    training = training or Training(local_epochs=2, batch_size=4, lr=0.05)
    experiment = Experiment(algorithm, training=training, schedule=schedule or Schedule(seed=3), codec=codec or Codec())
    tables = {name: experiment.tables()[name] for name in ("algorithm", "training", "schedule", "codec")}
    settings = {"sites": names(n), "registered": False, "models": True, "patience": 0, "timeout": 5, **deploy}
    (folder / "pfedla.toml").write_text(tomli_w.dumps({"deploy": settings, **tables}))
    (folder / "site_code.py").write_text(CODE.format(net=net, n=n, test_seed=test_seed))
    return folder


class FakeGrid(Grid):
    """Nodes in this process. `change` sees every answer and may alter or lose it."""

    def __init__(self, app: Path, state: Path, n: int) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as in a ServerApp's process
        self.nodes: dict[int, dict[str, Any]] = {}  # node -> its configuration
        self.apps: dict[int, Path] = {}
        self.registered: dict[int, str] = {}  # node -> name
        self.change: Filter = lambda _, answer: answer
        self.messages: list[tuple[Message, Message | None]] = []  # all questions and answers
        self._replies: dict[str, Message | None] = {}
        for client, name in enumerate(names(n)):
            self.add(1000 - 7 * client, app, state, name)

    def add(self, node: int, app: Path, state: Path, name: str, registered: str = "", **config: Any) -> None:
        self.nodes[node] = {"site": name, "state": str(state / str(node)), **config}
        self.apps[node], self.registered[node] = app, registered

    def node_of(self, client: int) -> int:
        return 1000 - 7 * client

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, name=self.registered[node]) for node in self.nodes]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = []
        for message in messages:
            identity = f"message-{len(self.messages)}"
            message.metadata.__dict__["_message_id"] = identity
            answer = self._deliver(_through_bytes(message))
            self.messages.append((message, answer))
            self._replies[identity] = answer
            sent.append(identity)
        return sent

    def _deliver(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        context = Context(1, node, self.nodes[node], RecordDict(), {})
        try:
            answer = client_app(self.apps[node])(message, context)
        except Exception as error:
            answer = Message(Error(2, type(error).__name__), reply_to=message)
        return self.change(message, _through_bytes(answer))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = [self._replies.pop(identity, None) for identity in list(message_ids)]
        return [answer for answer in found if answer is not None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError


def _through_bytes(message: Message) -> Message:
    """Return what is left of a message after it was sent."""
    sent = message_to_proto(message).SerializeToString()
    kind = type(message_to_proto(message))
    received: Message = message_from_proto(kind.FromString(sent))
    return received
