from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, Local
from pfedla.client import Job, Kept, Runtime
from pfedla.errors import RunError
from pfedla.rounds import Schedule, run
from pfedla.training import score
from pfedla.tree import transform
from tests.troubled import Counting, Faulty
from tests.world import data, download, fleet_of, same, setting

MISTAKES = ["forgotten", "of another shape", "of another type", "beside another"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_method_that_forgets_what_its_clients_keep_is_refused(mistake: str) -> None:
    made = setting(Counting(mistake=mistake), "mlp")
    fleet, before = fleet_of(made, data(4)), fleet_of(made, data(4)).kept
    wrong = "fc2#more" if mistake == "beside another" else "#times"
    with pytest.raises(RunError, match=rf"^client 2 must keep what its method's enroll\(\) returns; {wrong} differs$"):
        fleet.train([0, 2], download(made, [0, 2]), 1)
    fleet.commit()
    same(fleet.kept, before)


def test_a_client_alone_with_its_data_is_that_client_of_the_fleet(algorithm: Algorithm[Any]) -> None:
    made, client, everybody = setting(algorithm), 5, data(6, test_seed=9)
    runtime, kept = Runtime(made, {client: everybody[client]}), made.enroll()
    fleet, sent = fleet_of(made, everybody), download(made, [client], 6)
    for t in (1, 2):
        kept, upload = runtime.run(Job("train", client, t, kept, sent))
        same(upload, fleet.train([client], sent, t).by_client[client])
        fleet.commit()
        same(kept, transform(fleet.kept, lambda _, rows: rows[client : client + 1]))
        assert kept.rounds.tolist() == [t]
    model = runtime.run(Job("personalize", client, 3, kept, sent))
    same(model, fleet.personalize([client], sent, 3).by_client[client])
    scores = runtime.run(Job("evaluate", client, 3, kept, sent))
    assert scores == fleet.evaluate([client], sent, 3).by_client[client]


def test_after_training_there_is_no_score_of_a_client_that_never_trained() -> None:
    made, clients = setting(Local()), data(2, test_seed=9)
    runtime, sent = Runtime(made, clients), download(made, [1])
    first = runtime.run(Job("evaluate", 1, 0, made.enroll(), sent))
    metrics = ["accuracy", "loss", "accuracy_known_classes", "accuracy_class_prior"]
    assert list(first.after_training) == list(first.personalized) == metrics
    assert all(math.isnan(value) for value in first.after_training.values())
    assert all(math.isfinite(value) for value in first.personalized.values())
    kept, _ = runtime.run(Job("train", 1, 1, made.enroll(), sent))
    second = runtime.run(Job("evaluate", 1, 1, kept, sent))
    expected = score(runtime.model, kept.own, [clients[1].test], [clients[1].train])
    assert second.after_training == {metric: values[0] for metric, values in expected.items()}
    assert second.after_training == second.personalized  # of a client that trains alone
    assert second.personalized["loss"] < first.personalized["loss"]


def test_a_model_as_received_and_one_after_training_are_scored_apart() -> None:
    made, clients = setting(FedAvg()), data(2, test_seed=9)
    runtime, sent = Runtime(made, clients), download(made, [1])
    kept = Kept({key: rows + 1 for key, rows in made.enroll().own.items()}, torch.tensor([1]))
    scores = runtime.run(Job("evaluate", 1, 1, kept, sent))
    for found, layers in ((scores.personalized, made.enroll().own), (scores.after_training, kept.own)):
        assert found["loss"] == score(runtime.model, layers, [clients[1].test])["loss"][0]
    assert scores.personalized != scores.after_training


def test_a_clients_mistake_names_it_and_shows_where() -> None:
    made = setting(Faulty(), "mlp")
    runtime, job = Runtime(made, data(2)), Job("train", 1, 2, made.enroll(), download(made, [1]))
    with pytest.raises(RunError, match=r"(?s)^client 1 failed in round 2:\nTraceback.*ZeroDivisionError: a mistake"):
        runtime.run(job)
    good, text = runtime.answer(job)
    assert not good
    assert text.startswith("client 1 failed in round 2:\nTraceback")
    assert runtime.answer(job._replace(t=1))[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_clients_divergence_is_reported_without_a_traceback(workers: int) -> None:
    made = setting(FedAvg(), "mlp", lr=1e30)
    fleet = fleet_of(made, data(2), workers)
    try:
        with pytest.raises(RunError, match=r"^training diverged at client \d in round 1") as caught:
            run(made, fleet, 2, Schedule(rounds=1))
    finally:
        fleet.close()
    assert "Traceback" not in str(caught.value)
