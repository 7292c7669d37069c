"""Figures 1, 5, 6 and 7: drawn from results, and what they are to show, computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from pfedla.paper.grid import ADAM, LITERAL, SIMILARITY, SLUGS, Column, Item, Method, Wanted, columns_of
from pfedla.paper.runs import Places, Summary, summaries_of
from pfedla.paper.tables import Figure, Sheet, heading, measured_by, spearman

__all__ = [
    "ROLES",
    "Drawing",
    "drawings_of",
    "falls_with_distance",
    "order_holds",
    "periods",
    "roles_of",
    "save",
    "sheets_of",
]

ROLES = ("own", "same classes", "similar", "others")  # Figure 5: clients 0, 1, 2, and the rest
LAYER_OF_FIG6 = {"EMNIST": "fc1", "FashionMNIST": "fc1", "CIFAR10": "fc3", "CIFAR100": "fc3"}  # the paper's choice
LARGEST = {"EMNIST": "fc3", "CIFAR10": "fc1"}  # Figure 7, as section 4.4 says
PERIODS = ("early", "middle", "late")

_INK, _FAINT, _GRID = "#22303c", "#5d6b77", "#dde3e8"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#7f7f7f")  # told apart by everybody, and by their lines in grey print
_LINES, _MARKS = ("-", "--", "-.", ":"), ("o", "s", "^", "x")
_SHADES = LinearSegmentedColormap.from_list("weights", ["#ffffff", "#cfe1f2", "#6baed6", "#2171b5", "#08306b"])


class Drawing(NamedTuple):
    """A picture and the name of its files."""

    name: str
    canvas: Canvas


# ---- what the figures are to show, computed


def sheets_of(item: Item, places: Places, wanted: Wanted) -> list[Sheet]:
    """Return what a figure is to show, as tables."""
    make = {"fig1": _toy_sheet, "fig5": _evolution_sheet, "fig6": _distance_sheet, "fig7": _layers_sheet}[item.name]
    return [make(places, column, method, found) for column, method, found in _measured(item, places, wanted)]


def _measured(item: Item, places: Places, wanted: Wanted) -> Iterator[tuple[Column, Method, dict[str, list[Summary]]]]:
    """Yield the columns and methods of a figure that are measured, with their cells."""
    for column in columns_of(item, wanted):
        if item.name == "fig1":
            found = summaries_of(places, column, SIMILARITY, wanted.seeds)
            if len(found) == len(SIMILARITY):
                yield column, SIMILARITY[0], found
            continue
        for method in (LITERAL, ADAM):
            found = summaries_of(places, column, (method,), wanted.seeds)
            found = {name: [cell for cell in cells if "alpha" in cell] for name, cells in found.items()}
            if any(found.values()):
                yield column, method, found


def periods(rounds: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Return which records belong to the early, the middle and the late third of the rounds."""
    t = np.asarray(rounds)
    third = np.ceil(3 * t / t.max()).clip(1, 3)
    return [np.flatnonzero(third == part) for part in (1, 2, 3)]


def roles_of(summary: Summary) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounds, and the target's weights by layer: for itself, its equal, the similar one, the others."""
    rounds, alpha = summary["alpha_over_time"]
    weights = np.asarray(alpha)  # (records, layers, clients)
    parts = [weights[..., 0], weights[..., 1], weights[..., 2], weights[..., 3:].mean(-1)]
    return np.asarray(rounds), np.stack(parts, -1)  # (records, layers, roles)


def order_holds(weights: Sequence[float]) -> bool:
    """Say whether own > same classes > similar > others."""
    return all(more > less for more, less in pairwise(weights))


def _toy_sheet(places: Places, column: Column, method: Method, found: dict[str, list[Summary]]) -> Sheet:  # noqa: ARG001
    rows, records = [], []
    for name, cells in found.items():
        first, everybody = fmean(100 * c["curve"][2][-1] for c in cells), fmean(100 * c["curve"][1][-1] for c in cells)
        rows.append((Figure(name), Figure(f"{first:.2f}"), Figure(f"{everybody:.2f}")))
        records.append({"item": "fig1", "scale": places.scale, "method": name, "client_0": first, "mean": everybody})
    seeds = min(map(len, found.values()))
    layer, model = (found[method.name][:seeds] for method in SIMILARITY)
    pairs = list(zip(layer, model, strict=True))
    above = sum(a["curve"][2][-1] > b["curve"][2][-1] for a, b in pairs)
    mean = sum(a["curve"][1][-1] > b["curve"][1][-1] for a, b in pairs)
    claim = f"Layer-wise is above model-wise for client 0 in {above} of {seeds} seeds, for the mean client in {mean}."
    title = f"Figure 1 ({heading(places, column, seeds)}), scale {places.scale}"
    head = ("aggregation by similarity", "client 0 %", "all clients %")
    return Sheet(title, head, tuple(rows), (claim, _commits(found)), tuple(records))


