"""Seconds per round on a local Ray cluster, against worker processes on the same cores.

The work is that of `benchmarks.training`, with 10 local epochs, and with 1, where what is sent weighs more. The two
fleets take turns; medians are compared, and both must end with the same values.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.federation import Federation
from benchmarks.measuring import Row, fresh, in_turns
from benchmarks.work import Work
from pfedla import PFedLA
from pfedla.pool import available_cores

__all__ = ["measure"]


def measure(quick: bool) -> list[Row]:
    """Return a line for each number of local epochs, each from a process that has not run Ray before."""
    usual = Work(clients=2, images=40) if quick else Work()
    cases = ((1, 1),) if quick else ((10, 3), (1, 9))
    return [fresh(compare, replace(usual, epochs=epochs), repeats) for epochs, repeats in cases]


def compare(task: Work, repeats: int) -> Row:
    """Return the seconds per round of both, and their ratio."""
    from pfedla.ray import ray_pool  # an extra

    workers = available_cores()
    processes = Federation(task, PFedLA(), workers)  # first: a process that runs Ray's threads is not to be forked
    ray = Federation(task, PFedLA(), workers, pool=ray_pool)
    took = in_turns({"processes": processes.round, "ray": ray.round}, repeats)
    ours, theirs = processes.fleet.kept.own, ray.fleet.kept.own
    assert all(torch.equal(rows, theirs[key]) for key, rows in ours.items())
    ray.close()
    processes.close()
    return {
        "local epochs": task.epochs,
        "processes, s per round": round(took["processes"], 3),
        "Ray, s per round": round(took["ray"], 3),
        "ratio": round(took["ray"] / took["processes"], 3),
    }
