"""Cells are run one by one, and what is measured is collected: one file for each column, which outlives the runs.

A cell that its column's file holds is finished, even if the run's folder is gone. Beside a run's final figures the file
holds what tables and figures need of its record.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from pfedla.comparison import (
    carry_out,
    changed,
    collect,
    collected,
    figures_of,
    forget,
    measured_otherwise,
    refuse_other_data,
    standing,
)
from pfedla.errors import PfedlaError, RunError
from pfedla.experiment import federation_of
from pfedla.interrupts import stoppable
from pfedla.paper.grid import Cell, Column, Method, Scale, experiment_of
from pfedla.record import LAYERS, ROUND, RunRecord
from pfedla.rounds import Watch

__all__ = [
    "NOTE",
    "RESULTS",
    "Places",
    "Summary",
    "finished",
    "in_common",
    "kept_of",
    "left",
    "own_weights",
    "run_all",
    "run_cell",
    "summaries_of",
]

Summary = dict[str, Any]
Report = Callable[[Cell, int], None]  # a cell, and the rounds it has done

WITH_WEIGHTS = ("pfedla", "heurpfedla", "similarity-layer", "similarity-model")
NOTE = "note: "  # how a cell's process begins what is to be told
RESULTS = Path("results/paper")  # where figures are collected unless another folder is named
MOST_CLIENTS, MOST_RECORDS, DIGITS = 10, 40, 5  # of the weights among clients that are kept


class Places(NamedTuple):
    """Where runs and results of a scale lie, and what the runs may use of the machine."""

    scale: Scale
    results: Path  # the folder of the laptop's; the other scales' are below it
    runs: Path
    machine: dict[str, Any]

    def file(self, column: str) -> Path:
        """Return the file that collects a column's figures."""
        return (self.results if self.scale == "laptop" else self.results / self.scale) / f"{column}.json"

    def folder(self, cell: Cell) -> Path:
        """Return a run's folder."""
        return self.runs / self.scale / cell.column.name / f"{cell.method.variant.label}-seed{cell.seed}"


def finished(places: Places, cell: Cell) -> Summary | None:
    """Return a finished cell's figures; refuse those of other settings.

    What `pfedla compare` added of a method with weights has none of them, which figures and Table 3 need.
    """
    return _usable(places, cell, _held(places, cell.column))


def _usable(places: Places, cell: Cell, held: Mapping[tuple[str, int], Summary]) -> Summary | None:
    """Return a finished cell's figures, of what its column's file holds."""
    known = held.get((cell.method.variant.label, cell.seed))
    if known and "curve" not in known and cell.method.algorithm in WITH_WEIGHTS:
        return None
    return _checked(places, cell, known) if known else None


def summaries_of(
    places: Places, column: Column, methods: Sequence[Method], seeds: int | None = None
) -> dict[str, list[Summary]]:
    """Return the finished cells of a column by the names of methods, those that have any; `seeds` of them, or all."""
    held, found = _held(places, column), dict[str, list[Summary]]()
    for method in methods:
        for seed in sorted(seed for label, seed in held if label == method.variant.label):
            if seeds is None or seed < seeds:
                known = held[method.variant.label, seed]
                found.setdefault(method.name, []).append(_checked(places, Cell(column, method, seed), known))
    return found


def in_common(found: Mapping[str, Sequence[Summary]]) -> dict[str, list[Summary]]:
    """Return the cells of the seeds that all methods have: what can be compared. It may be nothing."""
    seeds = set.intersection(*({cell["seed"] for cell in cells} for cells in found.values())) if found else set()
    return {name: [cell for cell in cells if cell["seed"] in seeds] for name, cells in found.items()} if seeds else {}


def _held(places: Places, column: Column) -> dict[tuple[str, int], Summary]:
    """Return what a column's file holds; in a figure's column, what `pfedla compare` added has nothing to draw."""
    held = collected(places.file(column.name))
    return {key: known for key, known in held.items() if "curve" in known or not column.drawn}


def _checked(places: Places, cell: Cell, known: Summary) -> Summary:
    if absent := [key for key in ("accuracy_mean", "rounds", "bytes_down", "bytes_up") if known.get(key) is None]:
        file = places.file(cell.column.name)
        raise RunError(f"{file} is damaged: {_words(cell)} is there without {', '.join(absent)}")
    if differing := changed(known, experiment_of(cell, places.scale)):
        why = measured_otherwise(places.file(cell.column.name), known, differing)
        raise RunError(f"{why}: choose another folder of results, or overwrite it")
    return known


