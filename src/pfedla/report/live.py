"""A run's progress, live in a terminal and line by line elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from pfedla.report.tables import shown
from pfedla.rounds import Progress, Watch

__all__ = ["Live", "watched"]


class Live:
    """Shows round, the headline's mean and worst client, bytes and the time left; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Bar(
            TextColumn("{task.description:>10}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,  # no thread beside the worker processes
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._label = ""
        self._told = 0

    def start(self, label: str, rounds: int) -> None:
        """Begin with a run."""
        self._label, self._told = label, 0
        self._task = self._bar.add_task(label, total=rounds, figures="starting")
        self._bar.refresh()

    def __call__(self, progress: Progress) -> None:
        """Take in a round."""
        assert self._task is not None
        figures = _figures(progress)
        self._bar.update(self._task, completed=progress.t, figures=figures, refresh=True)
        record = progress.record
        if not self._console.is_terminal and record and record["round"] > self._told:
            self._told = record["round"]
            self._console.print(
                f"{self._label}: round {progress.t}/{progress.rounds}  {figures}  {progress.seconds:.0f} s",
                highlight=False,
                soft_wrap=True,
            )

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


@contextmanager
def watched(
    label: str, rounds: int, watch: Watch | None, wanted: bool | None = None, note: str = ""
) -> Iterator[Watch | None]:
    """Give a watcher that shows a run's progress and asks `watch`; by default it shows it where somebody looks.

    That is a terminal, or a notebook, where it takes a line for each evaluation.
    """
    notebook = _in_notebook()
    console = Console(stderr=not notebook, force_jupyter=False, force_terminal=False if notebook else None)
    if wanted is None:
        wanted = notebook or console.is_terminal
    if not wanted:
        yield watch
        return
    if note:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    with Live(console) as live:
        live.start(label, rounds)

        def both(progress: Progress) -> bool | None:
            live(progress)
            return watch(progress) if watch else None

        yield both


def _in_notebook() -> bool:
    """Say whether this is a notebook's kernel, which a program that merely starts kernels is not."""
    python = sys.modules.get("IPython")
    return python is not None and hasattr(python.get_ipython(), "kernel")


def _figures(progress: Progress) -> str:
    traffic = f"{(progress.bytes_down + progress.bytes_up) / 1e6:,.1f} MB"
    name, percent = progress.objective.headline, progress.objective.percent
    if progress.record is None or progress.record[f"{name}_mean"] is None:
        return traffic
    mean, worst = (shown(progress.record[f"{name}_{part}"], percent) for part in ("mean", "worst"))
    unit = " %" if percent else ""
    return f"{name} {mean}{unit}, worst {worst}{unit}, {traffic}"
