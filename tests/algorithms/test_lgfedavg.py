from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pfedla.algorithms import LGFedAvg


def test_the_representation_stays_and_the_head_is_averaged(shared_and_own: Callable[..., Any]) -> None:
    shared, personalized, own = shared_and_own(LGFedAvg())
    assert shared == {"fc"}
    for key in ("conv", "bn", "bn#stats"):
        assert torch.equal(personalized[key], own[key])
        assert len(own[key].unique(dim=0)) == 3
