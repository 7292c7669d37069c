"""Pools of workers that play clients: this process, or processes with one torch thread and one resident model each.

A worker process always has its next job at hand while it does one, so it never waits for the server. The values of a
message are copied once, into a slot of memory that both processes see; only its outline goes through a pipe. A worker
that dies is replaced and its job done again; a client whose job kills two workers ends the run.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pfedla.client import Job, Runtime, Setting
from pfedla.errors import ConfigError, RunError
from pfedla.interrupts import SIGNALS
from pfedla.training import ClientData
from pfedla.tree import convert, flatten

__all__ = [
    "DEPTH",
    "InProcess",
    "Pool",
    "Processes",
    "Worker",
    "assign",
    "available_cores",
    "keep_freed_memory",
    "local_pool",
]

START_METHOD = "fork" if sys.platform == "linux" else "spawn"  # forked workers know functions made on the fly
DEPTH = 2  # jobs at most that one worker has: that being done, and the next
SLOT_BYTES = 64 * 2**20  # at most; what is larger goes through the pipe
ALIGNMENT = 64
MOST_TENSORS = 400  # of a job that is given to a busy worker: what tells of them must fit into the pipe

log = logging.getLogger("pfedla")
_ours: weakref.WeakSet[Connection] = weakref.WeakSet()  # the server's ends of all pipes


class Pool(Protocol):
    """Workers that do jobs. A job's result depends on the job alone, whoever does it."""

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Any]]:
        """Do all jobs, begun in this order; yield each client and its result, in any order."""

    def close(self) -> None:
        """End the workers."""


class Worker(Protocol):
    """A worker, seen from the server's side: the jobs that it was given and has not answered yet."""

    jobs: Any  # a sized collection

    def give(self, job: Job) -> None:
        """Add a job."""


W = TypeVar("W", bound=Worker)


def assign(waiting: deque[Job], workers: Sequence[W], accepts: Callable[[W, Job], bool]) -> None:
    """Give every idle worker that accepts it a job, then a second one as long as there are enough for all."""
    for depth in range(1, DEPTH + 1):
        for worker in workers:
            enough = len(waiting) > (0 if depth == 1 else len(workers))
            if enough and len(worker.jobs) < depth and accepts(worker, waiting[0]):
                worker.give(waiting.popleft())


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_pool(setting: Setting, data: Mapping[int, ClientData], workers: int | None = None) -> Pool:
    """Return a pool on this machine: `workers` processes, one per core by default; 0 to work in this process.

    On a GPU all clients share this process.
    """
    if workers is None:
        workers = 0 if setting.device != "cpu" else available_cores()
    if workers < 0:
        raise ConfigError(f"machine.workers = {workers} must be 0 (this process) or more")
    if workers and setting.device != "cpu":
        raise ConfigError(f"machine.workers = {workers}: on {setting.device} all clients share this process; use 0")
    return Processes(setting, data, min(workers, len(data))) if workers else InProcess(setting, data)


class InProcess:
    """Does the jobs here, one after the other: for debugging, and on a GPU."""

    def __init__(self, setting: Setting, data: Mapping[int, ClientData]) -> None:
        self._runtime = Runtime(setting, data)

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Any]]:
        """Do all jobs."""
        for job in jobs:
            yield job.client, self._runtime.run(job)

    def close(self) -> None:
        """Nothing is left to end."""


class Processes:
    """Worker processes on this machine."""

    def __init__(self, setting: Setting, data: Mapping[int, ClientData], workers: int) -> None:
        if START_METHOD != "fork":  # forked workers see this process's data anyway
            for samples in data.values():
                samples.train.share()
                samples.test.share()
        kept, model = setting.enroll(), setting.spec.read(setting.template)
        message = sum(tensor.nbytes for tensor in flatten((kept, model)).values())  # an ordinary one
        self._workers = [_Process(setting, data, message) for _ in range(workers)]

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Any]]:
        """Do all jobs."""
        if not self._workers:
            raise RunError("the pool is closed")
        for worker in self._workers:
            worker.drain()
        waiting = deque(jobs)
        while True:
            assign(waiting, self._workers, _Process.accepts)
            busy = {worker.channel.connection: worker for worker in self._workers if worker.jobs}
            if not busy:
                return
            ready = set(wait([*busy, *(worker.process.sentinel for worker in busy.values())]))
            for connection, worker in busy.items():
                if ready & {connection, worker.process.sentinel} and (answer := worker.take()):
                    yield answer

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []


