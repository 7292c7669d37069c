"""The clients, behind one small protocol: where they run can be swapped, the rounds stay the same.

`SimulatedFleet` runs every client on this machine, by a crew of worker processes. A client's result depends on its
inputs alone, so it is the same to the bit for any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from pfedla.errors import ConfigError, RunError
from pfedla.jobs import Crew, Data, InProcess, Job, Kind, Setting
from pfedla.layers import Layers
from pfedla.storage import repeat
from pfedla.training import Samples, Score
from pfedla.wire import Payload
from pfedla.workers import Processes, available_workers, keep_freed_memory

__all__ = ["Evaluation", "Fleet", "Setting", "SimulatedFleet", "available_workers"]


class Evaluation(NamedTuple):
    """Scores on the clients' test data."""

    personalized: Score  # of the model the server would have the client use now
    after_training: Score  # of the model the client held after its latest local training; NaN if it never trained


class Fleet(Protocol):
    """Clients that can be asked to train and to score models."""

    def train(self, ids: Sequence[int], got: Payload, t: int) -> tuple[list[int], Payload]:
        """Have clients train on what they got in round `t`; return who answered, sorted, and what they sent."""

    def commit(self) -> None:
        """Tell the clients that the server has taken their latest answers: what they trained is now theirs."""

    def evaluate(self, ids: Sequence[int], got: Payload, t: int) -> Evaluation:
        """Score the clients' personalized models. Reads and never writes."""


class SimulatedFleet:
    """All clients on this machine.

    Parameters
    ----------
    setting
        The model, the method and how clients train.
    train, test
        Each client's data. Processes share one copy.
    workers
        Worker processes; `None` for one a core, 0 to work in this process (for debugging, and on a GPU).
    """

    def __init__(
        self, setting: Setting, train: Sequence[Samples], test: Sequence[Samples], workers: int | None = None
    ) -> None:
        if workers is None:
            workers = 0 if setting.device != "cpu" else available_workers()
        if workers and setting.device != "cpu":
            raise ConfigError(f"run.workers = {workers}: on {setting.device} all clients share this process; use 0")
        if workers < 0:
            raise ConfigError(f"workers = {workers} must be 0 (this process) or more")
        keep_freed_memory()  # of the server's part of a round, and of clients in this process
        self.size = len(train)
        self.workers = min(workers, self.size)
        self.trained = torch.zeros(self.size, dtype=torch.bool)
        own = setting.algorithm.enroll(setting.spec.read(setting.template))
        self._staged: dict[int, Layers] = {}
        self._examples = [len(samples) for samples in train]
        self._crew = self._hire(setting, Data(list(train), list(test)), own)
        self.own = {key: repeat(row, self.size) for key, row in own.items()}  # after the forks: workers hold no copy

    # ---- the protocol

    def train(self, ids: Sequence[int], got: Payload, t: int) -> tuple[list[int], Payload]:
        """Train clients; what they will keep is held back until `commit`."""
        answers = self._do("train", ids, got, t)
        for client, (own, _) in answers.items():
            if own.keys() != self.own.keys():
                odd = ", ".join(sorted(own.keys() ^ self.own.keys()))
                raise RunError(f"client {client} must keep what its method's enroll() returns; this differs: {odd}")
        self._staged = {client: own for client, (own, _) in answers.items()}
        answered = sorted(answers)
        return answered, Payload.stack([answers[client][1] for client in answered])

    def commit(self) -> None:
        """Let the clients keep what they trained."""
        for client, own in self._staged.items():
            for key, rows in self.own.items():
                rows[client] = own[key][0]
            self.trained[client] = True
        self._staged = {}

    def evaluate(self, ids: Sequence[int], got: Payload, t: int) -> Evaluation:
        """Score clients' personalized models, and the models they held after their latest training."""
        answers = self._do("evaluate", ids, got, t)
        table = np.array([answers[client] for client in ids])  # (clients, 4)
        table[~self.trained[list(ids)].numpy(), 2:] = np.nan
        return Evaluation(Score(table[:, 0], table[:, 1]), Score(table[:, 2], table[:, 3]))

    # ---- beside the protocol

    def personalize(self, ids: Sequence[int], got: Payload, t: int) -> Layers:
        """Return clients' personalized models: `{entry: (clients, numbers)}`."""
        answers = self._do("personalize", ids, got, t)
        rows = [answers[client] for client in ids]
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}

    def state(self) -> tuple[Layers, Tensor]:
        """Return what the clients keep, to be saved."""
        return self.own, self.trained

    def close(self) -> None:
        """End the worker processes."""
        self._crew.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hire(self, setting: Setting, data: Data, own: Layers) -> Crew:
        """Return who does the clients' work: worker processes, or this one."""
        if not self.workers:
            return InProcess(setting, data)
        kept = sum(row.nbytes for row in own.values())
        model = sum(row.nbytes for row in setting.spec.read(setting.template).values())
        return Processes(setting, data, self.workers, message=kept + model)

    def _do(self, kind: Kind, ids: Sequence[int], got: Payload, t: int) -> dict[int, Any]:
        """Have every client of `ids` do one job; the longest first, so that workers end together."""
        row = {client: index for index, client in enumerate(ids)}

        def job(client: int) -> Job:
            own = {key: rows[client : client + 1] for key, rows in self.own.items()}
            return Job(kind, client, t, own, got.rows(slice(row[client], row[client] + 1)))

        order = sorted(ids, key=lambda client: -self._examples[client])
        with _one_thread():
            return dict(self._crew.work(map(job, order)))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Leave the cores to the workers: the server computes with all of them again when they are done."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
