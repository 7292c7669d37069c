"""Tables 1, 2 and 3: ours beside the paper's, and what can be counted of the two."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import numpy as np

from pfedla.data.datasets import DATASETS
from pfedla.layers import LayerSpec
from pfedla.models import make_model
from pfedla.objective import CLASS_PRIOR
from pfedla.paper.grid import ITEMS, KEEP, METHODS, Column, Item, Wanted, columns_of, facts_of, rows_of
from pfedla.paper.printed import TABLE1, TABLE2, TABLE3, Printed
from pfedla.paper.runs import Places, Summary, summaries_of

__all__ = [
    "FORMATS",
    "Entry",
    "Figure",
    "Format",
    "Sheet",
    "among_the_first",
    "count_first",
    "entry_of",
    "heading",
    "layer_sizes",
    "measured_by",
    "megabytes",
    "ranks",
    "spearman",
    "table_of_methods",
    "table_of_retained",
    "written",
]

Format = Literal["markdown", "csv", "latex"]
FORMATS: tuple[Format, ...] = ("markdown", "csv", "latex")
PRINTED = {"table1": TABLE1, "table2": TABLE2}
OURS = ("pFedLA", "HeurpFedLA")
MISSING = "missing"


class Figure(NamedTuple):
    """A text in a table, and whether it is the best of its column."""

    text: str
    best: bool = False


class Sheet(NamedTuple):
    """A table to be printed, with what stands above and below it; and the same as plain values."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Figure, ...], ...]
    notes: tuple[str, ...]
    records: tuple[dict[str, Any], ...]


class Entry(NamedTuple):
    """What is measured of a method in a column, in per cent; the spread is over seeds, None if there is one."""

    mean: float
    std: float | None
    seeds: int
    prior: float | None  # with the client's class frequencies


# ---- numbers


