"""Results as tables: in the terminal, and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pfedla.errors import ConfigError, unknown_name
from pfedla.objective import CLASS_PRIOR, KNOWN_CLASSES

__all__ = ["VALUES", "comparison_table", "counted", "overview", "shown"]

Summary = dict[str, Any]
Cells = dict[str, dict[str, dict[int, float]]]  # method -> comparison -> seed -> value

VALUES = (
    *("headline", "weighted", "class-prior", "known-classes", "spread", "worst", "after-training"),
    *("loss", "mb-down", "mb-up", "seconds"),
)

DEFAULTS = {"headline": "accuracy", "percent": True, "higher_is_better": True}  # of runs that do not say


class _Column(NamedTuple):
    """What a column shows of a summary."""

    heading: str
    key: str
    form: Callable[[float], str]
    better: int = 0  # 1 if more is better, -1 if less is, 0 if neither
    traffic: bool = False  # the best is then the least among those that communicate at all

    def value(self, summary: Summary) -> float:
        """Return the value, NaN if there is none."""
        found = summary.get(self.key)
        return math.nan if found is None else float(found)


def shown(value: float, percent: bool) -> str:
    """Return a metric as tables show it."""
    if math.isnan(value):
        return "-"
    return f"{100 * value:.2f}" if percent else f"{value:.4g}"


def counted(number: int, what: str) -> str:
    """Return a number of things in words: `1 client`, `2 clients`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _megabytes(value: float) -> str:
    """Return bytes as megabytes; few of them with two digits, for 0.0 would be nothing."""
    return f"{value / 1e6:,.1f}" if abs(value) >= 50_000 or not value else f"{value / 1e6:.2g}"


def _columns(summaries: Sequence[Summary]) -> dict[str, _Column]:
    """Return the columns for runs of one objective, by the names in `VALUES`; the headline decides what is best."""
    headlines = {summary.get("headline", "accuracy") for summary in summaries}
    if len(headlines) > 1:
        raise ConfigError(f"runs with different headlines cannot be compared: {', '.join(sorted(headlines))}")
    name, first = headlines.pop(), summaries[0]
    percent, up = first.get("percent", True), 1 if first.get("higher_is_better", True) else -1
    form = partial(shown, percent=percent)
    found = (
        _Column(f"{name}\n%" if percent else name, f"{name}_mean", form, up),
        _Column("by\nsamples", f"{name}_weighted", form, up),
        _Column("class\nprior", CLASS_PRIOR, form, up),
        _Column("known\nclasses", KNOWN_CLASSES, form, up),
        _Column("±\nclients", f"{name}_std", form),
        _Column("worst\nclient", f"{name}_worst", form, up),
        _Column("after\ntraining", f"{name}_after_training", form, up),
        _Column("loss", "loss_mean", lambda value: f"{value:.3f}", -1),
        _Column("MB\ndown", "bytes_down", _megabytes, -1, traffic=True),
        _Column("MB\nup", "bytes_up", _megabytes, -1, traffic=True),
        _Column("time\ns", "seconds", lambda value: f"{value:.1f}"),
    )
    return dict(zip(VALUES, found, strict=True))


