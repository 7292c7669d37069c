from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from pfedla.objective import Classification, Objective, Regression
from pfedla.report.live import Live
from pfedla.rounds import Progress


def told(objective: Objective, *records: dict[str, Any] | None, terminal: bool = False) -> str:
    """Return what is printed of some rounds."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
    with Live(console) as live:
        live.start("mine", 7)
        for t, record in enumerate(records, 1):
            live(Progress(t, 7, record, 2_000_000, 500_000, 3.4, objective))
    return file.getvalue()


def test_elsewhere_than_in_a_terminal_every_evaluation_is_a_line() -> None:
    first = {"round": 2, "accuracy_mean": 0.5, "accuracy_worst": 0.25}
    third = {"round": 3, "accuracy_mean": 0.625, "accuracy_worst": 0.5}
    assert told(Classification(), None, first, third, third).splitlines() == [
        "mine: round 2/7  accuracy 50.00 %, worst 25.00 %, 2.5 MB  3 s",
        "mine: round 3/7  accuracy 62.50 %, worst 50.00 %, 2.5 MB  3 s",
    ]


def test_the_headline_is_the_objectives() -> None:
    record = {"round": 1, "rmse_mean": 1.25, "rmse_worst": 2.5}
    assert told(Regression(), record) == "mine: round 1/7  rmse 1.25, worst 2.5, 2.5 MB  3 s\n"


def test_an_evaluation_that_nobody_answered_has_no_figures() -> None:
    record = {"round": 1, "rmse_mean": None, "rmse_worst": None}
    assert told(Regression(), record) == "mine: round 1/7  2.5 MB  3 s\n"


def test_a_terminal_shows_the_round_and_the_figures() -> None:
    record = {"round": 1, "rmse_mean": 1.25, "rmse_worst": 2.5}
    shown = told(Regression(), record, terminal=True)
    assert "1/7" in shown
    assert "rmse 1.25, worst 2.5, 2.5 MB" in shown
