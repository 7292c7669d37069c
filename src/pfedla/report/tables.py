"""Results as tables: in the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pfedla.errors import unknown_name

__all__ = ["VALUES", "comparison_table", "overview"]

Summary = dict[str, Any]
Cells = dict[str, dict[str, dict[int, float]]]  # method -> comparison -> seed -> value
Column = tuple[str, Callable[[Summary], float], Callable[[float], str], int]  # heading, value, format, better: 1 or -1

COLUMNS: tuple[Column, ...] = (
    ("accuracy\n%", lambda s: s["accuracy_mean"], lambda v: f"{100 * v:.2f}", 1),
    ("±\nclients", lambda s: s["accuracy_std"], lambda v: f"{100 * v:.2f}", 0),
    ("worst\nclient", lambda s: s["accuracy_worst"], lambda v: f"{100 * v:.2f}", 1),
    ("after\ntraining", lambda s: s["accuracy_after_training"], lambda v: f"{100 * v:.2f}", 1),
    ("MB\ndown", lambda s: s["bytes_down"], lambda v: f"{v / 1e6:,.1f}", -1),
    ("MB\nup", lambda s: s["bytes_up"], lambda v: f"{v / 1e6:,.1f}", -1),
    ("time\ns", lambda s: s["seconds"], lambda v: f"{v:.1f}", 0),
)

VALUES: dict[str, Column] = dict(
    zip(("accuracy", "spread", "worst", "after-training", "mb-down", "mb-up", "seconds"), COLUMNS, strict=True)
)


def overview(comparisons: Mapping[str, Sequence[Summary]], value: str = "accuracy", against: str | None = None) -> str:
    """Return one value of several comparisons as a Markdown table: a row a method, a column a comparison.

    Cells are means over the seeds with their standard deviation, the best of a column in bold; where a method has
    fewer seeds than others, their number stands beside it. With a method to hold the others `against`, they are the
    differences from it, taken seed by seed: what makes one seed harder than another for everybody falls out.
    """
    _, get, form, better = VALUES[value]
    cells: Cells = {}
    for column, summaries in comparisons.items():
        for summary in summaries:
            cells.setdefault(summary["label"], {}).setdefault(column, {})[summary["seed"]] = get(summary)
    if against is not None:
        cells, better = _differences(cells, against), max(better, 0)
    lines = [["method" if against is None else f"above `{against}`", *comparisons], ["---"] * (1 + len(comparisons))]
    lines += [[f"`{label}`"] for label in cells]
    for column in comparisons:
        found = {label: list(row[column].values()) for label, row in cells.items() if row.get(column)}
        seeds = max(map(len, found.values()), default=0)
        best = _best([fmean(values) for values in found.values()], better)
        for line, label in zip(lines[2:], cells, strict=True):
            if label not in found:
                line.append("-")
                continue
            mean, count = fmean(found[label]), len(found[label])
            text = ("+" if against is not None and mean > 0 else "") + form(mean)
            text += f" ± {form(stdev(found[label]))}" if count > 1 else ""
            line.append((f"**{text}**" if mean == best else text) + (f" ({count} of {seeds})" if count < seeds else ""))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _differences(cells: Cells, against: str) -> Cells:
    """Return by how much each method is above one of them, for the seeds that both have."""
    if against not in cells:
        raise unknown_name("method", against, cells)
    base = cells[against]
    return {
        label: {
            column: {seed: found - base[column][seed] for seed, found in values.items() if seed in base[column]}
            for column, values in row.items()
            if column in base
        }
        for label, row in cells.items()
        if label != against
    }


def comparison_table(runs: Sequence[tuple[str, Sequence[Summary]]], title: str | None = None) -> Table:
    """Return a row for each method, averaged over its seeds, the best value of a column marked `*`.

    Accuracy is that of the personalized models after the final round. The best traffic is the least among the
    methods that communicate at all.
    """
    seeds = max((len(summaries) for _, summaries in runs), default=0)
    caption = _caption(runs, seeds)
    table = Table(title=title, header_style="bold", box=SIMPLE_HEAD, padding=0, caption=caption, caption_justify="left")
    table.add_column("method", vertical="bottom", overflow="fold")
    means = {
        heading: [fmean(value(summary) for summary in summaries) for _, summaries in runs]
        for heading, value, _, _ in COLUMNS
    }
    for heading, *_ in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
        if heading == COLUMNS[0][0] and seeds > 1:
            table.add_column("±\nseeds", justify="right", no_wrap=True)
    for row, (label, summaries) in enumerate(runs):
        cells: list[Text] = [Text(label)]
        for heading, _, form, better in COLUMNS:
            value = means[heading][row]
            best = value == _best(means[heading], better)
            cells.append(Text(("*" if best else "") + form(value), style="bold green" if best else ""))
            if heading == COLUMNS[0][0] and seeds > 1:
                spread = [summary["accuracy_mean"] for summary in summaries]
                cells.append(Text(f"{100 * stdev(spread):.2f}" if len(spread) > 1 else "-"))
        table.add_row(*cells)
    return table


def _best(values: Sequence[float], better: int) -> float | None:
    """Return the best of a column, None where all are equal or none is better than another."""
    rivals = {value for value in values if better > 0 or value > 0}
    if not better or len(rivals) < 2:
        return None
    return max(rivals) if better > 0 else min(rivals)


def _caption(runs: Sequence[tuple[str, Sequence[Summary]]], seeds: int) -> str:
    first = runs[0][1][0]
    of = f"{first['dataset']}, {first['clients']} clients, {first['rounds']} rounds"
    over = f", means over {seeds} seeds" if seeds > 1 else f", seed {first['seed']}"
    best = " * marks the best." if len(runs) > 1 else ""
    return (
        f"{of}{over}. Accuracy on the clients' test images after the final round: of the personalized models (mean, "
        f"spread over clients, worst client), and of the models after the clients' latest local training.{best}"
    )
