"""Federations at the edge: they work, or are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

import pfedla
from pfedla import Clustered, HeurPFedLA, Training
from pfedla.algorithm import Algorithm
from pfedla.errors import ConfigError, DataError
from tests.world import METHODS

Client = tuple[np.ndarray, ...]
QUICK = Training(local_epochs=2, batch_size=4, lr=0.05)


def samples(count: int, classes: int = 3, seed: int = 0) -> Client:
    y = np.arange(count) % classes
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32) + y[:, None]
    return x, y


def run(algorithm: Algorithm[Any], clients: list[Any], **settings: Any) -> pfedla.Result:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    return pfedla.run(
        algorithm,
        settings.pop("model", make),
        clients,
        settings.pop("rounds", 3),
        training=QUICK,
        workers=0,
        **settings,
    )


CASES: dict[str, Callable[[], list[Client]]] = {
    "one client": lambda: [samples(12)],
    "two clients": lambda: [samples(12), samples(9, seed=1)],
    "one class": lambda: [samples(12, classes=1), samples(9, classes=1, seed=1)],
    "one sample to train on": lambda: [samples(2), samples(2, seed=1), samples(12)],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "fedbn"])
def test_small_federations_work(name: str, case: str) -> None:
    clients = CASES[case]()
    result = run(Clustered(groups=len(clients)) if name == "clustered" else METHODS[name](), clients)
    assert result.history[-1]["round"] == 3
    assert np.isfinite(result.summary["accuracy_mean"])
    assert result.summary["refused_uploads"] == 0
    assert all(
        np.isfinite(values).all() for values in (result.personalized[key].numpy() for key in result.personalized)
    )


def test_a_model_of_one_layer_works_and_can_be_retained_whole() -> None:
    for retain in (0, 1):
        result = run(HeurPFedLA(retain=retain), [samples(12), samples(9)], model=lambda: nn.Linear(4, 3))
        assert (result.ledger.down == 0) == bool(retain)


def test_more_layers_than_there_are_cannot_be_retained() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.retain = 3: this model has 2 layers"):
        run(HeurPFedLA(retain=3), [samples(12)])


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.rounds = 0 must be at least 1"):
        run(HeurPFedLA(), [samples(12)], rounds=0)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "there are no clients"),
        ([samples(0)], "client-0 has no samples"),
        (
            [samples(1)],
            "client-0: .*must leave at least one for training and one for the test|of the 2 samples that a client",
        ),
        ([(*samples(12), *samples(0))], "client-0 has no samples"),
        ([samples(12), (np.zeros((3, 5), np.float32), np.zeros(3, int))], "all clients' inputs must have one shape"),
    ],
)
def test_what_cannot_be_trained_or_tested_is_refused(clients: list[Any], message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        run(HeurPFedLA(), clients)


def test_a_client_that_never_takes_part_is_scored_with_the_common_model() -> None:
    result = run(HeurPFedLA(), [samples(12, seed=i) for i in range(12)], participants=1, rounds=1)
    record = result.history[-1]["clients"]
    assert sum(value is not None for value in record["accuracy_after_training"]) == 1
    assert all(value is not None for value in record["accuracy"])