def _evolution_sheet(places: Places, column: Column, method: Method, found: dict[str, list[Summary]]) -> Sheet:
    cells = found[method.name]
    layers = cells[0]["layers"]
    means = []  # (seeds, periods, layers, roles)
    for cell in cells:
        rounds, weights = roles_of(cell)
        means.append([weights[some].mean(0) if len(some) else weights[0] * np.nan for some in periods(rounds)])
    values = np.asarray(means)
    rows, records = [], []
    holds = [[order_holds(values[seed, -1, place]) for place in range(len(layers))] for seed in range(len(cells))]
    for place, layer in enumerate(layers):
        mean = values[:, :, place].mean(0)  # (periods, roles)
        texts = [Figure(" / ".join(f"{x:.3f}" for x in mean[part])) for part in range(len(PERIODS))]
        good = sum(row[place] for row in holds)
        rows.append((Figure(layer), *texts, Figure(f"{good} of {len(cells)}")))
        for part, period in enumerate(PERIODS):
            record = {"item": "fig5", "scale": places.scale, "dataset": column.place.dataset, "method": method.name}
            weights_of = {role.replace(" ", "_"): float(x) for role, x in zip(ROLES, mean[part], strict=True)}
            records.append({**record, "layer": layer, "period": period, **weights_of})
    claim = f"Own > same classes > similar > others, late: in {sum(map(sum, holds))} of {len(layers) * len(cells)} "
    claim += "cases (layers x seeds)."
    title = f"Figure 5, {column.place.dataset}, {method.name} ({heading(places, column, len(cells))}), "
    title += f"scale {places.scale}. The target's weights: {' / '.join(ROLES)} (mean of the five)"
    head = ("layer", *PERIODS, "order holds, late (seeds)")
    return Sheet(title, head, tuple(rows), (claim, _commits(found)), tuple(records))


def _distance_sheet(places: Places, column: Column, method: Method, found: dict[str, list[Summary]]) -> Sheet:
    cells = found[method.name]
    layers = cells[0]["layers"]
    rows, records = [], []
    for place, layer in enumerate(layers):
        weights = [np.asarray(cell["alpha"])[:, place] for cell in cells]  # seeds of (clients, clients)
        found_here = [falls_with_distance(some) for some in weights]
        known = [x for x in found_here if x is not None]
        rho = fmean(known) if known else None
        largest = fmean(float((some.argmax(1) == np.arange(len(some))).mean()) for some in weights)
        own = fmean(float(np.diag(some).mean()) for some in weights)
        shown = f"{rho:+.2f}" if rho is not None else "-"
        rows.append((Figure(layer), Figure(shown), Figure(f"{own:.3f}"), Figure(f"{largest:.0%}")))
        record = {"item": "fig6", "scale": places.scale, "dataset": column.place.dataset, "method": method.name}
        records.append({**record, "layer": layer, "spearman": rho, "own": own, "own_is_largest": largest})
    down = [record["spearman"] for record in records if record["spearman"] is not None]
    claim = f"Weight falls with distance in number (negative rank correlation) in {sum(x < 0 for x in down)} of "
    claim += f"{len(layers)} layers."
    title = f"Figure 6, {column.place.dataset}, {method.name} ({heading(places, column, len(cells))}), "
    head = ("layer", "Spearman of weight and distance, own left out", "own weight", "own is largest (clients)")
    return Sheet(title + f"scale {places.scale}", head, tuple(rows), (claim, _commits(found)), tuple(records))


def falls_with_distance(weights: np.ndarray) -> float | None:
    """Return the rank correlation of the weights for others and their distance in number, `weights (N, N)`."""
    i, j = np.nonzero(~np.eye(len(weights), dtype=bool))
    return spearman(weights[i, j].tolist(), np.abs(i - j).tolist())


