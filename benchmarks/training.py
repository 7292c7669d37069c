"""Sample passes a second of whole simulated rounds, against a bare PyTorch loop on the same cores in the same run.

The work: 10 clients x 420 images of 3x32x32, LeNet with batch norm, mini-batches of 32, 10 local epochs. A round of
ours is download, training, upload and update. The bare loop is what one would write by hand: a process a core with one
thread, `torch.optim.SGD`, data in memory, channels-last, no server at all. The two take turns; medians are compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedla.algorithms import PFedLA
from pfedla.fleet import Setting, SimulatedFleet, available_workers
from pfedla.layers import LayerSpec
from pfedla.ledger import Ledger
from pfedla.models import LeNet
from pfedla.randomness import numpy_stream, stream
from pfedla.rounds import Server, participants, run_round
from pfedla.training import Samples, Training

CLIENTS, IMAGES, CLASSES, BATCH, LR = 10, 420, 10, 32, 0.01


def federation() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return random images and labels for each client."""
    rng = numpy_stream(0, "benchmark")
    return [
        (rng.integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8), rng.integers(0, CLASSES, IMAGES))
        for _ in range(CLIENTS)
    ]


def bare_client(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train one client by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loss_function = nn.CrossEntropyLoss()
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(y)).split(BATCH):
            optimizer.zero_grad()
            loss_function(model(x[index]), y[index]).backward()
            optimizer.step()


def bare_worker(connection: Connection, data: list[tuple[np.ndarray, np.ndarray]], epochs: int) -> None:
    """Train this process's clients whenever asked to."""
    torch.set_num_threads(1)
    last = torch.channels_last
    first = LeNet((3, 32, 32), CLASSES, batch_norm=True).to(memory_format=last)  # type: ignore[call-overload]
    tensors = [
        (torch.from_numpy(x).float().div(127.5).sub(1).contiguous(memory_format=last), torch.from_numpy(y))
        for x, y in data
    ]
    while connection.recv():
        for x, y in tensors:
            bare_client(copy.deepcopy(first), x, y, epochs)
        connection.send(True)


class BareLoop:
    """A process a core, each with its share of the clients."""

    def __init__(self, data: list[tuple[np.ndarray, np.ndarray]], workers: int, epochs: int) -> None:
        context: Any = multiprocessing.get_context("fork")
        self.pipes = []
        for worker in range(workers):
            ours, theirs = context.Pipe()
            context.Process(target=bare_worker, args=(theirs, data[worker::workers], epochs), daemon=True).start()
            self.pipes.append(ours)

    def round(self) -> None:
        """Train every client once."""
        for pipe in self.pipes:
            pipe.send(True)
        for pipe in self.pipes:
            pipe.recv()

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.send(False)


def measure(repeats: int, epochs: int) -> dict[str, Any]:
    """Return sample passes a second of both, and their ratio."""
    data, workers = federation(), available_workers()
    template = LeNet((3, 32, 32), CLASSES, batch_norm=True)
    spec = LayerSpec.of(template)
    algorithm = PFedLA().for_model(spec)
    setting = Setting(template, spec, algorithm, Training(local_epochs=epochs, batch_size=BATCH, lr=LR), seed=0)
    samples = [Samples(x, y) for x, y in data]
    bare = BareLoop(data, workers, epochs)
    seconds: dict[str, list[float]] = {"bare": [], "pfedla": []}
    with SimulatedFleet(setting, samples, samples, workers) as fleet:
        server = Server(algorithm.init(spec.read(template), CLIENTS, stream(0, "init")))
        ledger = Ledger(spec.names)
        for _ in range(repeats + 1):  # the first warms up
            for name in seconds:
                start = time.perf_counter()
                if name == "bare":
                    bare.round()
                else:
                    ids = participants(0, server.t + 1, CLIENTS, CLIENTS)
                    run_round(algorithm, server, fleet, ledger, ids)
                seconds[name].append(time.perf_counter() - start)
    bare.close()
    passes = CLIENTS * IMAGES * epochs
    rate = {name: passes / statistics.median(times[1:]) for name, times in seconds.items()}
    return {
        "ratio_to_bare_loop": round(rate["pfedla"] / rate["bare"], 3),
        "samples_per_second": round(rate["pfedla"]),
        "bare_samples_per_second": round(rate["bare"]),
        "workers": workers,
        "local_epochs": epochs,
        "repeats": repeats,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    found = measure(arguments.repeats, arguments.epochs)
    if arguments.json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:26} {value}")


if __name__ == "__main__":
    main()