def ranks(values: Sequence[float]) -> np.ndarray:
    """Return ranks from 1, equals sharing the mean of theirs."""
    x = np.asarray(values, float)
    below, equal = (x[:, None] > x).sum(1), (x[:, None] == x).sum(1)
    return np.asarray(below + (equal + 1) / 2)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the rank correlation; None if there are fewer than three pairs, or one side is constant."""
    if len(a) < 3:
        return None
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else None


def among_the_first(column: Mapping[str, Printed | Entry], names: Iterable[str], *, within: bool) -> bool:
    """Say whether one of these methods is first; or `within` one standard deviation of the first.

    That is the larger of the two methods' deviations. Where there is one seed there is none.
    """
    best = max(column.values(), key=lambda entry: entry.mean)
    for name in names:
        room = max(best.std or 0.0, column[name].std or 0.0) if within else 0.0
        if best.mean - column[name].mean <= room:
            return True
    return False


def count_first(columns: Sequence[Mapping[str, Printed | Entry]], names: Sequence[str]) -> tuple[int, int]:
    """Return in how many columns one of these methods is first, and first or within one standard deviation of it."""
    first, near = (sum(among_the_first(column, names, within=within) for column in columns) for within in (False, True))
    return first, near


def layer_sizes(column: Column) -> dict[str, int]:
    """Return how many trained values each layer of a column's model has, in the paper's setting."""
    images = DATASETS[facts_of(column, "laptop").data.dataset]
    template = make_model("auto", images.shape, len(images.classes))
    spec = LayerSpec.of(template)
    return {name: spec.read(template)[name].shape[1] for name in spec.names}


def megabytes(sizes: Mapping[str, int], retained: Mapping[str, float]) -> float:
    """Return the traffic of Table 3 in its own unit, from layer sizes and the share of downloads without each layer.

    4 bytes a value, 2^20 bytes a megabyte, 600 rounds x 10 clients, uploads and downloads; divided by 8, as the printed
    figures are.
    """
    transfers = 600 * 10 / 8
    saved = sum(share * sizes[name] for name, share in retained.items())
    return (2 * sum(sizes.values()) - saved) * transfers * 4 / 2**20


# ---- what is measured


def entry_of(summaries: Sequence[Summary]) -> Entry:
    """Return what is measured of a method, over its seeds."""
    values = [100 * summary["accuracy_mean"] for summary in summaries]
    priors = [100 * summary[CLASS_PRIOR] for summary in summaries if summary.get(CLASS_PRIOR) is not None]
    std = stdev(values) if len(values) > 1 else None
    return Entry(fmean(values), std, len(values), fmean(priors) if priors else None)


def heading(places: Places, column: Column, seeds: int) -> str:
    """Return what the head of a column says."""
    experiment = facts_of(column, places.scale)
    data, schedule = experiment.data, experiment.schedule
    own = data.samples_per_client - round(data.train_fraction * data.samples_per_client)
    tests = data.test_samples_per_client or own
    words = f"{data.clients} clients, {data.dataset}, {schedule.rounds} rounds, {tests} test images"
    return words + (f", {seeds} seed{'s' if seeds > 1 else ''}" if seeds else "")


def measured_by(summaries: Iterable[Summary]) -> str:
    """Say which commits measured some cells."""
    commits = sorted({str(summary.get("commit") or "unknown") for summary in summaries})
    return f"Measured by commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}." if commits else ""


# ---- Tables 1 and 2


def table_of_methods(item: Item, places: Places, wanted: Wanted) -> list[Sheet]:
    """Return Table 1 or 2, a sheet for each data set, and what can be counted below the last."""
    printed = PRINTED[item.name]
    by_dataset: dict[str, list[Column]] = {}
    for column in columns_of(item, wanted):
        by_dataset.setdefault(column.place.dataset, []).append(column)
    sheets, seen = [], []
    comparable: list[tuple[Column, dict[str, Printed | Entry], dict[str, Printed | Entry]]] = []
    for dataset, columns in by_dataset.items():
        head = ["method"]
        lines: dict[str, list[Figure]] = {method.name: [Figure(method.name)] for method in METHODS}
        records: list[dict[str, Any]] = []
        for column in columns:
            methods = rows_of(column, places.scale)
            found = summaries_of(places, column, methods, wanted.seeds)
            seen += [summary for summaries in found.values() for summary in summaries]
            ours = {name: entry_of(summaries) for name, summaries in found.items()}
            seeds = max((entry.seeds for entry in ours.values()), default=0)
            theirs = {name: row[column.place] for name, row in printed.items() if column.place in row}
            both = [name for name in theirs if name in ours]
            comparable.append((column, dict(ours), {name: theirs[name] for name in both}))
            head += [f"{heading(places, column, seeds)}: ours %", "paper %", "difference", "ours, class prior %"]
            top, top_prior = _top(ours), max((e.prior for e in ours.values() if e.prior is not None), default=None)
            top_paper = _top(theirs)
            names = {method.name for method in methods}
            for name, line in lines.items():
                entry, paper = ours.get(name), theirs.get(name)
                apart = entry.mean - paper.mean if entry and paper else None
                line += [
                    _mean(entry, name == top, seeds) if entry else Figure(MISSING if name in names else "-"),
                    _mean(paper, name == top_paper) if paper else Figure("-"),
                    Figure(f"{apart:+.2f}" if apart is not None else ""),
                    Figure(f"{entry.prior:.2f}", entry.prior == top_prior) if entry and entry.prior else Figure(""),
                ]
                if name in names:
                    records.append(
                        _record(item, places, column, name)
                        | {
                            "seeds": entry.seeds if entry else 0,
                            "ours": entry.mean if entry else None,
                            "ours_std": entry.std if entry else None,
                            "ours_best": name == top,
                            "paper": paper.mean if paper else None,
                            "paper_std": paper.std if paper else None,
                            "paper_best": name == top_paper,
                            "difference": apart,
                            "ours_class_prior": entry.prior if entry else None,
                        }
                    )
        title = f"Table {item.name[-1]}, {dataset}, scale {places.scale}"
        rows = tuple(tuple(line) for line in lines.values())
        sheets.append(Sheet(title, tuple(head), rows, (), tuple(records)))
    if sheets:
        notes = (*_counts(item, comparable), measured_by(seen))
        sheets[-1] = sheets[-1]._replace(notes=tuple(note for note in notes if note))
    return sheets


def _counts(
    item: Item, columns: Sequence[tuple[Column, dict[str, Printed | Entry], dict[str, Printed | Entry]]]
) -> list[str]:
    """Say what can be counted: firsts on both sides, and how alike the orders are."""
    everywhere = [
        {name: row[column.place] for name, row in PRINTED[item.name].items() if column.place in row}
        for column in ITEMS[item.name].columns
    ]
    first, near = count_first(everywhere, OURS)
    said = (
        f"In the paper, pFedLA or HeurpFedLA is first in {first} of {len(everywhere)} columns, and first or within one "
    )
    lines = [said + f"standard deviation of the first in {near}."]
    usable = [(ours, theirs) for _, ours, theirs in columns if set(OURS) <= ours.keys() and len(theirs) > len(OURS)]
    if usable:
        adam = [f"{name}, Adam" for name in OURS]
        apart = [{name: entry for name, entry in ours.items() if name not in adam} for ours, _ in usable]
        ours_first, ours_near = count_first(apart, OURS)
        first, near = count_first([theirs for _, theirs in usable], OURS)
        lines.append(
            f"Among the methods measured here: first in {ours_first} of {len(usable)} columns, and first or within one "
            f"standard deviation in {ours_near} (paper, same columns and methods: {first} and {near})."
        )
        both = [ours for ours, _ in usable if set(adam) <= ours.keys()]
        if both:
            without = [{name: entry for name, entry in ours.items() if name not in OURS} for ours in both]
            adam_first, adam_near = count_first(without, adam)
            lines.append(f"With Adam in place of the literal step: {adam_first} and {adam_near} of {len(both)}.")
    for column, ours, theirs in columns:
        names = list(theirs)
        found = spearman([ours[name].mean for name in names], [theirs[name].mean for name in names])
        if found is not None:
            lines.append(
                f"Rank correlation with the paper's order, {column.place.dataset}, {column.place.clients} clients: "
                f"{found:+.2f} over {len(names)} methods."
            )
    lines.append(
        "Class prior: the same models, told each client's class frequencies when they predict. What remains of a "
        "method's lead there is more than knowing which classes a client has."
    )
    return lines


# ---- Table 3


def table_of_retained(item: Item, places: Places, wanted: Wanted) -> list[Sheet]:
    """Return Table 3, a sheet for each data set: accuracy, bytes, the paper's unit, and which layers were retained."""
    sheets = []
    for column in columns_of(item, wanted):
        dataset, sizes = column.place.dataset, layer_sizes(column)
        paper = {retained.k: retained for retained in TABLE3[dataset]}
        found = summaries_of(places, column, KEEP, wanted.seeds)
        entries = {name: entry_of(summaries) for name, summaries in found.items()}
        seeds = max((entry.seeds for entry in entries.values()), default=0)
        rows, records = [], []
        for k, method in enumerate(KEEP):
            entry, printed = entries.get(method.name), paper.get(k)
            summaries = found.get(method.name, [])
            ours = _retained(summaries)
            down, up = (_millions(summaries, f"bytes_{way}") for way in ("down", "up"))
            unit = megabytes(sizes, ours) if summaries else None
            named = dict.fromkeys(printed.layers, 1.0) if printed else {}
            theirs = megabytes(sizes, named) if printed else None
            often = sorted(ours.items(), key=lambda pair: -pair[1])
            shares = ", ".join(f"{name} {share:.0%}" for name, share in often if share)
            rows.append(
                (
                    Figure(str(k)),
                    _mean(entry, method.name == _top(entries), seeds) if entry else Figure(MISSING),
                    Figure(f"{printed.accuracy:.2f}", printed == max(paper.values(), key=lambda p: p.accuracy))
                    if printed
                    else Figure("-"),
                    Figure(f"{down:,.1f} / {up:,.1f}" if down is not None and up is not None else ""),
                    Figure(f"{unit:.2f}" if unit is not None else ""),
                    Figure(f"{printed.megabytes:.2f}" if printed else "-"),
                    Figure(f"{theirs:.2f}" if theirs is not None else "-"),
                    Figure(shares or ("none" if summaries and not k else "")),
                    Figure((", ".join(printed.layers) or "none") if printed else "-"),
                )
            )
            records.append(
                _record(item, places, column, method.name)
                | {
                    "k": k,
                    "seeds": entry.seeds if entry else 0,
                    "ours": entry.mean if entry else None,
                    "ours_std": entry.std if entry else None,
                    "paper": printed.accuracy if printed else None,
                    "megabytes_down": down,
                    "megabytes_up": up,
                    "paper_unit_ours": unit,
                    "paper_unit_printed": printed.megabytes if printed else None,
                    "paper_unit_of_its_layers": theirs,
                    "retained": shares,
                    "retained_in_the_paper": ", ".join(printed.layers) if printed else None,
                }
            )
        figures = ("k", "ours %", "paper %", "MB down / up", "paper's unit: ours", "printed", "from its layers")
        head = (*figures, "retained here (share of downloads)", "in the paper")
        title = f"Table 3, {dataset} ({heading(places, column, seeds)}), scale {places.scale}"
        note = "MB are 10^6 bytes of layers as sent, of all rounds run here. The paper's unit is for its 600 rounds."
        notes = tuple(text for text in (note, measured_by(s for some in found.values() for s in some)) if text)
        sheets.append(Sheet(title, head, tuple(rows), notes, tuple(records)))
    return sheets


