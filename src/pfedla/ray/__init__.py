"""Clients on a Ray cluster: the same rounds as on one machine, and the same result to the bit.

Workers are actors of one CPU and one torch thread each. Everybody's data is placed in the object store once, and the
actors of a node read one copy of it. An actor always has its next job at hand while it does one, so it never waits
for the server. One that dies is replaced and its jobs are done again, each alone, since an answer may be lost with it;
a client whose job kills two of them ends the run.

This is the only place that imports ray, and nothing imports this place unless a cluster is asked for.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedla.client import Job, Runtime, Setting
from pfedla.errors import ConfigError, RunError
from pfedla.pool import assign, keep_freed_memory
from pfedla.training import ClientData, Samples
from pfedla.tree import convert

try:
    import ray
except ImportError as error:
    raise ImportError("a cluster needs Ray: pip install 'pfedla[ray]'") from error
from ray.exceptions import ObjectLostError, RayActorError, RayError

__all__ = ["Actors", "ray_pool"]

PATIENCE = 60.0  # seconds without any worker until a warning

log = logging.getLogger("pfedla")


def ray_pool(
    setting: Setting, data: Mapping[int, ClientData], workers: int | None = None, address: str | None = None
) -> Actors:
    """Connect to a Ray cluster and start a pool of actors on it.

    Parameters
    ----------
    setting, data
        What the actors play clients with.
    workers
        Actors; by default as many as the cluster has CPUs.
    address
        The cluster's `host:port`; `"auto"` for the one that this machine is part of; `"local"` for a new one on this
        machine that ends with the pool. By default the one that $RAY_ADDRESS names or that this machine is part of, or
        else a new one. A process that is connected already stays so.
    """
    if setting.device != "cpu":
        raise ConfigError(f"machine.device = {setting.device!r}: on a Ray cluster clients train on CPUs")
    connected_here = _connect(address)
    try:
        cpus = int(ray.cluster_resources().get("CPU", 0))
        workers = cpus if workers is None else workers
        if not 1 <= workers <= cpus:
            raise ConfigError(f"machine.workers = {workers}: each takes one of the Ray cluster's {cpus} CPUs")
        return Actors(setting, data, min(workers, len(data)), disconnect=connected_here)
    except BaseException:
        if connected_here:
            ray.shutdown()
        raise


class Actors:
    """A pool of Ray actors; with `disconnect`, closing it ends this process's connection."""

    def __init__(
        self, setting: Setting, data: Mapping[int, ClientData], workers: int, *, disconnect: bool = False
    ) -> None:
        self._disconnect = disconnect
        try:
            self._setting = ray.put(setting)
        except (TypeError, RayError) as error:
            raise RunError(f"the model or the method cannot be sent to a cluster: {error}") from error
        self._data = ray.put({client: [part.parts() for part in samples] for client, samples in data.items()})
        self._workers = [self._start() for _ in range(workers)]

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Any]]:
        """Do all jobs."""
        if not self._workers:
            raise RunError("the pool is closed")
        for worker in self._workers:
            worker.jobs.clear()  # of a call that was broken off; what is under way is thrown away
        waiting, deaths = deque(jobs), Counter[int | None]()
        while True:
            assign(waiting, self._workers, lambda worker, job: worker.accepts(job, deaths))
            if not waiting and not any(worker.jobs for worker in self._workers):
                return
            expected = {worker.expected: worker for worker in self._workers if worker.expected}
            answered, _ = ray.wait(list(expected), timeout=PATIENCE)
            if not answered and not any(worker.here for worker in self._workers):
                log.warning("the Ray cluster has had no free CPU for %d seconds; waiting for one", PATIENCE)
            for worker in (expected[reference] for reference in answered):
                try:
                    answer = worker.take()
                except (RayActorError, ObjectLostError) as error:
                    self._replace(worker, error, waiting, deaths)
                    continue
                except RayError as error:
                    raise RunError(f"the Ray cluster failed: {error}") from error
                if answer:
                    yield answer

    def _start(self) -> _Actor:
        return _Actor(ray.remote(num_cpus=1, max_restarts=0)(_Player).remote(self._setting, self._data))

    def _replace(self, worker: _Actor, error: RayError, waiting: deque[Job], deaths: Counter[int | None]) -> None:
        """Put a new worker in the place of one that died; its jobs go back to the head of the queue."""
        jobs = [job for _, job in worker.jobs]
        doing = "while it had no job" if worker.seen else "while it started"
        if jobs:
            clients = " or ".join(str(job.client) for job in jobs)  # an answer may have died with it
            doing = f"while it worked for client {clients} in round {jobs[0].t}"
        text = f"a worker died {doing}. {_reason(error)}"
        if jobs or not worker.seen:
            over: list[int | None] = [job.client for job in jobs]
            deaths.update(over or [None])
        if getattr(error, "actor_init_failed", False):
            raise RunError(f"{text}. Every node needs pfedla, and the modules of your own model and method")
        if max(deaths.values(), default=0) > 1:
            raise RunError(f"{text}. It was the second one to die {'over this job' if jobs else 'so'}")
        log.warning("%s. %s by a new worker", text, "The work is done again" if jobs else "It is replaced")
        waiting.extendleft(reversed(jobs))
        worker.end()
        self._workers[self._workers.index(worker)] = self._start()
        for other in self._workers:
            other.check()  # if a node is gone, they may be, too

    def close(self) -> None:
        """End the actors, and the connection if it was made for them."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        if self._disconnect:
            ray.shutdown()
        self._disconnect = False


class _Actor:
    """An actor, seen from the server's side."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.jobs: deque[tuple[Any, Job]] = deque()  # references to answers, and what was asked
        self.seen = False  # it has started
        self._call: Any = actor.here.remote()  # a roll call, None once it is answered

    @property
    def here(self) -> bool:
        """Whether it has answered the latest roll call."""
        return self._call is None

    @property
    def expected(self) -> Any:
        """A reference to what it answers next, None if it was asked nothing."""
        return self._call if self._call is not None else self.jobs[0][0] if self.jobs else None

    def accepts(self, job: Job, deaths: Counter[int | None]) -> bool:
        """Have a job that may have killed a worker done alone: should one die again, it is known which job it was."""
        return self.here and (not self.jobs or not any(deaths[x.client] for x in (self.jobs[0][1], job)))

    def give(self, job: Job) -> None:
        """Add a job to the actor's queue; the values go through the object store."""
        self.jobs.append((self._actor.do.remote(convert(job, Tensor, Tensor.numpy)), job))

    def check(self) -> None:
        """Have it tell that it is here before it gets another job, if it is idle."""
        if self.here and not self.jobs:
            self._call = self._actor.here.remote()

    def take(self) -> tuple[int, Any] | None:
        """Return the next answer; None if it was to a roll call."""
        if self._call is not None:
            ray.get(self._call)
            self._call, self.seen = None, True
            return None
        reference, job = self.jobs[0]
        good, answer = ray.get(reference)
        self.jobs.popleft()
        if not good:
            raise RunError(answer)
        return job.client, convert(answer, np.ndarray, torch.tensor)

    def end(self) -> None:
        """End it."""
        self.jobs.clear()
        ray.kill(self._actor)


