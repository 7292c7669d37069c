"""Figures for papers: PDF, SVG or PNG, one or two columns wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from pfedla.errors import ConfigError, RunError
from pfedla.report.federation import draw_federation
from pfedla.report.runs import Run, spread
from pfedla.report.weights import MOST, draw_retained, draw_weights
from pfedla.result import Result

__all__ = ["KINDS", "draw", "prepare_picture"]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#595959")  # Okabe and Ito
MARKS = "osD^vXP"
DASHES = ("-", "--", ":", "-.")
WIDTHS = {1: 3.3, 2: 6.9}  # inches of a column, and of a page with two
FORMATS = (".pdf", ".svg", ".png")
FONTS: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name is a name, whatever signs it has
}


def prepare_picture(path: Path) -> None:
    """Make the folder that a picture is to be written to; refuse a name that is no picture's."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path}: a picture is a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None


def draw(kind: str, runs: Sequence[Run], path: Path, columns: int = 1) -> None:
    """Draw one of `KINDS` of some runs; what shows one run alone takes one."""
    prepare_picture(path)
    evaluated = [run for run in runs if run.history]
    if not evaluated:
        raise RunError("none of these runs has been evaluated yet")
    if kind in ALONE and len(evaluated) > 1:
        raise ConfigError(f"{kind} shows one run: name one of {', '.join(run.name for run in evaluated[:8])}")
    if len({run.headline for run in evaluated}) > 1:
        raise ConfigError("runs with different headlines cannot be compared: name some with the same")
    try:
        with rc_context(FONTS):
            KINDS[kind](evaluated, path, WIDTHS[columns])
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None


def _by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


def _curves(runs: Sequence[Run], path: Path, width: float) -> None:
    _lines(runs, path, width, "round", lambda line: float(line["round"]))


def _bytes(runs: Sequence[Run], path: Path, width: float) -> None:
    _lines(runs, path, width, "MB down and up", lambda line: (line["bytes_down"] + line["bytes_up"]) / 1e6)


