"""Exact bytes by round, client, layer and direction, read off the payloads themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pfedla.wire import Payload

__all__ = ["Ledger"]


class Ledger:
    """What crossed the wire: a line for each client and round, `down` and `up` by layer.

    Directions are seen from the client. Evaluation is not counted: it is the observer's, not the method's.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)
        self._rounds: list[np.ndarray] = []
        self._clients: list[np.ndarray] = []
        self._bytes: dict[str, list[np.ndarray]] = {"down": [], "up": []}

    def record(self, t: int, asked: Sequence[int], down: Payload, answered: Sequence[int], up: Payload) -> None:
        """Add a round: what the clients that were asked got, and what those that answered sent."""
        lines = {client: line for line, client in enumerate(asked)}
        sent = np.zeros((len(asked), len(self.layers)), dtype=np.int64)
        sent[[lines[client] for client in answered]] = up.size()
        self._rounds.append(np.full(len(asked), t))
        self._clients.append(np.asarray(asked, dtype=np.int64))
        self._bytes["down"].append(down.size())
        self._bytes["up"].append(sent)

    @property
    def down(self) -> int:
        """Bytes downloaded by all clients so far."""
        return int(sum(lines.sum() for lines in self._bytes["down"]))

    @property
    def up(self) -> int:
        """Bytes uploaded by all clients so far."""
        return int(sum(lines.sum() for lines in self._bytes["up"]))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return `round` and `client` `(lines,)`, `down` and `up` `(lines, layers)`, and the layers' names."""
        none, empty = np.zeros(0, dtype=np.int64), np.zeros((0, len(self.layers)), dtype=np.int64)
        return {
            "round": np.concatenate([none, *self._rounds]),
            "client": np.concatenate([none, *self._clients]),
            "down": np.concatenate([empty, *self._bytes["down"]]),
            "up": np.concatenate([empty, *self._bytes["up"]]),
            "layers": np.array(self.layers, dtype=np.str_),
        }

    def save(self, path: Path) -> None:
        """Write the arrays to an `.npz` file."""
        np.savez_compressed(path, **self.arrays())  # type: ignore[arg-type]

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Ledger:
        """Return the ledger that has these arrays."""
        ledger = cls([str(name) for name in arrays["layers"]])
        ledger._rounds, ledger._clients = [arrays["round"]], [arrays["client"]]
        ledger._bytes = {"down": [arrays["down"]], "up": [arrays["up"]]}
        return ledger

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """Read what `save` wrote."""
        with np.load(path) as file:
            return cls.of(file)