def _layers_sheet(places: Places, column: Column, method: Method, found: dict[str, list[Summary]]) -> Sheet:
    cells = found[method.name]
    layers, dataset = cells[0]["layers"], column.place.dataset
    own = np.asarray(
        [np.asarray(cell["alpha"]).diagonal(axis1=0, axis2=2) for cell in cells]
    )  # (seeds, layers, clients)
    target, everybody = own[:, :, 0].mean(0), own.mean((0, 2))
    rows, records = [], []
    for place, layer in enumerate(layers):
        best = target[place] == target.max(), everybody[place] == everybody.max()
        rows.append(
            (Figure(layer), Figure(f"{target[place]:.3f}", best[0]), Figure(f"{everybody[place]:.3f}", best[1]))
        )
        record = {"item": "fig7", "scale": places.scale, "dataset": dataset, "method": method.name, "layer": layer}
        records.append({**record, "target": float(target[place]), "mean": float(everybody[place])})
    tops = [layers[top] for top in own.argmax(1).flatten()]
    often = max(dict.fromkeys(tops), key=tops.count)
    claim = (
        f"The target's largest own weight is in {layers[int(target.argmax())]} (paper: {LARGEST[dataset]}); over all "
    )
    claim += f"clients and seeds it is most often in {often}, {tops.count(often)} of {len(tops)} times."
    title = (
        f"Figure 7, {dataset}, {method.name} ({heading(places, column, len(cells))}), scale {places.scale}. Own weights"
    )
    head = ("layer", "target client", "mean client")
    return Sheet(title, head, tuple(rows), (claim, _commits(found)), tuple(records))


def _commits(found: dict[str, list[Summary]]) -> str:
    return measured_by(cell for cells in found.values() for cell in cells)


# ---- drawn


def drawings_of(item: Item, places: Places, wanted: Wanted) -> list[Drawing]:
    """Draw a figure from what is measured: the first seed, as the paper shows one."""
    found = list(_measured(item, places, wanted))
    if item.name == "fig1":
        return [Drawing("fig1", _draw_toy(places, column, cells)) for column, _, cells in found]
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
                canvas.savefig(path, metadata=metadata, dpi=200)
            paths.append(path)
    return paths


def _canvas(width: float, height: float, title: str, below: str) -> Canvas:
    canvas = Canvas(figsize=(width, height), layout="constrained", facecolor="white")
    canvas.suptitle(title, color=_INK, fontsize=12, fontweight="bold", x=0.01, ha="left")
    canvas.supxlabel(below, color=_FAINT, fontsize=8, x=0.01, ha="left")
    return canvas


def _plain(axis: Axes, title: str = "") -> Axes:
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_FAINT)
    axis.tick_params(labelsize=8, colors=_FAINT, length=2)
    axis.grid(axis="y", color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axis.set_title(title, fontsize=10, color=_INK, loc="left")
    return axis


def _heat(axis: Axes, values: np.ndarray, top: float, *, numbers: bool = True) -> Any:
    """Draw weights as a map, with the figures in it."""
    image = axis.imshow(values, cmap=_SHADES, norm=PowerNorm(0.5, 0, top), interpolation="nearest", aspect="auto")
    axis.tick_params(length=0, labelsize=8, colors=_INK)
    axis.spines[:].set_visible(False)
    axis.set_xticks(np.arange(values.shape[1]))
    if numbers:
        for (row, place), value in np.ndenumerate(values):
            dark = value > 0.3 * top
            text = f"{value:.2f}".removeprefix("0") if 0.005 <= value < 0.995 else f"{value:.0f}"
            axis.text(place, row, text, ha="center", va="center", fontsize=7, color="white" if dark else _INK)
    return image


def _draw_toy(places: Places, column: Column, found: dict[str, list[Summary]]) -> Canvas:
    """Figure 1: accuracy of client 0, and its weights by layer at the end."""
    below = f"{heading(places, column, 1)}, scale {places.scale}"
    canvas = _canvas(9.2, 3.6, "Aggregation by similarity: of layers, or of whole models", below)
    left, right = canvas.subplots(1, 2, width_ratios=(1, 1.15))
    _plain(left, "(a) accuracy of client 0, %")
    for place, (name, cells) in enumerate(found.items()):
        rounds, _, first = cells[0]["curve"]
        style: dict[str, Any] = {"color": _COLOURS[place], "linestyle": _LINES[place], "marker": _MARKS[place]}
        left.plot(rounds, 100 * np.asarray(first), label=name, linewidth=1.8, markersize=4, **style)
    left.set_xlabel("round", fontsize=9, color=_INK)
    left.legend(frameon=False, fontsize=9)
    layer, model = (found[method.name][0] for method in SIMILARITY)
    weights = np.concatenate([np.asarray(layer["alpha"])[0], np.asarray(model["alpha"])[0][:1]])
    _heat(right, weights, 1.0)
    right.set_yticks(np.arange(len(weights)), [*layer["layers"], "whole model"])
    right.axhline(len(weights) - 1.5, color="white", linewidth=4)
    right.set_xlabel("weight of client", fontsize=9, color=_INK)
    right.set_title("(b) weights of client 0 after the last round", fontsize=10, color=_INK, loc="left")
    return canvas


def _draw_evolution(places: Places, column: Column, method: Method, cell: Summary) -> Canvas:
    """Figure 5: the target's weights over the rounds, a panel for each layer."""
    rounds, weights = roles_of(cell)
    layers = cell["layers"]
    across = 4 if len(layers) > 5 else len(layers)
    down = -(-len(layers) // across)
    below = (
        f"Client 0's weights; lines divide early, middle and late. {heading(places, column, 1)}, scale {places.scale}"
    )
    title = f"{column.place.dataset}, {method.name}: from whom the target client learns"
    canvas = _canvas(0.6 + 2.35 * across, 1.1 + 2.1 * down, title, below)
    axes = canvas.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(layers) :]:
        axis.axis("off")
    for place, (layer, axis) in enumerate(zip(layers, axes.flat, strict=False)):
        _plain(axis, layer)
        for role, name in enumerate(ROLES):
            axis.plot(rounds, weights[:, place, role], _LINES[role], color=_COLOURS[role], linewidth=1.8, label=name)
        for third in (1, 2):
            axis.axvline(third * rounds.max() / 3, color=_GRID, linewidth=1)
        axis.set_ylim(0, 1)
        if place + across >= len(layers):
            axis.set_xlabel("round", fontsize=9, color=_INK)
            axis.tick_params(labelbottom=True)
    for row in axes:
        row[0].set_ylabel("weight", fontsize=9, color=_INK)
    names = [ROLES[0], "same classes", "three of the same", "others (mean)"]
    handles = axes.flat[0].get_lines()[: len(ROLES)]
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 2.6}
    if down * across > len(layers):
        axes.flat[-1].legend(handles, names, loc="center", **look)
    else:
        canvas.legend(handles, names, loc="outside upper right", ncols=4, **look)
    return canvas


