"""What every test of a deployment stands on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is logged reach `caplog`: in Flower's processes the app takes it to a handler of its own."""
    pytest.importorskip("flwr")
    monkeypatch.setattr("pfedla.flower.app._tell", lambda: None)
