"""Memory that one more client takes, in the whole simulation: the server's process and its workers.

LeNet with batch norm, 140 images of 3x32x32 per client, rounds of 10 until everyone took part once. Measured as growth
of the processes' proportional set size (shared pages count once) from 20 to 220 clients. Beside it the bytes of what
has to be there: the server's state, what the clients keep, and their images.
"""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from typing import Any

from benchmarks.federation import Federation
from benchmarks.measuring import Row, fresh
from benchmarks.work import Work
from pfedla import FedAvg, PFedLA
from pfedla.algorithm import Algorithm
from pfedla.tree import flatten

__all__ = ["measure"]


def measure(quick: bool) -> list[Row]:
    """Return a line for each method and number of clients."""
    if quick:
        return [_row("pFedLA", PFedLA(), 2, 4)]
    return [_row(name, algorithm, 20, 220) for name, algorithm in (("FedAvg", FedAvg()), ("pFedLA", PFedLA()))]


def _row(name: str, algorithm: Algorithm[Any], first: int, last: int) -> Row:
    fewer, more = (fresh(_simulation, algorithm, n) for n in (first, last))
    growth = {part: (more[part] - fewer[part]) / (last - first) for part in more}
    needed = sum(value for part, value in growth.items() if part != "measured")
    return {
        "method": name,
        "clients": f"{first} to {last}",
        "kB per client": round(growth["measured"] / 1e3),
        "server's state, kB": round(growth["state"] / 1e3),
        "clients' own, kB": round(growth["own"] / 1e3),
        "images, kB": round(growth["images"] / 1e3),
        "measured to needed": round(growth["measured"] / needed, 2),
        f"all processes at {last}, MB": round(more["measured"] / 1e6),
    }


def _simulation(algorithm: Algorithm[Any], n: int) -> dict[str, int]:
    work = Work(clients=n, images=140, epochs=1)
    federation = Federation(work, algorithm)
    for first in range(0, n, 10):
        federation.round(range(n)[first : first + 10])
    processes = ["self", *(str(child.pid) for child in multiprocessing.active_children())]
    measured = {
        "measured": sum(_proportional(process) for process in processes),
        "state": sum(tensor.nbytes for tensor in flatten(federation.server.state).values()),
        "own": sum(tensor.nbytes for tensor in flatten(federation.fleet.snapshot()).values()),
        "images": sum(work.arrays(client)[0].nbytes for client in range(n)),
    }
    federation.close()
    return measured


def _proportional(process: str) -> int:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), flags=re.MULTILINE)
    assert found
    return int(found[1]) * 1024