def _draw_heat_maps(places: Places, method: Method, parts: Sequence[tuple[Column, Summary]]) -> Canvas:
    """Figure 6: one layer's weights among all clients, a panel for each data set."""
    ordered = sorted(parts, key=lambda part: list(LAYER_OF_FIG6).index(part[0].place.dataset))
    below = (
        f"Row: whose model; column: whose layer it mixes in. Scale {places.scale}; final weights. Own weights framed."
    )
    title = f"Weights among clients that overlap with their neighbours ({method.name})"
    across = min(2, len(ordered))
    down = -(-len(ordered) // across)
    canvas = _canvas(0.4 + 4.3 * across, 1.0 + 3.5 * down, title, below)
    axes = canvas.subplots(down, across, squeeze=False)
    for axis in axes.flat[len(ordered) :]:
        axis.axis("off")
    for (column, cell), axis in zip(ordered, axes.flat, strict=False):
        layer = LAYER_OF_FIG6[column.place.dataset]
        weights = np.asarray(cell["alpha"])[:, cell["layers"].index(layer)]
        _heat(axis, weights, float(weights.max()))
        axis.set_yticks(np.arange(len(weights)))
        for i in range(len(weights)):
            axis.add_patch(_frame(i))
        rho = falls_with_distance(weights)
        words = f"{column.place.dataset}, {layer}: rank correlation {rho:+.2f}" if rho is not None else layer
        axis.set_title(words, fontsize=10, color=_INK, loc="left")
    return canvas


def _draw_layers(places: Places, method: Method, parts: Sequence[tuple[Column, Summary]]) -> Canvas:
    """Figure 7: the target's weights by layer, for itself and for each of the others."""
    ordered = sorted(parts, key=lambda part: list(LARGEST).index(part[0].place.dataset))
    below = f"Client 0's final weights for every client, itself framed. Scale {places.scale}"
    canvas = _canvas(0.6 + 4.9 * len(ordered), 3.9, f"Weights of the target client by layer ({method.name})", below)
    axes = canvas.subplots(1, len(ordered), squeeze=False)
    for (column, cell), axis in zip(ordered, axes.flat, strict=True):
        weights = np.asarray(cell["alpha"])[0]  # (layers, clients)
        _heat(axis, weights, 1.0)
        axis.set_yticks(np.arange(len(weights)), cell["layers"])
        axis.set_xlabel("client", fontsize=9, color=_INK)
        for i in range(len(weights)):
            axis.add_patch(_frame(0, i))
        axis.set_title(f"{column.place.dataset}, {heading(places, column, 1)}", fontsize=9, color=_INK, loc="left")
    return canvas


def _frame(x: int, y: int | None = None) -> Rectangle:
    """Return a frame around a square of a map, on the diagonal if there is one place."""
    corner = (x - 0.47, (x if y is None else y) - 0.47)
    return Rectangle(corner, 0.94, 0.94, fill=False, edgecolor="#d55e00", linewidth=1.4)
