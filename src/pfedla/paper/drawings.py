"""Figures 1, 5, 6 and 7, drawn from results: as wide as a page, and readable at that width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize, PowerNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from pfedla.paper.figures import LARGEST, PERIODS, ROLES, falls_with_distance, measured, roles_of, temperature_of
from pfedla.paper.grid import SLUGS, Column, Item, Method, Wanted
from pfedla.paper.measured import heading
from pfedla.paper.runs import Places, Summary

__all__ = ["Drawing", "drawings_of", "in_percent", "save"]

LAYER_OF_FIG6 = {"EMNIST": "fc1", "FashionMNIST": "fc1", "CIFAR10": "fc3", "CIFAR100": "fc3"}  # the paper's choice
WIDTH = 7.0  # inches: the text of a page
LEAST_SPAN = 20  # points of accuracy on an axis, so that noise looks like noise

_INK, _FAINT, _GRID = "#22303c", "#5d6b77", "#dde3e8"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#7f7f7f")  # told apart by everybody, and by their lines in grey print
_LINES, _MARKS = ("-", "--", "-.", ":"), ("o", "s", "^", "x")
_SHADES = LinearSegmentedColormap.from_list("weights", ["#ffffff", "#cfe1f2", "#6baed6", "#2171b5", "#08306b"])


class Drawing(NamedTuple):
    """A picture and the name of its files."""

    name: str
    canvas: Canvas


def drawings_of(item: Item, places: Places, wanted: Wanted) -> list[Drawing]:
    """Draw a figure from what is measured: the first seed, as the paper shows one."""
    found = list(measured(item, places, wanted))
    if item.name == "fig1":
        return [Drawing("fig1", _draw_toy(places, found))] if found else []
    by_method: dict[Method, list[tuple[Column, Summary]]] = {}
    for column, method, cells in found:
        by_method.setdefault(method, []).append((column, cells[method.name][0]))
    drawings = []
    for method, parts in by_method.items():
        tail = "" if method.printed else "-adam"
        if item.name == "fig5":
            drawings += [
                Drawing(f"fig5-{SLUGS[column.place.dataset]}{tail}", _draw_evolution(places, column, method, cell))
                for column, cell in parts
            ]
        else:
            draw = _draw_heat_maps if item.name == "fig6" else _draw_layers
            drawings.append(Drawing(f"{item.name}{tail}", draw(places, method, parts)))
    return drawings


def save(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    """Write every drawing as PNG and SVG, the same bytes for the same results."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, canvas in drawings:
        for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            path = folder / f"{name}.{suffix}"
            with rc_context({"svg.hashsalt": name}):
                canvas.savefig(path, metadata=metadata, dpi=300)
            paths.append(path)
    return paths


# ---- parts