def left(places: Places, cells: Sequence[Cell], *, overwrite: bool = False) -> list[Cell]:
    """Return the cells that are not finished."""
    if overwrite:
        return list(cells)
    held = {column: _held(places, column) for column in dict.fromkeys(cell.column for cell in cells)}
    return [cell for cell in cells if _usable(places, cell, held[cell.column]) is None]


def kept_of(record: RunRecord, *, over_time: bool) -> Summary:
    """Return what is kept of a run beside its final figures.

    `curve`: rounds, mean accuracy, and the first client's; `losses`: mean test losses in the same rounds; `retained`:
    the share of downloads that each layer was left out of; `retained_changes`: the share of downloads that left out
    other layers than the client's last one; `alpha`: the final weights, if the clients are few; `alpha_over_time`: the
    first client's; `own`: rounds, and clients' weights for themselves, by layer.
    """
    history, found = record.history(), record.diagnostics()
    kept: Summary = {
        "curve": [
            [line["round"] for line in history],
            [_rounded(line["accuracy_mean"]) for line in history],
            [_rounded(line["clients"]["accuracy"][0]) for line in history],
        ],
        "losses": [_rounded(line["loss_mean"]) for line in history],
    }
    if LAYERS in found:
        kept["layers"] = [str(name) for name in found[LAYERS]]
    if "retained" in found:
        lines = record.ledger().arrays()
        left_out = lines["down"] == 0  # (downloads, layers)
        kept["retained"] = _rounded(left_out.mean(0))
        kept["retained_changes"] = _rounded(_changes(left_out, lines["client"]))
    if "alpha" in found:
        kept["own"] = [found[ROUND].tolist(), _rounded(own_weights(found["alpha"]).mean(-1))]
    if "alpha" in found and found["alpha"].shape[1] <= MOST_CLIENTS:
        kept["alpha"] = _rounded(found["alpha"][-1])
        if over_time:
            some = np.unique(np.linspace(0, len(found[ROUND]) - 1, MOST_RECORDS).round().astype(int))
            kept["alpha_over_time"] = [found[ROUND][some].tolist(), _rounded(found["alpha"][some, 0])]
    return kept


def own_weights(alpha: np.ndarray) -> np.ndarray:
    """Return clients' weights for themselves: `(..., clients, layers, clients) -> (..., layers, clients)`."""
    return alpha.diagonal(axis1=-3, axis2=-1)


