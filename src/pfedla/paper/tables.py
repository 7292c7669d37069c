"""Tables 1 and 2: ours beside the paper's, and what can be counted of the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pfedla.paper.counting import Spread, count_first, spearman
from pfedla.paper.grid import ITEMS, METHODS, Column, Item, Wanted, columns_of, methods_of, rows_of
from pfedla.paper.measured import (
    MISSING,
    Entry,
    bests,
    by_layer,
    by_share,
    entry_of,
    figure_of,
    heading,
    measured_by,
    missing,
    record_of,
    retained_of,
    with_notes,
)
from pfedla.paper.printed import TABLE1, TABLE2, Printed
from pfedla.paper.runs import Places, Summary, in_common, summaries_of
from pfedla.paper.sheets import Figure, Group, Sheet

__all__ = ["table_of_methods"]

PRINTED = {"table1": TABLE1, "table2": TABLE2}
OURS = ("pFedLA", "HeurpFedLA")
WITH_ADAM = tuple(f"{name}, Adam" for name in OURS)
COLUMNS = ("ours %", "paper %", "difference", "ours, class prior %")


class _Both(NamedTuple):
    """A column on both sides: everything that is measured, and the paper's figures for the same methods."""

    column: Column
    ours: dict[str, Entry]  # over the seeds that all of them have
    theirs: dict[str, Printed]
    own: dict[str, dict[str, float]]  # method -> layer -> the clients' weights for themselves
    retained: dict[str, str]  # method -> which layers stay at the clients


def table_of_methods(item: Item, places: Places, wanted: Wanted) -> list[Sheet]:
    """Return Table 1 or 2, a sheet for each data set, and what can be counted below the last.

    The best of a column are the best of all that is measured or printed, also where fewer methods are asked for; on our
    side, the best of the paper's methods, too, if a row with Adam is above them.
    """
    printed = PRINTED[item.name]
    by_dataset: dict[str, list[Column]] = {}
    for column in columns_of(item, wanted):
        by_dataset.setdefault(column.place.dataset, []).append(column)
    shown = {column: methods_of(item, column, wanted) for column in columns_of(item, wanted)}
    sheets, seen, sides, uneven = [], [], list[_Both](), list[str]()
    for dataset, columns in by_dataset.items():
        head, groups = ["method"], list[Group]()
        names = [m.name for m in METHODS if not wanted.algorithms or m.algorithm in wanted.algorithms]
        lines: dict[str, list[Figure]] = {name: [Figure(name)] for name in names}
        records: list[dict[str, Any]] = []
        for column in columns:
            found = summaries_of(places, column, rows_of(column, places.scale), wanted.seeds)
            seen += [summary for summaries in found.values() for summary in summaries]
            ours = {name: entry_of(summaries) for name, summaries in found.items()}
            seeds = max((len(entry.values) for entry in ours.values()), default=0)
            compared = {name: entry_of(summaries) for name, summaries in in_common(found).items()}
            theirs = {name: row[column.place] for name, row in printed.items() if column.place in row}
            own = {name: weights for name, cells in found.items() if (weights := _own_weights(cells))}
            kept = {name: shares for name, cells in found.items() if (shares := by_share(retained_of(cells)))}
            both = {name: theirs[name] for name in theirs if name in compared}
            sides.append(_Both(column, compared, both, own, kept))
            fewest = min((len(entry.values) for entry in compared.values()), default=0)
            if fewest < seeds:
                uneven.append(
                    f"{_words(column)}: methods are compared over the seeds that all have, {fewest} of {seeds}."
                )
            groups.append(Group(heading(places, column, seeds), len(head), len(COLUMNS)))
            head += COLUMNS
            if mixed := [name for name, cells in found.items() if _makers(cells) > 1]:
                uneven.append(
                    f"{_words(column)}: seeds of {', '.join(mixed)} come from different commits or compiled loops."
                )
            told = {name: entry.told for name, entry in compared.items() if entry.told}
            top, top_told = (bests(some) | bests(_without(some, WITH_ADAM)) for some in (compared, told))
            top_paper = bests(theirs)
            known = {method.name for method in shown[column]}
            for name, line in lines.items():
                entry, paper = ours.get(name), theirs.get(name)
                apart = entry.mean - paper.mean if entry and paper else None
                prior = entry.told.mean if entry and entry.told else None
                line += [
                    figure_of(entry, name in top, seeds) if entry else Figure(MISSING if name in known else "-"),
                    figure_of(paper, name in top_paper) if paper else Figure("-"),
                    Figure(f"{apart:+.2f}" if apart is not None else ""),
                    Figure(f"{prior:.2f}", name in top_told) if prior is not None else Figure(""),
                ]
                if name in known:
                    records.append(
                        record_of(item, places, column, name)
                        | {
                            "seeds": len(entry.values) if entry else 0,
                            "ours": entry.mean if entry else None,
                            "ours_std": entry.std if entry else None,
                            "ours_best": name in top,
                            "paper": paper.mean if paper else None,
                            "paper_std": paper.std if paper else None,
                            "paper_best": name in top_paper,
                            "difference": apart,
                            "ours_class_prior": prior,
                        }
                    )
        title = f"Table {item.name[-1]}, {dataset}, scale {places.scale}"
        rows = tuple(tuple(line) for line in lines.values())
        sheets.append(Sheet(title, tuple(head), rows, (), tuple(records), tuple(groups)))
    notes = [*uneven, *_counts(item, sides), *_priors(sides), *_kept_for_oneself(sides)]
    notes += [*missing(item, places, wanted, shown), measured_by(seen)]
    return with_notes(sheets, notes) if sheets else []


