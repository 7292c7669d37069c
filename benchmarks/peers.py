"""Seconds per round of other simulators on the same work, on the same cores, in the same run.

10 clients x 420 images of 3x32x32, LeNet with batch norm as one writes it, mini-batches of 32, plain SGD, FedAvg with
everyone taking part, 10 local epochs and 1. Flower runs its Ray simulation with two workers of one CPU and one torch
thread each, with the bare loop's `train` and channels-last inside; pfl runs two processes with one thread each and its
own training loop, as it comes and with channels-last set by hand. Ours is FedAvg and pFedLA with one worker per core
and our own LeNet. All are started first and wait for their turn; starting up and the first turn are not counted.

The peers live in environments of their own: `make bench-peers` sets them up under `.bench-envs/`.
"""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import work
from benchmarks.federation import Federation
from benchmarks.measuring import Row, in_turns
from benchmarks.turns import DONE, GO
from benchmarks.work import BareLoop, Work
from pfedla import FedAvg, PFedLA
from pfedla.pool import available_cores

__all__ = ["measure"]

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".bench-envs"


def measure(quick: bool) -> list[Row]:
    """Return a line for each simulator, with a column for each number of local epochs."""
    usual = Work(clients=2, images=40) if quick else Work()
    cases = ((1, 1),) if quick else ((10, 3), (1, 7))
    found = {epochs: compare(replace(usual, epochs=epochs), repeats) for epochs, repeats in cases}
    rows: list[Row] = []
    for name in next(iter(found.values())):
        row: Row = {"simulator": name}
        for epochs, took in found.items():
            row[f"{epochs} local epochs, s per round"] = round(took[name], 3)
            row[f"{epochs} local epochs, to bare loop"] = round(took[name] / took["bare loop"], 2)
        rows.append(row)
    return rows


def compare(task: Work, repeats: int) -> dict[str, float]:
    """Return everyone's median seconds per round."""
    workers = available_cores()
    contestants: dict[str, BareLoop | Federation | Peer] = {
        "bare loop": BareLoop(task, partial(work.LeNet, task.shape, task.classes, task.batch_norm), workers),
        "pfedla, FedAvg": Federation(task, FedAvg(), workers),
        "pfedla, pFedLA": Federation(task, PFedLA(), workers),
    }
    try:
        contestants[f"Flower {version('flower', 'flwr')}"] = Peer("flower", task, 1)
        pfl = f"pfl {version('pfl', 'pfl')}"
        contestants[pfl] = Peer("pfl", task, workers, "channels_first")
        contestants[f"{pfl}, channels-last by hand"] = Peer("pfl", task, workers, "channels_last")
        return in_turns({name: contestant.round for name, contestant in contestants.items()}, repeats)
    finally:
        for contestant in contestants.values():
            contestant.close()


class Peer:
    """Another simulator: processes that run a round for each line on their input, and then say so."""

    def __init__(self, name: str, task: Work, processes: int, *options: str) -> None:
        self.name = name
        command = [
            interpreter(name),
            "-m",
            f"benchmarks.peer_{name}",
            str(task.clients),
            str(task.images),
            str(task.epochs),
        ]
        ports = [_free_port() for _ in range(processes)]
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = {**os.environ, **one_thread, "PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0"}
        if processes > 1:
            environment["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{port}" for port in ports)
        self.processes = [
            subprocess.Popen(  # noqa: S603
                [*command, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env={**environment, "PFL_WORKER_RANK": str(rank)},
            )
            for rank in range(processes)
        ]

    def round(self) -> None:
        """Run one round."""
        for process in self.processes:
            assert process.stdin
            process.stdin.write(GO + "\n")
            process.stdin.flush()
        for process in self.processes:
            assert process.stdout
            if not any(line.strip() == DONE for line in process.stdout):
                raise SystemExit(f"{self.name} ended early; `python -m benchmarks.peer_{self.name} 10 420 1` tells why")

    def close(self) -> None:
        """End its processes: the end of their input tells them to."""
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def interpreter(name: str) -> str:
    """Return the Python of a peer's environment."""
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"there is no environment for {name}: run `make bench-peers`")
    return str(python)


def version(name: str, package: str) -> str:
    """Return the version of a package in a peer's environment."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([interpreter(name), "-c", program], check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])
