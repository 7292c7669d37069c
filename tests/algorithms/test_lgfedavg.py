from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pfedla.algorithms import LGFedAvg
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.ledger import Ledger
from pfedla.rounds import Server, run_round
from pfedla.training import Samples


def test_the_representation_stays_and_the_head_is_averaged(
    setting: Callable[..., Setting], data: Callable[..., list[Samples]]
) -> None:
    made, samples = setting(LGFedAvg()), data(3)
    ledger, server = (
        Ledger(made.spec.names),
        Server(made.algorithm.init(made.spec.read(made.template), 3, torch.Generator())),
    )
    with SimulatedFleet(made, samples, samples, workers=0) as fleet:
        run_round(made.algorithm, server, fleet, ledger, [0, 1, 2])
        got = made.algorithm.download(server.state, torch.arange(3))
        personalized = fleet.personalize([0, 1, 2], got, 1)
    assert set(got.layers) == {"fc"}
    expected = np.zeros(3 * 48 + 3)
    for client in range(3):
        expected += len(samples[client]) / sum(map(len, samples)) * fleet.own["fc"][client].numpy()
    for client in range(3):
        np.testing.assert_allclose(personalized["fc"][client].numpy(), expected, atol=1e-6)
    for key in ("conv", "bn", "bn#stats"):
        assert torch.equal(personalized[key], fleet.own[key])
        assert len(fleet.own[key].unique(dim=0)) == 3
