"""A tiny world for every test: two small networks, samples, settings, fleets, rounds, and exact comparison."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from pfedla.algorithm import Algorithm
from pfedla.algorithms import ALGORITHMS, APFL, Clustered, PFedLAPeers, PFedLAX, PFedLAXPeers
from pfedla.algorithms.pfedla_x_hyper import PFedLAXHyper
from pfedla.client import Evaluation, Job, Runtime, Setting
from pfedla.codec import Codec
from pfedla.engine import FlatModel
from pfedla.fleet import Answers, Fleet, Judge, SimulatedFleet
from pfedla.layers import Layers, LayerSpec
from pfedla.ledger import Ledger
from pfedla.pool import local_pool
from pfedla.randomness import stream
from pfedla.record import RunRecord
from pfedla.result import Result
from pfedla.rounds import Outcome, Schedule, Server, Watch, run, run_round
from pfedla.training import ClientData, Samples, Task, Training
from pfedla.tree import flatten
from pfedla.wire import Payload, decode, encode

CLASSES = 3

METHODS: dict[str, Callable[[], Algorithm[Any]]] = {
    **ALGORITHMS,
    "apfl-adaptive": lambda: APFL(adaptive=True),
    "clustered": lambda: Clustered(groups=2),
    "pfedla-peers": lambda: PFedLAPeers(peers=2, refresh=2),
    "heurpfedla-peers": lambda: PFedLAPeers(peers=2, refresh=2, retain=1),
    "pfedla-x-hold": lambda: PFedLAX(hold=1),
    "pfedla-x-peers": lambda: PFedLAXPeers(hold=1, peers=2, refresh=2),
    "pfedla-x-hyper": lambda: PFedLAXHyper(hold=1),
}
"""Every method, with its default settings; and variants with a path of their own."""


class TinyConv(nn.Module):
    """Convolution, batch norm, dropout and a linear head, for images of 6x6."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(3 * 4 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.drop(self.bn(self.conv(x)).relu().flatten(1)))
        return out


class TinyMLP(nn.Module):
    """Two linear layers, for images of 6x6 taken flat."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2 * 6 * 6, 5)
        self.fc2 = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return out


def net(name: str = "conv") -> nn.Module:
    """Make one of the tiny networks, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return TinyConv() if name == "conv" else TinyMLP()


def samples(clients: int, count: int = 7, seed: int = 0) -> list[Samples]:
    """Make clients' samples: each sees two classes, moved apart, and has a number of samples of its own."""
    rng = np.random.default_rng(seed)
    made = []
    for client in range(clients):
        y = (rng.integers(0, 2, count + client) + client) % CLASSES
        x = rng.normal(size=(len(y), 2, 6, 6)) + y[:, None, None, None]
        made.append(Samples(x.astype(np.float32), y))
    return made


def data(clients: int, count: int = 7, test_seed: int = 0) -> dict[int, ClientData]:
    """Make clients' training and test data; with the default seed they are the same."""
    pairs = zip(samples(clients, count), samples(clients, count, test_seed), strict=True)
    return {client: ClientData(*pair) for client, pair in enumerate(pairs)}


def setting(
    algorithm: Algorithm[Any], name: str = "conv", seed: int = 3, codec: Codec | None = None, **training: Any
) -> Setting:
    """Make a setting around an algorithm; keywords go to `Training`."""
    template = net(name)
    spec = LayerSpec.of(template)
    how = Training(**{"local_epochs": 2, "batch_size": 4, "lr": 0.05, **training})
    return Setting(template, spec, algorithm.for_model(spec), how, seed, codec=codec or Codec())


def task_of(made: Setting, ids: list[int], t: int = 1, clients: int = 7) -> Task:
    """Make the task of some clients in a round."""
    everybody = samples(clients)
    model = FlatModel(copy.deepcopy(made.template), made.spec)
    return Task(model, [everybody[i] for i in ids], ids, made.training, made.seed, t)


def by_hand(task: Task, theta: Layers) -> tuple[list[Any], Callable[[np.ndarray, Any], np.ndarray]]:
    """Give the batches that a task draws for its first client, and the loss's gradient at any weights on one."""
    batches: list[Any] = []
    task.each(theta, lambda row, _, drawn: None if row else batches.extend(drawn))

    def gradient(w: np.ndarray, batch: Any) -> np.ndarray:
        task.model.weights.copy_(torch.from_numpy(w))
        return task.model.backward(*batch).numpy().copy()

    return batches, gradient