def _counts(item: Item, sides: Sequence[_Both]) -> list[str]:
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
    usable = [side for side in sides if set(OURS) <= side.ours.keys() and len(side.theirs) > len(OURS)]
    if usable:
        spread = [side for side in usable if all(entry.std is not None for entry in side.ours.values())]
        absent = {
            name: sum(side.column.place in row and name not in side.ours for side in usable)
            for name, row in PRINTED[item.name].items()
        }
        ours_first, _ = count_first([_without(side.ours, WITH_ADAM) for side in usable], OURS)
        first, _ = count_first([side.theirs for side in usable], OURS)
        line = "Among the methods measured here, without the rows with Adam: "
        line += f"first in {ours_first} of {len(usable)} columns that have both; in the paper, in {first} of them."
        if any(absent.values()):
            line += f" Not measured: {', '.join(f'{name} in {n}' for name, n in absent.items() if n)} of them."
        lines.append(line)
        if spread:
            _, ours_near = count_first([_without(side.ours, WITH_ADAM) for side in spread], OURS)
            _, near = count_first([side.theirs for side in spread], OURS)
            line = f"First or within one standard deviation: in {ours_near} of {len(spread)} columns of several seeds"
            lines.append(f"{line}; in the paper, in {near} of them.")
        else:
            lines.append("One seed has no deviation that others could be within.")
        both, several = (
            [_without(side.ours, OURS) for side in some if set(WITH_ADAM) <= side.ours.keys()]
            for some in (usable, spread)
        )
        if both:
            line = f"With Adam in place of the literal step: first in {count_first(both, WITH_ADAM)[0]} of {len(both)}"
            near = count_first(several, WITH_ADAM)[1]
            line += f", and first or within one standard deviation in {near} of {len(several)}" if several else ""
            lines.append(f"{line}; a tie counts.")
    for column, ours, theirs, *_ in sides:
        names = list(theirs)
        found = spearman([ours[name].mean for name in names], [theirs[name].mean for name in names])
        if found is not None:
            lines.append(
                f"Rank correlation with the paper's order, {_words(column)}: {found:+.2f} over {len(names)} methods."
            )
    return lines


def _makers(cells: Sequence[Summary]) -> int:
    """Return how many commits, with their settings of the compiled loops, measured a method's seeds."""
    return len({(cell.get("commit"), cell.get("compiled_loop")) for cell in cells})


def _without(column: Mapping[str, Spread], names: Sequence[str]) -> dict[str, Spread]:
    return {name: entry for name, entry in column.items() if name not in names}


def _words(column: Column) -> str:
    return f"{column.place.dataset}, {column.place.clients} clients"


def _priors(sides: Sequence[_Both]) -> list[str]:
    """Say what the class prior is, and for each column what remains with it of a lead over the other methods."""
    meaning = "Class prior: the same models, told each client's class frequencies when they predict. "
    lines = [meaning + "What remains of a method's lead there is more than knowing which classes a client has."]
    for column, ours, *_ in sides:
        mine = {name: ours[name] for name in OURS if name in ours}
        others = {name: entry for name, entry in ours.items() if not name.startswith(OURS)}
        if mine and others:
            line = f"{_words(column)}: the better of {' and '.join(OURS)} is {_lead(mine, others)}"
            told = [{name: entry.told for name, entry in some.items() if entry.told} for some in (mine, others)]
            line += f"; with the class prior, {_lead(*told)}" if all(told) else ""
            lines.append(line + ".")
    return lines


def _lead(mine: Mapping[str, Entry], others: Mapping[str, Entry]) -> str:
    """Say by how much the best of mine is ahead of the best of the others; the deviation is that of the differences."""
    best = max(others, key=lambda name: others[name].mean)
    top = max(mine.values(), key=lambda entry: entry.mean)
    ahead = Entry(tuple(a - b for a, b in zip(top.values, others[best].values, strict=True)))
    size = f"{abs(ahead.mean):.2f}" + (f" ± {ahead.std:.2f}" if ahead.std is not None else "")
    return f"{size} points {'above' if ahead.mean >= 0 else 'below'} the best other method, {best}"


def _own_weights(cells: Sequence[Summary]) -> dict[str, float]:
    """Return the weights that clients end up giving to themselves, by layer: means over clients and seeds."""
    known = [cell for cell in cells if "own" in cell]
    if not known:
        return {}
    own = np.mean([cell["own"][1][-1] for cell in known], axis=0)
    return dict(zip(known[0]["layers"], own, strict=True))


def _kept_for_oneself(sides: Sequence[_Both]) -> list[str]:
    """Say for each column how much of its own model pFedLA leaves a client, and which layers HeurpFedLA does."""
    lines = []
    for column, _, _, own, retained in sides:
        said = [f"{name}: {by_layer(weights)}" for name, weights in own.items() if name.startswith("pFedLA")]
        if said:
            lines.append(f"Clients' weights for themselves, {_words(column)}. {'; '.join(said)}.")
        if kept := [f"{name}: {shares}" for name, shares in retained.items()]:
            lines.append(f"Retained (share of downloads), {_words(column)}. {'; '.join(kept)}.")
    return lines
