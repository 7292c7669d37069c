"""Does the order of the methods change with the rounds? Read from the curves of runs that are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from pfedla.errors import ConfigError
from pfedla.paper.counting import correlation, ranks, spearman
from pfedla.paper.grid import Column, Item, Wanted, columns_of, methods_of, rows_of
from pfedla.paper.measured import by_layer, heading, measured_by, missing, record_of, with_notes
from pfedla.paper.printed import TABLE1, TABLE2
from pfedla.paper.runs import Places, Summary, in_common, summaries_of
from pfedla.paper.sheets import Figure, Sheet

__all__ = ["MARKS", "changes", "marks", "order_by_rounds"]

MARKS = (60, 200, 600)
Curves = dict[str, dict[int, float]]  # method -> round -> accuracy in per cent


def order_by_rounds(item: Item, places: Places, wanted: Wanted) -> list[Sheet]:
    """Return accuracies and ranks after some rounds, a sheet for each column that has two methods or more."""
    sheets, recorded = list[Sheet](), set[int]()
    asked = {column: methods_of(item, column, wanted) for column in columns_of(item, wanted)}
    for column in asked:
        rows = [m for m in rows_of(column, places.scale) if not wanted.algorithms or m.algorithm in wanted.algorithms]
        found = summaries_of(places, column, rows, wanted.seeds)
        found = {name: [cell for cell in cells if "curve" in cell] for name, cells in found.items()}
        found = in_common({name: cells for name, cells in found.items() if cells})
        curves = {name: _curve(cells) for name, cells in found.items()}
        if len(curves) > 1:
            sheets.append(_sheet(item, places, column, curves, found, marks(curves, wanted.at)))
            recorded |= _common(curves)
    if sheets and (unknown := [t for t in wanted.at if t not in recorded]):
        raise ConfigError(f"no curve has round {unknown[0]}: they have {', '.join(map(str, sorted(recorded)))}")
    return with_notes(sheets, missing(item, places, wanted, asked)) if sheets else []


def marks(curves: Mapping[str, Mapping[int, float]], at: Sequence[int] = ()) -> list[int]:
    """Return the rounds to look at: 60, 200, 600 and the last that all have; of short curves the first and the last.

    If some are asked for, it is those `at` which all have been scored.
    """
    if asked := sorted({*at} & _common(curves)):
        return asked
    common = sorted(_common(curves))
    chosen = sorted({*(t for t in MARKS if t in common), *common[-1:]})
    return chosen if len(chosen) > 1 else sorted({*common[:1], *chosen})


def _common(curves: Mapping[str, Mapping[int, float]]) -> set[int]:
    """Return the rounds that all curves have."""
    return set.intersection(*map(set, curves.values()))


def changes(curves: Mapping[str, Mapping[int, float]], before: int, after: int) -> list[tuple[str, str]]:
    """Return the pairs of methods of which the first is ahead after `before` rounds, and the second after `after`."""
    pairs = [pair for a, b in combinations(curves, 2) for pair in ((a, b), (b, a))]
    return [
        (one, other)
        for one, other in pairs
        if curves[one][before] > curves[other][before] and curves[one][after] < curves[other][after]
    ]


def _curve(cells: Sequence[Summary]) -> dict[int, float]:
    """Return the mean over seeds, of the rounds that all have."""
    return {t: 100 * mean for t, mean in _means([dict(zip(*cell["curve"][:2], strict=True)) for cell in cells]).items()}


def _means(each: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return means by round, of the rounds that all have."""
    common = sorted(set.intersection(*map(set, each)))
    return {t: float(np.mean([values[t] for values in each])) for t in common}


