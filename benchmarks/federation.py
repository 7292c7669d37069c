"""The same work as a federation of ours: a server, a fleet of simulated clients, and their rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.work import Work
from pfedla.algorithm import Algorithm
from pfedla.client import Setting
from pfedla.fleet import SimulatedFleet
from pfedla.layers import LayerSpec
from pfedla.ledger import Ledger
from pfedla.models import LeNet
from pfedla.pool import Pool, local_pool
from pfedla.randomness import stream
from pfedla.rounds import Server, evaluate, run_round
from pfedla.training import ClientData, Samples, Training

__all__ = ["Federation"]


class Federation:
    """A whole simulation of ours; a round is download, training, upload and update."""

    def __init__(
        self,
        work: Work,
        algorithm: Algorithm[Any],
        workers: int | None = None,
        test_images: int = 0,
        pool: Callable[..., Pool] = local_pool,
    ) -> None:
        torch.manual_seed(0)
        template = LeNet(work.shape, work.classes, batch_norm=work.batch_norm)
        spec = LayerSpec.of(template)
        self.work = work
        self.algorithm = algorithm.for_model(spec)
        training = Training(local_epochs=work.epochs, batch_size=work.batch, lr=work.lr)
        data = {}
        for client in range(work.clients):
            train = Samples(*work.arrays(client))
            data[client] = ClientData(train, Samples(*work.arrays(client, test_images)) if test_images else train)
        setting = Setting(template, spec, self.algorithm, training, seed=0)
        self.fleet = SimulatedFleet(setting, data, pool(setting, data, workers))
        state = self.algorithm.init(spec.read(template), work.clients, stream(0, "init"))
        self.server = Server(state, Ledger(spec.names))

    def round(self, ids: Sequence[int] | None = None) -> None:
        """Run the next round, with all clients by default."""
        run_round(self.algorithm, self.server, self.fleet, ids or range(self.work.clients))

    def evaluate(self) -> None:
        """Score every client's model."""
        evaluate(self.algorithm, self.server.state, self.fleet, self.work.clients, self.server.t)

    def close(self) -> None:
        """End the worker processes."""
        self.fleet.close()
