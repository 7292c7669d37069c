"""What is asked of a client, and the one piece of code that does it, wherever it runs."""

from __future__ import annotations

import copy
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from torch import nn

from pfedla.algorithm import Algorithm
from pfedla.errors import PfedlaError, RunError
from pfedla.layers import FlatModel, Layers, LayerSpec
from pfedla.training import Samples, Task, Training, score
from pfedla.wire import Payload

__all__ = ["DEPTH", "Crew", "Data", "Hand", "InProcess", "Job", "Kind", "Setting", "Work", "hand_out"]

DEPTH = 2  # jobs at most that one hand has: that being done, and the next

Kind = Literal["train", "evaluate", "personalize"]


@dataclass(frozen=True)
class Setting:
    """What is fixed for a whole run: the model, its layers, the method, and how clients train."""

    template: nn.Module
    spec: LayerSpec
    algorithm: Algorithm[Any]
    training: Training
    seed: int
    device: str = "cpu"


class Data(NamedTuple):
    """Everybody's data."""

    train: list[Samples]
    test: list[Samples]


class Job(NamedTuple):
    """What one client is to do in round `t`, with what it keeps and what it got."""

    kind: Kind
    client: int
    t: int
    own: Layers
    got: Payload


class Crew(Protocol):
    """Those who do jobs. A job's result depends on the job alone, whoever does it."""

    def work(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Any]]:
        """Do all jobs, begun in this order; yield each client and its result, in any order."""

    def close(self) -> None:
        """Dismiss them."""


class Hand(Protocol):
    """One of a crew: the jobs that it was given and has not answered yet."""

    jobs: Any  # a sized collection

    def give(self, job: Job) -> None:
        """Add a job."""


H = TypeVar("H", bound=Hand)


def hand_out(waiting: deque[Job], hands: Sequence[H], accepts: Callable[[H, Job], bool]) -> None:
    """Give every idle hand that accepts it a job, then a second one as long as there are enough for all."""
    for depth in range(1, DEPTH + 1):
        for hand in hands:
            enough = len(waiting) > (0 if depth == 1 else len(hands))
            if enough and len(hand.jobs) < depth and accepts(hand, waiting[0]):
                hand.give(waiting.popleft())


class Work:
    """Does jobs with one resident model."""

    def __init__(self, setting: Setting, data: Data) -> None:
        self.setting, self.data = setting, data
        self.model = FlatModel(copy.deepcopy(setting.template), setting.spec, setting.device)

    def do(self, job: Job) -> Any:
        """Do a job; whatever goes wrong is an error that names the client."""
        try:
            return self._do(job)
        except PfedlaError:
            raise
        except Exception as error:
            text = f"client {job.client} failed in round {job.t}:\n{traceback.format_exc()}"
            raise RunError(text) from error

    def answer(self, job: Job) -> tuple[bool, Any]:
        """Do a job; return True and its result, or False and what went wrong, to be told in another process."""
        try:
            return True, self.do(job)
        except PfedlaError as error:
            return False, str(error)

    def _do(self, job: Job) -> Any:
        setting, client = self.setting, job.client
        task = Task(self.model, [self.data.train[client]], [client], setting.training, setting.seed, job.t)
        if job.kind == "train":
            return setting.algorithm.train(job.own, job.got, task)
        personalized = setting.algorithm.personalize(job.own, job.got, task)
        if job.kind == "personalize":
            return personalized
        before, after = (score(self.model, layers, [self.data.test[client]]) for layers in (personalized, job.own))
        return [float(s[0]) for pair in (before, after) for s in pair]


class InProcess:
    """Does the jobs here, one after the other: for debugging, and on a GPU."""

    def __init__(self, setting: Setting, data: Data) -> None:
        self._work = Work(setting, data)

    def work(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Any]]:
        """Do all jobs."""
        for job in jobs:
            yield job.client, self._work.do(job)

    def close(self) -> None:
        """Nothing is left to dismiss."""
