"""The server's part of a round by method: download and update for 10 of N participants, LeNet with batch norm.

Each method and size runs in a process of its own, as in `benchmarks.server`. "State" is resident memory before the
round, "peak" the most until its end, each less that of a process that has loaded everything and holds no state.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.measuring import Row, fresh, resident
from benchmarks.server import lenet, play
from pfedla import FedAvg, PFedLA, PFedLAPeers, PFedLAX
from pfedla.algorithm import Algorithm
from pfedla.algorithms.pfedla_x_peers import PFedLAXPeers
from pfedla.pool import keep_freed_memory

__all__ = ["measure"]

METHODS: dict[str, Algorithm[Any]] = {
    "FedAvg": FedAvg(),
    "pFedLA": PFedLA(),
    "pFedLA-X": PFedLAX(),
    "pFedLA, 20 candidates": PFedLAPeers(peers=20),
    "pFedLA-X, 20 candidates": PFedLAXPeers(peers=20),
}


def measure(quick: bool) -> list[Row]:
    """Return a line for each method and number of clients."""
    sizes = ((30, 1),) if quick else ((100, 20), (1000, 5))
    names = ["FedAvg", "pFedLA"] if quick else list(METHODS)
    return [{"method": name, **fresh(_measure, name, n, repeats)} for n, repeats in sizes for name in names]


def _measure(name: str, n: int, repeats: int) -> Row:
    keep_freed_memory()  # as in a run
    torch.set_num_threads(1)
    model, nothing = lenet(), resident()
    took, before, peak = play(METHODS[name], model, n, repeats)
    return {
        "clients": n,
        **{f"{part}, ms": float(f"{1e3 * took[part]:.3g}") for part in ("download", "update", "both")},
        "state, MB": round((before - nothing) / 1e6),
        "peak, MB": round((peak - nothing) / 1e6),
    }
