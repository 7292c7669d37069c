"""What every method keeps to. A new one is included by being in `ALGORITHMS`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.checkpoint import load_tensors, restore, save_tensors, tensors_of
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.layers import COUNTERS, Layers, kind_of, layer_of
from pfedla.ledger import Ledger
from pfedla.randomness import stream
from pfedla.rounds import Server, run_round
from pfedla.training import Samples, Task
from pfedla.wire import Payload, decode, encode

N = 7  # a prime: what has a multiple of 7 rows has rows of clients
IDS = [1, 4, 6]

Same = Callable[..., None]


@dataclass
class Case:
    """A federation in which some clients trained, and what three of them send next."""

    algorithm: Algorithm[Any]
    setting: Setting
    state: Any
    own: Layers
    task: Callable[[list[int]], Task]

    def download(self, ids: list[int]) -> Payload:
        return self.algorithm.download(self.state, torch.tensor(ids))

    def train(self, ids: list[int]) -> tuple[Layers, Payload]:
        return self.algorithm.train(self.rows(ids), self.download(ids), self.task(ids))

    def update(self, ids: list[int], upload: Payload) -> Any:
        return self.algorithm.update(self.state, torch.tensor(ids), self.download(ids), upload)

    def rows(self, ids: list[int]) -> Layers:
        return {key: rows[ids] for key, rows in self.own.items()}


@pytest.fixture
def case(
    algorithm: Algorithm[Any],
    setting: Callable[..., Setting],
    data: Callable[..., list[Samples]],
    task_of: Callable[..., Task],
) -> Case:
    made = setting(algorithm)
    theta = made.spec.read(made.template)
    server, samples = Server(made.algorithm.init(theta, N, stream(0, "init"))), data(N)
    with SimulatedFleet(made, samples, samples, workers=0) as fleet:
        for ids in ([0, 1, 4], [1, 2, 6]):
            run_round(made.algorithm, server, fleet, Ledger(made.spec.names), ids)
    return Case(made.algorithm, made, server.state, fleet.own, lambda ids: task_of(made, ids, t=3, clients=N))


def rows_of(value: object, index: list[int]) -> dict[str, Tensor]:
    """Return the rows of some clients, of all that has rows of clients."""
    return {key: x.reshape(N, -1)[index] for key, x in tensors_of(value) if x.dim() and len(x) and len(x) % N == 0}


def test_init_does_not_change_or_keep_the_common_model(case: Case, same: Same) -> None:
    theta = case.setting.spec.read(case.setting.template)
    before = copy.deepcopy(theta)
    state = case.algorithm.init(theta, N, stream(0, "init"))
    for tensor in theta.values():
        tensor.fill_(9)
    same(state, case.algorithm.init(before, N, stream(0, "init")))


def test_reading_methods_leave_their_arguments_alone(case: Case, same: Same) -> None:
    state, own, got = copy.deepcopy(case.state), case.rows(IDS), case.download(IDS)
    own_before, got_before = copy.deepcopy(own), copy.deepcopy(got)
    case.algorithm.train(own, got, case.task(IDS))
    case.algorithm.personalize(own, got, case.task(IDS))
    case.algorithm.inspect(case.state)
    same(case.state, state)
    same(own, own_before)
    same(got, got_before)


def test_update_leaves_what_crossed_the_wire_alone(case: Case, same: Same) -> None:
    _, upload = case.train(IDS)
    got = copy.deepcopy(case.download(IDS))  # it may hold views of the state
    before = copy.deepcopy(got), copy.deepcopy(upload)
    case.algorithm.update(case.state, torch.tensor(IDS), got, upload)
    same(got, before[0])
    same(upload, before[1])


def test_download_is_pure(case: Case, same: Same) -> None:
    same(case.download(IDS), case.download(IDS))


def test_what_is_inspected_does_not_change_with_later_rounds(case: Case, same: Same) -> None:
    seen = case.algorithm.inspect(case.state)
    before = copy.deepcopy(seen)
    case.update(IDS, case.train(IDS)[1])
    same(seen, before)


def test_rows_of_absent_clients_are_unchanged_by_update(case: Case, same: Same) -> None:
    absent = [i for i in range(N) if i not in IDS]
    before = copy.deepcopy(rows_of(case.state, absent))
    after = case.update(IDS, case.train(IDS)[1])
    same(rows_of(after, absent), before)


def test_what_absent_clients_keep_is_unchanged_by_a_round(
    case: Case, data: Callable[..., list[Samples]], same: Same
) -> None:
    absent = [i for i in range(N) if i not in IDS]
    samples, server = data(N), Server(case.state)
    with SimulatedFleet(case.setting, samples, samples, workers=0) as fleet:
        before = {key: rows[absent] for key, rows in fleet.own.items()}
        first = copy.deepcopy(fleet.own)
        run_round(case.algorithm, server, fleet, Ledger(case.setting.spec.names), IDS)
        same({key: fleet.own[key][absent] for key in before}, before)
        assert all(not torch.equal(fleet.own[key][IDS], first[key][IDS]) for key in first)


def test_the_order_of_clients_does_not_matter(case: Case, same: Same) -> None:
    order, (_, upload) = [2, 0, 1], case.train(IDS)
    shuffled = [IDS[i] for i in order]
    got = case.download(IDS)
    one = case.algorithm.update(copy.deepcopy(case.state), torch.tensor(IDS), got, upload)
    other = case.algorithm.update(
        copy.deepcopy(case.state), torch.tensor(shuffled), got.rows(order), upload.rows(order)
    )
    same(one, other, atol=1e-6)
    same(case.download(IDS).rows(order), case.download(shuffled), atol=1e-6)


def test_one_client_at_a_time_equals_many_at_once(case: Case, same: Same) -> None:
    own, got = case.rows(IDS), case.download(IDS)
    kept, upload = case.algorithm.train(own, got, case.task(IDS))
    personalized = case.algorithm.personalize(own, got, case.task(IDS))
    for row, client in enumerate(IDS):
        mine, mine_got = case.rows([client]), got.rows([row])
        kept_alone, upload_alone = case.algorithm.train(mine, mine_got, case.task([client]))
        same(kept_alone, {key: rows[[row]] for key, rows in kept.items()})
        assert set(upload_alone.layers) <= set(upload.layers)
        same(
            upload_alone, upload.rows([row])._replace(layers={k: upload.layers[k][[row]] for k in upload_alone.layers})
        )
        alone = case.algorithm.personalize(mine, mine_got, case.task([client]))
        same(alone, {key: rows[[row]] for key, rows in personalized.items()})


def test_the_personalized_model_is_complete(case: Case) -> None:
    personalized = case.algorithm.personalize(case.rows(IDS), case.download(IDS), case.task(IDS))
    for key in case.setting.spec.slots:
        assert torch.isfinite(personalized[key]).all(), key


def test_state_survives_a_checkpoint(case: Case, same: Same, tmp_path: Path) -> None:
    save_tensors(tmp_path / "state.safetensors", case.state)
    fresh = case.algorithm.init(case.setting.spec.read(case.setting.template), N, stream(1, "init"))
    loaded = restore(fresh, load_tensors(tmp_path / "state.safetensors"))
    assert type(loaded) is type(case.state)
    same(loaded, case.state)
    same(case.algorithm.download(loaded, torch.tensor(IDS)), case.download(IDS))


def test_types_and_shapes_of_the_state_are_stable(case: Case) -> None:
    fresh = case.algorithm.init(case.setting.spec.read(case.setting.template), N, stream(0, "init"))
    shapes = {key: (x.shape, x.dtype) for key, x in tensors_of(fresh)}
    assert shapes == {key: (x.shape, x.dtype) for key, x in tensors_of(case.state)}


@pytest.mark.parametrize("direction", ["down", "up"])
def test_payloads_hold_what_they_say_and_nothing_else(case: Case, direction: str) -> None:
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


def test_uploads_count_the_clients_examples(case: Case) -> None:
    upload = case.train(IDS)[1]
    assert upload.examples.tolist() == case.task(IDS).examples.tolist()


@pytest.mark.parametrize("direction", ["down", "up"])
def test_a_payload_survives_the_wire(case: Case, direction: str, same: Same) -> None:
    payload = case.download(IDS) if direction == "down" else case.train(IDS)[1]
    for row in range(len(IDS)):
        mine = payload.rows([row])
        back = decode(encode(mine), case.setting.spec.names)
        assert back.names == mine.names
        own = case.rows([IDS[row]])
        same(back.fill(own), mine.fill(own))
        same((back.sent, back.examples), (mine.sent, mine.examples))
