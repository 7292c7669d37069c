"""Commands on a finished run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from pfedla.report.clients import clients_table
from pfedla.trained import standing

__all__ = ["COMMANDS"]

_run = click.argument("run", type=click.Path(path_type=Path))


@click.command()
@_run
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def clients(run: Path, as_json: bool) -> None:
    """Print how each client of the run in folder RUN stands, by name."""
    found = standing(run)
    if as_json:
        sys.stdout.write(json.dumps(found.rows, indent=2, ensure_ascii=False) + "\n")
        return
    title = f"round {found.t}: {found.headline} of the personalized models, and after local training"
    table = clients_table(found.rows, found.headline, found.higher_is_better, found.percent, found.scored_on, title)
    Console().print(table, markup=False, highlight=False)


COMMANDS: tuple[click.Command, ...] = (clients,)
