"""Methods with whom workers get into trouble."""

from __future__ import annotations

import gc
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from pfedla.algorithms import FedAvg
from pfedla.layers import Layers
from pfedla.training import Task
from pfedla.wire import Payload

__all__ = ["Collecting", "Counting", "Faulty", "Killed"]


@dataclass(frozen=True)
class Killed(FedAvg):
    """A method whose worker is killed at client 2, or only once: as long as a file does not exist."""

    once: str = ""

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        if task.ids[0] == 2 and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(own, got, task)


@dataclass(frozen=True)
class Faulty(FedAvg):
    """A method with a mistake at client 1, in round 2."""

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        if (task.ids[0], task.t) == (1, 2):
            raise ZeroDivisionError("a mistake")
        return super().train(own, got, task)


@dataclass(frozen=True)
class Collecting(FedAvg):
    """A method whose clients collect garbage."""

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        gc.collect()
        return super().train(own, got, task)


@dataclass(frozen=True)
class Counting(FedAvg):
    """A method whose clients keep a count of their rounds, from 5 on; they may lose it, or keep another thing."""

    mistake: str = ""

    def enroll(self, theta: Layers) -> Layers:
        return {**theta, "#times": torch.full((1, 1), 5.0)}

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        kept, upload = super().train(own, got, task)
        times = own["#times"] + 1
        wrong: dict[str, Layers] = {
            "forgotten": {},
            "of another shape": {"#times": times[0]},
            "of another type": {"#times": times.double()},
            "beside another": {"#times": times, "fc2#more": times},
        }
        return kept | wrong.get(self.mistake, {"#times": times}), upload