def run_cell(
    places: Places,
    cell: Cell,
    *,
    watch: Watch | None = None,
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Summary:
    """Run a cell, or resume it, and add its figures to its column's file; what another process has added is kept."""
    if overwrite:
        forget(places.file(cell.column.name), cell.method.variant.label, cell.seed)  # until it is run anew
    elif known := finished(places, cell):
        return known
    experiment, path = experiment_of(cell, places.scale, places.machine), places.folder(cell)
    stands = "new" if overwrite else standing(path, experiment)
    if stands != "complete":
        federation = federation_of(experiment)
        if federation.note:
            tell(federation.note)
        if not overwrite:  # else the first of many that are run anew would be held against the others
            refuse_other_data(_given(places, cell), federation)
        carry_out(path, experiment, stands, federation, watch=watch, overwrite=overwrite)
    record = RunRecord(path)
    kept = kept_of(record, over_time=cell.column.drawn)
    summary = {**figures_of(path), **kept, "label": cell.method.variant.label}
    collect(places.file(cell.column.name), [summary])
    return summary


def _given(places: Places, cell: Cell) -> dict[str, str | None]:
    """Return what other cells of the same column and seed were measured on, as far as their figures say."""
    file = places.file(cell.column.name)
    return {
        f"{file}, {label}, seed {seed},": known["data"]
        for (label, seed), known in collected(file).items()
        if seed == cell.seed and "data" in known
    }


def run_all(
    places: Places,
    cells: Sequence[Cell],
    *,
    jobs: int = 1,
    overwrite: bool = False,
    report: Report = lambda *_: None,
    leave: Callable[[Cell], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Run cells one by one, or `jobs` at a time, each in a process; return why those that failed did.

    Cells that another process is at are left to it.

    Parameters
    ----------
    places
        Where runs and results lie.
    cells
        What to run.
    jobs
        How many at a time.
    overwrite
        Run anew what is there already.
    report
        Called with a cell and its rounds, as they come.
    leave
        Called with a cell that will not be run: it failed, or another process is at it.
    tell
        Called with sentences for the user.
    """
    failed: dict[str, list[Cell]] = {}
    told = set[str]()

    def tell_once(text: str) -> None:
        if text not in told:
            told.add(text)
            tell(text)

    def fail(cell: Cell, why: str) -> None:
        failed.setdefault(why, []).append(cell)
        leave(cell)
        tell(f"{_words(cell)} is left out: {why}")

    def free(cell: Cell) -> bool:
        record = RunRecord(places.folder(cell))
        if taken := record.exists and record.state == "running":
            leave(cell)
            tell(f"{_words(cell)} is left to the process that runs it already")
        return not taken

    if jobs > 1:
        _run_processes(places, cells, jobs, overwrite, report, fail, free, tell_once)
    else:
        for cell in filter(free, cells):
            try:
                watch: Watch = lambda now, cell=cell: report(cell, now.t)  # type: ignore[misc]  # noqa: E731
                run_cell(places, cell, watch=watch, overwrite=overwrite, tell=tell_once)
            except PfedlaError as error:
                fail(cell, str(error))
    return [f"{', '.join(_words(cell) for cell in some)}: {why}" for why, some in failed.items()]


def _run_processes(
    places: Places,
    cells: Sequence[Cell],
    jobs: int,
    overwrite: bool,
    report: Report,
    fail: Callable[[Cell, str], None],
    free: Callable[[Cell], bool],
    tell: Callable[[str], None],
) -> None:
    """Run cells in processes of their own; if this one is stopped, so are they, each with a checkpoint."""
    waiting, busy = list(cells), dict[subprocess.Popen[str], tuple[Cell, IO[Any]]]()
    before = dict[Cell, Any]()  # the runs that the folders held, if they are to be run anew
    try:
        with stoppable():
            while waiting or busy:
                while waiting and len(busy) < jobs:
                    cell = waiting.pop(0)
                    if free(cell):
                        before[cell] = _id(places, cell) if overwrite else None
                        said: IO[Any] = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
                        busy[_start(places, cell, overwrite, said)] = cell, said
                time.sleep(0.2)
                for process, (cell, said) in list(busy.items()):
                    if process.poll() is None:
                        started = before[cell] is None or _id(places, cell) != before[cell]
                        history = RunRecord(places.folder(cell)).history() if started else []
                        report(cell, history[-1]["round"] if history else 0)
                        continue
                    del busy[process]
                    error = _closed(said)
                    if process.returncode:
                        fail(cell, error.strip().removeprefix("error: ") or f"it ended with {process.returncode}")
                        continue
                    for line in error.splitlines():
                        if line.startswith(NOTE):
                            tell(line.removeprefix(NOTE))
                    report(cell, experiment_of(cell, places.scale).schedule.rounds)
    finally:
        for process in busy:
            process.send_signal(signal.SIGTERM)
        for process, (_, said) in busy.items():
            process.wait()
            said.close()


def _closed(said: IO[Any]) -> str:
    """Return what a process has written, and close the file."""
    with said:
        said.seek(0)
        return str(said.read())


def _start(places: Places, cell: Cell, overwrite: bool, said: IO[Any]) -> subprocess.Popen[str]:
    """Start the process of a cell: this very program, with one worker. What it says goes to a file."""
    words = ["paper", "--cell", cell.column.name, cell.method.spec, str(cell.seed), "--scale", places.scale]
    words += ["--results", str(places.results), "--runs", str(places.runs), "--workers", "1"]
    words += ["--data-dir", places.machine["data_dir"]] if "data_dir" in places.machine else []
    words += ["--download"] if places.machine.get("download") else []
    words += ["--overwrite"] if overwrite else []
    program = [sys.executable, "-c", "from pfedla.cli import main; main()", *words]
    return subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=said, text=True)  # noqa: S603


def _id(places: Places, cell: Cell) -> Any:
    """Return by what the run in a cell's folder is known, None if there is none."""
    try:
        return RunRecord(places.folder(cell)).facts().get("id")
    except RunError:
        return None


def _words(cell: Cell) -> str:
    return f"{cell.method.name} on {cell.column.name}, seed {cell.seed}"


def _changes(sets: np.ndarray, clients: np.ndarray) -> float:
    """Return how often a client's set differs from its last one: `sets` are of many clients, in the order of time."""
    own = [sets[clients == client] for client in np.unique(clients)]
    differs = [(one[1:] != one[:-1]).any(1) for one in own]
    return float(np.concatenate(differs).mean()) if any(map(len, differs)) else 0.0


def _rounded(value: Any) -> Any:
    return None if value is None else np.round(np.asarray(value, float), DIGITS).tolist()