def overview(
    comparisons: Mapping[str, Sequence[Summary]],
    values: Sequence[str] = ("headline",),
    against: str | None = None,
    average: bool = False,
) -> str:
    """Return values of several comparisons as a Markdown table: a row per method, a column per comparison and value.

    Cells are means over the seeds with their standard deviation; where a method has fewer seeds than others, their
    number stands beside it. The best of the methods that have all seeds of a column is in bold: fewer may have been the
    easier ones. With a method to hold the others `against`, cells are the differences from it, taken seed by seed: what
    makes one seed harder than another for everybody falls out. `average` adds the mean over all comparisons, seed by
    seed, of the methods that are in all.
    """
    values = list(dict.fromkeys(values))
    kinds: dict[str, _Column] = {}  # by heading
    cells: Cells = {}
    for name, summaries in comparisons.items():
        known = _columns(summaries)
        for value in values:
            words = known["headline"].heading.replace("\n", " ") if value == "headline" else value
            heading = name if len(values) == 1 else words if len(comparisons) == 1 else f"{name}, {words}"
            kinds[heading] = known[value]
            for summary in summaries:
                found = known[value].value(summary)
                cells.setdefault(summary["label"], {}).setdefault(heading, {})[summary["seed"]] = found
    if average:
        _refuse_means([summaries[0] for summaries in comparisons.values()])
        for place, value in enumerate(values):
            headings = list(kinds)[place :: len(values)][: len(comparisons)]
            heading = "mean" if len(values) == 1 else f"mean, {value}"
            kinds[heading] = kinds[headings[0]]
            for row in cells.values():
                common = set.intersection(*(set(row.get(name, ())) for name in headings))
                row[heading] = {seed: fmean(row[name][seed] for name in headings) for seed in sorted(common)}
    if against is not None:
        cells = _differences(cells, against)
    lines = [["method" if against is None else f"above `{against}`", *kinds], ["---"] * (1 + len(kinds))]
    lines += [[f"`{label}`"] for label in cells]
    for name, kind in kinds.items():
        column = {label: row[name] for label, row in cells.items() if row.get(name)}
        seeds = set[int]().union(*column.values())
        complete = {label: fmean(found.values()) for label, found in column.items() if found.keys() == seeds}
        best = _best(list(complete.values()), kind._replace(better=0) if against is not None and kind.traffic else kind)
        for line, label in zip(lines[2:], cells, strict=True):
            of_seeds = list(column.get(label, {}).values())
            mean, count = fmean(of_seeds or [math.nan]), len(of_seeds)
            if math.isnan(mean):
                line.append("-")
                continue
            text = ("+" if against is not None and mean > 0 else "") + kind.form(mean)
            text += f" ± {kind.form(_spread(of_seeds))}" if count > 1 else ""
            line.append(
                (f"**{text}**" if complete.get(label) == best is not None else text)
                + (f" ({count} of {len(seeds)})" if count < len(seeds) else "")
            )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _refuse_means(firsts: Sequence[Summary]) -> None:
    """Refuse the mean over comparisons whose figures are not of one kind."""
    kinds = {tuple(one.get(key, known) for key, known in DEFAULTS.items()) for one in firsts}
    if len(kinds) > 1:
        names = ", ".join(sorted({str(name) for name, *_ in kinds}))
        raise ConfigError(f"there is no mean over comparisons with different headlines or units: {names}")


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

    The headline is that of the personalized models after the final round. The best traffic is the least among the
    methods that communicate at all.
    """
    columns = _columns([summary for _, summaries in runs for summary in summaries])
    every = [summary for _, summaries in runs for summary in summaries]
    plain = not any(CLASS_PRIOR in summary for summary in every)
    mean, weighted = columns["headline"], columns["weighted"]
    known = [summary for summary in every if not math.isnan(weighted.value(summary))]
    alike = all(mean.form(mean.value(one)) == mean.form(weighted.value(one)) for one in known)
    left_out = {"known-classes", "loss", *(["class-prior"] if plain else ()), *(["weighted"] if alike else ())}
    kinds = [kind for value, kind in columns.items() if value not in left_out]
    seeds = max((len(summaries) for _, summaries in runs), default=0)
    caption = _caption(runs, seeds, not alike)
    table = Table(title=title, header_style="bold", box=SIMPLE_HEAD, padding=0, caption=caption, caption_justify="left")
    table.add_column("method", vertical="bottom", overflow="fold")
    means = {kind.key: [fmean(map(kind.value, summaries)) for _, summaries in runs] for kind in kinds}
    for kind in kinds:
        table.add_column(kind.heading, justify="right", no_wrap=True)
        if kind is kinds[0] and seeds > 1:
            table.add_column("±\nseeds", justify="right", no_wrap=True)
    for row, (label, summaries) in enumerate(runs):
        cells: list[Text] = [Text(label)]
        for kind in kinds:
            value = means[kind.key][row]
            best = value == _best(means[kind.key], kind)
            cells.append(Text(("*" if best else "") + kind.form(value), style="bold green" if best else ""))
            if kind is kinds[0] and seeds > 1:
                spread = [kind.value(summary) for summary in summaries]
                cells.append(Text(kind.form(_spread(spread)) if len(spread) > 1 else "-"))
        table.add_row(*cells)
    return table


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation over seeds, NaN if a seed has no value."""
    return math.nan if any(map(math.isnan, values)) else stdev(values)


def _best(values: Sequence[float], kind: _Column) -> float | None:
    """Return the best of a column, None where all are equal or none is better than another."""
    rivals = {value for value in values if not math.isnan(value) and (value > 0 or not kind.traffic)}
    if not kind.better or len(rivals) < 2:
        return None
    return max(rivals) if kind.better > 0 else min(rivals)


def _caption(runs: Sequence[tuple[str, Sequence[Summary]]], seeds: int, by_samples: bool) -> str:
    first = runs[0][1][0]
    of = f"{first['dataset']}, {counted(first['clients'], 'client')}, {counted(first['rounds'], 'round')}"
    over = f", means over {seeds} seeds" if seeds > 1 else f", seed {first['seed']}"
    best = " * marks the best." if len(runs) > 1 else ""
    name = first.get("headline", "accuracy")
    weighted = ", mean weighted by samples" if by_samples else ""
    most = max(summary.get("few_test_samples", 0) for _, summaries in runs for summary in summaries)
    few = f" {counted(most, 'client')} with fewer than 10 such samples." if most else ""
    counts = {label: sum(summary.get("refused_uploads", 0) for summary in summaries) for label, summaries in runs}
    of_whom = ", ".join(f"{number:,} of {label}" for label, number in counts.items() if number)
    refused = f" Refused uploads: {of_whom}; many mean that training diverged (training.lr)." if of_whom else ""
    control = "the same with the client's class frequencies, " if CLASS_PRIOR in first else ""
    return (
        f"{of}{over}. {name[0].upper()}{name[1:]} on the clients' {first.get('scored_on', 'test')} samples after the "
        f"final round: of the personalized models (mean{weighted}, {control}spread over clients, worst client), and of "
        f"the models after the clients' latest local training.{few}{refused}{best}"
    )
