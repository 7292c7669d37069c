"""What a codec costs and what it saves: the headline against all bytes that travelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from pfedla.errors import ConfigError, unknown_name

__all__ = ["Choice", "Point", "apart", "draw_pareto", "everywhere", "frontier", "in_words", "most_run", "points"]

_INK, _FAINT = "#22303c", "#6b7a87"
_COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")  # Okabe and Ito
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
PLAIN = "no codec"
DEPTH = 6  # times the margin: what is worse by more stands at the panel's edge, below a dotted line, with its figure


class Point(NamedTuple):
    """A method with a codec, over its seeds."""

    label: str
    method: str
    codec: str
    megabytes: float  # of layers, values and headers, both ways
    score: float  # the headline, in percent if it is one
    spread: float | None  # over the seeds, if there are several
    each: tuple[tuple[int, float], ...]  # seeds and their scores

    @property
    def seeds(self) -> int:
        """How many there are."""
        return len(self.each)


class Choice(NamedTuple):
    """A method with a codec that is good enough in every comparison."""

    label: str
    codec: str
    megabytes: float  # of all comparisons together
    worst: float  # the headline's least difference from that of the reference


def points(summaries: Sequence[dict[str, Any]], name: str = "") -> list[Point]:
    """Return the points of a comparison, in its order; methods that send no layer are left out.

    An error names the comparison, if it has a name.
    """
    by_label: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        if summary["bytes_down"] + summary["bytes_up"] and summary[_headline(summary)] is not None:
            by_label.setdefault(summary["label"], []).append(summary)
    if not by_label:
        raise ConfigError(f"none of the runs {f'of {name}' if name else 'here'} has both a result and traffic")
    found = []
    for label, runs in by_label.items():
        sides = ("bytes_down", "bytes_up", "overhead_down", "overhead_up")
        megabytes = fmean(sum(run[side] for side in sides) / 1e6 for run in runs)
        scores = [run[_headline(run)] * (100 if run.get("percent", True) else 1) for run in runs]
        spread = stdev(scores) if len(scores) > 1 else None
        method = ",".join(part for part in label.split(",") if not part.startswith("codec"))
        codec = in_words(runs[0].get("settings", {}).get("codec", {}))
        each = zip((run["seed"] for run in runs), scores, strict=True)
        found.append(Point(label, method, codec, megabytes, fmean(scores), spread, tuple(each)))
    return found


def frontier(found: Sequence[Point], higher_is_better: bool = True) -> list[Point]:
    """Return the points that no other beats in both, from the least traffic to the most.

    What was run with fewer seeds than others is none of them: it may have been lucky.
    """
    sign, best = 1 if higher_is_better else -1, list[Point]()
    for point in sorted(_complete(found), key=lambda point: (point.megabytes, -sign * point.score)):
        if not best or sign * point.score > sign * best[-1].score:
            best.append(point)
    return best


def most_run(found: Sequence[Point]) -> str:
    """Return the label of the first point that was run with as many seeds as any."""
    return _complete(found)[0].label


def _complete(found: Sequence[Point]) -> list[Point]:
    """Return the points that were run with as many seeds as any."""
    seeds = max((point.seeds for point in found), default=0)
    return [point for point in found if point.seeds == seeds]


def everywhere(
    comparisons: Sequence[Sequence[Point]], against: str, within: float, higher_is_better: bool = True
) -> list[Choice]:
    """Return what is at most `within` worse than the label `against` in every comparison, the least traffic first.

    They are compared over the seeds of `against`. What was not run with all of these is no choice: it may have been
    lucky.
    """
    found = [{point.label: point for point in some} for some in comparisons]
    for known in found:
        if against not in known:
            raise unknown_name("method", against, known)
    sign = 1 if higher_is_better else -1
    good = []
    for label in found[0]:
        apart = [_above(known.get(label), known[against]) for known in found]
        if None not in apart:
            worst = min(sign * difference for difference in apart if difference is not None)
            if worst >= -within:
                megabytes = sum(known[label].megabytes for known in found)
                good.append(Choice(label, found[0][label].codec, megabytes, worst))
    return sorted(good, key=lambda choice: choice.megabytes)


def _above(point: Point | None, reference: Point) -> float | None:
    """Return by how much a point's score is above the reference's over the latter's seeds; None if it lacks some."""
    if point is None or not {seed for seed, _ in reference.each} <= {seed for seed, _ in point.each}:
        return None
    scores = dict(point.each)
    return fmean(scores[seed] - score for seed, score in reference.each)


