"""What a finished run is good for: its clients, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pfedla.errors import RunError
from pfedla.objective import OBJECTIVES
from pfedla.record import RunRecord
from pfedla.report.clients import client_rows

__all__ = ["Standing", "standing"]


class Standing(NamedTuple):
    """How a run's clients stand after its latest evaluation."""

    rows: list[dict[str, Any]]  # one for each client
    t: int  # the round
    headline: str
    higher_is_better: bool
    percent: bool
    scored_on: str


def standing(path: Path | str) -> Standing:
    """Read how every client of a run, complete or not, stands after its latest evaluation."""
    record = RunRecord(path)
    if not record.exists:
        raise RunError(f"{record.path} holds no run")
    history, facts = record.history(), record.facts()
    if not history:
        raise RunError(f"the run in {record.path} has not been evaluated yet")
    settings = facts.get("settings", {})
    table = settings.get("objective", {})
    kind: Any = OBJECTIVES.get(table.get("name"))
    metrics = history[-1].get("clients") or {}
    headline = table.get("headline", kind.headline if kind else next(iter(metrics), "loss"))
    up, percent = (table.get(key, getattr(kind, key, False)) for key in ("higher_is_better", "percent"))
    scored_on = "test" if settings.get("data", {}).get("validation") is None else "validation"
    try:
        rows = client_rows(facts["names"], facts["samples"], history[-1], scored_on)
        return Standing(rows, int(history[-1]["round"]), headline, bool(up), bool(percent), scored_on)
    except (LookupError, TypeError) as error:
        raise RunError(f"{record.path} is damaged or of an earlier version: {error!r}") from error
