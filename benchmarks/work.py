"""The work that everyone is measured on, in plain PyTorch: images, a LeNet as one writes it, and a bare training loop.

It imports nothing of `pfedla`, because the peers of `benchmarks.peers` run it in environments of their own.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["BareLoop", "LeNet", "Work", "train"]


@dataclass(frozen=True)
class Work:
    """What a round trains: clients x images x epochs, in mini-batches, with plain SGD."""

    shape: tuple[int, int, int] = (3, 32, 32)
    batch_norm: bool = True
    clients: int = 10
    images: int = 420
    epochs: int = 10
    classes: int = 10
    batch: int = 32
    lr: float = 0.01

    @property
    def passes(self) -> int:
        """Sample passes in a round."""
        return self.clients * self.images * self.epochs

    def arrays(self, client: int, images: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return a client's pixels, uint8, and labels: random, and the same in every process."""
        rng = np.random.default_rng([0, client])
        count = images or self.images
        return rng.integers(0, 256, (count, *self.shape), dtype=np.uint8), rng.integers(0, self.classes, count)

    def tensors(self, client: int, *, channels_last: bool = True) -> tuple[Tensor, Tensor]:
        """Return a client's images as floats in [-1, 1], and labels."""
        x, y = self.arrays(client)
        floats = torch.from_numpy(x).float().div(127.5).sub(1)
        return (floats.contiguous(memory_format=torch.channels_last) if channels_last else floats), torch.from_numpy(y)


class LeNet(nn.Module):
    """The paper's CNN as one writes it by hand: convolution, batch norm, ReLU, max pooling."""

    def __init__(self, shape: tuple[int, int, int], classes: int, batch_norm: bool) -> None:
        super().__init__()
        side = ((shape[1] - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(shape[0], 16, 5)
        self.bn1 = nn.BatchNorm2d(16) if batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(16, 32, 5)
        self.bn2 = nn.BatchNorm2d(32) if batch_norm else nn.Identity()
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(32 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        x = self.pool(self.relu(self.bn2(self.conv2(x))))
        x = self.relu(self.fc1(x.flatten(1)))
        out: Tensor = self.fc3(self.relu(self.fc2(x)))
        return out


def train(model: nn.Module, x: Tensor, y: Tensor, work: Work) -> None:
    """Train one client by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    loss_function = nn.CrossEntropyLoss()
    model.train()
    for _ in range(work.epochs):
        for index in torch.randperm(len(y)).split(work.batch):
            optimizer.zero_grad()
            loss_function(model(x[index]), y[index]).backward()
            optimizer.step()


class BareLoop:
    """The clients trained by hand: one process per core with one thread, data in memory, channels-last, no server."""

    def __init__(self, work: Work, model: Callable[[], nn.Module], workers: int) -> None:
        context: Any = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for worker in range(workers):
            ours, theirs = context.Pipe()
            clients = range(worker, work.clients, workers)
            process = context.Process(target=_serve, args=(theirs, work, model, clients), daemon=True)
            gc.disable()
            process.start()
            gc.enable()
            self._pipes.append(ours)
            self._processes.append(process)

    def round(self) -> None:
        """Train every client once."""
        for pipe in self._pipes:
            pipe.send(True)
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join()


def _serve(connection: Connection, work: Work, model: Callable[[], nn.Module], clients: Sequence[int]) -> None:
    """Train this process's clients whenever asked to."""
    gc.freeze()  # to end what came along with the fork may mean to wait for threads that did not
    gc.enable()
    torch.set_num_threads(1)
    first = model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data = [work.tensors(client) for client in clients]
    while connection.recv():
        for x, y in data:
            train(copy.deepcopy(first), x, y, work)
        connection.send(True)
