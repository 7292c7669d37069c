"""Tables 1 and 2: ours beside the paper's, and what can be counted of the two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pfedla.paper.counting import Spread, correlation, count_first
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
COLUMNS = ("ours %", "paper %", "difference", "ours, after local training %", "ours, class prior %")
NOT_RUN = "not run"  # unless it is asked for
TRAINED = (
    "After local training: what the clients' training of the last round left. Of Per-FedAvg that is a start to adapt "
    "from, and no model to serve."
)
TOLD = (
    "Class prior: the same models, told each client's class frequencies when they predict. What remains of a method's "
    "lead there is more than knowing which classes a client has. A model that was trained on the client's samples "
    "alone knows them already, and can lose by being told twice."
)


class _Both(NamedTuple):
    """A column on both sides: everything that is measured, and the paper's figures."""

    column: Column
    found: dict[str, list[Summary]]  # by method
    ours: dict[str, Entry]  # over the seeds that all of them have
    printed: dict[str, Printed]  # all that the paper has

    @property
    def theirs(self) -> dict[str, Printed]:
        """The paper's figures of the methods that are compared."""
        return {name: self.printed[name] for name in self.printed if name in self.ours}

    @property
    def seeds(self) -> int:
        """How many there are of the method that has most."""
        return max(map(len, self.found.values()), default=0)


def table_of_methods(item: Item, places: Places, wanted: Wanted) -> list[Sheet]:
    """Return Table 1 or 2, a sheet for each data set, and what can be counted below the last.

    The best of a column are the best of all that is measured or printed, also where fewer methods are asked for; on our
    side, the best of the paper's methods, too, if a row with Adam is above them.
    """
    by_dataset: dict[str, list[_Both]] = {}
    for column in columns_of(item, wanted):
        by_dataset.setdefault(column.place.dataset, []).append(_both(item, places, column, wanted))
    sheets = [_sheet(item, places, wanted, sides) for sides in by_dataset.values()]
    every = [side for sides in by_dataset.values() for side in sides]
    notes = [*_uneven(every), *_counts(item, every), *_leads(every), *_kept_for_oneself(every)]
    shown = {side.column: methods_of(item, side.column, wanted) for side in every}
    seen = (summary for side in every for summaries in side.found.values() for summary in summaries)
    notes += [*missing(item, places, wanted, shown), measured_by(seen)]
    return with_notes(sheets, notes) if sheets else []


def _both(item: Item, places: Places, column: Column, wanted: Wanted) -> _Both:
    found = summaries_of(places, column, rows_of(column, places.scale), wanted.seeds)
    ours = {name: entry_of(summaries) for name, summaries in in_common(found).items()}
    printed = {name: row[column.place] for name, row in PRINTED[item.name].items() if column.place in row}
    return _Both(column, found, ours, printed)


def _sheet(item: Item, places: Places, wanted: Wanted, sides: Sequence[_Both]) -> Sheet:
    """Return the table of a data set."""
    head, groups, records = ["method"], list[Group](), list[dict[str, Any]]()
    names = [method.name for method in METHODS if not wanted.algorithms or method.algorithm in wanted.algorithms]
    lines = {name: [Figure(name)] for name in names}
    for side in sides:
        column = side.column
        groups.append(Group(heading(places, column, side.seeds), len(head), len(COLUMNS)))
        head += COLUMNS
        trained = {name: entry.trained for name, entry in side.ours.items() if entry.trained}
        told = {name: entry.told for name, entry in side.ours.items() if entry.told}
        top, top_trained, top_told = (
            bests(some) | bests(_without(some, WITH_ADAM)) for some in (side.ours, trained, told)
        )
        top_paper = bests(side.printed)
        shown = {method.name for method in methods_of(item, column, wanted)}
        runnable = {method.name for method in rows_of(column, places.scale)}
        for name, line in lines.items():
            entry = entry_of(side.found[name]) if name in side.found else None
            paper = side.printed.get(name)
            absent = MISSING if name in shown else NOT_RUN if name in runnable else "-"
            apart = entry.mean - paper.mean if entry and paper else None
            line += [
                figure_of(entry, name in top, side.seeds) if entry else Figure(absent),
                figure_of(paper, name in top_paper) if paper else Figure("-"),
                Figure(f"{apart:+.2f}" if apart is not None else ""),
                _in_another_way(entry.trained if entry else None, name in top_trained),
                _in_another_way(entry.told if entry else None, name in top_told),
            ]
            if name in shown:
                ours = {
                    "seeds": len(entry.values) if entry else 0,
                    "ours": entry.mean if entry else None,
                    "ours_std": entry.std if entry else None,
                    "ours_best": name in top,
                    "paper": paper.mean if paper else None,
                    "paper_std": paper.std if paper else None,
                    "paper_best": name in top_paper,
                    "difference": apart,
                    "ours_after_training": entry.trained.mean if entry and entry.trained else None,
                    "ours_class_prior": entry.told.mean if entry and entry.told else None,
                }
                records.append(record_of(item, places, column, name) | ours)
    title = f"Table {item.name[-1]}, {sides[0].column.place.dataset}, scale {places.scale}"
    return Sheet(title, tuple(head), tuple(map(tuple, lines.values())), (), tuple(records), tuple(groups))


