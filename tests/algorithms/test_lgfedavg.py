from __future__ import annotations

import torch

from pfedla.algorithms import LGFedAvg
from tests.world import shared_and_own


def test_the_representation_stays_and_the_head_is_averaged() -> None:
    shared, personalized, own = shared_and_own(LGFedAvg())
    assert shared == {"fc"}
    for key in ("conv", "bn", "bn#stats"):
        assert torch.equal(personalized[key], own[key])
        assert len(own[key].unique(dim=0)) == 3
