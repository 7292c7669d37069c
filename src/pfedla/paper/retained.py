"""Table 3: accuracy and traffic by the number of retained layers, in bytes and in the paper's unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from pfedla.data.datasets import DATASETS
from pfedla.layers import LayerSpec
from pfedla.models import make_model
from pfedla.paper.grid import KEEP, Column, Item, Wanted, columns_of, facts_of, methods_of
from pfedla.paper.measured import (
    MISSING,
    bests,
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
from pfedla.paper.printed import TABLE3
from pfedla.paper.runs import Places, Summary, in_common, summaries_of
from pfedla.paper.sheets import Figure, Sheet

__all__ = ["layer_sizes", "megabytes", "table_of_retained"]


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


def table_of_retained(item: Item, places: Places, wanted: Wanted) -> list[Sheet]:
    """Return Table 3, a sheet for each data set: accuracy, bytes, the paper's unit, and which layers were retained."""
    sheets, shown = [], {column: methods_of(item, column, wanted) for column in columns_of(item, wanted)}
    for column, methods in shown.items():
        dataset, sizes = column.place.dataset, layer_sizes(column)
        paper = {retained.k: retained for retained in TABLE3[dataset]}
        found = summaries_of(places, column, KEEP, wanted.seeds)
        entries = {name: entry_of(summaries) for name, summaries in found.items()}
        seeds = max((len(entry.values) for entry in entries.values()), default=0)
        top = bests({name: entry_of(summaries) for name, summaries in in_common(found).items()})
        rows, records = [], []
        for k, method in enumerate(KEEP):
            if method not in methods:
                continue
            entry, printed = entries.get(method.name), paper.get(k)
            summaries = found.get(method.name, [])
            ours = retained_of(summaries)
            down, up = (_millions(summaries, f"bytes_{way}") for way in ("down", "up"))
            unit = megabytes(sizes, ours) if ours or (summaries and not k) else None
            named = dict.fromkeys(printed.layers, 1.0) if printed else {}
            theirs = megabytes(sizes, named) if printed else None
            shares = by_share(ours)
            changes = [summary["retained_changes"] for summary in summaries if "retained_changes" in summary]
            rows.append(
                (
                    Figure(str(k)),
                    figure_of(entry, method.name in top, seeds) if entry else Figure(MISSING),
                    Figure(f"{printed.accuracy:.2f}", printed == max(paper.values(), key=lambda p: p.accuracy))
                    if printed
                    else Figure("-"),
                    Figure(f"{down:,.1f} / {up:,.1f}" if down is not None and up is not None else ""),
                    Figure(f"{unit:.2f}" if unit is not None else ""),
                    Figure(f"{printed.megabytes:.2f}" if printed else "-"),
                    Figure(f"{theirs:.2f}" if theirs is not None else "-"),
                    Figure(shares or ("none" if summaries and not k else "")),
                    Figure(f"{fmean(changes):.1%}" if changes else ""),
                    Figure((", ".join(printed.layers) or "none") if printed else "-"),
                )
            )
            records.append(
                record_of(item, places, column, method.name)
                | {
                    "k": k,
                    "seeds": len(entry.values) if entry else 0,
                    "ours": entry.mean if entry else None,
                    "ours_std": entry.std if entry else None,
                    "paper": printed.accuracy if printed else None,
                    "megabytes_down": down,
                    "megabytes_up": up,
                    "paper_unit_ours": unit,
                    "paper_unit_printed": printed.megabytes if printed else None,
                    "paper_unit_of_its_layers": theirs,
                    "retained": shares,
                    "retained_changes": fmean(changes) if changes else None,
                    "retained_in_the_paper": ", ".join(printed.layers) if printed else None,
                }
            )
        figures = ("k", "ours %", "paper %", "MB down / up", "paper's unit: ours", "printed", "from its layers")
        head = (*figures, "retained here (share of downloads)", "other layers than last time", "in the paper")
        title = f"Table 3, {dataset} ({heading(places, column, seeds)}), scale {places.scale}"
        note = "MB are 10^6 bytes of layers as sent, of all rounds run here. The paper's unit is for its 600 rounds."
        notes = tuple(text for text in (note, measured_by(s for some in found.values() for s in some)) if text)
        sheets.append(Sheet(title, head, tuple(rows), notes, tuple(records)))
    return with_notes(sheets, missing(item, places, wanted, shown)) if sheets else []


def _millions(summaries: Sequence[Summary], key: str) -> float | None:
    return fmean(summary[key] for summary in summaries) / 1e6 if summaries else None
