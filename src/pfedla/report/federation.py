"""Who holds what: the federation as a table and as a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from pfedla.report.tables import counted

__all__ = ["draw_federation", "federation_table", "named_ticks"]

Ints = npt.NDArray[np.int64]

_INK, _FAINT, _EMPTY = "#22303c", "#6b7a87", "#f1f4f6"
_SHADES = LinearSegmentedColormap.from_list("samples", ["#e0edf4", "#93c3db", "#2f7fae", "#0b3c5d"]).with_extremes(
    bad=_EMPTY
)


def federation_table(
    counts: Ints,
    classes: tuple[str, ...],
    *,
    names: Sequence[str] | None = None,
    title: str | None = None,
    groups: Ints | None = None,
    most: int = 4,
    scored: str = "test",
) -> Table:
    """Return a table with one row per client: its samples and its classes, the largest first.

    `counts (clients, classes, 2)` are training samples and those that clients are `scored` on, `groups` the clients'
    groups, for a column of their own; `most` classes are named, of the others only the number is given. Without
    `names`, clients are numbered.
    """
    table = Table(title=title, show_footer=True, header_style="bold", footer_style="bold")
    table.add_column("client", footer="all", justify="right" if names is None else "left")
    if groups is not None:
        table.add_column("group", footer=str(len(np.unique(groups))), justify="right")
    for part, name in enumerate(("training", scored)):
        table.add_column(name, footer=f"{counts[..., part].sum():,}", justify="right")
    held = int((counts[..., 0].sum(axis=0) > 0).sum())
    table.add_column("classes (training samples)", footer=f"{held} of {len(classes)} classes")
    for client, row in enumerate(counts):
        cells = [Text(names[client] if names else str(client))]
        cells += [] if groups is None else [Text(str(groups[client]))]
        cells += [Text(f"{total:,}") for total in row.sum(axis=0)]
        table.add_row(*cells, _holdings(row[:, 0], classes, most))
    return table


def _holdings(row: Ints, classes: tuple[str, ...], most: int) -> Text:
    """Return the classes a client trains on with their counts, the largest first."""
    order = [c for c in np.argsort(-row, kind="stable") if row[c]]
    named, others = order[:most], order[most:]
    text = Text()
    for position, c in enumerate(named):
        text.append(", " if position else "").append(f"{row[c]} ", style="cyan").append(classes[c])
    if others:
        low, high = row[others[-1]], row[others[0]]
        each = f"{low}" if low == high else f"{low} to {high}"
        text.append(f", {each} of {len(others)} more", style="dim")
    return text


def draw_federation(
    path: Path,
    counts: Ints,
    classes: tuple[str, ...],
    title: str,
    *,
    names: Sequence[str] | None = None,
    groups: Ints | None = None,
) -> None:
    """Draw who trains on what: clients across, classes down, the darker the more training samples.

    Bars at the right give the training samples of each class. Bars above give those of each client, if
    clients differ; a coloured strip gives their groups, if there are any. `counts (clients, classes, 2)` are training
    and test samples. `names` stand below clients that have some of their own, if there is room; others are numbered.
    """
    train = counts[..., 0].T
    rows, clients = train.shape
    cell = max(0.42, 3.4 / clients) if clients <= 30 else 12.6 / clients
    tall = 0.34 if rows <= 30 else 0.15
    width, height = cell * clients, tall * rows
    totals = train.sum(axis=0)
    bars = 0.6 if totals.min() < totals.max() else 0.0
    strip = 0.16 if groups is not None else 0.0
    below = named_ticks(names, clients)
    left, right, top = 0.3 + 0.085 * max(map(len, classes)), 1.7, 0.75 + bars + strip
    bottom = 0.6 if below is None else 0.5 + 0.075 * max(map(len, below))
    figure = Figure(figsize=(left + width + right, bottom + height + top), dpi=150, facecolor="white")
    whole_width, whole_height = figure.get_size_inches()

    def panel(x: float, y: float, w: float, h: float) -> Axes:
        axes = figure.add_axes((x / whole_width, y / whole_height, w / whole_width, h / whole_height))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, colors=_INK, labelsize=8 if rows <= 30 else 6)
        return axes

    main = panel(left, bottom, width, height)
    numbers = clients <= 30 and rows <= 30
    _draw_cells(main, train, numbers=numbers)
    main.set_yticks(np.arange(rows), classes)
    main.tick_params(axis="x", labelsize=8)
    step = 1 if clients <= 30 else 10 ** math.ceil(math.log10(clients / 12))
    if below is None:
        main.set_xticks(np.arange(0, clients, step))
        main.set_xlabel("client", color=_INK, fontsize=9)
    else:
        main.set_xticks(np.arange(clients), below, rotation=90, parse_math=False)

    side = panel(left + width + 0.12, bottom, right - 0.75, height)
    _draw_class_totals(side, train.sum(axis=1))
    if groups is not None:
        _draw_groups(panel(left, bottom + height + 0.05, width, 0.1), groups)
    if bars:
        above = panel(left, bottom + height + strip + 0.08, width, bars - 0.1)
        above.bar(np.arange(clients), totals, width=0.8, color="#9db4c2")
        above.set_xlim(-0.5, clients - 0.5)
        above.set_xticks([])
        above.set_yticks([int(totals.max())])
    figure.text(0.12 / whole_width, 1 - 0.2 / whole_height, title, va="top", fontsize=12, color=_INK, weight="bold")
    held = (train > 0).sum(axis=0)
    each = f"{held.min()}" if held.min() == held.max() else f"{held.min()} to {held.max()}"
    amount = f"{totals.min()}" if not bars else f"{totals.min()} to {totals.max()}"
    note = f"{counted(clients, 'client')}, {amount} training samples and {each} of {rows} classes each"
    if not numbers:
        note += f"; darkest: {train.max()} samples"
    figure.text(0.12 / whole_width, 1 - 0.45 / whole_height, note, va="top", fontsize=8.5, color=_FAINT)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def named_ticks(names: Sequence[str] | None, clients: int, most: int = 30) -> list[str] | None:
    """Return what to write beside clients with names of their own, long ones cut; None if their numbers say as much.

    More than `most` are numbered.
    """
    if names is None or clients > most or all(re.fullmatch(r"client-\d+", name) for name in names):
        return None
    return [name if len(name) <= 24 else f"{name[:23]}…" for name in names]


def _draw_cells(axes: Axes, train: Ints, *, numbers: bool) -> None:
    """Draw one square per client and class, darker with more samples, with the number in it if wanted."""
    rows, clients = train.shape
    top = max(1, int(train.max()))
    gap = 1.2 if numbers else (0.35 if clients <= 200 else 0)
    shown = np.ma.masked_equal(train, 0)
    edges = np.arange(clients + 1) - 0.5, np.arange(rows + 1) - 0.5
    axes.pcolormesh(*edges, shown, cmap=_SHADES, vmin=0, vmax=top, edgecolors="white", linewidth=gap)
    axes.set_ylim(rows - 0.5, -0.5)
    if numbers:
        for (row, client), number in np.ndenumerate(train):
            if number:
                colour = "white" if number > 0.5 * top else _INK
                axes.text(client, row, str(number), ha="center", va="center", fontsize=7, color=colour)


def _draw_class_totals(axes: Axes, totals: Ints) -> None:
    """Draw the training samples of each class as bars, with the numbers beside them."""
    top = max(1, int(totals.max()))
    axes.barh(np.arange(len(totals)), totals, height=0.7, color="#9db4c2")
    axes.set_ylim(len(totals) - 0.5, -0.5)
    axes.set_xlim(0, top)
    axes.set_xticks([])
    axes.set_yticks([])
    size = 7.5 if len(totals) <= 30 else 5.5
    for row, total in enumerate(totals):
        axes.text(total + 0.05 * top, row, f"{total:,}", va="center", fontsize=size, color=_FAINT)
    axes.set_xlabel("all clients", color=_INK, fontsize=9, loc="left")


def _draw_groups(axes: Axes, groups: Ints) -> None:
    """Draw the group of each client as a strip of colours."""
    palette = colormaps["Set2"]
    axes.bar(np.arange(len(groups)), 1, width=1.0, color=[palette(int(group) % palette.N) for group in groups])
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylim(0, 1)
    axes.set_xticks([])
    axes.set_yticks([0.5], ["group"])
