"""The one loop: rounds of download, training and update, and the evaluation between them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch

from pfedla.algorithm import Algorithm
from pfedla.errors import ConfigError
from pfedla.fleet import Evaluation, Fleet
from pfedla.ledger import Ledger
from pfedla.randomness import numpy_stream
from pfedla.storage import let_go
from pfedla.training import Score

__all__ = ["Server", "chunks", "evaluate", "participants", "run_round", "uninterrupted"]

CHUNK = 64  # clients


def participants(seed: int, t: int, n: int, count: int) -> list[int]:
    """Return who takes part in round `t`, sorted: the same for every algorithm, known before any training."""
    if not 1 <= count <= n:
        raise ConfigError(f"participants = {count} must be from 1 to the number of clients, {n}")
    chosen = numpy_stream(seed, "participants", t).choice(n, count, replace=False)
    return sorted(int(client) for client in chosen)


@dataclass
class Server:
    """The server between two rounds."""

    state: Any
    t: int = 0  # rounds completed


def run_round(algorithm: Algorithm[Any], server: Server, fleet: Fleet, ledger: Ledger, ids: Sequence[int]) -> None:
    """Run the next round with the clients `ids`.

    Ctrl-C before the clients have answered leaves everything as it was; after that it waits for the update.
    """
    t = server.t + 1
    got = algorithm.download(server.state, torch.tensor(ids))
    answered, upload = fleet.train(ids, got, t)
    with uninterrupted():
        ledger.record(t, ids, got, answered, upload)
        if answered != list(ids):
            got = got.rows([ids.index(client) for client in answered])
        server.state = algorithm.update(server.state, torch.tensor(answered), got, upload)
        server.t = t
        fleet.commit()
    let_go()


def evaluate(algorithm: Algorithm[Any], state: Any, fleet: Fleet, n: int, t: int) -> Evaluation:
    """Score all clients' models as the server would send them now; nothing changes."""
    parts = []
    for ids in chunks(n):
        parts.append(fleet.evaluate(ids, algorithm.download(state, torch.tensor(ids)), t))
        let_go()

    def join(scores: list[Score]) -> Score:
        return Score(np.concatenate([s.accuracy for s in scores]), np.concatenate([s.loss for s in scores]))

    return Evaluation(join([p.personalized for p in parts]), join([p.after_training for p in parts]))


def chunks(n: int) -> list[range]:
    """Return all clients in portions, so that what is sent to them at once stays small."""
    return [range(start, min(start + CHUNK, n)) for start in range(0, n, CHUNK)]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done, so that state and its record change together or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if asked and callable(before):
            before(*asked[-1])
