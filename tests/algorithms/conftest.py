"""What tests of several methods share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pfedla.algorithm import Algorithm
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.layers import Layers
from pfedla.ledger import Ledger
from pfedla.rounds import Server, run_round
from pfedla.training import Samples


@pytest.fixture
def shared_and_own(
    setting: Callable[..., Setting], data: Callable[..., list[Samples]]
) -> Callable[[Algorithm[Any]], tuple[set[str], Layers, Layers]]:
    """Return what a method of averaged and personal layers does in a round of three clients.

    The entries that are sent, found to be everybody's weighted mean; the personalized models; and the clients' own.
    """

    def play(algorithm: Algorithm[Any]) -> tuple[set[str], Layers, Layers]:
        made, samples, ids = setting(algorithm), data(3), [0, 1, 2]
        server = Server(made.algorithm.init(made.spec.read(made.template), 3, torch.Generator()))
        with SimulatedFleet(made, samples, samples, workers=0) as fleet:
            run_round(made.algorithm, server, fleet, Ledger(made.spec.names), ids)
            got = made.algorithm.download(server.state, torch.tensor(ids))
            personalized = fleet.personalize(ids, got, 1)
        for key in got.layers:
            expected = np.zeros(fleet.own[key].shape[1])
            for client in ids:
                expected += len(samples[client]) / sum(map(len, samples)) * fleet.own[key][client].numpy()
            for client in ids:
                np.testing.assert_allclose(personalized[key][client].numpy(), expected, atol=1e-6)
        return set(got.layers), personalized, fleet.own

    return play