def _canvas(height: float, title: str, below: str) -> Canvas:
    canvas = Canvas(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    canvas.suptitle(title, color=_INK, fontsize=10, fontweight="bold", x=0.01, ha="left")
    canvas.supxlabel(below, color=_FAINT, fontsize=7, x=0.01, ha="left")
    return canvas


def _plain(axis: Axes, title: str = "") -> Axes:
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_FAINT)
    axis.tick_params(labelsize=7, colors=_FAINT, length=2)
    axis.grid(axis="y", color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    _name(axis, title)
    return axis


def _name(axis: Axes, title: str) -> None:
    axis.set_title(title, fontsize=8.5, color=_INK, loc="left")


def _heat(axis: Axes, values: np.ndarray, shades: Normalize | None = None) -> None:
    """Draw weights as a map with the figures in it, in per cent; by default shades follow the root."""
    shades = shades or PowerNorm(0.5, 0, 1)
    axis.imshow(values, cmap=_SHADES, norm=shades, interpolation="nearest", aspect="auto")
    axis.tick_params(length=0, labelsize=7, colors=_INK)
    axis.spines[:].set_visible(False)
    axis.set_xticks(np.arange(values.shape[1]))
    axis.set_xticks(np.arange(values.shape[1] - 1) + 0.5, minor=True)
    axis.set_yticks(np.arange(values.shape[0] - 1) + 0.5, minor=True)
    axis.grid(which="minor", color=_GRID, linewidth=0.5)
    axis.tick_params(which="minor", length=0)
    for (row, place), value in np.ndenumerate(values):
        colour = "white" if float(shades(max(value, 1e-6))) > 0.64 else _INK
        axis.text(place, row, in_percent(value), ha="center", va="center", fontsize=6.5, color=colour)


def in_percent(weight: float) -> str:
    """Return a weight in per cent with two digits, or as 0 if it is less than a hundredth of one."""
    percent = 100 * weight
    if percent < 0.0095:
        return "0"
    return f"{percent:.0f}" if percent >= 9.95 else f"{percent:.1f}" if percent >= 0.995 else f"{percent:.2f}"


def _frame(x: int, y: int | None = None) -> Rectangle:
    """Return a frame around a square of a map, on the diagonal if there is one place."""
    corner = (x - 0.46, (x if y is None else y) - 0.46)
    return Rectangle(corner, 0.92, 0.92, fill=False, edgecolor=_COLOURS[1], linewidth=1.2)


# ---- figures


def _draw_toy(places: Places, found: Sequence[tuple[Column, Method, dict[str, list[Summary]]]]) -> Canvas:
    """Figure 1: accuracy of client 0, and its weights by layer at the end, a row for each temperature."""
    below = f"{heading(places, found[0][0], 1)}, scale {places.scale}. Weights are the softmax of cosines / temperature"
    title = "Aggregation by similarity: of layers, or of whole models"
    canvas = _canvas(0.5 + 2.4 * len(found), title, below)
    axes = canvas.subplots(len(found), 2, width_ratios=(1, 1.1), squeeze=False, sharey="col")
    for row, ((_, method, cells), (left, right)) in enumerate(zip(found, axes, strict=True)):
        layer, model = (some[0] for some in cells.values())
        _plain(left, f"temperature {temperature_of(method):g}: accuracy of client 0, %")
        for place, (name, summary) in enumerate(zip(("layer-wise", "model-wise"), (layer, model), strict=True)):
            rounds, _, first = summary["curve"]
            style: dict[str, Any] = {"color": _COLOURS[place], "linestyle": _LINES[place], "marker": _MARKS[place]}
            left.plot(rounds, 100 * np.asarray(first), label=name, linewidth=1.5, markersize=3, **style)
        left.set_xlabel("round", fontsize=8, color=_INK)
        if row == 0:
            left.legend(frameon=False, fontsize=8, labelcolor=_INK)
        weights = np.concatenate([np.asarray(layer["alpha"])[0], np.asarray(model["alpha"])[0][:1]])
        _heat(right, weights)
        right.set_yticks(np.arange(len(weights)), [*layer["layers"], "whole model"])
        right.axhline(len(weights) - 1.5, color="white", linewidth=4)
        right.set_xlabel("client", fontsize=8, color=_INK)
        _name(right, "final weights of client 0 for every client, %")
    low, high = axes[0, 0].get_ylim()
    middle = (low + high) / 2
    axes[0, 0].set_ylim(min(low, middle - LEAST_SPAN / 2), max(high, middle + LEAST_SPAN / 2))
    return canvas


def _draw_evolution(places: Places, column: Column, method: Method, cell: Summary) -> Canvas:
    """Figure 5: the target's weights over the rounds, a panel for each layer and the last for the legend."""
    rounds, weights = roles_of(cell)
    layers = cell["layers"]
    across = 4 if len(layers) > 5 else 3
    down = -(-(len(layers) + 1) // across)
    below = "Weights of client 0 for clients by what they hold, on a square-root scale.\n"
    below += f"{heading(places, column, 1)}, scale {places.scale}"
    title = f"{column.place.dataset}, {method.name}: from whom the target client learns"
    canvas = _canvas(0.7 + 1.6 * down, title, below)
    axes = canvas.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(layers) :]:
        axis.axis("off")
    for place, (layer, axis) in enumerate(zip(layers, axes.flat, strict=False)):
        _plain(axis, layer)
        for role, name in enumerate(ROLES):
            axis.plot(rounds, weights[:, place, role], _LINES[role], color=_COLOURS[role], linewidth=1.5, label=name)
        for third, period in enumerate(PERIODS):
            axis.axvline(third * rounds.max() / 3, color=_GRID, linewidth=0.8, zorder=0)
            axis.text(
                (third + 0.5) * rounds.max() / 3, 1.06, period, ha="center", va="bottom", fontsize=6, color=_FAINT
            )
        axis.set_yscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
        axis.set_yticks([0, 0.01, 0.05, 0.1, 0.25, 0.5, 1], ["0", ".01", ".05", ".1", ".25", ".5", "1"])
        axis.set_ylim(0, 1.2)
        axis.set_xlim(0, rounds.max())
        if place + across >= len(layers):  # nothing is below it
            axis.tick_params(labelbottom=True)
            axis.set_xlabel("round", fontsize=8, color=_INK)
    for row in axes:
        row[0].set_ylabel("weight", fontsize=8, color=_INK)
    names = ["itself", "the same classes", "three of the same", "others (mean of five)"]
    handles = axes.flat[0].get_lines()[: len(ROLES)]
    look: dict[str, Any] = {"frameon": False, "fontsize": 7.5, "handlelength": 2.6, "labelcolor": _INK}
    axes.flat[-1].legend(handles, names, loc="center", borderpad=0, **look).set_in_layout(False)
    return canvas


def _draw_heat_maps(places: Places, method: Method, parts: Sequence[tuple[Column, Summary]]) -> Canvas:
    """Figure 6: one layer's weights among all clients, a panel for each data set."""
    ordered = sorted(parts, key=lambda part: list(LAYER_OF_FIG6).index(part[0].place.dataset))
    rounds = " or ".join(dict.fromkeys(str(cell["rounds"]) for _, cell in ordered))
    below = (
        "Weights in %, shaded logarithmically from 0.01 to 100 %; row: whose model, column: whose layer it mixes in.\n"
    )
    below += "Rank correlation: of a client's weights for others and the difference between their numbers, mean. "
    below += f"After {rounds} rounds, scale "
    title = f"Weights among clients that overlap with their neighbours ({method.name})"
    across = min(2, len(ordered))
    down = -(-len(ordered) // across)
    canvas = _canvas(0.7 + 2.75 * down, title, below + places.scale)
    axes = canvas.subplots(down, across, squeeze=False)
    for axis in axes.flat[len(ordered) :]:
        axis.axis("off")
    for (column, cell), axis in zip(ordered, axes.flat, strict=False):
        layer = LAYER_OF_FIG6[column.place.dataset]
        weights = np.asarray(cell["alpha"])[:, cell["layers"].index(layer)]
        _heat(axis, weights, LogNorm(1e-4, 1, clip=True))  # by the root all but the own weights would look like none
        axis.set_yticks(np.arange(len(weights)))
        axis.set_xlabel("client", fontsize=8, color=_INK)
        axis.set_ylabel("client", fontsize=8, color=_INK)
        for i in range(len(weights)):
            axis.add_patch(_frame(i))
        rho = falls_with_distance(weights)
        words = f"{column.place.dataset}, {layer}"
        _name(axis, f"{words}: rank correlation {rho:+.2f}" if rho is not None else words)
    return canvas


def _draw_layers(places: Places, method: Method, parts: Sequence[tuple[Column, Summary]]) -> Canvas:
    """Figure 7: the target's weights by layer, for itself and for each of the others."""
    ordered = sorted(parts, key=lambda part: list(LARGEST).index(part[0].place.dataset))
    below = (
        f"Client 0's final weights for every client in %, shaded by their root, its own framed. Scale {places.scale}"
    )
    canvas = _canvas(2.9, f"Weights of the target client by layer ({method.name})", below)
    axes = canvas.subplots(1, len(ordered), squeeze=False)
    for (column, cell), axis in zip(ordered, axes.flat, strict=True):
        weights = np.asarray(cell["alpha"])[0]  # (layers, clients)
        _heat(axis, weights)
        axis.set_yticks(np.arange(len(weights)), cell["layers"])
        axis.set_xlabel("client", fontsize=8, color=_INK)
        for i in range(len(weights)):
            axis.add_patch(_frame(0, i))
        _name(axis, f"{column.place.dataset}, {cell['rounds']} rounds")
    return canvas
