"""The commands that show runs: `pfedla report`, `pfedla watch` and `pfedla plot`."""

from __future__ import annotations

from pathlib import Path

import click

from pfedla.errors import RunError
from pfedla.record import PAGE
from pfedla.report.figures import KINDS, draw
from pfedla.report.page import report as page_of
from pfedla.report.runs import find_runs
from pfedla.report.watch import serve

__all__ = ["plot", "report", "watch", "write_report"]

_folders = click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN|DIR...")


def write_report(paths: tuple[Path, ...], out: Path | None = None) -> Path:
    """Write the page of the runs in some folders; beside them if there is one folder and nothing else is said."""
    runs = find_runs(paths)
    if not runs:
        raise RunError(f"{paths[0]} holds no run")
    out = out or (paths[0] / PAGE if len(paths) == 1 else Path(PAGE))
    text = page_of(runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror}") from None
    return out


@click.command()
@_folders
@click.option(
    "--out", "-o", type=click.Path(path_type=Path, dir_okay=False), help=f"The page; {PAGE} in DIR by default."
)
def report(paths: tuple[Path, ...], out: Path | None) -> None:
    """Write one page about runs, with every figure in it: it needs no network, and opens from disk."""
    written = write_report(paths, out)
    click.echo(f"report: {written} ({written.stat().st_size / 1e6:.1f} MB)")


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A free one by default.")
@click.option("--open", "opens", is_flag=True, help="Open it in a browser.")
def watch(folder: Path, port: int, opens: bool) -> None:
    """Show the runs of a folder in a browser, updated as rounds finish; on this machine alone, and read-only."""
    serve(folder, port, opens=opens, tell=click.echo)


@click.command()
@_folders
@click.option("--kind", type=click.Choice(list(KINDS)), default="curves", show_default=True, help="What to draw.")
@click.option(
    "--out", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A .pdf, .svg or .png."
)
@click.option("--columns", type=click.Choice(["1", "2"]), default="1", show_default=True, help="How wide, in a paper.")
def plot(paths: tuple[Path, ...], kind: str, out: Path, columns: str) -> None:
    """Draw a figure for a paper: of runs, or of all runs in a folder."""
    draw(kind, find_runs(paths), out, int(columns))
    click.echo(f"figure: {out}")
