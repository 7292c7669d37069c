"""The clients, behind one small protocol: where they run can be swapped, the rounds stay the same.

`SimulatedFleet` plays every client with a pool of workers, on this machine or on a cluster. A client's result depends
on its inputs alone, so it is the same to the bit for any pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from pfedla.client import Evaluation, Job, Kept, Setting, threads
from pfedla.layers import Layers
from pfedla.pool import Pool, keep_freed_memory
from pfedla.training import ClientData
from pfedla.tree import flatten, transform
from pfedla.wire import Payload

__all__ = ["Answers", "Fleet", "Judge", "SimulatedFleet"]

T = TypeVar("T")
Judge = Callable[[Mapping[int, Payload]], Mapping[int, str]]  # of uploads, returns those that cannot be used, and why


class Answers(NamedTuple, Generic[T]):
    """What clients answered, and why the others did not. Nobody is a legal answer."""

    by_client: dict[int, T]  # in ascending order of the clients
    missing: dict[int, str] = {}  # noqa: RUF012 (a NamedTuple's default, never written)


class Fleet(Protocol):
    """All that a run knows of its clients. What they keep may lie anywhere, also with themselves.

    `sent` is a packed payload with one row for each client of `ids`; answers are packed, too.
    """

    @property
    def forgot(self) -> Collection[int]:
        """The clients that have lost what they kept: they are sent whatever the server knows of it."""

    def train(self, ids: Sequence[int], sent: Payload, t: int, judge: Judge | None = None) -> Answers[Payload]:
        """Have clients train in round `t`; return one row from each that answered.

        A fleet that asks again when too few have answered counts the answers that `judge` does not refuse. All are
        returned.
        """

    def commit(self, clients: Collection[int] | None = None) -> None:
        """Tell clients, all by default, that the server has taken their latest answers: what they trained is theirs."""

    def evaluate(self, ids: Sequence[int], sent: Payload, t: int) -> Answers[Evaluation]:
        """Score clients' personalized models. Reads and never writes."""

    def personalize(self, ids: Sequence[int], sent: Payload, t: int) -> Answers[Layers]:
        """Return clients' personalized models, one row each. Reads and never writes."""

    def snapshot(self) -> Any:
        """Return what the fleet itself holds of the clients, nested tensors, as it is until the next `commit`."""

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot, which is the fleet's from then on."""

    def close(self) -> None:
        """End it."""


class SimulatedFleet:
    """All clients, played by a pool of workers; what they keep lies in this process.

    Parameters
    ----------
    setting
        The model, the method and how clients train.
    data
        Each client's data; clients are numbered from 0.
    pool
        Who plays them. It is closed with the fleet.
    """

    forgot: Collection[int] = ()

    def __init__(self, setting: Setting, data: Mapping[int, ClientData], pool: Pool) -> None:
        keep_freed_memory()  # of the server's part of a round, and of clients in this process
        self.kept = setting.enroll_all(len(data))
        self._examples = {client: len(samples.train) for client, samples in data.items()}
        self._pool = pool
        self._staged: dict[int, Kept] = {}

    def train(self, ids: Sequence[int], sent: Payload, t: int, judge: Judge | None = None) -> Answers[Payload]:  # noqa: ARG002
        """Train clients; what they will keep is held back until `commit`. Whoever is asked answers, and once."""
        answers: dict[int, tuple[Kept, Payload]] = self._run("train", ids, sent, t)
        self._staged = {client: kept for client, (kept, _) in answers.items()}
        return Answers({client: upload for client, (_, upload) in answers.items()})

    def commit(self, clients: Collection[int] | None = None) -> None:
        """Let clients, all by default, keep what they trained."""
        everybody = flatten(self.kept)
        for client, kept in self._staged.items():
            if clients is None or client in clients:
                for path, row in flatten(kept).items():
                    everybody[path][client] = row[0]
        self._staged = {}

    def evaluate(self, ids: Sequence[int], sent: Payload, t: int) -> Answers[Evaluation]:
        """Score clients' personalized models, and the models after their latest training."""
        return Answers(self._run("evaluate", ids, sent, t))

    def personalize(self, ids: Sequence[int], sent: Payload, t: int) -> Answers[Layers]:
        """Return clients' personalized models."""
        return Answers(self._run("personalize", ids, sent, t))

    def snapshot(self) -> Kept:
        """Return what the clients keep."""
        return self.kept

    def restore(self, snapshot: Kept) -> None:
        """Have the clients keep this."""
        self.kept, self._staged = snapshot, {}

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _run(
        self, kind: Literal["train", "evaluate", "personalize"], ids: Sequence[int], sent: Payload, t: int
    ) -> dict[int, Any]:
        """Have every client of `ids` do one job; the longest first, so that workers end together."""
        row = {client: index for index, client in enumerate(ids)}

        def job(client: int) -> Job:
            kept: Kept = transform(self.kept, lambda _, rows: rows[client : client + 1])
            return Job(kind, client, t, kept, sent.rows(slice(row[client], row[client] + 1)))

        order = sorted(ids, key=lambda client: -self._examples[client])
        with threads(1):
            return dict(sorted(self._pool.run(map(job, order))))