def _retained(summaries: Sequence[Summary]) -> dict[str, float]:
    """Return the share of downloads that each layer was left out of, over all seeds."""
    found: dict[str, list[float]] = {}
    for summary in summaries:
        for name, share in zip(summary.get("layers", ()), summary.get("retained", ()), strict=False):
            found.setdefault(name, []).append(share)
    return {name: fmean(shares) for name, shares in found.items()}


def _millions(summaries: Sequence[Summary], key: str) -> float | None:
    return fmean(summary[key] for summary in summaries) / 1e6 if summaries else None


# ---- as text


def written(sheets: Sequence[Sheet], form: Format) -> str:
    """Return sheets as text."""
    if form == "csv":
        text = io.StringIO()
        records = [record for sheet in sheets for record in sheet.records]
        writer = csv.DictWriter(text, list(records[0]) if records else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()
    return "\n".join(_markdown(sheet) if form == "markdown" else _latex(sheet) for sheet in sheets)


def _markdown(sheet: Sheet) -> str:
    lines = [sheet.head, ("---",) * len(sheet.head)]
    lines += [tuple(f"**{cell.text}**" if cell.best else cell.text for cell in row) for row in sheet.rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = "".join(f"- {note}\n" for note in sheet.notes)
    return f"{sheet.title}\n\n{table}" + (f"\n{notes}" if notes else "")


def _latex(sheet: Sheet) -> str:
    def row(cells: Iterable[Figure]) -> str:
        texts = (rf"\textbf{{{_escaped(cell.text)}}}" if cell.best else _escaped(cell.text) for cell in cells)
        return " & ".join(texts) + r" \\"

    lines = [f"% {sheet.title}", rf"\begin{{tabular}}{{l{'r' * (len(sheet.head) - 1)}}}", r"\toprule"]
    lines += [row(map(Figure, sheet.head)), r"\midrule", *map(row, sheet.rows), r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*lines, *(f"% {note}" for note in sheet.notes)]) + "\n"


def _escaped(text: str) -> str:
    for sign, word in (("%", r"\%"), ("_", r"\_"), ("±", r"$\pm$"), ("^", r"\^{}")):
        text = text.replace(sign, word)
    return text


def _record(item: Item, places: Places, column: Column, name: str) -> dict[str, Any]:
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


def _mean(entry: Printed | Entry, best: bool, seeds: int = 0) -> Figure:
    """Return a mean with its spread, and the number of seeds where it is less than others have."""
    text = f"{entry.mean:.2f}" + (f" ± {entry.std:.2f}" if entry.std is not None else "")
    fewer = isinstance(entry, Entry) and entry.seeds < seeds
    return Figure(text + (f" ({entry.seeds} of {seeds})" if fewer and isinstance(entry, Entry) else ""), best)


def _top(entries: Mapping[str, Printed | Entry]) -> str | None:
    """Return the best method's name, None where there is nothing to compare."""
    return max(entries, key=lambda name: entries[name].mean) if len(entries) > 1 else None
