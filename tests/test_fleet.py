from __future__ import annotations

import copy
from contextlib import closing
from typing import Any

import pytest
import torch

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, PFedLA
from pfedla.client import Kept
from pfedla.layers import Layers
from pfedla.rounds import run_round
from pfedla.training import Task
from pfedla.wire import Payload
from tests.troubled import Counting
from tests.world import data, download, fleet_of, same, server_of, setting


def test_what_clients_trained_is_theirs_after_commit_only() -> None:
    made, ids = setting(FedAvg()), [1, 3]
    fleet = fleet_of(made, data(4))
    before = copy.deepcopy(fleet.kept)
    answers = fleet.train(ids, download(made, ids), 1)
    same(fleet.kept, before)
    assert not fleet.kept.rounds.any()
    fleet.train(ids, download(made, ids), 1)  # again, as after Ctrl-C: the same
    fleet.commit()
    assert (list(answers.by_client), answers.missing) == (ids, {})
    assert fleet.kept.rounds.tolist() == [0, 1, 0, 1]
    for key, rows in Payload.stack(list(answers.by_client.values())).layers.items():
        torch.testing.assert_close(fleet.kept.own[key][ids], before.own[key][ids] + rows)
    after = copy.deepcopy(fleet.kept)
    fleet.commit()
    same(fleet.kept, after)


@pytest.mark.parametrize("workers", [0, 2])
def test_answers_come_sorted_whatever_the_order_asked(workers: int) -> None:
    made = setting(FedAvg(), "mlp")
    with closing(fleet_of(made, data(4), workers)) as fleet:
        one, other = (fleet.train(ids, download(made, ids), 1).by_client for ids in ([3, 0, 2], [0, 2, 3]))
    assert list(one) == list(other) == [0, 2, 3]
    for client, upload in one.items():
        assert len(upload.sent) == 1
        same(upload, other[client])


@pytest.mark.parametrize("workers", [0, 2])
def test_clients_keep_what_their_method_adds(workers: int) -> None:
    made = setting(Counting(), "mlp")
    with closing(fleet_of(made, data(4), workers)) as fleet:
        for t, ids in enumerate(([0, 1], [1, 3]), 1):
            fleet.train(ids, download(made, ids), t)
            fleet.commit()
        assert fleet.kept.own["#times"].flatten().tolist() == [6, 7, 5, 6]
        assert fleet.kept.rounds.tolist() == [1, 2, 0, 1]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_scores_are_those_of_the_client_asked(workers: int) -> None:
    made = setting(PFedLA())
    with closing(fleet_of(made, data(4), workers)) as fleet:
        forward, backward = (
            fleet.evaluate(ids, download(made, ids), 1).by_client for ids in ([0, 1, 2, 3], [3, 2, 1, 0])
        )
    assert list(forward) == list(backward) == [0, 1, 2, 3]
    loss = {client: scores.personalized["loss"] for client, scores in forward.items()}
    assert loss == pytest.approx({client: scores.personalized["loss"] for client, scores in backward.items()})
    assert len(set(loss.values())) == 4


@pytest.mark.slow
def test_a_fleet_goes_back_to_a_snapshot_to_the_bit(algorithm: Algorithm[Any]) -> None:
    made, ids = setting(algorithm), [0, 2, 3]
    fleet, server = fleet_of(made, data(4)), server_of(made, 4)
    for participants in ([0, 1, 2], [1, 3]):
        run_round(made.algorithm, server, fleet, participants)
    saved = copy.deepcopy(fleet.snapshot())
    assert saved.rounds.tolist() == [1, 2, 1, 1]
    sent = made.algorithm.download(server.state, torch.tensor(ids))
    found: list[tuple[Payload, Kept, str]] = []
    for place in (fleet, fleet, fleet_of(made, data(4))):  # as it went on, gone back, and another fleet
        if found:
            place.restore(copy.deepcopy(saved))
            same(place.kept, saved)
        answers = place.train(ids, sent, 3).by_client
        place.commit()
        scores = place.evaluate(range(4), download(made, range(4)), 3).by_client
        found.append((Payload.stack(list(answers.values())), copy.deepcopy(place.kept), repr(scores)))
    for upload, kept, scores_found in found[1:]:
        same(upload, found[0][0])
        same(kept, found[0][1])
        assert scores_found == found[0][2]
    assert not torch.equal(found[0][1].rounds, saved.rounds)


def test_going_back_forgets_what_was_trained_and_not_committed() -> None:
    made, ids = setting(FedAvg(), "mlp"), [0, 1]
    fleet = fleet_of(made, data(2))
    saved = copy.deepcopy(fleet.snapshot())
    fleet.train(ids, download(made, ids, 2), 1)
    fleet.restore(copy.deepcopy(saved))
    fleet.commit()
    same(fleet.kept, saved)


def test_clients_have_one_thread_each() -> None:
    threads = []

    class Telling(FedAvg):
        def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
            threads.append(torch.get_num_threads())
            raise ZeroDivisionError

    made, before = setting(Telling(), "mlp"), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(Exception, match="client 0 failed"):
            fleet_of(made, data(1)).train([0], download(made, [0]), 1)
        assert (threads, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