def theta_of(made: Setting) -> Layers:
    """Return the common first model, `(1, values)`."""
    return made.spec.read(made.template)


def server_of(made: Setting, n: int, seed: int = 0) -> Server:
    """Make a server before its first round."""
    state = made.algorithm.init(theta_of(made), n, stream(seed, "init"))
    return Server(state, Ledger(made.spec.names), coding=made.coding)


def fleet_of(made: Setting, clients: dict[int, ClientData], workers: int = 0) -> SimulatedFleet:
    """Make a fleet on this machine."""
    return SimulatedFleet(made, clients, local_pool(made, clients, workers))


def download(made: Setting, ids: Sequence[int], n: int = 4) -> Payload:
    """Return what clients are sent in the first round, packed."""
    return made.coding.pack(made.algorithm.download(server_of(made, n).state, torch.tensor(ids)), "down", ids, 1)


def uploads(fleet: Fleet, made: Setting, ids: Sequence[int], t: int = 1, n: int = 4) -> Payload:
    """Return what clients send back if the first round's models are sent to them, client after client."""
    return Payload.stack(list(fleet.train(ids, download(made, ids, n), t).by_client.values()))


@dataclass
class Played:
    """A federation after some rounds."""

    setting: Setting
    server: Server
    fleet: Fleet
    n: int

    @property
    def state(self) -> Any:
        """The server's state."""
        return self.server.state

    @property
    def own(self) -> Layers:
        """What all clients keep, of a simulated fleet."""
        assert isinstance(self.fleet, SimulatedFleet)
        return self.fleet.kept.own

    def sent(self, ids: list[int]) -> Payload:
        """Return what clients would be sent now, packed."""
        payload = self.setting.algorithm.download(self.state, torch.tensor(ids))
        return self.setting.coding.pack(payload, "down", ids, self.server.t + 1)

    def personalized(self) -> Layers:
        """Return all clients' personalized models."""
        ids = list(range(self.n))
        rows = list(self.fleet.personalize(ids, self.sent(ids), self.server.t).by_client.values())
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def play(
    algorithm: Algorithm[Any] | Setting,
    rounds: Iterable[list[int]] = ([0, 1], [1, 2]),
    n: int = 3,
    name: str = "conv",
    fleet: Callable[[Setting, dict[int, ClientData]], Fleet] = fleet_of,
    **training: Any,
) -> Played:
    """Play rounds with these clients."""
    made = algorithm if isinstance(algorithm, Setting) else setting(algorithm, name, **training)
    played = Played(made, server_of(made, n), fleet(made, data(n)), n)
    for ids in rounds:
        run_round(made.algorithm, played.server, played.fleet, ids)
    played.fleet.close()
    return played


def outcome_of(
    algorithm: Algorithm[Any] | Setting,
    record: RunRecord | None = None,
    watch: Watch | None = None,
    *,
    fleet: Callable[[Setting, dict[int, ClientData]], Fleet] = fleet_of,
    checkpoint_every: int | None = None,
    **schedule: Any,
) -> Outcome:
    """Run the loop with 4 clients, 3 of them in each of 6 rounds; keywords go to `Schedule`."""
    made, n = algorithm if isinstance(algorithm, Setting) else setting(algorithm), 4
    when = Schedule(**{"rounds": 6, "participants": 3, "eval_every": 2, **schedule})
    with closing(fleet(made, data(n, test_seed=9))) as clients:
        return run(made, clients, n, when, record, watch, checkpoint_every=checkpoint_every)


def shared_and_own(algorithm: Algorithm[Any]) -> tuple[set[str], Layers, Layers]:
    """Return what a method of averaged and personal layers does in a round of three clients.

    The entries that are sent, found to be everybody's weighted mean; the personalized models; and the clients' own.
    """
    ids = [0, 1, 2]
    played, everybody = play(algorithm, [ids]), samples(3)
    shared = set(played.setting.algorithm.download(played.state, torch.tensor(ids)).layers)
    personalized = played.personalized()
    for key in shared:
        expected = np.zeros(played.own[key].shape[1])
        for client in ids:
            expected += len(everybody[client]) / sum(map(len, everybody)) * played.own[key][client].numpy()
        for client in ids:
            np.testing.assert_allclose(personalized[key][client].numpy(), expected, atol=1e-6)
    return shared, personalized, played.own


