"""What the compiled loop brings to whole runs: rounds of pFedLA with it and without it, in turns.

The paper's two settings with batch norm: 10 clients x 140 images, 10 local epochs, everybody takes part; and 10 of 100
clients, 20 local epochs. A kernel stays only if a whole run gets at least 5 % faster with it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

from benchmarks.federation import Federation
from benchmarks.measuring import Row, in_turns
from benchmarks.work import Work
from pfedla import PFedLA, kernels
from pfedla.pool import available_cores

__all__ = ["measure"]

SETTINGS = {
    "10 clients, 10 local epochs": (Work(images=140), range(10)),
    "10 of 100 clients, 20 local epochs": (Work(clients=100, images=140, epochs=20), range(0, 100, 10)),
}


def measure(quick: bool) -> list[Row]:
    """Return a line for each setting."""
    rows: list[Row] = []
    for name, (usual, ids) in SETTINGS.items():
        work = replace(usual, clients=2, images=40, epochs=1) if quick else usual
        taking_part = range(2) if quick else ids
        with kernels.switch(kernels.OFF):  # workers inherit what is chosen when they are forked
            plain = Federation(work, PFedLA(), available_cores())
        compiled = Federation(work, PFedLA(), available_cores())
        with closing(plain), closing(compiled):
            rounds = {"without": partial(plain.round, taking_part), "with": partial(compiled.round, taking_part)}
            took = in_turns(rounds, 1 if quick else 7)
        rows.append(
            {
                "setting": name,
                "loop": kernels.level(),
                "without, s per round": round(took["without"], 3),
                "with, s per round": round(took["with"], 3),
                "gain": round(took["without"] / took["with"], 3),
            }
        )
    return rows
