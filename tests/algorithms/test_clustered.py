from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pfedla.algorithms import Clustered, FedAvg, Local
from pfedla.algorithms.clustered import group_of_each
from pfedla.config import Experiment
from pfedla.data.shifts import blocks_of
from pfedla.errors import ConfigError
from pfedla.layers import kind_of
from pfedla.settings import build
from tests.world import play, same, samples, setting

EVERYBODY = [[0, 1, 2, 3]] * 2


def test_groups_are_those_of_splits_and_shifts_or_as_listed() -> None:
    for clients, groups in ((12, 3), (7, 3), (5, 5), (4, 1)):
        assert group_of_each(groups, clients).tolist() == blocks_of(clients, groups).tolist()
    assert group_of_each((1, 0, 1), 3).tolist() == [1, 0, 1]


def test_one_group_is_federated_averaging_and_one_each_is_training_alone() -> None:
    one, averaged = (play(algorithm, EVERYBODY, 4) for algorithm in (Clustered(groups=1), FedAvg()))
    same(one.state.theta, averaged.state.theta, atol=1e-6)
    each, alone = (play(algorithm, EVERYBODY, 4) for algorithm in (Clustered(groups=4), Local()))
    same(each.personalized(), alone.personalized(), atol=1e-6)


def test_a_groups_model_is_the_weighted_mean_of_its_clients() -> None:
    played, sizes = play(Clustered(groups=(1, 0, 1, 1)), [[0, 1, 2, 3]], 4), [len(s) for s in samples(4)]
    for key in played.state.theta:
        mean = sum(sizes[i] * played.own[key][i].numpy() for i in (0, 2, 3)) / (sizes[0] + sizes[2] + sizes[3])
        np.testing.assert_allclose(played.state.theta[key][1], mean, atol=1e-6)
        np.testing.assert_allclose(played.state.theta[key][0], played.own[key][1], atol=1e-6)
    served = played.personalized()
    assert torch.equal(served["fc"][0], served["fc"][3])
    assert not torch.equal(served["fc"][0], served["fc"][1])


def test_a_group_of_which_nobody_answers_keeps_its_model() -> None:
    played, fresh = play(Clustered(groups=2), [[0, 1]], 4), setting(Clustered(groups=2)).template
    first = setting(Clustered(groups=2)).spec.read(fresh)
    for key, rows in played.state.theta.items():
        assert torch.equal(rows[1], first[key][0])
        assert kind_of(key) or not torch.equal(rows[0], first[key][0])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (0, r"algorithm\.groups = 0 must be at least 1"),
        ("3", r"algorithm\.groups = '3' must be a whole number"),
        (1.5, r"algorithm\.groups = 1\.5 must be a whole number"),
        (5, r"algorithm\.groups = 5 must be at most the number of clients, 4"),
        ([0, 1], r"algorithm\.groups must name a group from 0 to 3 for each of the 4 clients"),
        ([0, 1, 4, 1], r"algorithm\.groups must name a group from 0 to 3"),
        ([0, 1, -1, 1], r"algorithm\.groups must name a group from 0 to 3"),
        (None, r"algorithm\.groups must be given: how many groups of clients there are, or each client's"),
        ([], r"algorithm\.groups must be given"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        play(build(Clustered, {"groups": groups}), EVERYBODY, 4)


@pytest.mark.parametrize("groups", [3, [0, 1, 1]])
def test_groups_are_kept_in_a_file(groups: Any) -> None:
    experiment = Experiment.from_tables({"algorithm": {"name": "clustered", "groups": groups}})
    assert experiment.tables()["algorithm"]["groups"] == groups
    assert Experiment.from_tables(experiment.tables()) == experiment