class Device:
    """A client as a machine of its own: what it keeps never leaves it, and what it is sent and sends are bytes."""

    def __init__(self, made: Setting, client: int, mine: ClientData) -> None:
        self.client, self.names = client, made.spec.names
        self.runtime, self.kept, self.staged = Runtime(made, {client: mine}), made.enroll(), made.enroll()

    def ask(self, kind: Any, message: bytes, t: int) -> Any:
        answer = self.runtime.run(Job(kind, self.client, t, self.kept, decode(message, self.names)))
        if kind == "train":
            self.staged, upload = answer
            return encode(upload)
        return json.dumps(answer).encode() if kind == "evaluate" else to_safetensors(answer)


class WireFleet:
    """A fleet of devices that are asked in random order, one at a time; every message is encoded and decoded."""

    forgot: Collection[int] = ()

    def __init__(self, made: Setting, clients: dict[int, ClientData], lost: tuple[int, ...] = ()) -> None:
        self.names = made.spec.names
        self.lost = lost  # who never answers
        self.devices = {client: Device(made, client, mine) for client, mine in clients.items()}
        self.answered: list[int] = []
        self.messages: list[tuple[int, int, str, bytes]] = []

    def _ask(self, kind: Any, ids: Sequence[int], sent: Payload, t: int) -> dict[int, Any]:
        answers = {}
        for row in np.random.default_rng(t).permutation(len(ids)).tolist():
            message = encode(sent.rows([row]))
            if kind == "train":
                self.messages.append((t, ids[row], "down", message))
            if ids[row] not in self.lost:
                answers[ids[row]] = self.devices[ids[row]].ask(kind, message, t)
        return dict(sorted(answers.items()))

    def train(self, ids: Sequence[int], sent: Payload, t: int, judge: Judge | None = None) -> Any:
        replies = self._ask("train", ids, sent, t)
        self.answered = list(replies)
        self.messages += [(t, client, "up", reply) for client, reply in replies.items()]
        return self._answers(ids, {client: decode(reply, self.names) for client, reply in replies.items()})

    def evaluate(self, ids: Sequence[int], sent: Payload, t: int) -> Any:
        replies = self._ask("evaluate", ids, sent, t)
        return self._answers(ids, {client: Evaluation(*json.loads(reply)) for client, reply in replies.items()})

    def personalize(self, ids: Sequence[int], sent: Payload, t: int) -> Any:
        replies = self._ask("personalize", ids, sent, t)
        return self._answers(ids, {client: from_safetensors(reply) for client, reply in replies.items()})

    def _answers(self, ids: Sequence[int], by_client: dict[int, Any]) -> Any:
        return Answers(by_client, {client: "out of reach" for client in ids if client in self.lost})

    def commit(self, clients: Collection[int] | None = None) -> None:
        for client in self.answered if clients is None else clients:
            self.devices[client].kept = self.devices[client].staged
        self.answered = []

    def snapshot(self) -> dict[str, Tensor]:
        return {}  # what clients keep lies with them

    def restore(self, snapshot: Any) -> None:
        assert snapshot == {}

    def close(self) -> None:
        pass

    def own(self) -> Layers:
        """Return what all clients keep, to be compared with a simulated fleet's."""
        rows = [device.kept.own for device in self.devices.values()]
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def same(one: object, other: object, atol: float = 0.0) -> None:
    """Compare nested tensors by path, exactly unless a tolerance is given; blanks equal blanks."""
    a, b = _flat(one), _flat(other)
    assert sorted(a) == sorted(b)
    for key in a:
        assert (a[key].shape, a[key].dtype) == (b[key].shape, b[key].dtype), key
        assert torch.allclose(a[key], b[key], rtol=0, atol=atol, equal_nan=True), key


def _flat(value: object) -> dict[str, Tensor]:
    if isinstance(value, Payload):
        value = {"layers": value.layers, "sent": value.sent, "values": value.values}
    return flatten(value)


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record or a summary without what the clock decides."""
    return {key: value for key, value in record.items() if key not in ("seconds", "samples_per_second")}


def same_outcome(one: Outcome | Result, other: Outcome | Result) -> None:
    """Compare what two runs measured and ended with, in everything but time."""
    same(one.personalized, other.personalized)
    assert list(map(timeless, one.history)) == list(map(timeless, other.history))
    for pair in ((one.diagnostics, other.diagnostics), (one.ledger.arrays(), other.ledger.arrays())):
        assert list(pair[0]) == list(pair[1])
        for key, values in pair[0].items():
            assert values.dtype == pair[1][key].dtype, key
            assert np.array_equal(values, pair[1][key]), key


def same_result(one: Result, other: Result) -> None:
    """Compare two runs in everything but time."""
    same_outcome(one, other)
    assert timeless(one.summary) == timeless(other.summary)
