from __future__ import annotations

import copy
import json
import os
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pfedla
from pfedla.algorithm import Algorithm
from pfedla.algorithms import PFedLA
from pfedla.algorithms.fedavg import FedAvg, Local, SharedModel
from pfedla.codec import Codec
from pfedla.engine import FlatModel
from pfedla.errors import ConfigError
from pfedla.layers import Layers, kind_of
from pfedla.models import MLP
from pfedla.record import RunRecord
from pfedla.rounds import Schedule, evaluate, participants, run_round
from pfedla.training import Task, score
from pfedla.wire import Payload
from tests.world import WireFleet, data, fleet_of, outcome_of, play, same, same_result, server_of, setting, theta_of

FIVE = Schedule(seed=0, participants=5)


def test_participants_are_distinct_sorted_and_known_beforehand() -> None:
    for t in range(1, 20):
        ids = participants(FIVE, t, 20)
        assert ids == sorted(set(ids))
        assert len(ids) == 5
        assert set(ids) <= set(range(20))
        assert ids == participants(FIVE, t, 20)


def test_participants_change_with_round_and_seed_and_cover_everybody() -> None:
    rounds = [tuple(participants(FIVE, t, 20)) for t in range(1, 60)]
    assert len(set(rounds)) > 50
    assert set().union(*rounds) == set(range(20))
    assert rounds != [tuple(participants(Schedule(seed=1, participants=5), t, 20)) for t in range(1, 60)]
    assert participants(Schedule(), 1, 4) == participants(Schedule(participants=4), 1, 4) == [0, 1, 2, 3]


def test_more_participants_than_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.participants = 6 must be from 1 to the number of clients, 5"):
        participants(Schedule(participants=6), 1, 5)


@pytest.mark.parametrize("count", [0, -1])
def test_a_bad_number_of_participants_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"schedule\.participants = {count} must be at least 1"):
        Schedule(participants=count)


@dataclass(frozen=True)
class Interrupted(FedAvg):
    """A method whose user presses Ctrl-C in the middle of the update."""

    def update(self, state: SharedModel, ids: Tensor, got: Payload, upload: Payload) -> SharedModel:
        os.kill(os.getpid(), signal.SIGINT)
        return super().update(state, ids, got, upload)


def test_ctrl_c_in_the_middle_of_the_update_waits_for_the_round_to_be_complete() -> None:
    made = setting(Interrupted(), "mlp")
    server, fleet = server_of(made, 2), fleet_of(made, data(2))
    with pytest.raises(KeyboardInterrupt):
        run_round(made.algorithm, server, fleet, [0])
    assert server.t == 1
    assert not torch.equal(server.state.theta["fc1"], theta_of(made)["fc1"])
    assert server.ledger.arrays()["client"].tolist() == [0]
    assert fleet.kept.rounds.tolist() == [1, 0]


@dataclass(frozen=True)
class Impatient(FedAvg):
    """A method whose user presses Ctrl-C while the second client trains."""

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        if task.ids[0] == 0:  # the shortest job comes last
            os.kill(os.getpid(), signal.SIGINT)
        return super().train(own, got, task)


def test_ctrl_c_before_the_clients_have_answered_leaves_everything_as_it_was() -> None:
    made = setting(Impatient(), "mlp")
    server, fleet = server_of(made, 2), fleet_of(made, data(2))
    before = copy.deepcopy((server.state, fleet.kept))
    with pytest.raises(KeyboardInterrupt):
        run_round(made.algorithm, server, fleet, [0, 1])
    fleet.commit()
    same((server.state, fleet.kept), before)
    assert server.t == len(server.ledger.arrays()["round"]) == 0