class _Player:
    """Runs in an actor: does jobs with one resident model, on data that it shares with the other actors of its node."""

    def __init__(self, setting: Setting, data: dict[int, list[tuple[np.ndarray, np.ndarray, bool]]]) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        samples = {client: ClientData(*(Samples.of_parts(*part) for part in parts)) for client, parts in data.items()}
        self._runtime = Runtime(setting, samples)

    def here(self) -> None:
        """Answer the roll call."""

    def do(self, job: Job) -> tuple[bool, Any]:
        """Do a job, on a copy of its values: the object store's are read-only, and a method may be careless."""
        good, answer = self._runtime.answer(convert(job, np.ndarray, torch.tensor))
        return good, convert(answer, Tensor, Tensor.numpy)


def _connect(address: str | None) -> bool:
    """Connect this process to a cluster, quietly; return False if it was connected already."""
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise ConfigError(f"machine.ray_address = {address!r}: this process is connected to the cluster at {here}")
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS") or ""
    host, _, port = address.rpartition(":")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if port.isdecimal() and "/" not in host:
            socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for minutes
        ray.init(address or None, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"machine.ray_address = {address!r}: {error}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own would end the run without a checkpoint
    return True


def _reason(error: RayError) -> str:
    """Return the telling part of Ray's long message: its last line, up to the list of guesses."""
    return "Ray says: " + str(error).strip().splitlines()[-1].partition(" Some common causes")[0].rstrip(".")
