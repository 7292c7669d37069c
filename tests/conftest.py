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


@pytest.fixture(params=world.METHODS)
def algorithm(request: pytest.FixtureRequest) -> Algorithm[Any]:
    """Every method."""
    return world.METHODS[request.param]()
