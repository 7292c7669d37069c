"""What every method keeps to. A new one is included by being in `ALGORITHMS`."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pfedla import tensorfile
from pfedla.algorithm import Algorithm
from pfedla.algorithms import (
    FedBN,
    FedPer,
    FedRep,
    LGFedAvg,
)
from pfedla.algorithms.fedavg import PersonalLayers
from pfedla.client import Kept, Setting
from pfedla.codec import Codec
from pfedla.errors import ConfigError
from pfedla.fleet import Fleet
from pfedla.layers import COUNTERS, Layers, kind_of, layer_of
from pfedla.ledger import Ledger
from pfedla.rounds import Server, run_round
from pfedla.training import ClientData, Task
from pfedla.tree import flatten, restore
from pfedla.wire import Payload, decode, encode
from tests.world import (
    METHODS,
    Played,
    WireFleet,
    data,
    download,
    fleet_of,
    play,
    same,
    server_of,
    setting,
    task_of,
    theta_of,
)

N = 7  # a prime: what has a multiple of 7 rows has rows of clients
ROUNDS = [[0, 1, 4], [1, 2, 6]]
IDS = [1, 4, 6]
ABSENT = [i for i in range(N) if i not in IDS]

CODECS = {"as they are": Codec(), "float16": Codec("float16", "float16"), "int8": Codec("int8", "int8")}
FLEETS: dict[str, Callable[[Setting, dict[int, ClientData]], Fleet]] = {"simulated": fleet_of, "bytes": WireFleet}


@cache
def after_rounds(algorithm: Algorithm[Any], where: str = "simulated", codec: str = "as they are") -> Played:
    """Return a federation in which some clients trained; it is made once, to be copied and never changed."""
    return play(algorithm, ROUNDS, N, fleet=FLEETS[where], codec=CODECS[codec])


@dataclass
class Case:
    """A federation in which some clients trained, and what three of them send next."""

    setting: Setting
    state: Any
    own: Layers

    @classmethod
    def of(cls, algorithm: Algorithm[Any]) -> Case:
        played = after_rounds(algorithm)
        return cls(played.setting, copy.deepcopy(played.state), copy.deepcopy(played.own))

    @property
    def algorithm(self) -> Algorithm[Any]:
        return self.setting.algorithm

    def task(self, ids: list[int]) -> Task:
        return task_of(self.setting, ids, t=len(ROUNDS) + 1, clients=N)

    def download(self, ids: list[int]) -> Payload:
        return self.algorithm.download(self.state, torch.tensor(ids))

    def train(self, ids: list[int]) -> tuple[Layers, Payload]:
        return self.algorithm.train(self.rows(ids), self.download(ids), self.task(ids))

    def update(self, ids: list[int], upload: Payload) -> Any:
        return self.algorithm.update(self.state, torch.tensor(ids), self.download(ids), upload)

    def rows(self, ids: list[int]) -> Layers:
        return {key: rows[ids] for key, rows in self.own.items()}

    def server(self) -> Server:
        return Server(self.state, Ledger(self.setting.spec.names), t=len(ROUNDS))

    def devices(self) -> WireFleet:
        """Return all clients as machines of their own."""
        fleet = WireFleet(self.setting, data(N))
        for client, device in fleet.devices.items():
            device.kept = Kept(self.rows([client]), torch.tensor([sum(client in ids for ids in ROUNDS)]))
        return fleet


def rows_of(value: object, index: list[int]) -> dict[str, Tensor]:
    """Return the rows of some clients, of all that has rows of clients."""
    return {k: x.reshape(N, -1)[index] for k, x in flatten(value).items() if x.dim() and len(x) and len(x) % N == 0}


def own_of(fleet: Fleet) -> Layers:
    """Return what the clients of a fleet keep, copied."""
    return copy.deepcopy(fleet.own() if isinstance(fleet, WireFleet) else fleet.snapshot().own)


# ---- on the server


def test_init_does_not_change_or_keep_the_common_model(algorithm: Algorithm[Any]) -> None:
    made = setting(algorithm)
    theta = theta_of(made)
    before, state = copy.deepcopy(theta), made.algorithm.init(theta, N, torch.Generator())
    same(theta, before)
    for tensor in theta.values():
        tensor.fill_(9)
    same(state, made.algorithm.init(before, N, torch.Generator()))


def test_reading_methods_leave_their_arguments_alone(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    state, own, got = copy.deepcopy(case.state), case.rows(IDS), case.download(IDS)
    own_before, got_before = copy.deepcopy(own), copy.deepcopy(got)
    case.algorithm.train(own, got, case.task(IDS))
    case.algorithm.personalize(own, got, case.task(IDS))
    case.algorithm.diagnostics(case.state)
    same(case.state, state)
    same(own, own_before)
    same(got, got_before)


def test_update_leaves_what_crossed_the_wire_alone(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    _, upload = case.train(IDS)
    got = copy.deepcopy(case.download(IDS))  # it may hold views of the state
    before = copy.deepcopy(got), copy.deepcopy(upload)
    case.algorithm.update(case.state, torch.tensor(IDS), got, upload)
    same(got, before[0])
    same(upload, before[1])


def test_download_is_pure(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    same(case.download(IDS), case.download(IDS))


def test_diagnostics_do_not_change_with_later_rounds(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    seen = case.algorithm.diagnostics(case.state)
    before = copy.deepcopy(seen)
    case.update(IDS, case.train(IDS)[1])
    same(seen, before)


def test_rows_of_absent_clients_are_unchanged_by_update(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    before = copy.deepcopy(rows_of(case.state, ABSENT))
    after = case.update(IDS, case.train(IDS)[1])
    same(rows_of(after, ABSENT), before)


def test_the_order_of_clients_does_not_matter(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    order, (_, upload) = [2, 0, 1], case.train(IDS)
    shuffled = [IDS[i] for i in order]
    got = case.download(IDS)
    one = case.algorithm.update(copy.deepcopy(case.state), torch.tensor(IDS), got, upload)
    other = case.algorithm.update(
        copy.deepcopy(case.state), torch.tensor(shuffled), got.rows(order), upload.rows(order)
    )
    same(one, other, atol=1e-6)
    same(case.download(IDS).rows(order), case.download(shuffled), atol=1e-6)


def test_state_survives_a_checkpoint(algorithm: Algorithm[Any], tmp_path: Path) -> None:
    case = Case.of(algorithm)
    with (tmp_path / "state.safetensors").open("wb") as file:
        tensorfile.write(file, flatten(case.state))
    loaded = restore(server_of(case.setting, N, seed=1).state, load_file(tmp_path / "state.safetensors"))
    assert type(loaded) is type(case.state)
    same(loaded, case.state)
    same(case.algorithm.download(loaded, torch.tensor(IDS)), case.download(IDS))


def test_types_and_shapes_of_the_state_are_stable(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    fresh = {key: (x.shape, x.dtype) for key, x in flatten(server_of(case.setting, N).state).items()}
    assert fresh == {key: (x.shape, x.dtype) for key, x in flatten(case.state).items()}


# ---- at the clients


def test_one_client_at_a_time_equals_many_at_once(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    own, got = case.rows(IDS), case.download(IDS)
    kept, upload = case.algorithm.train(own, got, case.task(IDS))
    personalized = case.algorithm.personalize(own, got, case.task(IDS))
    alone = []
    for row, client in enumerate(IDS):
        mine, mine_got = case.rows([client]), got.rows([row])
        kept_alone, upload_alone = case.algorithm.train(mine, mine_got, case.task([client]))
        same(kept_alone, {key: rows[[row]] for key, rows in kept.items()})
        model = case.algorithm.personalize(mine, mine_got, case.task([client]))
        same(model, {key: rows[[row]] for key, rows in personalized.items()})
        alone.append(upload_alone)
    same(Payload.stack(alone), upload)


def test_the_personalized_model_is_complete(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    personalized = case.algorithm.personalize(case.rows(IDS), case.download(IDS), case.task(IDS))
    for key in case.setting.spec.slots:
        assert torch.isfinite(personalized[key]).all(), key


def test_what_a_client_keeps_is_what_it_enrolled_with(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    first = {key: (rows.shape[1:], rows.dtype) for key, rows in case.setting.enroll().own.items()}
    assert {key: (rows.shape[1:], rows.dtype) for key, rows in case.train(IDS)[0].items()} == first
    assert set(case.setting.spec.slots) <= set(first)


# ---- on the wire


@pytest.mark.parametrize("direction", ["down", "up"])
def test_payloads_hold_what_they_say_and_nothing_else(algorithm: Algorithm[Any], direction: str) -> None:
    case = Case.of(algorithm)
    payload = case.download(IDS) if direction == "down" else case.train(IDS)[1]
    assert payload.names == case.setting.spec.names
    assert payload.sent.shape == (len(IDS), len(payload.names))
    assert payload.sent.dtype == torch.bool
    for key, rows in payload.layers.items():
        assert kind_of(key) != COUNTERS
        assert rows.is_floating_point()
        sent = payload.sent[:, payload.names.index(layer_of(key))]
        assert torch.isfinite(rows[sent]).all(), key
        assert rows[~sent].isnan().all(), key
    for name, column in zip(payload.names, payload.sent.T, strict=True):
        assert (name in payload.layers) or not column.any()
    for name, values in payload.values.items():
        assert len(values) == len(IDS), name
        assert torch.isfinite(values).all(), name


def test_uploads_count_the_clients_examples(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    upload = case.train(IDS)[1]
    assert upload.examples.tolist() == case.task(IDS).examples.tolist()


@pytest.mark.parametrize("direction", ["down", "up"])
def test_a_payload_survives_the_wire(algorithm: Algorithm[Any], direction: str) -> None:
    case = Case.of(algorithm)
    payload = case.download(IDS) if direction == "down" else case.train(IDS)[1]
    for row in range(len(IDS)):
        mine = payload.rows([row])
        back = decode(encode(mine), case.setting.spec.names)
        assert back.names == mine.names
        sent = {name for name, yes in zip(mine.names, mine.sent[0].tolist(), strict=True) if yes}
        same(back, mine._replace(layers={key: rows for key, rows in mine.layers.items() if layer_of(key) in sent}))
        own = case.rows([IDS[row]])
        same(back.fill(own), mine.fill(own))


# ---- in rounds


@pytest.mark.parametrize("codec", CODECS)
def test_messages_in_bytes_answered_one_by_one_in_any_order_change_nothing(
    algorithm: Algorithm[Any], codec: str
) -> None:
    here, apart = (after_rounds(algorithm, where, codec) for where in FLEETS)
    same(apart.state, here.state)
    same(own_of(apart.fleet), here.own)
    same(apart.personalized(), here.personalized())
    sent = here.sent(IDS)
    scores, others = (played.fleet.evaluate(IDS, sent, played.server.t).by_client for played in (here, apart))
    assert list(scores) == IDS
    assert scores == others
    ledger, other = here.server.ledger.arrays(), apart.server.ledger.arrays()
    assert list(ledger) == list(other)
    for key, values in ledger.items():
        assert np.array_equal(values, other[key]), key


@pytest.mark.parametrize("codec", CODECS)
def test_the_ledger_counts_every_byte_of_the_messages(algorithm: Algorithm[Any], codec: str) -> None:
    played, counted = after_rounds(algorithm, "bytes", codec), {}
    lines = played.server.ledger.arrays()
    for line, (t, client) in enumerate(zip(lines["round"].tolist(), lines["client"].tolist(), strict=True)):
        for way in ("down", "up"):
            parts = [values[line].sum() for key, values in lines.items() if key == way or key.startswith(f"{way}:")]
            counted[t, client, way] = int(sum(parts))
    assert isinstance(played.fleet, WireFleet)
    assert counted == {(t, client, way): len(message) for t, client, way, message in played.fleet.messages}


@pytest.mark.parametrize("where", FLEETS)
def test_what_absent_clients_keep_is_unchanged_by_a_round(algorithm: Algorithm[Any], where: str) -> None:
    case = Case.of(algorithm)
    fleet = FLEETS[where](case.setting, data(N))
    before = own_of(fleet)
    kept, _ = case.algorithm.train({k: x[IDS] for k, x in before.items()}, case.download(IDS), case.task(IDS))
    run_round(case.algorithm, case.server(), fleet, IDS)
    after = own_of(fleet)
    same({key: rows[ABSENT] for key, rows in after.items()}, {key: rows[ABSENT] for key, rows in before.items()})
    same({key: rows[IDS] for key, rows in after.items()}, kept)
    assert all(not torch.equal(after[key][i], before[key][i]) for key in case.setting.spec.slots for i in IDS)


def test_a_round_that_some_do_not_answer_is_one_of_those_that_do(algorithm: Algorithm[Any]) -> None:
    case, answered, places = Case.of(algorithm), [1, 6], [0, 2]
    server, fleet, got = case.server(), case.devices(), copy.deepcopy(case.download(IDS))
    kept, upload = case.algorithm.train(case.rows(answered), got.rows(places), case.task(answered))
    ids = torch.tensor(answered)
    state = case.algorithm.update(copy.deepcopy(case.state), ids, got.rows(places), upload)
    fleet.lost = (4,)
    assert run_round(case.algorithm, server, fleet, IDS) == {4: "out of reach"}
    assert server.t == 3
    same(server.state, state)
    after, others = own_of(fleet), [i for i in range(N) if i not in answered]
    same({key: rows[answered] for key, rows in after.items()}, kept)
    same({key: rows[others] for key, rows in after.items()}, case.rows(others))
    lines = server.ledger.arrays()
    assert lines["client"].tolist() == IDS
    assert np.array_equal(lines["down"], got.layer_bytes())  # it was sent to all of them
    assert np.array_equal(lines["down:header"], got.header_bytes())
    assert np.array_equal(lines["up"][places], upload.layer_bytes())
    assert not any(lines[key][1].any() for key in lines if key.startswith("up"))


def test_a_round_that_nobody_answers_leaves_the_state_as_it_was(algorithm: Algorithm[Any]) -> None:
    case = Case.of(algorithm)
    server, fleet, got = case.server(), case.devices(), copy.deepcopy(case.download(IDS))
    state = copy.deepcopy(case.state)
    fleet.lost = tuple(IDS)
    assert run_round(case.algorithm, server, fleet, IDS) == dict.fromkeys(IDS, "out of reach")
    assert server.t == 3
    same(server.state, state)
    same(own_of(fleet), case.own)
    assert (server.ledger.down, server.ledger.up) == (int(got.layer_bytes().sum()), 0)
    beside = int(got.header_bytes().sum()) + len(IDS) * sum(got.value_bytes().values())
    assert (server.ledger.overhead_down, server.ledger.overhead_up) == (beside, 0)
    fleet.lost = ()
    assert run_round(case.algorithm, server, fleet, IDS) == {}  # the rounds go on
    assert server.t == 4
    assert server.ledger.arrays()["round"].tolist() == [3, 3, 3, 4, 4, 4]
    assert all(not torch.equal(own_of(fleet)[key][IDS], case.rows(IDS)[key]) for key in case.setting.spec.slots)


# ---- before and after a method knows its model

UNRESOLVED = [FedPer, FedRep, FedBN, LGFedAvg]


def test_the_methods_that_have_to_know_their_model_are_these() -> None:
    made = {type(make()) for make in METHODS.values()}
    found = {kind for kind in made if any("resolved" in field.metadata for field in dataclasses.fields(kind))}
    assert found == set(UNRESOLVED)


@pytest.mark.parametrize("kind", UNRESOLVED)
def test_a_method_that_does_not_know_its_model_is_refused_and_one_that_does_works(kind: type[Algorithm[Any]]) -> None:
    made, refused = setting(kind()), f"{kind.__name__} does not know its model yet: use what for_model(spec) returns"
    state, ids = server_of(made, N).state, torch.tensor(IDS)
    with pytest.raises(ConfigError, match=re.escape(refused)):
        kind().download(state, ids)
    assert made.algorithm.download(state, ids).sent.any()
    assert made.algorithm == setting(made.algorithm).algorithm  # to resolve it again changes nothing
    case = Case(made, state, {key: rows.repeat(N, 1) for key, rows in made.enroll().own.items()})
    with pytest.raises(AssertionError):
        same(case.update(IDS, case.train(IDS)[1]), server_of(made, N).state)


@pytest.mark.parametrize("kind", [kind for kind in UNRESOLVED if issubclass(kind, PersonalLayers)])
def test_a_method_that_does_not_know_its_model_sends_nothing(kind: type[Algorithm[Any]]) -> None:
    made = setting(kind())
    got, task = download(made, IDS, N), task_of(made, IDS, clients=N)
    own = {key: rows.repeat(len(IDS), 1) for key, rows in made.enroll().own.items()}
    for use in (lambda: kind().send(theta_of(made)), lambda: kind().shares("fc"), lambda: kind().train(own, got, task)):
        with pytest.raises(ConfigError, match="does not know its model yet"):
            use()
    assert 0 < len(made.algorithm.send(theta_of(made)).layers) < len(theta_of(made))
