"""Tables as text: Markdown, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["FORMATS", "Figure", "Format", "Group", "Sheet", "lasting", "written"]

Format = Literal["markdown", "csv", "latex"]
FORMATS: tuple[Format, ...] = ("markdown", "csv", "latex")


class Figure(NamedTuple):
    """A text in a table, and whether it is the best of its column."""

    text: str
    best: bool = False


class Group(NamedTuple):
    """Neighbouring columns with a heading of their own above them: the first of them, and how many."""

    heading: str
    first: int
    columns: int


class Sheet(NamedTuple):
    """A table to be printed, with what stands above and below it; and the same as plain values."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Figure, ...], ...]
    notes: tuple[str, ...]
    records: tuple[dict[str, Any], ...]
    groups: tuple[Group, ...] = ()


def written(sheets: Sequence[Sheet], form: Format) -> str:
    """Return sheets as text."""
    if form == "csv":
        text = io.StringIO()
        records = [record for sheet in sheets for record in sheet.records]
        writer = csv.DictWriter(text, list(records[0]) if records else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _plain(value) for key, value in record.items()} for record in records)
        return text.getvalue()
    if form == "markdown":
        return "\n".join(map(_markdown, sheets))
    return "\n".join([r"% \usepackage{booktabs, graphicx}", *map(_latex, sheets)])


def _plain(value: Any) -> Any:
    """Return a value as CSV shows it: as many digits as are measured."""
    return round(value, 6) if isinstance(value, float) else value


def _markdown(sheet: Sheet) -> str:
    head = list(sheet.head)
    for group in sheet.groups:
        head[group.first] = f"{group.heading}: {head[group.first]}"
    lines = [tuple(head), ("---",) * len(head)]
    lines += [tuple(f"**{cell.text}**" if cell.best else cell.text for cell in row) for row in sheet.rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = "".join(f"- {note}\n" for note in sheet.notes)
    return f"{sheet.title}\n\n{table}" + (f"\n{notes}" if notes else "")


def _latex(sheet: Sheet) -> str:
    def row(cells: Iterable[Figure]) -> str:
        texts = (rf"\textbf{{{_escaped(cell.text)}}}" if cell.best else _escaped(cell.text) for cell in cells)
        return " & ".join(texts) + r" \\"

    lines = [r"\begin{table*}", r"\centering", rf"\caption{{{_escaped(sheet.title)}}}"]
    lines += [r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"]  # wide tables shrink, others stay
    lines += [rf"\begin{{tabular}}{{l{'r' * (len(sheet.head) - 1)}}}", r"\toprule"]
    lines += _latex_groups(sheet)
    lines += [row(map(Figure, sheet.head)), r"\midrule", *map(row, sheet.rows), r"\bottomrule", r"\end{tabular}}"]
    return "\n".join([*lines, r"\end{table*}", *(f"% {note}" for note in sheet.notes)]) + "\n"


def _latex_groups(sheet: Sheet) -> list[str]:
    """Return a line of headings above groups of columns, with rules below them; none without groups."""
    if not sheet.groups:
        return []
    starts = {group.first: group for group in sheet.groups}
    covered = {group.first + i for group in sheet.groups for i in range(1, group.columns)}
    cells = [
        rf"\multicolumn{{{starts[i].columns}}}{{c}}{{{_escaped(starts[i].heading)}}}" if i in starts else ""
        for i in range(len(sheet.head))
        if i not in covered
    ]
    rules = (rf"\cmidrule(lr){{{group.first + 1}-{group.first + group.columns}}}" for group in sheet.groups)
    return [" & ".join(cells) + r" \\", " ".join(rules)]


def _escaped(text: str) -> str:
    for sign, word in (("%", r"\%"), ("_", r"\_"), ("±", r"$\pm$"), ("^", r"\^{}")):
        text = text.replace(sign, word)
    return re.sub(r"^-(?=\d)", "$-$", text)


def lasting(seconds: float) -> str:
    """Return a time in words: hours, minutes, or seconds."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
