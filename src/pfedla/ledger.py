"""Exact bytes by round, client and direction: of each layer, of each named value, and of the messages' headers.

Counted is what is packed, the very message that `wire.encode` makes of it. Directions are seen from the client.
Evaluation is not counted: it is the observer's, not the method's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from pfedla.wire import Payload

__all__ = ["Ledger"]

DIRECTIONS = ("down", "up")


class Ledger:
    """What crossed the wire: a line for each client and round."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)
        self._rounds: list[dict[str, np.ndarray]] = []  # columns: `down`, `down:header`, `down:#NAME` of a value, ...
        self._totals = Counter[str]()

    def record(self, t: int, asked: Sequence[int], down: Payload, answered: Sequence[int], up: Payload | None) -> None:
        """Add a round: what the clients that were asked were sent, and what those that answered sent back."""
        lines: dict[str, np.ndarray] = {"round": np.full(len(asked), t), "client": np.asarray(asked, dtype=np.int64)}
        lines |= self._bytes("down", down, list(range(len(asked))), len(asked))
        place = {client: line for line, client in enumerate(asked)}
        self._add(lines | self._bytes("up", up, [place[client] for client in answered], len(asked)))

    def _bytes(self, direction: str, payload: Payload | None, rows: list[int], count: int) -> dict[str, np.ndarray]:
        """Return the bytes of a payload, whose clients have the lines `rows` of `count`."""
        found: dict[str, np.ndarray] = {direction: np.zeros((count, len(self.layers)), dtype=np.int64)}
        found[f"{direction}:header"] = np.zeros(count, dtype=np.int64)
        if payload is None:
            return found
        found[direction][rows] = payload.layer_bytes()
        found[f"{direction}:header"][rows] = payload.header_bytes()
        for name, size in payload.value_bytes().items():
            found[f"{direction}:#{name}"] = np.zeros(count, dtype=np.int64)
            found[f"{direction}:#{name}"][rows] = size
        return found

    @property
    def down(self) -> int:
        """Bytes of layers downloaded by all clients so far."""
        return self._totals["down"]

    @property
    def up(self) -> int:
        """Bytes of layers uploaded by all clients so far."""
        return self._totals["up"]

    @property
    def overhead_down(self) -> int:
        """Bytes downloaded beside the layers: named values and headers."""
        return sum(total for key, total in self._totals.items() if key.startswith("down:"))

    @property
    def overhead_up(self) -> int:
        """Bytes uploaded beside the layers: named values and headers."""
        return sum(total for key, total in self._totals.items() if key.startswith("up:"))

    def _add(self, lines: dict[str, np.ndarray]) -> None:
        self._rounds.append(lines)
        self._totals.update({key: int(column.sum()) for key, column in lines.items()})

    def arrays(self) -> dict[str, np.ndarray]:
        """Return `round` and `client` `(lines,)`, bytes of layers `down` and `up` `(lines, layers)`, and their names.

        Bytes beside the layers are `(lines,)`: `down:header`, and `up:#examples` for a value.
        """
        fixed = ["round", "client", *(f"{direction}{part}" for part in ("", ":header") for direction in DIRECTIONS)]
        columns = dict.fromkeys([*fixed, *sorted(key for lines in self._rounds for key in lines)])
        found: dict[str, np.ndarray] = {
            key: np.zeros((0, len(self.layers)) if key in DIRECTIONS else 0, dtype=np.int64) for key in columns
        }
        for key, none in found.items():
            parts = (lines.get(key, np.zeros(len(lines["round"]), dtype=np.int64)) for lines in self._rounds)
            found[key] = np.concatenate([none, *parts])
        return {**found, "layers": np.array(self.layers, dtype=np.str_)}

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Ledger:
        """Return the ledger that has these arrays."""
        ledger = cls([str(name) for name in arrays["layers"]])
        ledger._add({key: arrays[key] for key in arrays if key != "layers"})
        return ledger
