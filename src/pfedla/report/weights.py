"""The learned aggregation weights as pictures: who learns from whom, and what stays at home, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pfedla.report.federation import named_ticks
from pfedla.result import Result

__all__ = ["MOST", "draw_result", "draw_retained", "draw_weights", "picture", "retained_changes"]

_INK, _FAINT = "#22303c", "#6b7a87"
_SHADES = LinearSegmentedColormap.from_list("weights", ["#ffffff", "#f9d9a8", "#ef8a5a", "#b8325e", "#3b0f4f"])


MOST = 1000  # clients of whom a picture can be made


def draw_result(path: Path, result: Result, method: str, groups: np.ndarray | None = None) -> None:
    """Draw the weights at the end of a run, if its method learns any and a picture can hold them."""
    if "alpha" not in result.diagnostics or len(result.names) > MOST:
        return
    alpha, t = result.final_alpha, int(result.diagnostics["round"][-1])
    assert alpha is not None
    title = f"Who learns from whom: the weights of {method} after round {t}"
    draw_weights(path, alpha, result.ledger.layers, title, groups, result.names)


def draw_weights(
    path: Path,
    alpha: np.ndarray,
    layers: Sequence[str],
    title: str,
    groups: np.ndarray | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Draw α of one round as a PNG, a panel for each layer; see `picture`.

    `names` stand beside clients that have some of their own, if there is room; others are numbered.
    """
    _weights(alpha, layers, title, groups, names).savefig(path)


