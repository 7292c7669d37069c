"""Results without runs: figures that a test makes up, in the form that `pfedla paper` collects them in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pfedla.comparison import collect
from pfedla.paper.grid import Cell, experiment_of
from pfedla.paper.runs import RESULTS, Places

Put = Callable[..., None]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.chdir(tmp_path)
    return Places("laptop", RESULTS, Path("runs"), {"workers": 0, "keep_models": False})


@pytest.fixture
def put(places: Places) -> Put:
    """Return what adds a cell with some accuracy, as if it had been run; what is given as None is left out."""

    def add(cell: Cell, accuracy: float, **more: Any) -> None:
        settings = json.loads(json.dumps(experiment_of(cell, places.scale).decisive()))
        summary = {"label": cell.method.variant.label, "seed": cell.seed, "settings": settings, "commit": "abc"}
        figures: dict[str, Any] = {"accuracy_mean": accuracy, "accuracy_class_prior": accuracy + 0.01, "seconds": 1.0}
        figures |= {"bytes_down": 2_000_000, "bytes_up": 3_000_000, "rounds": settings["schedule"]["rounds"]}
        figures["curve"] = [[figures["rounds"]], [accuracy], [accuracy]]  # or it would count as added by hand
        every = {**summary, **figures, **more}
        collect(places.file(cell.column.name), [{key: value for key, value in every.items() if value is not None}])

    return add
