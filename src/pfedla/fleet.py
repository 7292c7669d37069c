"""The clients, behind one small protocol: where they run can be swapped, the rounds stay the same.

`SimulatedFleet` runs every client on this machine: worker processes with one torch thread each, a resident model
in each worker, data in shared memory. A client's result depends on its inputs alone, so it is the same to the
bit for any number of workers.
"""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pfedla.algorithm import Algorithm
from pfedla.errors import ConfigError, PfedlaError, RunError
from pfedla.layers import FlatModel, Layers, LayerSpec
from pfedla.training import Samples, Score, Task, Training, score
from pfedla.wire import Payload

__all__ = ["Evaluation", "Fleet", "Setting", "SimulatedFleet", "available_workers"]

START_METHOD = "fork" if sys.platform == "linux" else "spawn"  # forked workers know functions made on the fly
Kind = Literal["train", "evaluate", "personalize"]


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


@dataclass(frozen=True)
class Setting:
    """What is fixed for a whole run: the model, its layers, the method, and how clients train."""

    template: nn.Module
    spec: LayerSpec
    algorithm: Algorithm[Any]
    training: Training
    seed: int
    device: str = "cpu"


def available_workers() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class SimulatedFleet:
    """All clients on this machine.

    Parameters
    ----------
    setting
        The model, the method and how clients train.
    train, test
        Each client's data. It is moved to shared memory.
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
        self.size = len(train)
        self.workers = min(workers, self.size)
        self.trained = torch.zeros(self.size, dtype=torch.bool)
        own = setting.algorithm.enroll(setting.spec.read(setting.template))
        self.own = {key: row.repeat(self.size, 1) for key, row in own.items()}
        self._staged: dict[int, Layers] = {}
        self._examples = [len(samples) for samples in train]
        self._hands: list[_Worker] = []
        data = _Data([samples.share() for samples in train], [samples.share() for samples in test])
        if self.workers:
            self._hands = [_Worker(setting, data) for _ in range(self.workers)]
        else:
            self._work = _Work(setting, data)

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
        for hand in self._hands:
            hand.close()
        self._hands = []

    def __enter__(self) -> SimulatedFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, kind: Kind, ids: Sequence[int], got: Payload, t: int) -> dict[int, Any]:
        """Have every client of `ids` do one job; the longest first, so that workers end together."""
        row = {client: index for index, client in enumerate(ids)}

        def job(client: int) -> _Job:
            own = {key: rows[client : client + 1] for key, rows in self.own.items()}
            return _Job(kind, client, t, own, got.rows(slice(row[client], row[client] + 1)))

        order = sorted(ids, key=lambda client: -self._examples[client])
        if not self._hands:
            with _one_thread():
                return {client: self._work.do(job(client)) for client in order}
        answers: dict[int, Any] = {}
        idle, busy = list(self._hands), dict[Any, _Worker]()
        while order or busy:
            while order and idle:
                hand = idle.pop()
                hand.give(job(order.pop(0)))
                busy[hand.connection] = hand
            ready = wait([*busy, *(hand.process.sentinel for hand in busy.values())])
            for connection in [c for c in busy if c in ready] or list(busy):
                hand = busy[connection]
                if connection in ready or not hand.process.is_alive():
                    client, answers[client] = hand.take()
                    idle.append(busy.pop(connection))
        return answers


class _Data(NamedTuple):
    train: list[Samples]
    test: list[Samples]


class _Job(NamedTuple):
    kind: Kind
    client: int
    t: int
    own: Layers
    got: Payload


class _Work:
    """Does jobs with one resident model: the same code in a worker and in this process."""

    def __init__(self, setting: Setting, data: _Data) -> None:
        self.setting, self.data = setting, data
        self.model = FlatModel(copy.deepcopy(setting.template), setting.spec, setting.device)

    def do(self, job: _Job) -> Any:
        """Do a job for one client; whatever goes wrong is an error that names it."""
        try:
            return self._do(job)
        except PfedlaError:
            raise
        except Exception as error:
            text = f"client {job.client} failed in round {job.t}:\n{traceback.format_exc()}"
            raise RunError(text) from error

    def _do(self, job: _Job) -> Any:
        setting, client = self.setting, job.client
        task = Task(self.model, [self.data.train[client]], [client], setting.training, setting.seed, job.t)
        if job.kind == "train":
            return setting.algorithm.train(job.own, job.got, task)
        personalized = setting.algorithm.personalize(job.own, job.got, task)
        if job.kind == "personalize":
            return personalized
        before, after = (score(self.model, layers, [self.data.test[client]]) for layers in (personalized, job.own))
        return [float(s[0]) for pair in (before, after) for s in pair]


class _Worker:
    """A worker process, seen from the server's side. Tensors cross the pipe as arrays."""

    def __init__(self, setting: Setting, data: _Data) -> None:
        context: Any = multiprocessing.get_context(START_METHOD)
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, setting, data, os.getpid()), daemon=True, name="pfedla-worker"
        )
        self.process.start()
        theirs.close()
        self.client = self.t = -1

    def give(self, job: _Job) -> None:
        self.client, self.t = job.client, job.t
        try:
            self.connection.send(_arrays(job))
        except OSError:
            raise self._died() from None

    def take(self) -> tuple[int, Any]:
        try:
            good, answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if not good:
            raise RunError(answer)
        return self.client, _tensors(answer)

    def _died(self) -> RunError:
        self.process.join(1)
        code = self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        hint = ". It may have run out of memory: try fewer workers" if how == "signal SIGKILL" else ""
        return RunError(f"a worker died ({how}) while it worked for client {self.client} in round {self.t}{hint}")

    def close(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: Connection, setting: Setting, data: _Data, parent: int) -> None:
    """Run a worker: take jobs until the server's process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    _keep_freed_memory()
    work = _Work(setting, data)
    while True:
        while not connection.poll(1.0):
            if os.getppid() != parent:
                return
        try:
            job: _Job = _tensors(connection.recv())
        except (EOFError, OSError):
            return
        try:
            answer = True, _arrays(work.do(job))
        except PfedlaError as error:
            answer = False, str(error)
        connection.send(answer)


def _keep_freed_memory() -> None:
    """Have the C library keep what is freed: activations come and go with every batch.

    By default glibc returns blocks of megabytes to the system at once, and each batch then pays for thousands of
    page faults: 10 to 15 % of the time. Other C libraries are left as they are.
    """
    trim_threshold, mmap_threshold = -1, -3  # from malloc.h
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(trim_threshold, 2**30)
        libc.mallopt(mmap_threshold, 2**25)  # the largest that glibc takes


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _arrays(value: Any) -> Any:
    """Replace tensors by arrays in nested tuples and dictionaries."""
    return _convert(value, Tensor, lambda tensor: np.ascontiguousarray(tensor.numpy()))


def _tensors(value: Any) -> Any:
    """Replace arrays by tensors, the inverse of `_arrays`."""
    return _convert(value, np.ndarray, torch.from_numpy)


def _convert(value: Any, kind: type, to: Any) -> Any:
    if isinstance(value, kind):
        return to(value)
    if isinstance(value, dict):
        return {key: _convert(part, kind, to) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [_convert(part, kind, to) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
