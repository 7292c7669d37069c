"""What every test stands on; the tiny world itself is in `tests/world.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pfedla.algorithm import Algorithm
from tests import world


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors are slower on many threads."""
    torch.set_num_threads(1)


QUICK = ("fedavg", "fedper", "fedfomo", "pfedla", "heurpfedla", "pfedla-peers")  # one of each kind


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in world.METHODS])
def algorithm(request: pytest.FixtureRequest) -> Algorithm[Any]:
    """Every method; most of them only where slow tests run, too."""
    return world.METHODS[request.param]()
