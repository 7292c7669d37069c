"""Writing and reading the server's whole state, against writing and reading as many plain bytes; and a checkpoint.

pFedLA's state for LeNet with batch norm: models, hypernetworks and Adam's moments. Neither waits for the disk
(no fsync), both go to a temporary folder. Reading maps a file from the system's cache and adds up all its values.
A checkpoint is what a run writes: the state and what clients keep, with checksums, and it waits for the disk.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.measuring import Row, in_turns
from benchmarks.server import lenet, state_for
from pfedla import PFedLA, RunRecord, tensorfile
from pfedla.config import Machine
from pfedla.ledger import Ledger
from pfedla.record import Snapshot
from pfedla.rounds import COST
from pfedla.tree import flatten, restore

__all__ = ["measure"]


def measure(quick: bool) -> list[Row]:
    """Return a line for each number of clients."""
    return [_measure(n, 1 if quick else 3) for n in ((4,) if quick else (10, 100))]


def _measure(n: int, repeats: int) -> Row:
    algorithm, state = state_for(PFedLA(), lenet(), n)
    size = sum(tensor.nbytes for tensor in flatten(state).values())
    plain = np.ones(size, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "state.safetensors"), Path(folder, "plain")

        def read() -> float:
            return sum(float(tensor.sum()) for tensor in flatten(restore(state, load_file(ours))).values())

        def write() -> None:
            with ours.open("wb") as file:
                tensorfile.write(file, flatten(state))

        def read_plain() -> float:
            return float(torch.from_file(str(theirs), size=size // 4).sum())

        record = RunRecord.create(Path(folder, "run"), "", {})
        kept = algorithm.known(state, torch.arange(n))
        snapshot = Snapshot(1, state, kept, Ledger(tuple(state.theta)), [], {}, 0.0, {}, {}, 0)

        took = in_turns(
            {
                "checkpoint": lambda: record.checkpoint(snapshot),
                "write": write,
                "plain write": lambda: plain.tofile(theirs),
                "read": read,
                "plain read": read_plain,
            },
            repeats,
        )
        record.release()
    pause = max(Machine().checkpoint_every, took["checkpoint"] / COST)
    return {
        "clients": n,
        "MB": round(size / 1e6, 1),
        "write, s": round(took["write"], 3),
        "read, s": round(took["read"], 3),
        "write to plain bytes": round(took["write"] / took["plain write"], 2),
        "read to plain bytes": round(took["read"] / took["plain read"], 2),
        "checkpoint, s": round(took["checkpoint"], 3),
        "% of a run": round(100 * took["checkpoint"] / (pause + took["checkpoint"]), 2),
    }