def apart(found: Sequence[Point], against: str) -> list[Point]:
    """Return points with their difference from `against` for a score, seed by seed; those that share no seed left out.

    What a seed's clients have in common is gone from the spread, and points of different seeds can be compared.
    """
    reference = dict(next(point for point in found if point.label == against).each)
    held = []
    for point in found:
        each = tuple((seed, score - reference[seed]) for seed, score in point.each if seed in reference)
        scores = [score for _, score in each]
        if scores:
            spread = stdev(scores) if len(scores) > 1 else None
            held.append(point._replace(score=fmean(scores), spread=spread, each=each))
    return held


def draw_pareto(
    path: Path, comparisons: Mapping[str, Sequence[dict[str, Any]]], against: str, within: float, chosen: str
) -> None:
    """Draw how far a headline is from that of `against`, by megabytes: a colour a codec, a marker a method.

    Where there is but one codec, methods have colours as well. Every comparison has a panel, in which `chosen` is
    circled, and the frontier is a line; colours and markers mean the same in all of them. Differences are taken seed by
    seed. What was run with fewer seeds than others is pale.
    """
    found = {name: apart(points(summaries), against) for name, summaries in comparisons.items()}
    every = [point for some in found.values() for point in some]
    codecs, methods = (list(dict.fromkeys(getattr(point, what) for point in every)) for what in ("codec", "method"))
    figure = Figure(figsize=(7.2, 5.2), dpi=300, layout="constrained")  # as wide as a page
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (name, summaries) in zip(panels, comparisons.items(), strict=True):
        _panel(axis, found[name], summaries[0], against, within, chosen, codecs, methods)
    where = " in all panels" if len(found) > 1 else ""
    percent = all(summary.get("percent", True) for summaries in comparisons.values() for summary in summaries)
    margin = f"{within:g} {'point' if within == 1 else 'points'}" if percent else f"{within:g}"
    title = f"Circled: the least traffic within {margin} of {against} (the band){where}.  "
    title += "Line: the best with no more traffic"
    figure.suptitle(title, fontsize=8, color=_INK, fontweight="bold", x=0.01, ha="left")
    by_codec = [Line2D([], [], marker="o", ls="none", ms=5.5, label=c, **_style(i)) for i, c in enumerate(codecs)]
    one, grey = len(codecs) == 1, {"markerfacecolor": "#d5dbe0", "markeredgecolor": _FAINT}
    by_method = [
        Line2D(
            [], [], marker=_MARKERS[i % len(_MARKERS)], ls="none", ms=5.5, label=method, **(_style(i) if one else grey)
        )
        for i, method in enumerate(methods)
    ]
    look: dict[str, Any] = {"frameon": False, "fontsize": 7.5, "labelcolor": _INK, "alignment": "left"}
    legends = [
        figure.legend(handles=by_method, title="method", loc="outside lower left", ncols=-(-len(methods) // 8), **look)
    ]
    if not one:
        legends.append(figure.legend(handles=by_codec, title="codec", loc="outside lower right", ncols=2, **look))
    for legend in legends:
        legend.get_title().set(fontsize=7.5, fontweight="bold", color=_INK)
    figure.savefig(path)


def _panel(
    axis: Axes,
    found: Sequence[Point],
    first: dict[str, Any],
    against: str,
    within: float,
    chosen: str,
    codecs: Sequence[str],
    methods: Sequence[str],
) -> None:
    """Draw the points of one comparison, of which `first` is a run and `chosen` the label to circle."""
    up, percent = first.get("higher_is_better", True), first.get("percent", True)
    best = frontier(found, up)
    reference, least = (next(point for point in found if point.label == label) for label in (against, chosen))
    sign = 1 if up else -1
    edge = reference.score - within * sign
    axis.axhspan(*sorted((edge, reference.score)), color="#eef1f3", zorder=0)
    axis.axhline(reference.score, color=_FAINT, linewidth=0.8, zorder=1)
    axis.axhline(edge, color=_FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    shown = [point for point in found if sign * (reference.score - point.score) <= DEPTH * within or not within]
    line = [point for point in best if point in shown]
    axis.plot([point.megabytes for point in line], [point.score for point in line], drawstyle="steps-post",
              color=_FAINT, linewidth=1.1, zorder=2)  # fmt: skip
    complete = _complete(found)
    looks = {
        point: (
            _MARKERS[methods.index(point.method) % len(_MARKERS)],
            _style(methods.index(point.method) if len(codecs) == 1 else codecs.index(point.codec))
            | ({} if point in complete else {"alpha": 0.45}),
        )
        for point in found
    }
    for point in shown:
        marker, style = looks[point]
        axis.errorbar(point.megabytes, point.score, point.spread, fmt="none", ecolor=style["markeredgecolor"],
                      elinewidth=0.8, alpha=0.45, zorder=3)  # fmt: skip
        axis.plot(point.megabytes, point.score, marker, markersize=5.5, linestyle="none", zorder=4, **style)
    axis.plot(least.megabytes, least.score, "o", markersize=12, fillstyle="none", color=_INK, mew=1.1, zorder=5)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    if beyond := sorted((point for point in found if point not in shown), key=lambda point: point.megabytes):
        _draw_beyond(axis, [(point, *looks[point]) for point in beyond], sign)
    axis.set_xlabel("MB in all, down and up, headers included", fontsize=8, color=_INK)
    name = first.get("headline", "accuracy")
    unit = "points " if percent else ""
    axis.set_ylabel(f"{name}: {unit}above {against}, seed by seed", fontsize=8, color=_INK)
    axis.tick_params(labelsize=7.5, colors=_FAINT, which="both")
    axis.grid(color="#e6eaed", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    of = f"{first['dataset']}, {first['clients']} clients, {first['rounds']} rounds"
    fewest, seeds = (pick(point.seeds for point in found) for pick in (min, max))
    over = f"{seeds} seeds" if seeds > 1 else f"seed {first['seed']}"
    over += " (pale: fewer)" if fewest < seeds else ""
    axis.set_title(f"{of}, {over}", fontsize=7.5, color=_INK, loc="left")


def _draw_beyond(axis: Axes, points: Sequence[tuple[Point, str, dict[str, Any]]], sign: int) -> None:
    """Draw points that are too bad for the scale beside it, by their traffic alone, with their figures."""
    ends = axis.get_ylim()
    height, last = ends[1] - ends[0], ends[0] if sign > 0 else ends[1]
    ticks = [tick for tick in axis.get_yticks() if ends[0] <= tick <= ends[1]]
    axis.axhline(last, color=_FAINT, linewidth=0.8, linestyle=":", zorder=1)
    axis.annotate("off the scale", (1, last), (-2, -3 * sign), xycoords=("axes fraction", "data"), zorder=6, ha="right",
                  textcoords="offset points", va="top" if sign > 0 else "bottom", fontsize=7, color=_FAINT)  # fmt: skip
    left, right = np.log10(axis.get_xlim())
    taken = [0.0] * 5  # how far each row is covered, as a share of the width
    for point, marker, style in points:
        across = (np.log10(point.megabytes) - left) / (right - left)
        row = next((row for row, end in enumerate(taken) if end <= across), int(np.argmin(taken)))
        taken[row] = across + 0.13
        place = last - (0.04 + 0.045 * row) * height * sign
        axis.plot(point.megabytes, place, marker, markersize=5.5, linestyle="none", zorder=4, **style)
        words = f"{point.score:.1f}" if abs(point.score) < 100 else f"{point.score:.0f}"
        axis.annotate(words, (point.megabytes, place), (5, 0), textcoords="offset points", va="center",
                      fontsize=6.5, color=_INK, zorder=6)  # fmt: skip
    axis.set_yticks(ticks)


def in_words(settings: dict[str, Any]) -> str:
    """Return a codec's settings in a few words."""
    if settings.keys() == {"up", "down"} and settings["up"] == settings["down"]:
        return str(settings["up"])
    return " ".join(f"{key}={settings[key]}" for key in ("up", "down", "keep") if key in settings) or PLAIN


def _style(index: int) -> dict[str, Any]:
    """Return the look of the codec at this place: full of a colour, or hollow once all colours are taken.

    Of methods, whose markers come again with the colours, those after two rounds have other colours than before.
    """
    colour = _COLOURS[(index + 3 * (index // (2 * len(_COLOURS)))) % len(_COLOURS)]
    full = index // len(_COLOURS) % 2 == 0
    return {"markerfacecolor": colour if full else "white", "markeredgecolor": colour, "markeredgewidth": 1.2}


def _headline(summary: dict[str, Any]) -> str:
    return f"{summary.get('headline', 'accuracy')}_mean"
