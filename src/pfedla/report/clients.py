"""Every client by name: what it holds, and how its models score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pfedla.data.federation import FEW
from pfedla.report.tables import counted, shown

__all__ = ["client_rows", "clients_table"]

Row = dict[str, Any]


def client_rows(names: Sequence[str], samples: Sequence[Sequence[int]], record: Row, scored_on: str) -> list[Row]:
    """Return a row for each client: its name, its samples, and its metrics in one evaluation, None if it has none."""
    return [
        {
            "client": name,
            "training_samples": samples[i][0],
            f"{scored_on}_samples": samples[i][1],
            **{metric: values[i] for metric, values in record["clients"].items()},
        }
        for i, name in enumerate(names)
    ]


def clients_table(rows: Sequence[Row], headline: str, up: bool, percent: bool, scored_on: str, title: str) -> Table:
    """Return the rows as a table, the best client first; clients with few samples to be scored on are pointed out."""

    def cell(row: Row, metric: str) -> str:
        return "-" if row.get(metric) is None else shown(row[metric], percent)

    def rank(row: Row) -> float:
        value = row.get(headline)
        return math.inf if value is None else -value if up else value

    table = Table(title=title, header_style="bold", box=SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    unit = " %" if percent else ""
    table.add_column("client", overflow="fold")
    for heading in ("training", scored_on, f"{headline}{unit}", "after training"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in sorted(rows, key=rank):
        few = row[f"{scored_on}_samples"]
        table.add_row(
            Text(row["client"]),
            f"{row['training_samples']:,}",
            f"{few:,}" if few else "-",  # a site does not tell
            cell(row, headline),
            cell(row, f"{headline}_after_training"),
            f"only {counted(few, f'{scored_on} sample')}" if 0 < few < FEW else "",
        )
    return table
