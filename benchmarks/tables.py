"""Tables of what was measured: on the terminal, as Markdown, and in the page about them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measuring import Row

__all__ = ["markdown", "show", "write_into"]


def show(name: str, rows: Sequence[Row]) -> None:
    """Print a table; one with many columns is turned on its side."""
    table = Table(title=name, title_justify="left")
    head, *body = _turned(rows)
    for column, title in enumerate(head):
        table.add_column(title, justify="right" if column else "left")
    for line in body:
        table.add_row(*line)
    Console().print(table)


def markdown(rows: Sequence[Row]) -> str:
    """Return a table as Markdown."""
    head, *body = _turned(rows)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_into(page: Path, results: Mapping[str, Any]) -> None:
    """Fill the tables of a page, each between `<!-- table: NAME -->` and `<!-- end -->`."""

    def filled(match: re.Match[str]) -> str:
        found = results.get(match[1])
        if not found:
            return match[0]
        where = (
            f"Commit `{found['commit']}`, torch {found['torch']}, {found['cores']} cores, "
            f"{100 * found['busy with other work']:.0f} % of them busy with other work meanwhile."
        )
        return f"<!-- table: {match[1]} -->\n{markdown(found['rows'])}\n\n{where}\n<!-- end -->"

    text = page.read_text()
    page.write_text(re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", filled, text, flags=re.DOTALL))


def _turned(rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of a table, heading first; columns become lines if there are more than seven."""
    columns = list(rows[0])
    lines = [columns, *([_text(row[column]) for column in columns] for row in rows)]
    return [list(line) for line in zip(*lines, strict=True)] if len(columns) > 7 else lines


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def load(path: Path) -> dict[str, Any]:
    """Return what earlier runs measured, by benchmark."""
    return dict(json.loads(path.read_text())) if path.exists() else {}