def _sheet(
    item: Item,
    places: Places,
    column: Column,
    curves: Curves,
    found: Mapping[str, Sequence[Summary]],
    at: Sequence[int],
) -> Sheet:
    names = list(curves)
    cells = [cell for some in found.values() for cell in some]
    ranked = {t: dict(zip(names, ranks([-curves[name][t] for name in names]), strict=True)) for t in at}
    best = {t: max(curve[t] for curve in curves.values()) for t in at}
    rows, records = [], []
    for name, curve in curves.items():
        figures = [Figure(f"{curve[t]:.2f} ({ranked[t][name]:g})", curve[t] == best[t]) for t in at]
        rows.append((Figure(name), *figures))
        records += [
            record_of(item, places, column, name) | {"after": t, "accuracy": curve[t], "rank": float(ranked[t][name])}
            for t in at
        ]
    notes = [_compared(curves, before, after) for before, after in combinations(at, 2)]
    printed = TABLE1 if column.name.endswith("non-iid-1") else TABLE2
    known = [name for name in names if column.place in printed.get(name, ())]
    paper = [printed[name][column.place].mean for name in known]
    notes += [f"{name}, clients' weights for themselves: {said}." for name in names if (said := _own(found[name], at))]
    if losses := [f"{name} {said}" for name in names if (said := _losses(found[name]))]:
        notes.append(f"Mean test loss, lowest and last: {'; '.join(losses)}.")
    alike = [(t, correlation([curves[name][t] for name in known], paper)) for t in at]
    if correlations := [f"{rho} in round {t}" for t, rho in alike if rho]:
        notes.append(f"Rank correlation with the paper's order: {', '.join(correlations)}, over {len(known)} methods.")
    seeds = len({cell["seed"] for cell in cells})
    split = column.name.partition("-non-")[2]
    title = f"Order over the rounds, {column.place.dataset}, non-{split} ({heading(places, column, seeds)}), "
    head = ("method", *(f"round {t}: % (rank)" for t in at))
    return Sheet(title + f"scale {places.scale}", head, tuple(rows), (*notes, measured_by(cells)), tuple(records))


def _own(cells: Sequence[Summary], at: Sequence[int]) -> str:
    """Say what clients gave to themselves after some rounds, by layer; nothing where it is not known."""
    if not cells or any("own" not in cell for cell in cells):
        return ""
    each = [dict(zip(*cell["own"], strict=True)) for cell in cells]
    said = []
    for t in at:
        known = [found[t] for found in each if t in found]
        if known:
            weights = dict(zip(cells[0]["layers"], np.mean(known, 0), strict=True))
            said.append(f"round {t} {by_layer(weights)}")
    return "; ".join(said)


def _losses(cells: Sequence[Summary]) -> str:
    """Say when the test loss was lowest, and what it came to; nothing where it is not known."""
    if not cells or any("losses" not in cell for cell in cells):
        return ""
    losses = _means([dict(zip(cell["curve"][0], cell["losses"], strict=True)) for cell in cells])
    lowest, last = min(losses, key=lambda t: losses[t]), max(losses)
    return f"{losses[lowest]:.2f} in round {lowest}, {losses[last]:.2f} in round {last}"


def _compared(curves: Curves, before: int, after: int) -> str:
    """Say how alike the orders at two rounds are, and who changes places by how much: those first who do so clearly."""

    def gaps(pair: tuple[str, str]) -> tuple[float, float]:
        one, other = (curves[name] for name in pair)
        return other[before] - one[before], other[after] - one[after]

    found = spearman([curve[before] for curve in curves.values()], [curve[after] for curve in curves.values()])
    said = f"Rounds {before} and {after}: "
    said += f"rank correlation {found:+.2f} over {len(curves)} methods; " if found is not None else ""
    swaps = sorted(changes(curves, before, after), key=lambda pair: -min(map(abs, gaps(pair))))
    if not swaps:
        return said + "no two methods change places."
    clearest = "; ".join("{1} overtakes {0} ({2:+.2f}, then {3:+.2f})".format(*pair, *gaps(pair)) for pair in swaps[:3])
    pairs = len(curves) * (len(curves) - 1) // 2
    return said + f"{len(swaps)} of {pairs} pairs change places, most clearly: {clearest}."