def test_evaluation_changes_nothing_and_covers_all_clients(
    algorithm: Algorithm[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = setting(algorithm)
    server, fleet = server_of(made, 4), fleet_of(made, data(4))
    run_round(made.algorithm, server, fleet, [0, 3])
    before = copy.deepcopy((server.state, fleet.kept))
    one = evaluate(made.algorithm, server.state, fleet, 4, 1)
    monkeypatch.setattr("pfedla.rounds.CHUNK", 3)
    other = evaluate(made.algorithm, server.state, fleet, 4, 1)
    same((server.state, fleet.kept), before)
    metrics = ["accuracy", "loss", "accuracy_known_classes", "accuracy_class_prior"]
    assert list(one.personalized) == list(one.after_training) == metrics
    for metric, values in one.personalized.items():
        assert np.isfinite(values).tolist() == [True] * 4
        np.testing.assert_allclose(other.personalized[metric], values, rtol=0, atol=1e-6)  # products of fewer rows
        after = one.after_training[metric]
        assert np.isnan(after).tolist() == [False, True, True, False]
        assert np.array_equal(after, other.after_training[metric], equal_nan=True)
    assert one.missing == other.missing == {}
    assert server.t == 1


# ---- clients that do not answer


def test_the_update_sees_what_those_got_who_answered() -> None:
    made = setting(PFedLA(), "mlp")
    found, everybody = [], data(4)
    for fleet, ids in ((WireFleet(made, everybody, lost=(1,)), [0, 1, 3]), (fleet_of(made, everybody), [0, 3])):
        server = server_of(made, 4)
        server.state.theta["fc1"] += torch.arange(4.0)[:, None]  # so that everybody gets something else
        missing = run_round(made.algorithm, server, fleet, ids)
        assert missing == ({1: "out of reach"} if len(ids) == 3 else {})
        found.append(server.state)
    same(found[0], found[1], atol=1e-6)


def test_a_round_that_nobody_answers_changes_nothing_but_its_number(algorithm: Algorithm[Any]) -> None:
    made = setting(algorithm)
    server, fleet = server_of(made, 3), WireFleet(made, data(3), lost=(0, 2))
    before = copy.deepcopy((server.state, fleet.own()))
    assert run_round(made.algorithm, server, fleet, [0, 2]) == {0: "out of reach", 2: "out of reach"}
    assert server.t == 1
    same((server.state, fleet.own()), before)
    table = server.ledger.arrays()
    assert table["client"].tolist() == [0, 2]
    assert server.ledger.up == server.ledger.overhead_up == 0
    assert (table["down"].sum(1) + table["down:header"] > 0).all()  # they were asked
    run_round(made.algorithm, server, fleet, [0, 1])  # and the next one is played as ever
    assert [device.kept.rounds.item() for device in fleet.devices.values()] == [0, 1, 0]


def test_a_run_that_nobody_answers_ends_with_a_record_without_figures(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "run", "", {})
    outcome = outcome_of(FedAvg(), record, fleet=partial(WireFleet, lost=(0, 1, 2, 3)), rounds=2)
    record.release()
    (found,) = outcome.history
    figures = [f"accuracy_{what}" for what in ("mean", "std", "worst", "p10")]
    figures += ["loss_mean", "accuracy_after_training", "loss_after_training"]
    assert [found[figure] for figure in figures] == [None] * 7
    assert set(found) - {"missing"} == set(outcome_of(FedAvg(), rounds=2).history[0])
    assert found["clients"] == {}
    assert found["missing"] == {str(client): "out of reach" for client in range(4)}
    assert outcome.personalized == {}

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == found


def test_a_client_missing_from_an_evaluation_is_left_out_of_its_figures() -> None:
    made, n = setting(PFedLA()), 4
    server, lossy = server_of(made, n), WireFleet(made, data(n, test_seed=9))
    run_round(made.algorithm, server, lossy, [0, 1])
    everybody = evaluate(made.algorithm, server.state, lossy, n, 1)
    lossy.lost = (1, 2)
    some = evaluate(made.algorithm, server.state, lossy, n, 1)
    assert (everybody.missing, some.missing) == ({}, {1: "out of reach", 2: "out of reach"})
    for of_all, of_some in zip(everybody[:2], some[:2], strict=True):
        for metric, values in of_all.items():
            assert np.isnan(of_some[metric][[1, 2]]).all()
            assert np.array_equal(of_some[metric][[0, 3]], values[[0, 3]], equal_nan=True)


def test_the_record_says_who_is_missing_and_counts_the_others() -> None:
    outcome = outcome_of(FedAvg(), fleet=partial(WireFleet, lost=(1,)))
    for record in outcome.history:
        assert record["missing"] == {"1": "out of reach"}
        accuracy, loss = record["clients"]["accuracy"], record["clients"]["loss"]
        assert [value is None for value in accuracy] == [value is None for value in loss] == [False, True, False, False]
        known = np.array([value for value in accuracy if value is not None])
        assert record["accuracy_mean"] == pytest.approx(known.mean(), abs=1e-6)
        assert record["accuracy_std"] == pytest.approx(known.std(), abs=1e-6)
        assert record["accuracy_worst"] == pytest.approx(known.min(), abs=1e-6)
        assert record["loss_mean"] == pytest.approx(np.mean([value for value in loss if value is not None]), abs=1e-6)
        after = record["clients"]["accuracy_after_training"]
        assert after[1] is None
        known = np.array([value for value in after if value is not None])
        assert record["accuracy_after_training"] == pytest.approx(known.mean(), abs=1e-6)
    assert not any("missing" in record for record in outcome_of(FedAvg()).history)


def test_who_is_missing_in_a_round_is_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    schedule, fleet = Schedule(participants=3), partial(WireFleet, lost=(1,))
    outcome_of(FedAvg(), fleet=fleet, rounds=6)
    asked = [t for t in range(1, 7) if 1 in participants(schedule, t, 4)]
    assert 0 < len(asked) < 6
    assert [record.message for record in caplog.records] == [
        *(f"client 1 is absent from round {t}: out of reach" for t in asked),
        "client 1 did not send its personalized model: out of reach",
    ]


def test_the_personalized_model_of_a_client_that_is_missing_is_blank() -> None:
    everybody, some = outcome_of(Local()), outcome_of(Local(), fleet=partial(WireFleet, lost=(1,)))
    for key, rows in some.personalized.items():
        assert rows[1].isnan().all() if rows.is_floating_point() else not rows[1].any()
        for client in (0, 2, 3):
            assert torch.equal(rows[client], everybody.personalized[key][client]), key


# ---- with a codec


HALF = Codec("float16", "float16")


def halved(layers: Layers) -> Layers:
    """Return what float16 makes of layers: it rounds trained parameters, and nothing else."""
    return {key: rows if kind_of(key) else rows.half().float() for key, rows in layers.items()}


@pytest.mark.parametrize("fleet", [fleet_of, WireFleet])
def test_the_ledger_counts_what_a_codec_packs(fleet: Any) -> None:
    plain = play(FedAvg(), fleet=fleet, name="mlp").server.ledger.arrays()
    played = play(FedAvg(), fleet=fleet, name="mlp", codec=HALF)
    packed = played.server.ledger.arrays()
    for direction in ("down", "up"):
        assert (packed[direction] > 0).all()
        assert np.array_equal(2 * packed[direction], plain[direction])
    assert np.array_equal(packed["up:#examples"], plain["up:#examples"])
    if isinstance(played.fleet, WireFleet):
        sent = sum(len(message) for *_, message in played.fleet.messages)
        assert sent == sum(values.sum() for key, values in packed.items() if key.startswith(("down", "up")))


def test_what_the_clients_unpacked_is_what_reaches_the_update() -> None:
    seen: list[tuple[str, list[int], Payload]] = []
    uploads: dict[str, list[Payload]] = {"sent": [], "taken": []}

    class Recording(PFedLA):
        def download(self, state: Any, ids: Tensor) -> Payload:
            seen.append(("download", ids.tolist(), copy.deepcopy(super().download(state, ids))))
            return seen[-1][2]

        def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
            seen.append(("train", list(task.ids), got))
            kept, upload = super().train(own, got, task)
            uploads["sent"].append(upload)
            return kept, upload

        def update(self, state: Any, ids: Tensor, got: Payload, upload: Payload) -> Any:
            seen.append(("update", ids.tolist(), got))
            uploads["taken"].append(copy.deepcopy(upload))
            return super().update(state, ids, got, upload)

    made = setting(Recording(), codec=HALF)
    run_round(made.algorithm, server_of(made, 3), fleet_of(made, data(3)), [0, 2])
    (_, ids, downloaded), *trained, (last, updated, got) = seen
    assert (ids, last, updated) == ([0, 2], "update", [0, 2])
    by_client = {clients[0]: payload for _, clients, payload in trained}
    same(got, Payload.stack([by_client[0], by_client[2]]))
    same(got.layers, halved(downloaded.layers))
    assert not torch.equal(got.layers["fc"], downloaded.layers["fc"])
    (taken,), sent = uploads["taken"], Payload.stack(uploads["sent"][::-1])  # the client with more samples came first
    same(taken.layers, halved(sent.layers))
    assert not torch.equal(taken.layers["fc"], sent.layers["fc"])


def test_with_a_codec_clients_are_scored_on_what_they_unpack() -> None:
    made, clients = setting(FedAvg(), codec=HALF), data(3, test_seed=9)
    found = evaluate(made.algorithm, server_of(made, 3).state, fleet_of(made, clients), 3, 0, made.coding)
    theta, model = theta_of(made), FlatModel(made.template, made.spec)
    for client, mine in clients.items():
        losses = [score(model, layers, [mine.test])["loss"][0] for layers in (halved(theta), theta)]
        assert found.personalized["loss"][client] == losses[0] != losses[1]


def test_the_result_does_not_depend_on_how_many_threads_the_server_might_use() -> None:
    rng, before = np.random.default_rng(0), torch.get_num_threads()
    clients = [(rng.normal(size=(10, 300)).astype(np.float32), np.arange(10) % 3) for _ in range(10)]
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(pfedla.run(PFedLA(), partial(MLP, (300,), 3), clients, 3, workers=0))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        same_result(other, results[0])