def _lines(runs: Sequence[Run], path: Path, width: float, label: str, at: Callable[[dict[str, Any]], float]) -> None:
    """Draw the headline over something, a line for each method with a band of one standard deviation over its seeds."""
    figure = Figure(figsize=(width, 0.66 * width if width < 5 else 0.5 * width), layout="constrained")
    axis = figure.subplots()
    first = runs[0]
    factor, key = 100 if first.percent else 1, f"{first.headline}_mean"
    groups = _by_label(runs)
    for i, (name, seeds) in enumerate(groups.items()):
        points: dict[int, list[tuple[float, float]]] = {}
        for run in seeds:
            for line in run.history:
                if line.get(key) is not None:
                    points.setdefault(line["round"], []).append((at(line), factor * line[key]))
        rounds = sorted(t for t in points if len(points[t]) == len(seeds))  # a line of fewer seeds would jump
        x = np.array([fmean(place for place, _ in points[t]) for t in rounds])
        y = np.array([fmean(value for _, value in points[t]) for t in rounds])
        band = np.array([stdev([v for _, v in points[t]]) if len(points[t]) > 1 else 0.0 for t in rounds])
        colour = COLOURS[i % len(COLOURS)]
        marked = spread(len(x), 12)
        style = DASHES[i // len(COLOURS) % len(DASHES)]
        axis.plot(x, y, style, color=colour, marker=MARKS[i % len(MARKS)], ms=3.5, lw=1.2, markevery=marked, label=name)
        if len(seeds) > 1:
            axis.fill_between(x, y - band, y + band, color=colour, alpha=0.18, linewidth=0)
    axis.set_xlabel(label)
    axis.set_ylabel(f"{first.headline} (%)" if first.percent else first.headline)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.legend(frameon=False, fontsize=7, ncols=1 if len(groups) <= 6 else 2)
    figure.savefig(path, dpi=300)


def _clients(runs: Sequence[Run], path: Path, width: float) -> None:
    """Draw every client's headline, sorted, before and after local training."""
    (run,) = runs
    last, factor = run.history[-1], 100 if run.percent else 1
    before, after = (
        np.array(last["clients"].get(f"{run.headline}{part}", [None] * len(run.names)), dtype=float) * factor
        for part in ("", "_after_training")
    )
    order = np.argsort(np.where(np.isnan(before), np.inf, before if run.higher_is_better else -before), kind="stable")
    named = len(order) <= 60
    height = max(1.6, 0.55 + (0.14 * len(order) if named else 3))
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    place = np.arange(len(order))
    axis.hlines(place, before[order], after[order], color="#b8c2ca", linewidth=1)
    axis.plot(after[order], place, "o", mfc="white", mec=COLOURS[1], ms=3.5, label="after local training")
    axis.plot(before[order], place, "o", color=COLOURS[0], ms=3.5, label="personalized model")
    if named:
        axis.set_yticks(place, [_short(run.names[i]) for i in order], fontsize=6.5)
    else:
        axis.set_ylabel("clients, the worst on top")
    axis.invert_yaxis()
    axis.set_xlabel(f"{run.headline} (%), round {last['round']}" if run.percent else run.headline)
    axis.grid(axis="x", alpha=0.25, linewidth=0.5)
    figure.legend(frameon=False, fontsize=7, loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=300)


def _weights(runs: Sequence[Run], path: Path, width: float) -> None:  # noqa: ARG001 (as large as its panels)
    """Draw the weights at the latest record."""
    (run,) = runs
    result = _learned(run, "alpha", "weights to draw: its method learns none")
    if len(run.names) > MOST:
        raise RunError(f"{run.name} has {len(run.names):,} clients: a picture of weights can hold {MOST:,}")
    title = f"Who learns from whom: {run.algorithm} after round {int(result.diagnostics['round'][-1])}"
    assert result.final_alpha is not None
    draw_weights(path, result.final_alpha, result.ledger.layers, title, run.groups(), run.names)


def _retained(runs: Sequence[Run], path: Path, width: float) -> None:  # noqa: ARG001 (as large as its panel)
    """Draw which layers stay at the clients over the rounds."""
    (run,) = runs
    draw_retained(path, _learned(run, "retained", "retained layers to draw: its method retains none"), run.algorithm)


def _learned(run: Run, name: str, what: str) -> Result:
    """Return what a run has recorded over its rounds so far, if something of that name is among it."""
    ledger, diagnostics = run.record.so_far()
    if ledger is None or name not in diagnostics:
        raise RunError(f"{run.name} has no {what}, or has written no checkpoint yet")
    return Result({}, [], diagnostics, ledger, tuple(run.names), None, None, dict)


def _federation(runs: Sequence[Run], path: Path, width: float) -> None:  # noqa: ARG001 (as large as its cells)
    """Draw who holds what, in runs that share their data."""
    if len({run.facts.get("data") for run in runs}) > 1:
        raise ConfigError(f"these runs have different data: name one of {', '.join(run.name for run in runs[:8])}")
    run = runs[0]
    counts, classes = run.record.holdings(), tuple(map(str, run.facts.get("classes", ())))
    if counts is None:
        samples = run.facts.get("samples")
        if not samples:
            raise RunError(f"the record of {run.name} does not say who holds what")
        counts, classes = np.array(samples)[:, None], ("samples",)
    draw_federation(path, counts, classes, f"{run.dataset}, seed {run.seed}", names=run.names, groups=run.groups())


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:27]}…"


KINDS: dict[str, Callable[[Sequence[Run], Path, float], None]] = {
    "curves": _curves,
    "bytes": _bytes,
    "clients": _clients,
    "weights": _weights,
    "retained": _retained,
    "federation": _federation,
}
ALONE = ("clients", "retained", "weights")