def _in_another_way(entry: Entry | None, best: bool) -> Figure:
    return Figure(f"{entry.mean:.2f}", best) if entry else Figure("")


def _uneven(sides: Iterable[_Both]) -> Iterator[str]:
    """Say where methods or seeds are not on equal terms."""
    for side in sides:
        fewest = min((len(entry.values) for entry in side.ours.values()), default=0)
        if fewest < side.seeds:
            yield f"{_words(side.column)}: methods are compared over the seeds that all have, {fewest} of {side.seeds}."
        if mixed := [name for name, cells in side.found.items() if _makers(cells) > 1]:
            yield f"{_words(side.column)}: seeds of {', '.join(mixed)} come from different commits or compiled loops."


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
            line += " columns that have both rows"
            near = count_first(several, WITH_ADAM)[1]
            line += f", and first or within one standard deviation in {near} of {len(several)}" if several else ""
            lines.append(f"{line}; a tie counts.")
    for side in sides:
        names = list(side.theirs)
        alike = correlation([side.ours[name].mean for name in names], [side.theirs[name].mean for name in names])
        if alike:
            said = f"Rank correlation with the paper's order, {_words(side.column)}: {alike}"
            lines.append(f"{said} over {len(names)} methods.")
    if any("(p = " in line for line in lines):
        lines.append("p: the share of random orders of the methods whose correlation is as far from 0.")
    return lines


def _makers(cells: Sequence[Summary]) -> int:
    """Return how many commits, with their settings of the compiled loops, measured a method's seeds."""
    return len({(cell.get("commit"), cell.get("compiled_loop")) for cell in cells})


def _without(column: Mapping[str, Spread], names: Sequence[str]) -> dict[str, Spread]:
    return {name: entry for name, entry in column.items() if name not in names}


def _words(column: Column) -> str:
    return f"{column.place.dataset}, {column.place.clients} clients"


def _leads(sides: Sequence[_Both]) -> list[str]:
    """Say for each column what lead there is, and what remains of it after local training or with the class prior."""
    lines = [TRAINED, TOLD]
    for side in sides:
        mine = {name: side.ours[name] for name in OURS if name in side.ours}
        others = {name: entry for name, entry in side.ours.items() if not name.startswith(OURS)}
        if mine and others:
            line = f"{_words(side.column)}: the better of {' and '.join(OURS)} is {_lead(mine, others)}"
            trained = [
                {name: entry.trained for name, entry in some.items() if entry.trained} for some in (mine, others)
            ]
            told = [{name: entry.told for name, entry in some.items() if entry.told} for some in (mine, others)]
            line += f"; after local training, {_lead(*trained)}" if all(trained) else ""
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
    for side in sides:
        own = {name: weights for name, cells in side.found.items() if (weights := _own_weights(cells))}
        said = [f"{name}: {by_layer(weights)}" for name, weights in own.items() if name.startswith("pFedLA")]
        if said:
            lines.append(f"Clients' weights for themselves, {_words(side.column)}. {'; '.join(said)}.")
        kept = {name: shares for name, cells in side.found.items() if (shares := by_share(retained_of(cells)))}
        if kept:
            said = [f"{name}: {shares}" for name, shares in kept.items()]
            lines.append(f"Retained (share of downloads), {_words(side.column)}. {'; '.join(said)}.")
    return lines
