"""Every upload is looked at before it touches the server's state.

An upload is refused, and its client absent from the round, if it cannot be unpacked, lacks a layer or a value that it
must have, has another shape or type than the model, is not finite, claims an impossible number of examples, or is
absurdly long: a hundred times the median of the latest uploads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.layers import STATS, LayerSpec, kind_of, layer_of
from pfedla.wire import EXAMPLES, Payload, unpack

__all__ = ["Inspected", "Inspector"]

LATEST = 100  # uploads that are remembered
FEW = 3  # of which there must be as many, to tell what is usual
LONGEST = 100.0  # times the median
MOST_EXAMPLES = 10**9


class Inspected(NamedTuple):
    """Who sent what can be used, and why others did not."""

    accepted: list[int]
    refused: dict[int, str]


class Inspector:
    """Judges uploads by the model, by each other and by the latest before them."""

    def __init__(self, spec: LayerSpec | None = None) -> None:
        self._spec = spec
        self.lengths = torch.full((LATEST,), torch.nan, dtype=torch.float64)  # of the latest uploads, the newest first
        self.refused = 0  # so far

    def inspect(self, algorithm: Algorithm[Any], packed: Mapping[int, Payload]) -> Inspected:
        """Judge a round's uploads, one row each, as they came."""
        uploads: dict[int, Payload] = {}
        refused: dict[int, str] = {}
        for client, row in packed.items():
            try:
                uploads[client] = unpack(row)
            except Exception as error:  # whatever a stranger sent
                refused[client] = f"it cannot be unpacked: {error}"
        entries = _usual(upload.layers.keys() for upload in uploads.values())
        values = _usual(upload.values.keys() for upload in uploads.values())
        lengths: dict[int, float] = {}
        for client, upload in uploads.items():
            if fault := self._fault(algorithm, upload, entries, values):
                refused[client] = fault
            else:
                lengths[client] = float(_length(upload))
        known = torch.tensor([length for length in lengths.values() if length > 0], dtype=torch.float64)
        usual = torch.cat([known, self.lengths[~self.lengths.isnan()]])
        most = LONGEST * float(usual.median()) if len(usual) >= FEW else torch.inf
        for client, length in lengths.items():
            if not length <= most:
                refused[client] = f"it is {length:.3g} long, {length / most * LONGEST:.3g} times the usual upload"
        accepted = [client for client in packed if client not in refused]
        latest = torch.tensor([lengths[client] for client in accepted if lengths[client] > 0], dtype=torch.float64)
        self.lengths = torch.cat([latest.flip(0), self.lengths])[:LATEST]
        self.refused += len(refused)
        return Inspected(accepted, dict(sorted(refused.items())))

    def _fault(self, algorithm: Algorithm[Any], upload: Payload, entries: set[str], values: set[str]) -> str | None:
        """Return what is wrong with an upload, None if nothing is."""
        if self._spec and upload.names != self._spec.names:
            return "it is of another model"
        sent = {name for name, yes in zip(upload.names, upload.sent[0].tolist(), strict=True) if yes}
        missing = [name for name in upload.names if algorithm.uploads(name) and name not in sent]
        missing += [key for key in entries if layer_of(key) in sent and key not in upload.layers]
        missing += [f"the value {name}" for name in values if name not in upload.values]
        if missing:
            return f"it lacks {', '.join(sorted(missing)[:3])}"
        for key, rows in upload.layers.items():
            expected = self._width(key)
            if rows.dim() != 2 or len(rows) != 1 or (expected is not None and rows.shape[1] != expected):
                return f"{key} has the shape {tuple(rows.shape[1:])}, not ({expected},)"
            if self._spec and expected is not None and rows.dtype != self._spec.dtype:
                return f"{key} is {rows.dtype}, not {self._spec.dtype}"
        for key, rows in [*upload.layers.items(), *upload.values.items()]:
            if rows.is_floating_point() and not torch.isfinite(torch.linalg.vector_norm(rows)):
                return f"{key} is not finite"
        if EXAMPLES in upload.values:
            count = upload.examples
            if count.is_floating_point() or count.shape != (1,) or not 1 <= int(count) <= MOST_EXAMPLES:
                return f"it claims {count[0].tolist() if count.dim() else count.tolist()} examples"
        return None

    def _width(self, key: str) -> int | None:
        """Return how many values an entry of the model has, None for one that is the method's own."""
        if self._spec is None or kind_of(key) not in ("", STATS):
            return None
        slots = self._spec.slots.get(key)
        return slots[-1].stop if slots else -1


def _usual(names: Any) -> set[str]:
    """Return the names that more than half of the uploads have."""
    found = [set(some) for some in names]
    count = Counter(name for some in found for name in some)
    return {name for name, times in count.items() if 2 * times > len(found)}


def _length(upload: Payload) -> Tensor:
    """Return the Euclidean length of all layers together."""
    parts = [torch.linalg.vector_norm(rows) for key, rows in upload.layers.items() if not kind_of(key)]
    return torch.linalg.vector_norm(torch.stack(parts).double()) if parts else torch.tensor(0.0)
