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
import socket
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedla.errors import ConfigError, RunError
from pfedla.fleet import SimulatedFleet
from pfedla.jobs import Crew, Data, Job, Setting, Work, hand_out
from pfedla.layers import Layers
from pfedla.training import Samples
from pfedla.workers import convert, keep_freed_memory

try:
    import ray
except ImportError as error:
    raise ImportError("a cluster needs Ray: pip install 'pfedla[ray]'") from error
from ray.exceptions import ObjectLostError, RayActorError, RayError

__all__ = ["Actors", "RayFleet"]

PATIENCE = 60.0  # seconds without any worker until a warning

log = logging.getLogger("pfedla")


class RayFleet(SimulatedFleet):
    """All clients, on a Ray cluster.

    Parameters
    ----------
    setting, train, test
        As for `SimulatedFleet`.
    workers
        Actors; `None` for as many as the cluster has CPUs.
    address
        The cluster's `host:port`; `"auto"` for the one that this machine is part of; `"local"` for a new one on this
        machine that ends with the fleet. If empty, the one that $RAY_ADDRESS names or that this machine is part of,
        or else a new one. A process that is connected already stays so.
    """

    def __init__(
        self,
        setting: Setting,
        train: Sequence[Samples],
        test: Sequence[Samples],
        workers: int | None = None,
        address: str = "",
    ) -> None:
        if setting.device != "cpu":
            raise ConfigError(f"run.device = {setting.device!r}: on a Ray cluster clients train on CPUs")
        self._connected_here = _connect(address)
        try:
            cpus = int(ray.cluster_resources().get("CPU", 0))
            workers = cpus if workers is None else workers
            if not 1 <= workers <= cpus:
                raise ConfigError(f"run.workers = {workers}: each takes one of the Ray cluster's {cpus} CPUs")
            super().__init__(setting, train, test, workers)
        except BaseException:
            self._disconnect()
            raise

    def close(self) -> None:
        """End the actors, and the connection if this fleet made it."""
        super().close()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connected_here:
            ray.shutdown()
        self._connected_here = False

    def _hire(self, setting: Setting, data: Data, own: Layers) -> Crew:  # noqa: ARG002
        return Actors(setting, data, self.workers)


class Actors:
    """A crew of Ray actors."""

    def __init__(self, setting: Setting, data: Data, workers: int) -> None:
        try:
            self._setting = ray.put(setting)
        except (TypeError, RayError) as error:
            raise RunError(f"the model or the method cannot be sent to a cluster: {error}") from error
        self._data = ray.put([[samples.parts() for samples in part] for part in data])
        self._hands = [self._start() for _ in range(workers)]

    def work(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Any]]:
        """Do all jobs."""
        for hand in self._hands:
            hand.jobs.clear()  # of work that was broken off; what is under way is thrown away
        waiting, deaths = deque(jobs), Counter[int | None]()
        while True:
            hand_out(waiting, self._hands, lambda hand, job: hand.accepts(job, deaths))
            if not waiting and not any(hand.jobs for hand in self._hands):
                return
            expected = {hand.expected: hand for hand in self._hands if hand.expected}
            answered, _ = ray.wait(list(expected), timeout=PATIENCE)
            if not answered and not any(hand.here for hand in self._hands):
                log.warning("the Ray cluster has had no free CPU for %d seconds; waiting for one", PATIENCE)
            for hand in (expected[reference] for reference in answered):
                try:
                    answer = hand.take()
                except (RayActorError, ObjectLostError) as error:
                    self._replace(hand, error, waiting, deaths)
                    continue
                except RayError as error:
                    raise RunError(f"the Ray cluster failed: {error}") from error
                if answer:
                    yield answer

    def _start(self) -> _Hand:
        return _Hand(ray.remote(num_cpus=1, max_restarts=0)(_Worker).remote(self._setting, self._data))

    def _replace(self, hand: _Hand, error: RayError, waiting: deque[Job], deaths: Counter[int | None]) -> None:
        """Put a new worker in the place of one that died; its jobs go back to the head of the queue."""
        jobs = [job for _, job in hand.jobs]
        doing = "while it had no job" if hand.seen else "while it started"
        if jobs:
            clients = " or ".join(str(job.client) for job in jobs)  # an answer may have died with it
            doing = f"while it worked for client {clients} in round {jobs[0].t}"
        text = f"a worker died {doing}. {_reason(error)}"
        if jobs or not hand.seen:
            over: list[int | None] = [job.client for job in jobs]
            deaths.update(over or [None])
        if getattr(error, "actor_init_failed", False):
            raise RunError(f"{text}. Every node needs pfedla, and the modules of your own model and method")
        if max(deaths.values(), default=0) > 1:
            raise RunError(f"{text}. It was the second one to die {'over this job' if jobs else 'so'}")
        log.warning("%s. %s by a new worker", text, "The work is done again" if jobs else "It is replaced")
        waiting.extendleft(reversed(jobs))
        hand.dismiss()
        self._hands[self._hands.index(hand)] = self._start()
        for other in self._hands:
            other.check()  # if a node is gone, they may be, too

    def close(self) -> None:
        """End the actors."""
        for hand in self._hands:
            hand.dismiss()
        self._hands = []


class _Hand:
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
        """Add a job to the actor's queue; the numbers go through the object store."""
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

    def dismiss(self) -> None:
        """End it."""
        self.jobs.clear()
        ray.kill(self._actor)


class _Worker:
    """An actor: does jobs with one resident model, on data that it shares with the other actors of its node."""

    def __init__(self, setting: Setting, data: list[list[tuple[np.ndarray, np.ndarray, bool]]]) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._work = Work(setting, Data(*([Samples.of_parts(*parts) for parts in part] for part in data)))

    def here(self) -> None:
        """Answer the roll call."""

    def do(self, job: Job) -> tuple[bool, Any]:
        """Do a job, on a copy of its numbers: the object store's are read-only, and a method may be careless."""
        good, answer = self._work.answer(convert(job, np.ndarray, torch.tensor))
        return good, convert(answer, Tensor, Tensor.numpy)


def _connect(address: str) -> bool:
    """Connect this process to a cluster, quietly; return False if it was connected already."""
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in ("", "auto", here):
            raise ConfigError(f"run.ray_address = {address!r}: this process is connected to the cluster at {here}")
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal() and "/" not in host:
            socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for minutes
        ray.init(address or None, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"run.ray_address = {address!r}: {error}") from error
    return True


def _reason(error: RayError) -> str:
    """Return the telling part of Ray's long message: its last line, up to the list of guesses."""
    return "Ray says: " + str(error).strip().splitlines()[-1].partition(" Some common causes")[0].rstrip(".")
