from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.algorithms import PFedLA
from pfedla.algorithms.fedavg import FedAvg, SharedModel
from pfedla.errors import ConfigError
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.ledger import Ledger
from pfedla.rounds import Server, evaluate, participants, run_round, uninterrupted
from pfedla.training import Samples
from pfedla.wire import Payload


def test_participants_are_distinct_sorted_and_known_beforehand() -> None:
    for t in range(1, 20):
        ids = participants(0, t, 20, 5)
        assert ids == sorted(set(ids))
        assert len(ids) == 5
        assert set(ids) <= set(range(20))
        assert ids == participants(0, t, 20, 5)


def test_participants_change_with_round_and_seed_and_cover_everybody() -> None:
    rounds = [tuple(participants(0, t, 20, 5)) for t in range(1, 60)]
    assert len(set(rounds)) > 50
    assert set().union(*rounds) == set(range(20))
    assert rounds != [tuple(participants(1, t, 20, 5)) for t in range(1, 60)]
    assert participants(0, 1, 4, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [0, -1, 6])
def test_a_bad_number_of_participants_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"participants = {count} must be from 1 to the number of clients, 5"):
        participants(0, 1, 5, count)


def test_ctrl_c_is_held_back_until_the_block_is_done() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@dataclass(frozen=True)
class Interrupted(FedAvg):
    """A method whose user presses Ctrl-C in the middle of the update."""

    def update(self, state: SharedModel, ids: Tensor, got: Payload, upload: Payload) -> SharedModel:
        os.kill(os.getpid(), signal.SIGINT)
        return super().update(state, ids, got, upload)


def test_ctrl_c_in_the_middle_of_the_update_waits_for_the_round_to_be_complete(
    setting: Callable[..., Setting], data: Callable[..., list[Samples]]
) -> None:
    made, samples = setting(Interrupted(), "mlp"), data(2)
    theta = made.spec.read(made.template)
    server, ledger = Server(made.algorithm.init(theta, 2, torch.Generator())), Ledger(made.spec.names)
    fleet = SimulatedFleet(made, samples, samples, workers=0)
    with pytest.raises(KeyboardInterrupt):
        run_round(made.algorithm, server, fleet, ledger, [0])
    assert server.t == 1
    assert not torch.equal(server.state.theta["fc1"], theta["fc1"])
    assert ledger.arrays()["client"].tolist() == [0]
    assert fleet.trained.tolist() == [True, False]


class Lossy(SimulatedFleet):
    """A fleet whose client 1 never answers."""

    def train(self, ids: Sequence[int], got: Payload, t: int) -> tuple[list[int], Payload]:
        answered, upload = super().train(ids, got, t)
        rows = [row for row, client in enumerate(answered) if client != 1]
        return [answered[row] for row in rows], upload.rows(rows)


def test_the_update_sees_what_those_got_who_answered(
    setting: Callable[..., Setting], data: Callable[..., list[Samples]], same: Callable[..., None]
) -> None:
    made, samples = setting(PFedLA(), "mlp"), data(4)
    states = []
    for kind, ids in ((Lossy, [0, 1, 3]), (SimulatedFleet, [0, 3])):
        server = Server(made.algorithm.init(made.spec.read(made.template), 4, torch.Generator().manual_seed(0)))
        server.state.theta["fc1"] += torch.arange(4.0)[:, None]  # so that everybody gets something else
        with kind(made, samples, samples, workers=0) as fleet:
            run_round(made.algorithm, server, fleet, Ledger(made.spec.names), ids)
        states.append(server.state)
    same(*states, atol=1e-6)


def test_without_ctrl_c_nothing_happens() -> None:
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_go_on_without_a_handler() -> None:
    seen: list[str] = []

    def work() -> None:
        with uninterrupted():
            seen.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["done"]


def test_evaluation_changes_nothing_and_covers_all_clients(
    algorithm: Algorithm[Any],
    setting: Callable[..., Setting],
    data: Callable[..., list[Samples]],
    same: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, samples = setting(algorithm), data(4)
    server = Server(made.algorithm.init(made.spec.read(made.template), 4, torch.Generator()))
    with SimulatedFleet(made, samples, samples, workers=0) as fleet:
        run_round(made.algorithm, server, fleet, Ledger(made.spec.names), [0, 3])
        before = {key: rows.clone() for key, rows in fleet.own.items()}
        one = evaluate(made.algorithm, server.state, fleet, 4, 1)
        monkeypatch.setattr("pfedla.rounds.CHUNK", 3)
        other = evaluate(made.algorithm, server.state, fleet, 4, 1)
        same(fleet.own, before)
    assert np.array_equal(one.personalized, other.personalized)
    assert np.isnan(one.after_training.accuracy).tolist() == [False, True, True, False]
    assert server.t == 1
