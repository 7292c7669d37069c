"""Results as tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

__all__ = ["comparison_table"]

Summary = dict[str, Any]
Column = tuple[str, Callable[[Summary], float], Callable[[float], str], int]  # heading, value, format, better: 1 or -1

COLUMNS: tuple[Column, ...] = (
    ("accuracy %", lambda s: s["accuracy_mean"], lambda v: f"{100 * v:.2f}", 1),
    ("± clients", lambda s: s["accuracy_std"], lambda v: f"{100 * v:.2f}", 0),
    ("worst", lambda s: s["accuracy_worst"], lambda v: f"{100 * v:.2f}", 1),
    ("after training", lambda s: s["accuracy_after_training"], lambda v: f"{100 * v:.2f}", 1),
    ("MB down", lambda s: s["bytes_down"], lambda v: f"{v / 1e6:,.1f}", -1),
    ("MB up", lambda s: s["bytes_up"], lambda v: f"{v / 1e6:,.1f}", -1),
    ("seconds", lambda s: s["seconds"], lambda v: f"{v:.1f}", 0),
)


def comparison_table(runs: Sequence[tuple[str, Sequence[Summary]]], title: str | None = None) -> Table:
    """Return a row for each method, averaged over its seeds, the best value of a column marked `*`.

    Accuracy is that of the personalized models after the final round. The best traffic is the least among the
    methods that communicate at all.
    """
    seeds = max((len(summaries) for _, summaries in runs), default=0)
    table = Table(
        title=title, header_style="bold", box=SIMPLE_HEAD, caption=_caption(runs, seeds), caption_justify="left"
    )
    table.add_column("method")
    means = {
        heading: [fmean(value(summary) for summary in summaries) for _, summaries in runs]
        for heading, value, _, _ in COLUMNS
    }
    for heading, *_ in COLUMNS:
        table.add_column(heading, justify="right")
        if heading == "accuracy %" and seeds > 1:
            table.add_column("± seeds", justify="right")
    for row, (label, summaries) in enumerate(runs):
        cells: list[Text] = [Text(label)]
        for heading, _, form, better in COLUMNS:
            value = means[heading][row]
            rivals = [v for v in means[heading] if better > 0 or v > 0]
            best = len(runs) > 1 and better and value in rivals and value == (max if better > 0 else min)(rivals)
            cells.append(Text(form(value) + (" *" if best else "  "), style="bold green" if best else ""))
            if heading == "accuracy %" and seeds > 1:
                spread = [summary["accuracy_mean"] for summary in summaries]
                cells.append(Text(f"{100 * stdev(spread):.2f}" if len(spread) > 1 else "-"))
        table.add_row(*cells)
    return table


def _caption(runs: Sequence[tuple[str, Sequence[Summary]]], seeds: int) -> str:
    first = runs[0][1][0]
    of = f"{first['dataset']}, {first['clients']} clients, {first['rounds']} rounds"
    over = f", means over {seeds} seeds" if seeds > 1 else f", seed {first['seed']}"
    return f"{of}{over}; accuracy of the personalized models after the final round" + (
        "; * best" if len(runs) > 1 else ""
    )