class _Process:
    """A worker process, seen from the server's side."""

    def __init__(self, setting: Setting, data: Mapping[int, ClientData], message: int) -> None:
        self._setting, self._data, self._message = setting, data, message
        self.jobs: deque[Job] = deque()  # given and not yet answered
        self._tries = 0  # of the first of them
        self._start()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(START_METHOD)
        ours, theirs = context.Pipe()
        _ours.add(ours)
        size = _aligned(
            min(4 * self._message + 2**16, SLOT_BYTES, _shared_memory())
        )  # some methods send several models
        try:
            jobs, answers = (torch.empty(DEPTH, size, dtype=torch.uint8).share_memory_() for _ in range(2))
        except RuntimeError as error:
            raise RunError(
                f"there is no memory to share with workers ({error}): machine.workers = 0 needs none"
            ) from None
        self.channel = _Channel(ours, jobs, answers)
        self.process: BaseProcess = context.Process(
            target=_serve,
            args=(_Channel(theirs, answers, jobs), self._setting, self._data, os.getpid()),
            daemon=True,
            name="pfedla-worker",
        )
        with _uncollected():
            self.process.start()
        theirs.close()

    def accepts(self, job: Job) -> bool:
        """Refuse a job that would fill the pipe until the worker is idle: it may fill the pipe from the other end."""
        return not self.jobs or self.channel.has_room(job)

    def give(self, job: Job) -> None:
        self.jobs.append(job)
        try:
            self.channel.send(job)
        except OSError:
            self._replace()

    def take(self) -> tuple[int, Any] | None:
        """Return the next answer; None if the worker had died and the job is under way again."""
        try:
            good, answer = self.channel.receive(copy=True)
        except (EOFError, OSError):
            self._replace()
            return None
        job, self._tries = self.jobs.popleft(), 0
        if not good:
            raise RunError(answer)
        return job.client, answer

    def drain(self) -> None:
        """Throw away the answers to jobs that were broken off."""
        while self.jobs:
            with suppress(RunError):
                self.take()

    def _replace(self) -> None:
        """Put a new process in the place of one that died, with the same jobs."""
        job, self._tries = self.jobs[0], self._tries + 1
        self.process.join(1)
        self.close()
        code = self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        hint = ". It may have run out of memory: try fewer workers" if how == "signal SIGKILL" else ""
        text = f"a worker died ({how}) while it worked for client {job.client} in round {job.t}{hint}"
        if self._tries > 1:
            self.jobs.clear()
            raise RunError(f"{text}. It was the second one to die over this job")
        log.warning("%s. The job is done again by a new worker", text)
        self._start()
        jobs, self.jobs = self.jobs, deque()
        for again in jobs:
            self.give(again)

    def close(self) -> None:
        self.channel.connection.close()
        self.process.kill()  # it holds nothing that it would have to put in order
        self.process.join()


@dataclass(frozen=True)
class _Place:
    """Where a tensor of a message lies in shared memory."""

    slot: int
    start: int
    shape: torch.Size
    dtype: torch.dtype


class _Channel:
    """One end of a connection between the server and a worker. Messages take the slots in turn."""

    def __init__(self, connection: Connection, outgoing: Tensor, incoming: Tensor) -> None:
        self.connection = connection
        self._outgoing, self._incoming = outgoing, incoming  # (DEPTH, bytes) uint8, shared
        self._slot = 0

    def has_room(self, value: Any) -> bool:
        """Say whether all tensors of a message fit into a slot, and what tells of them surely into the pipe."""
        sizes: list[int] = []
        convert(value, Tensor, lambda tensor: sizes.append(_aligned(tensor.nbytes)))
        return sum(sizes) <= self._outgoing.shape[1] and len(sizes) <= MOST_TENSORS

    def send(self, value: Any) -> None:
        """Send nested tuples and dictionaries: tensors through the slot, as long as there is room, the rest beside."""
        slot, self._slot = self._slot, (self._slot + 1) % DEPTH
        room, start = self._outgoing[slot], 0

        def place(tensor: Tensor) -> _Place | np.ndarray:
            nonlocal start
            begin, end = start, start + tensor.nbytes
            if end > len(room):
                return tensor.numpy()
            room[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            start = _aligned(end)
            return _Place(slot, begin, tensor.shape, tensor.dtype)

        self.connection.send(convert(value, Tensor, place))

    def receive(self, *, copy: bool) -> Any:
        """Return the next message. Without a copy its tensors lie in the slot until that is used again."""

        def find(part: _Place | np.ndarray) -> Tensor:
            if isinstance(part, np.ndarray):
                return torch.from_numpy(part)
            end = part.start + part.shape.numel() * part.dtype.itemsize
            tensor = self._incoming[part.slot, part.start : end].view(part.dtype).view(part.shape)
            return tensor.clone() if copy else tensor

        return convert(self.connection.recv(), (_Place, np.ndarray), find)


def _serve(channel: _Channel, setting: Setting, data: Mapping[int, ClientData], parent: int) -> None:
    """Run a worker: take jobs until the server's process is gone."""
    gc.freeze()
    gc.enable()  # see _uncollected
    for number in SIGNALS:  # a whole group is often sent them, and they are the server's to handle
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent()
    for connection in list(_ours):  # the server's ends came along with the fork: held here, they would never break
        connection.close()
    torch.set_num_threads(1)
    runtime = Runtime(setting, data)
    while True:
        while not channel.connection.poll(1.0):
            if os.getppid() != parent:
                return
        try:
            job: Job = channel.receive(copy=False)
        except (EOFError, OSError):
            return
        channel.send(runtime.answer(job))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Have no garbage collected, for a fork.

    What comes along is the server's, and to end it may mean to wait for threads that do not: a worker freezes it all
    before it collects anything.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _shared_memory() -> int:
    """Return how large a slot may be: memory that is promised and not there would end the process that touches it."""
    try:
        free = shutil.disk_usage("/dev/shm").free  # noqa: S108 (where Linux keeps it)
    except OSError:
        return SLOT_BYTES
    return max(ALIGNMENT, free // (4 * DEPTH * available_cores()))


def _end_with_parent() -> None:
    """Have the system end this process with the one that made it, where it can."""
    set_death_signal = 1  # from sys/prctl.h
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Have glibc keep what is freed: activations come and go with every batch, a bank's products with every round.

    Otherwise it returns blocks of megabytes to the system at once, and the process pays with thousands of page faults.
    """
    trim_threshold, mmap_threshold = -1, -3  # from malloc.h
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(trim_threshold, 2**30)
        libc.mallopt(mmap_threshold, 2**25)  # the largest that glibc takes


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
