"""What is measured of a column, in words and figures; what is missing, and the command that adds it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from pfedla.objective import CLASS_PRIOR
from pfedla.paper.counting import Spread
from pfedla.paper.grid import SLUGS, Cell, Column, Item, Method, Wanted, columns_of, facts_of, methods_of, seconds_of
from pfedla.paper.runs import RESULTS, Places, Summary, left, summaries_of
from pfedla.paper.sheets import Figure, Sheet, lasting

__all__ = [
    "MISSING",
    "Entry",
    "bests",
    "by_layer",
    "by_share",
    "entry_of",
    "figure_of",
    "heading",
    "measured_by",
    "missing",
    "record_of",
    "retained_of",
    "with_notes",
]

MISSING = "missing"


class Entry(NamedTuple):
    """What is measured of a method in a column, in per cent, seed by seed; and of the same models in other ways."""

    values: tuple[float, ...]
    trained: Entry | None = None  # after local training, if all seeds have it
    told: Entry | None = None  # with the clients' class frequencies, likewise

    @property
    def mean(self) -> float:
        """The mean over seeds; as many right answers are as good, in whatever order they were added up."""
        return round(fmean(self.values), 9)

    @property
    def std(self) -> float | None:
        """The standard deviation over seeds, None if there is one."""
        return stdev(self.values) if len(self.values) > 1 else None


def entry_of(summaries: Sequence[Summary]) -> Entry:
    """Return what is measured of a method, over its seeds."""

    def found(key: str) -> Entry | None:
        values = [summary.get(key) for summary in summaries]
        known = tuple(100 * value for value in values if value is not None)
        return Entry(known) if len(known) == len(values) else None

    values = tuple(100 * summary["accuracy_mean"] for summary in summaries)
    return Entry(values, found("accuracy_after_training"), found(CLASS_PRIOR))


def heading(places: Places, column: Column, seeds: int) -> str:
    """Return what the head of a column says."""
    experiment = facts_of(column, places.scale)
    data, schedule = experiment.data, experiment.schedule
    own = data.samples_per_client - round(data.train_fraction * data.samples_per_client)
    tests = data.test_samples_per_client or own
    words = f"{data.clients} clients, {data.dataset}, {schedule.rounds} rounds, {tests} test images each"
    return words + (f", {seeds} seed{'s' if seeds > 1 else ''}" if seeds else "")


def measured_by(summaries: Iterable[Summary]) -> str:
    """Say which commits measured some cells."""
    commits = sorted({str(summary.get("commit") or "unknown") for summary in summaries})
    return f"Measured by commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}." if commits else ""


def record_of(item: Item, places: Places, column: Column, name: str) -> dict[str, Any]:
    """Return what a row of a CSV file begins with."""
    experiment = facts_of(column, places.scale)
    return {
        "item": item.name,
        "scale": places.scale,
        "dataset": column.place.dataset,
        "data": experiment.data.dataset,
        "clients": experiment.data.clients,
        "split": experiment.split.name,
        "rounds": experiment.schedule.rounds,
        "method": name,
    }


def figure_of(entry: Spread, best: bool, seeds: int = 0) -> Figure:
    """Return a mean with its spread, and the number of seeds where it is less than others have."""
    text = f"{entry.mean:.2f}" + (f" ± {entry.std:.2f}" if entry.std is not None else "")
    if isinstance(entry, Entry) and len(entry.values) < seeds:
        text += f" ({len(entry.values)} of {seeds})"
    return Figure(text, best)


def bests(entries: Mapping[str, Spread]) -> set[str]:
    """Return who is best, equals alike; nobody where there is nothing to compare."""
    top = max((entry.mean for entry in entries.values()), default=0.0)
    return {name for name, entry in entries.items() if entry.mean == top} if len(entries) > 1 else set()


def by_layer(weights: Mapping[str, float]) -> str:
    """Return weights in words, layer by layer."""
    return ", ".join(f"{layer} {weight:.2f}" for layer, weight in weights.items())


def retained_of(summaries: Sequence[Summary]) -> dict[str, float]:
    """Return the share of downloads that each layer was left out of, over all seeds; nothing where it is not known."""
    found: dict[str, list[float]] = {}
    for summary in summaries:
        if "retained" in summary:
            for name, share in zip(summary["layers"], summary["retained"], strict=True):
                found.setdefault(name, []).append(share)
    return {name: fmean(shares) for name, shares in found.items()}


def by_share(retained: Mapping[str, float]) -> str:
    """Return the shares of downloads that layers were left out of in words, the largest first."""
    often = sorted(retained.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in often if round(100 * share))


def with_notes(sheets: Sequence[Sheet], notes: Iterable[str]) -> list[Sheet]:
    """Put notes below the last table; those that are empty are left out."""
    *before, last = sheets
    return [*before, last._replace(notes=(*last.notes, *(note for note in notes if note)))]


def missing(item: Item, places: Places, wanted: Wanted, rows: Mapping[Column, Sequence[Method]]) -> list[str]:
    """Say which cells of a table or figure are missing, and by which commands they are added.

    `rows` are the methods that it shows. A column that has several seeds of one method misses those of the others.
    """
    groups: dict[tuple[str, ...], list[Cell]] = {}
    held = set[Cell]()
    for column in columns_of(item, wanted):
        known = summaries_of(places, column, rows[column])
        held |= {Cell(column, m, summary["seed"]) for m in rows[column] for summary in known.get(m.name, ())}
    for column in columns_of(item, wanted):
        alike = (
            1 + cell.seed for cell in held if cell.column.place == column.place
        )  # a command cannot tell them apart
        seeds = wanted.seeds or max(alike, default=1)
        cells = [Cell(column, method, seed) for seed in range(seeds) for method in rows[column]]
        cells = left(places, cells)
        default = methods_of(item, column, wanted._replace(algorithms=()))
        words: list[str] = []
        if item.name in ("table1", "table2"):
            words += ["--clients", str(column.place.clients)]
        if wanted.algorithms or not {cell.method for cell in cells} <= set(default):
            words += [word for name in dict.fromkeys(c.method.algorithm for c in cells) for word in ("-a", name)]
        words += ["--seeds", str(seeds)] if seeds > 1 else []
        words += ["--scale", places.scale] if places.scale != "laptop" else []
        words += ["--results", shlex.quote(str(places.results))] if places.results != RESULTS else []
        if cells:
            groups.setdefault(tuple(words), []).extend(cells)
    said = []
    for options, cells in groups.items():
        datasets = list(dict.fromkeys(cell.column.place.dataset for cell in cells))
        every = {
            column.place.dataset for column in item.columns if column.place.clients == cells[0].column.place.clients
        }
        which = [] if set(datasets) == every else [w for name in datasets for w in ("--dataset", SLUGS[name])]
        time = lasting(sum(seconds_of(cell, places.scale) for cell in cells))
        command = " ".join(["pfedla paper", item.name, *which, *options])
        many, them = (f"{len(cells)} cells are", "them") if len(cells) > 1 else ("1 cell is", "it")
        said.append(f"{many} missing: `{command}` adds {them} (about {time}).")
    return said
