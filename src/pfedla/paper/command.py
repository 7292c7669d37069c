"""`pfedla paper`: lists the paper's tables and figures, runs what is behind them, and shows ours beside the paper's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from pfedla.comparison import check_place
from pfedla.errors import ConfigError, RunError, unknown_name
from pfedla.options import stopped, with_options
from pfedla.paper.drawings import drawings_of, save
from pfedla.paper.figures import sheets_of
from pfedla.paper.grid import (
    ITEMS,
    PER_ROUND,
    SCALES,
    SLUGS,
    Cell,
    Item,
    Method,
    Scale,
    Wanted,
    cells_of,
    check_methods,
    columns_of,
    experiment_of,
    methods_of,
    seconds_of,
)
from pfedla.paper.measured import missing
from pfedla.paper.order import order_by_rounds
from pfedla.paper.retained import table_of_retained
from pfedla.paper.runs import NOTE, RESULTS, Places, finished, left, run_all, run_cell
from pfedla.paper.sheets import FORMATS, Format, Sheet, lasting, written
from pfedla.paper.tables import table_of_methods

__all__ = ["paper", "shown"]

SHEETS: dict[str, Callable[[Item, Places, Wanted], list[Sheet]]] = {  # all others are figures
    "table1": table_of_methods,
    "table2": table_of_methods,
    "table3": table_of_retained,
    "rounds": order_by_rounds,
}
_path = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("names", nargs=-1, metavar=f"[{'|'.join(ITEMS)}]...")
@click.option("--scale", type=click.Choice(list(SCALES)), default="laptop", show_default=True, help="How much to run.")
@click.option("--dataset", "datasets", multiple=True, help=f"Of {', '.join(SLUGS.values())}; all by default.")
@click.option("--clients", type=int, multiple=True, help="10 or 100, in tables; both by default.")
@click.option("--algorithm", "-a", "algorithms", multiple=True, help="Methods of the paper; all by default.")
@click.option(
    "--seeds", type=click.IntRange(min=1), help="How many: 1 to run, all that are there to print, by default."
)
@click.option("--at", type=click.IntRange(min=1), multiple=True, help="For rounds: after how many of them to look.")
@click.option("--print", "only_print", is_flag=True, help="Run nothing: show what is there.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="markdown", show_default=True, help="Of tables.")
@click.option("--draw", type=_path, metavar="DIR", help="Where to draw figures; below --runs after a run by default.")
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Cells at a time, each in a process with one worker; 1 by default."
)
@click.option("--workers", type=int, help="Processes of a cell; one per core by default. Never changes the result.")
@click.option("--data-dir", help="Where data sets lie; $PFEDLA_DATA by default.")
@click.option("--download", is_flag=True, help="Fetch missing files from their official address.")
@click.option("--results", type=_path, default=RESULTS, show_default=True, help="One file per column.")
@click.option("--runs", type=_path, default=Path("runs/paper"), show_default=True, help="For the run directories.")
@click.option("--overwrite", is_flag=True, help="Run anew what is there already.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
@click.option(
    "--cell", type=(str, str, int), hidden=True, help="Run this column, method and seed alone: what --jobs starts."
)
def paper(
    names: tuple[str, ...],
    scale: Scale,
    datasets: tuple[str, ...],
    clients: tuple[int, ...],
    algorithms: tuple[str, ...],
    seeds: int | None,
    at: tuple[int, ...],
    only_print: bool,
    form: Format,
    draw: Path | None,
    jobs: int | None,
    workers: int | None,
    data_dir: str | None,
    download: bool,
    results: Path,
    runs: Path,
    overwrite: bool,
    quiet: bool,
    cell: tuple[str, str, int] | None,
) -> None:
    """Reproduce the paper's tables and figures; without names, list them and what they cost.

    Finished cells are never run again and unfinished ones resumed: the same command continues.
    """
    machine: dict[str, Any] = {"keep_models": False}
    machine |= {"workers": workers} if workers is not None else {}
    machine |= {"data_dir": data_dir} if data_dir is not None else {}
    machine |= {"download": True} if download else {}
    places = Places(scale, results, runs, machine)
    if cell:
        run_cell(places, _cell(*cell), overwrite=overwrite, tell=lambda text: click.echo(NOTE + text, err=True))
        return
    wanted = Wanted(scale, datasets, clients, algorithms, seeds, at)
    for name in names:
        if name not in ITEMS:
            raise unknown_name("table or figure", name, ITEMS)
    items = [ITEMS[name] for name in names]
    check_methods(items or list(ITEMS.values()), wanted)
    if workers is not None and workers < 0:
        raise ConfigError(f"--workers {workers} must be at least 0")
    if only_print and quiet:
        raise ConfigError("--print and --quiet together show nothing")
    if only_print and (overwrite or jobs):
        raise ConfigError(f"--print runs nothing: leave out {'--overwrite' if overwrite else '--jobs'}")
    if at and "rounds" not in names:
        raise ConfigError("--at is for rounds: pfedla paper rounds --at 20")
    if items and clients and all(item.drawn for item in items):
        raise ConfigError("the figures' clients are fixed: --clients is for tables")
    if items and not any(columns_of(item, wanted) for item in items):
        raise ConfigError(" ".join(map(_without_columns, items)))
    if form == "csv" and len(items) > 1:
        raise ConfigError("tables have different columns as CSV: name one of them at a time")
    if only_print and not results.exists():
        if results != RESULTS:
            raise RunError(f"there are no results to print: {results} does not exist")
        click.echo(f"{NOTE}there is no {results} in this folder: nothing is measured here", err=True)
    if not items:
        _list(places, wanted)
        return
    failed = [] if only_print else _run(places, items, wanted, jobs or 1, overwrite, quiet)
    if not quiet:
        text, without = shown(items, places, wanted, form)
        click.echo(text, nl=False)
        if text and without and form == "markdown":
            click.echo()
        for sentence in without:
            click.echo(sentence, err=form != "markdown")
    if draw or not only_print:
        drawings = [drawing for item in items if item.drawn for drawing in drawings_of(item, places, wanted)]
        paths = save(drawings, draw or runs / scale / "figures") if drawings else []
        if paths and not quiet:
            said = f"drawn in {paths[0].parent}, as PNG and SVG: {', '.join(drawing.name for drawing in drawings)}"
            Console(stderr=True).print(said, markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise RunError(f"not everything could be run. {' '.join(failed)}")


def shown(items: Sequence[Item], places: Places, wanted: Wanted, form: Format) -> tuple[str, list[str]]:
    """Return tables, and what figures are to show, from what is measured; and what there is nothing of, in words."""
    texts, without = [], []
    for item in items:
        if sheets := SHEETS.get(item.name, sheets_of)(item, places, wanted):
            texts.append(written(sheets, form))
        elif columns := columns_of(item, wanted):
            needed = {column: methods_of(item, column, wanted) for column in columns}
            if not any(needed.values()):
                without.append(f"{item.name} has none of these methods.")
                continue
            said = [f"{item.name}: nothing is measured at scale {places.scale}."]
            if item.name == "rounds" and len({method for some in needed.values() for method in some}) < 2:
                said = ["rounds compares methods: ask for two or more."]
            without.append(" ".join([*said, *missing(item, places, wanted, needed)]))
        else:
            without.append(_without_columns(item))
    return "\n".join(texts), without


def _without_columns(item: Item) -> str:
    """Say which columns a table or figure has, where none of them is asked for."""
    columns = dict.fromkeys(column.place for column in item.columns)
    said = [f"{SLUGS[dataset]} with {clients} clients" for dataset, clients in columns]
    return f"{item.name} has no such columns: it has {', '.join(said)}."


def _cell(column: str, spec: str, seed: int) -> Cell:
    known = {found.name: found for item in ITEMS.values() for found in item.columns}
    if column not in known:
        raise unknown_name("column", column, known)
    return Cell(known[column], Method(spec, spec), seed)


def _list(places: Places, wanted: Wanted) -> None:
    """Print what each table and figure costs, and all of them together."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    for heading in ("name", "shows"):
        table.add_column(heading, overflow="fold")
    for heading in ("cells", "rounds\nof a cell", "finished", "time\nspent", "time left,\nestimated"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, title, items in [
        *((item.name, item.title, [item]) for item in ITEMS.values()),
        ("all", "what several of them need is run once", list(ITEMS.values())),
    ]:
        cells = cells_of(items, wanted)
        known = {cell: finished(places, cell) for cell in cells}
        rounds = sorted({experiment_of(cell, places.scale).schedule.rounds for cell in cells})
        spent = sum(summary["seconds"] for summary in known.values() if summary)
        to_do = sum(seconds_of(cell, places.scale) for cell, summary in known.items() if not summary)
        done = sum(summary is not None for summary in known.values())
        table.add_row(
            *(name, title, str(len(cells)), " or ".join(map(str, rounds)), str(done), lasting(spent), lasting(to_do)),
            end_section=name == list(ITEMS)[-1],
        )
    Console().print(table)
    click.echo(f"Scale {places.scale}: {SCALES[places.scale]}.")
    click.echo(
        f"Estimated for two cores: {PER_ROUND[1]} s for a round of ten clients on 28x28 images, {PER_ROUND[3]} s on "
        "CIFAR, and\n5 times as much for pFedMe, with the compiled loops (--jobs 2 runs two cells at a time). Machines "
        "differ;\nwhat results/paper holds was measured with one worker, on machines of different speed."
    )


def _run(places: Places, items: Sequence[Item], wanted: Wanted, jobs: int, overwrite: bool, quiet: bool) -> list[str]:
    """Run what is not finished; return why cells failed."""
    cells = cells_of(items, wanted)
    to_do = left(places, cells, overwrite=overwrite)
    for name in dict.fromkeys(cell.column.name for cell in to_do):
        check_place(places.file(name))
    console = Console(stderr=True, quiet=quiet)
    console.print(
        f"scale {places.scale}: {len(cells)} cells, {len(cells) - len(to_do)} finished", highlight=False, soft_wrap=True
    )
    try:
        with _Progress(console, places.scale, cells, to_do) as progress:
            tell = lambda text: console.print(with_options(text), markup=False, highlight=False, soft_wrap=True)  # noqa: E731
            return run_all(
                places, to_do, jobs=jobs, overwrite=overwrite, report=progress, leave=progress.leave, tell=tell
            )
    except KeyboardInterrupt:
        console.print(stopped(overwrite), soft_wrap=True)
        raise


class _Progress:
    """Shows how much of the grid is done, and the time left by the estimated costs and the speed so far."""

    def __init__(self, console: Console, scale: Scale, grid: Sequence[Cell], cells: Sequence[Cell]) -> None:
        self._console, self._cells = console, list(cells)
        self._all, self._before = len(grid), len(grid) - len(cells)
        self._cost = {cell: seconds_of(cell, scale) for cell in cells}
        self._rounds = {cell: experiment_of(cell, scale).schedule.rounds for cell in cells}
        self._first: dict[Cell, int] = {}  # rounds that an earlier start had done
        self._now: dict[Cell, int] = {}
        self._start = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            console=console,
            auto_refresh=False,  # no thread beside the worker processes
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task("cells", total=len(grid), completed=self._before, words="")

    def __call__(self, cell: Cell, t: int) -> None:
        self._first.setdefault(cell, max(0, t - 1))
        before, self._now[cell] = self._now.get(cell, 0), t
        done = self._before + sum(self._now.get(cell, 0) >= self._rounds[cell] for cell in self._cells)
        words = f"{cell.column.name}, {cell.method.name}, seed {cell.seed}"
        text = f"{words}: round {t}/{self._rounds[cell]}{self._time_left()}"
        self._bar.update(self._task, completed=done, words=text, refresh=True)
        if not self._console.is_terminal and t >= self._rounds[cell] > before:
            self._console.print(f"{done}/{self._all} {words}: done{self._time_left()}", highlight=False, soft_wrap=True)

    def leave(self, cell: Cell) -> None:
        """No longer count a cell among those to be run."""
        self._cells.remove(cell)

    def _time_left(self) -> str:
        """Say how much longer it takes, as fast as it went so far."""
        share = {cell: cost / self._rounds[cell] for cell, cost in self._cost.items()}
        worked = sum(share[cell] * (t - self._first[cell]) for cell, t in self._now.items())
        to_do = sum(share[cell] * (self._rounds[cell] - self._now.get(cell, 0)) for cell in self._cells)
        if not worked:
            return ""
        return f", about {lasting((time.monotonic() - self._start) / worked * to_do)} left"

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
