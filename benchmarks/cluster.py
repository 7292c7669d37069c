"""Seconds a round on a local Ray cluster, against worker processes on the same cores in the same run.

The work is that of `benchmarks.training`: 10 clients x 420 images of 3x32x32, LeNet with batch norm, batches of 32,
with 10 local epochs, and with 1, where what is sent weighs more. The two fleets take turns; medians are compared, and
the two must end with the same numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from benchmarks.training import BATCH, CLASSES, CLIENTS, LR, federation
from pfedla.algorithms import PFedLA
from pfedla.fleet import Setting, SimulatedFleet, available_workers
from pfedla.layers import LayerSpec
from pfedla.ledger import Ledger
from pfedla.models import LeNet
from pfedla.randomness import stream
from pfedla.ray import RayFleet
from pfedla.rounds import Server, participants, run_round
from pfedla.training import Samples, Training


def measure(repeats: int, epochs: int) -> dict[str, Any]:
    """Return seconds a round of both, and their ratio."""
    template = LeNet((3, 32, 32), CLASSES, batch_norm=True)
    spec = LayerSpec.of(template)
    algorithm = PFedLA().for_model(spec)
    setting = Setting(template, spec, algorithm, Training(local_epochs=epochs, batch_size=BATCH, lr=LR), seed=0)
    samples = [Samples(x, y) for x, y in federation()]
    workers = available_workers()
    seconds: dict[str, list[float]] = {"processes": [], "ray": []}
    with (  # processes first: a process that runs Ray's threads should not be forked
        SimulatedFleet(setting, samples, samples, workers) as processes,
        RayFleet(setting, samples, samples, workers, address="local") as ray,
    ):
        fleets = {"processes": processes, "ray": ray}
        theta = spec.read(template)
        servers = {name: Server(algorithm.init(theta, CLIENTS, stream(0, "init"))) for name in fleets}
        for _ in range(repeats + 1):  # the first warms up
            for name, fleet in fleets.items():
                ids = participants(0, servers[name].t + 1, CLIENTS, CLIENTS)
                start = time.perf_counter()
                run_round(algorithm, servers[name], fleet, Ledger(spec.names), ids)
                seconds[name].append(time.perf_counter() - start)
        assert all(torch.equal(rows, ray.own[key]) for key, rows in processes.own.items())
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return {
        "ratio_to_processes": round(median["ray"] / median["processes"], 3),
        "ray_seconds_per_round": round(median["ray"], 3),
        "processes_seconds_per_round": round(median["processes"], 3),
        "workers": workers,
        "local_epochs": epochs,
        "repeats": repeats,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, nargs="+", default=[10, 1])
    arguments = parser.parse_args()
    found = {f"epochs_{epochs}": measure(arguments.repeats, epochs) for epochs in arguments.epochs}
    if arguments.json:
        print(json.dumps(found))
        return
    for values in found.values():
        for key, value in values.items():
            print(f"{key:28} {value}")
        print()


if __name__ == "__main__":
    main()