def picture(alpha: np.ndarray, layers: Sequence[str], title: str, groups: np.ndarray | None = None) -> np.ndarray:
    """Return α of one round as a picture, `(height, width, 3)` bytes, with a panel for each layer.

    Row i of a panel shows how client i's layer is mixed from everybody's. A client's own weight is left out of the
    colours, which would otherwise show little else; its mean stands above the panel. `alpha` is `(clients, layers,
    clients)`; `groups`, of clients in contiguous blocks, are outlined.
    """
    canvas: Any = FigureCanvasAgg(_weights(alpha, layers, title, groups))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _weights(
    alpha: np.ndarray,
    layers: Sequence[str],
    title: str,
    groups: np.ndarray | None,
    names: Sequence[str] | None = None,
) -> Figure:
    clients = len(alpha)
    known = named_ticks(names, clients, 20)
    columns = min(len(layers), 4 if len(layers) <= 16 else 6)
    rows = -(-len(layers) // columns)
    side = (2.9 if clients <= 30 else 3.6) if len(layers) <= 16 else 2.6
    lines = max(_heading(layer, "own weight 0.00", side).count("\n") for layer in layers)
    figure = Figure(
        figsize=(columns * side + 0.9, rows * (side + 0.25 + 0.15 * lines) + 0.5), dpi=110, layout="constrained"
    )
    figure.suptitle(title, color=_INK, fontsize=12, fontweight="bold")
    axes = figure.subplots(rows, columns, squeeze=False)
    others = alpha.transpose(1, 0, 2).copy()  # (layers, clients, clients)
    index = np.arange(clients)
    own = others[:, index, index].copy()  # (layers, clients)
    others[:, index, index] = np.nan
    top = float(np.nanmax(others)) if clients > 1 else 1.0
    for axis in axes.flat[len(layers) :]:
        axis.axis("off")
    for place, (layer, axis) in enumerate(zip(layers, axes.flat, strict=False)):
        axis.set_facecolor("#cfd8df")  # behind what is left out: the diagonal
        image = axis.imshow(others[place], cmap=_SHADES, norm=PowerNorm(0.6, 0, top), interpolation="nearest")
        heading = _heading(layer, f"own weight {own[place].mean():.2f}", side)
        axis.set_title(heading, fontsize=9.5, color=_INK, parse_math=False)
        ticks = index if clients <= 20 else index[:: -(-clients // (10 if side > 2.6 else 5))]
        last = place + columns >= len(layers)  # nothing stands below
        axis.set_xticks(ticks)
        axis.set_yticks(ticks)
        if known is not None:
            axis.set_xticklabels(known if last else [], rotation=90, parse_math=False)
            axis.set_yticklabels(known if place % columns == 0 else [], parse_math=False)
        axis.tick_params(length=0, labelsize=7, colors=_FAINT)
        for spine in axis.spines.values():
            spine.set_color("#cfd8df")
        if place % columns == 0:
            axis.set_ylabel("client", fontsize=9, color=_INK)
        if last:
            axis.set_xlabel("learns from client", fontsize=8, color=_FAINT)
        for start, size in _blocks(groups):
            square = Rectangle((start - 0.5, start - 0.5), size, size, fill=False, edgecolor="#1b9aaa", linewidth=1.6)
            axis.add_patch(square)
    bar = figure.colorbar(image, ax=axes, shrink=min(0.75, 9 / (rows * side)), pad=0.015)
    bar.set_label("weight of another client (own: grey)", fontsize=8.5, color=_INK)
    bar.ax.tick_params(labelsize=7, colors=_FAINT)
    return figure


def _heading(layer: str, figure: str, side: float) -> str:
    """Return a panel's heading: on one line if it fits, else a long name on lines of its own, broken after dots."""
    room = int(side * 9.5)  # characters
    if len(layer) + 3 + len(figure) <= room:
        return f"{layer}   {figure}"
    lines = [""]
    for part in re.split(r"(?<=[._-])", layer):
        for piece in (part[i : i + room] for i in range(0, len(part), room)):
            lines = [*lines, piece] if len(lines[-1]) + len(piece) > room else [*lines[:-1], lines[-1] + piece]
    kept = lines if len(lines) <= 3 else ["…" + lines[-3][1:], *lines[-2:]]  # the end tells layers apart
    return "\n".join([*kept, figure])


def draw_retained(path: Path, result: Result, method: str) -> None:
    """Draw which layers stay at the clients over the rounds, if the method retains any."""
    if "retained" not in result.diagnostics:
        return
    rounds, retained = result.diagnostics["round"], result.diagnostics["retained"]
    share, layers = retained.mean(1).T, result.ledger.layers  # (layers, records)
    height = 0.32 * len(layers) + 1.6
    figure = Figure(figsize=(min(4 + 0.18 * len(rounds), 8), height), dpi=200, layout="constrained")
    axis = figure.subplots()
    edges = np.concatenate([[2 * rounds[0] - rounds[1]] if len(rounds) > 1 else [rounds[0] - 1], rounds])  # up to each
    mesh = axis.pcolormesh(edges, np.arange(len(layers) + 1), share, cmap=_SHADES, vmin=0, vmax=1)
    axis.set_yticks(np.arange(len(layers)) + 0.5, layers, fontsize=8, color=_INK)
    axis.invert_yaxis()
    axis.set_xlabel("round", fontsize=9, color=_INK)
    axis.tick_params(length=0, labelsize=8, colors=_FAINT)
    words = f"A client's layers change in {retained_changes(retained):.0%} of the steps from one column to the next"
    axis.set_title(words, fontsize=8.5, color=_FAINT, loc="left")
    figure.suptitle(f"Layers that stay at the clients: {method}", color=_INK, fontsize=12, fontweight="bold")
    bar = figure.colorbar(mesh, ax=axis, pad=0.015)
    bar.set_label("share of clients", fontsize=8.5, color=_INK)
    bar.ax.tick_params(labelsize=7, colors=_FAINT)
    figure.savefig(path)


def retained_changes(retained: np.ndarray) -> float:
    """Return how often a client's layers `(records, clients, layers)` differ from those of the record before."""
    return float((retained[1:] != retained[:-1]).any(-1).mean()) if len(retained) > 1 else 0.0


def _blocks(groups: np.ndarray | None) -> list[tuple[int, int]]:
    """Return where each group's clients start, and how many they are."""
    if groups is None:
        return []
    _, starts, sizes = np.unique(groups, return_index=True, return_counts=True)
    return list(zip(starts.tolist(), sizes.tolist(), strict=True))
