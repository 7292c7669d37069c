"""Figures 1, 5, 6 and 7: what they are to show, computed from results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from pfedla.paper.counting import ranks
from pfedla.paper.grid import ITEMS, SIMILARITY, Column, Item, Method, Wanted, columns_of, methods_of
from pfedla.paper.measured import heading, measured_by, missing, record_of, with_notes
from pfedla.paper.runs import Places, Summary, in_common, own_weights, summaries_of
from pfedla.paper.sheets import Figure, Sheet

__all__ = [
    "LARGEST",
    "PERIODS",
    "ROLES",
    "by_chance",
    "falls_with_distance",
    "measured",
    "order_holds",
    "periods",
    "roles_of",
    "sheets_of",
    "temperature_of",
]

ROLES = ("own", "same classes", "similar", "others")  # Figure 5: clients 0, 1, 2, and the rest
LARGEST = {"EMNIST": "fc3", "CIFAR10": "fc1"}  # Figure 7, as section 4.4 says
PERIODS = ("early", "middle", "late")
SHARE = 0.05  # of random orders of the clients, which Figure 6 is held against


def sheets_of(item: Item, places: Places, wanted: Wanted) -> list[Sheet]:
    """Return what a figure is to show, as tables."""
    make = {"fig1": _toy_sheet, "fig5": _evolution_sheet, "fig6": _distance_sheet, "fig7": _layers_sheet}[item.name]
    sheets = [make(places, column, method, found) for column, method, found in measured(item, places, wanted)]
    shown = {column: methods_of(item, column, wanted) for column in columns_of(item, wanted)}
    return with_notes(sheets, missing(item, places, wanted, shown)) if sheets else []


def measured(item: Item, places: Places, wanted: Wanted) -> Iterator[tuple[Column, Method, dict[str, list[Summary]]]]:
    """Yield the columns and methods of a figure that are measured, with their cells."""
    for column in columns_of(item, wanted):
        if item.name == "fig1":
            for pair in SIMILARITY.values():
                found = in_common(summaries_of(places, column, pair, wanted.seeds))
                if len(found) == len(pair):
                    yield column, pair[0], found
            continue
        for method in methods_of(item, column, wanted):
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


def temperature_of(method: Method) -> float:
    """Return the temperature of a method of Figure 1."""
    (found,) = (temperature for temperature, pair in SIMILARITY.items() if method in pair)
    return found


def _toy_sheet(places: Places, column: Column, method: Method, found: dict[str, list[Summary]]) -> Sheet:
    temperature = temperature_of(method)
    rows, records = [], []
    for name, cells in found.items():
        first, everybody = fmean(100 * c["curve"][2][-1] for c in cells), fmean(100 * c["curve"][1][-1] for c in cells)
        rows.append((Figure(name.partition(",")[0]), Figure(f"{first:.2f}"), Figure(f"{everybody:.2f}")))
        record = _record("fig1", places, column, name.partition(",")[0], cells) | {"temperature": temperature}
        records.append({**record, "client_0": first, "mean": everybody})
    pairs = list(zip(*found.values(), strict=True))
    seeds = len(pairs)
    above = sum(a["curve"][2][-1] > b["curve"][2][-1] for a, b in pairs)
    mean = sum(a["curve"][1][-1] > b["curve"][1][-1] for a, b in pairs)
    claim = f"Layer-wise is above model-wise for client 0 in {above} of {seeds} seeds, for the mean client in {mean}."
    title = f"Figure 1, temperature {temperature:g} ({heading(places, column, seeds)}), scale {places.scale}"
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
        texts = [Figure("-" if np.isnan(some).any() else " / ".join(f"{x:.3f}" for x in some)) for some in mean]
        good = sum(row[place] for row in holds)
        rows.append((Figure(layer), *texts, Figure(f"{good} of {len(cells)}")))
        for part, period in enumerate(PERIODS):
            record = _record("fig5", places, column, method.name, cells)
            known = [None if np.isnan(x) else float(x) for x in mean[part]]  # of few rounds some periods have none
            weights_of = dict(zip((role.replace(" ", "_") for role in ROLES), known, strict=True))
            records.append({**record, "layer": layer, "period": period, **weights_of})
    claim = f"Own > same classes > similar > others, late: in {sum(map(sum, holds))} of {len(layers) * len(cells)} "
    claim += "cases (layers x seeds)."
    fall = values[:, -1, :, 3] < values[:, 0, :, 3]  # (seeds, layers)
    falls = f"The others' weight is smaller late than early, as the paper says: in {fall.sum()} of {fall.size}."
    notes = (claim, *(() if np.isnan(values).any() else (falls,)), _commits(found))
    title = f"Figure 5, {column.place.dataset}, {method.name} ({heading(places, column, len(cells))}), "
    title += f"scale {places.scale}. The target's weights: {' / '.join(ROLES)} (mean of the five)"
    head = ("layer", *PERIODS, "order holds, late (seeds)")
    return Sheet(title, head, tuple(rows), notes, tuple(records))


def _distance_sheet(places: Places, column: Column, method: Method, found: dict[str, list[Summary]]) -> Sheet:
    cells = found[method.name]
    layers = cells[0]["layers"]
    rows, records = [], list[dict[str, Any]]()
    for place, layer in enumerate(layers):
        weights = [np.asarray(cell["alpha"])[:, place] for cell in cells]  # seeds of (clients, clients)
        found_here = [falls_with_distance(some) for some in weights]
        correlated = [x for x in found_here if x is not None]
        rho, chance = (fmean(correlated), by_chance(weights)) if len(correlated) == len(weights) else (None, None)
        largest = fmean(float((some.argmax(1) == np.arange(len(some))).mean()) for some in weights)
        own = fmean(float(np.diag(some).mean()) for some in weights)
        shown = [f"{x:+.2f}" if x is not None else "-" for x in (rho, chance)]
        rows.append((Figure(layer), *map(Figure, shown), Figure(f"{own:.3f}"), Figure(f"{largest:.0%}")))
        record = _record("fig6", places, column, method.name, cells)
        figures = {"spearman": rho, "by_chance": chance, "own": own, "own_is_largest": largest}
        records.append({**record, "layer": layer, **figures})
    known = [record for record in records if record["spearman"] is not None]
    falls = sum(record["spearman"] < 0 for record in known)
    clearly = [record["layer"] for record in known if record["spearman"] < min(record["by_chance"], 0)]
    claim = "Weight falls with the difference between the clients' numbers (negative rank correlation) in "
    claim += f"{falls} of {len(layers)} layers; lower than for 95 % of random orders of the clients in {len(clearly)}"
    claim += f": {', '.join(clearly)}" if clearly else ""
    claim += f". By chance it would be in {SHARE * len(layers):.2g} of them."
    title = f"Figure 6, {column.place.dataset}, {method.name} ({heading(places, column, len(cells))}), "
    rank = "Spearman of a client's weights and distance, own left out, mean"
    head = ("layer", rank, f"{SHARE:.0%} of random orders are below", "own weight", "own is largest (clients)")
    return Sheet(title + f"scale {places.scale}", head, tuple(rows), (claim, _commits(found)), tuple(records))


def falls_with_distance(weights: np.ndarray) -> float | None:
    """Return the rank correlation of a client's weights for others and the difference between their numbers.

    It is taken client by client, and its mean returned: how much a client gives away at all says nothing of to whom.
    `weights` are `(N, N)`; a client that gives all others the same counts as 0. None if all do, or they are too few.
    """
    ranked = _ranked_by_row(weights)
    return float((ranked * _ranked_by_row(_distances(len(weights)))).sum() / len(weights)) if ranked.any() else None


def by_chance(weights: Sequence[np.ndarray], share: float = SHARE, orders: int = 2000) -> float:
    """Return what `falls_with_distance`, its mean over seeds, is below for this share of random orders of clients."""
    n, rng = len(weights[0]), np.random.default_rng(0)
    mean = np.mean([_ranked_by_row(some) for some in weights], axis=0) / n
    distance = _ranked_by_row(_distances(n))
    drawn = [rng.permutation(n) for _ in range(orders)]
    return float(np.quantile([(mean * distance[np.ix_(order, order)]).sum() for order in drawn], share))


def _distances(n: int) -> np.ndarray:
    return np.abs(np.subtract.outer(np.arange(n), np.arange(n)))


def _ranked_by_row(values: np.ndarray) -> np.ndarray:
    """Return each row's ranks off the diagonal, of mean 0 and length 1; 0 on it, and for fewer than three or equals."""
    placed = np.zeros(values.shape)
    for i, row in enumerate(values):
        others = np.arange(len(row)) != i
        found = ranks(row[others].tolist())
        found -= found.mean()
        if len(found) > 2 and found.any():
            placed[i, others] = found / np.linalg.norm(found)
    return placed


def _layers_sheet(places: Places, column: Column, method: Method, found: dict[str, list[Summary]]) -> Sheet:
    cells = found[method.name]
    layers, dataset = cells[0]["layers"], column.place.dataset
    own = own_weights(np.array([cell["alpha"] for cell in cells]))  # (seeds, layers, clients)
    target, everybody = own[:, :, 0].mean(0), own.mean((0, 2))
    rows, records = [], []
    for place, layer in enumerate(layers):
        best = target[place] == target.max(), everybody[place] == everybody.max()
        rows.append(
            (Figure(layer), Figure(f"{target[place]:.3f}", best[0]), Figure(f"{everybody[place]:.3f}", best[1]))
        )
        record = _record("fig7", places, column, method.name, cells) | {"layer": layer}
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


def _record(name: str, places: Places, column: Column, method: str, cells: Sequence[Summary]) -> dict[str, Any]:
    """Return what a row of a figure's CSV file begins with."""
    return record_of(ITEMS[name], places, column, method) | {"seeds": len(cells)}


def _commits(found: dict[str, list[Summary]]) -> str:
    return measured_by(cell for cells in found.values() for cell in cells)
