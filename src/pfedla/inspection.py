"""Every upload is looked at before it touches the server's state.

An upload is refused, and its client absent from the round, if it cannot be unpacked, lacks a layer or a value that it
must have, holds one that nobody else sends, has another shape or type than the model or the others' uploads, is not
finite, claims an impossible number of examples, would make a running variance negative, or is absurdly long: a hundred
times the median of the latest uploads. Running statistics, which go by the square of the data, may be ten thousand
times as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.codec import AS_IT_IS, Coding
from pfedla.errors import plain
from pfedla.layers import STATS, LayerSpec, Slot, entry, kind_of, layer_of
from pfedla.wire import EXAMPLES, Payload

__all__ = ["Inspected", "Inspector"]

LATEST = 100  # uploads that are remembered
FEW = 3  # of which there must be as many, to tell what is usual
LONGEST = 100.0  # times the median
MOST_EXAMPLES = 10**9
ROUNDING = 1e-5  # what a variance may be below 0: as much as batch norm adds to it


Sent = Callable[[int], Payload | None]  # what a client was sent, packed; None if it is not known


class Inspected(NamedTuple):
    """Who sent what can be used, and why others did not."""

    accepted: list[int]
    refused: dict[int, str]


class Inspector:
    """Judges uploads by the model, by each other and by the latest before them.

    Examples are `counted`, or each client says 1.
    """

    def __init__(self, spec: LayerSpec | None = None, *, counted: bool = True) -> None:
        self._spec, self._most = spec, MOST_EXAMPLES if counted else 1
        self.lengths: dict[str, Tensor] = {}  # {kind of entry: lengths of the latest uploads, the newest first}
        self.usual: dict[str, str] = {}  # what the latest uploads held, and in which form
        self.refused = 0  # so far

    def inspect(
        self,
        algorithm: Algorithm[Any],
        packed: Mapping[int, Payload],
        coding: Coding = AS_IT_IS,
        got: Sent = lambda _: None,
    ) -> Inspected:
        """Judge a round's uploads, and remember those that are accepted: the next ones are judged by them, too.

        `got` is what the clients were sent, packed, if it is known.
        """
        found, usual, lengths = self._judge(algorithm, packed, coding, got)
        for kind in {kind for client in found.accepted for kind in lengths[client]}:
            known = [lengths[client].get(kind, 0.0) for client in found.accepted]
            latest = torch.tensor([length for length in known if length > 0], dtype=torch.float64)
            self.lengths[kind] = torch.cat([latest.flip(0), self._latest(kind)])[:LATEST]
        if found.accepted:
            self.usual = usual
        self.refused += len(found.refused)
        return found

    def judge(
        self,
        algorithm: Algorithm[Any],
        packed: Mapping[int, Payload],
        coding: Coding = AS_IT_IS,
        got: Sent = lambda _: None,
    ) -> Inspected:
        """Judge uploads, and remember nothing of it."""
        return self._judge(algorithm, packed, coding, got)[0]

    def _judge(
        self, algorithm: Algorithm[Any], packed: Mapping[int, Payload], coding: Coding, got: Sent
    ) -> tuple[Inspected, dict[str, str], dict[int, dict[str, float]]]:
        """Judge uploads, one row each, as they came, by what they unpack to; return what is usual, and lengths, too."""
        uploads: dict[int, Payload] = {}
        refused: dict[int, str] = {}
        for client, row in packed.items():
            try:
                upload = coding.unpack(row, "up")
            except Exception as error:  # whatever a stranger sent
                refused[client] = f"it cannot be unpacked: {error}"
                continue
            if fault := self._fault(algorithm, upload, partial(got, client)):
                refused[client] = fault
            else:
                uploads[client] = upload
        outlines = {client: _outline(upload) for client, upload in uploads.items()}
        usual = self._agreed(list(outlines.values()))
        for client, outline in outlines.items():
            if fault := _unusual(algorithm, uploads[client], outline, usual):
                refused[client] = fault
        lengths = {client: _lengths(upload) for client, upload in uploads.items() if client not in refused}
        for kind in sorted({kind for found in lengths.values() for kind in found}):
            refused |= self._too_long(kind, {client: found[kind] for client, found in lengths.items() if kind in found})
        accepted = [client for client in packed if client not in refused]
        return Inspected(accepted, {client: plain(why) for client, why in sorted(refused.items())}), usual, lengths

    def _fault(self, algorithm: Algorithm[Any], upload: Payload, got: Callable[[], Payload | None]) -> str | None:
        """Return what is wrong with an upload, whatever others sent; None if nothing is."""
        try:
            return self._misfit(algorithm, upload) or self._impossible(algorithm, upload, got)
        except Exception as error:  # a stranger's upload need not even be one
            return f"it cannot be read: {error}"

    def _misfit(self, algorithm: Algorithm[Any], upload: Payload) -> str | None:
        if self._spec and upload.names != self._spec.names:
            return "it is of another model"
        if upload.sent.dtype != torch.bool or upload.sent.shape != (1, len(upload.names)):
            return f"what it says to have sent is {upload.sent.dtype} {tuple(upload.sent.shape)}"
        sent = {name for name, yes in zip(upload.names, upload.sent[0].tolist(), strict=True) if yes}
        held = sent & upload.layers.keys()
        if missing := [name for name in upload.names if algorithm.uploads(name) and name not in held]:
            return f"it lacks {', '.join(sorted(missing)[:3])}"
        beside = upload.values.keys() | {kind_of(key) for key in upload.layers}
        if absent := [name for name in algorithm.uploads_beside if name not in beside]:
            return f"it lacks {', '.join(absent)}"
        for key, rows in upload.layers.items():
            expected = self._width(key)
            if rows.dim() != 2 or len(rows) != 1 or (expected is not None and rows.shape[1] != expected):
                return f"{key} has the shape {tuple(rows.shape[1:])}, not ({expected},)"
            if self._spec and expected is not None and rows.dtype != self._spec.dtype:
                return f"{key} is {rows.dtype}, not {self._spec.dtype}"
            if layer_of(key) not in sent:
                return f"it holds {key}, which it does not say to have sent"
        for key, rows in [*upload.layers.items(), *upload.values.items()]:
            if rows.is_floating_point() and not torch.isfinite(torch.linalg.vector_norm(rows)):
                return f"{key} is not finite"
        for name, (least, most) in algorithm.value_ranges.items():
            rows = upload.values.get(name, torch.empty(0))
            if not ((rows >= least) & (rows <= most)).all():
                return f"{name} is not from {least:g} to {most:g}"
        if EXAMPLES in upload.values:
            count = upload.examples
            if count.dtype != torch.int64 or count.shape != (1,) or not 1 <= int(count) <= self._most:
                return f"it claims {count[0].tolist() if count.dim() else count.tolist()} examples"
        return None

    def _impossible(self, algorithm: Algorithm[Any], upload: Payload, got: Callable[[], Payload | None]) -> str | None:
        """Return which running variance would be negative, where the server knows what a change started from."""
        found = {key: slots for key in upload.layers if kind_of(key) == STATS and (slots := self._variances(key))}
        if not found or not algorithm.starts_from_received or (before := got()) is None:
            return None
        received = {name for name, yes in zip(before.names, before.sent[0].tolist(), strict=True) if yes}
        for key, slots in found.items():
            if layer_of(key) in received:
                after = before.layers[key][0] + upload.layers[key][0]
                for slot in slots:
                    if float(after[slot.start : slot.stop].min()) < -ROUNDING:
                        return f"{slot.name} would be negative"
        return None

    def _variances(self, key: str) -> list[Slot]:
        """Return where an entry of statistics has variances."""
        slots = self._spec.slots.get(key, ()) if self._spec else ()
        return [slot for slot in slots if slot.name.endswith("running_var")]

    def _width(self, key: str) -> int | None:
        """Return how many values an entry of the model has, None for one that is the method's own."""
        if self._spec is None or kind_of(key) not in ("", STATS):
            return None
        slots = self._spec.slots.get(key)
        return slots[-1].stop if slots else -1

    def _agreed(self, outlines: list[dict[str, str]]) -> dict[str, str]:
        """Return what most uploads hold, and in which form; the latest before them have a vote, and the casting one."""
        counted = [outline for outline in outlines if entry("", EXAMPLES) in outline]  # what nearly all methods send
        outlines = counted if 2 * len(counted) >= len(outlines) else outlines
        voices = [self.usual, *outlines] if self.usual else outlines
        forms: dict[str, Counter[str]] = {}
        for voice in voices:
            for key, form in voice.items():
                forms.setdefault(key, Counter())[form] += 1
        agreed = {}
        for key, found in forms.items():
            majority = 2 * found.total() - len(voices)
            if majority > 0 or (majority == 0 and (key in self.usual or not self.usual)):
                agreed[key] = found.most_common(1)[0][0]
        return agreed

    def _too_long(self, kind: str, lengths: dict[int, float]) -> dict[int, str]:
        """Return whose entries of a kind are absurdly long."""
        known = torch.tensor([length for length in lengths.values() if length > 0], dtype=torch.float64)
        usual = torch.cat([known, self._latest(kind)])
        if len(usual) < FEW:
            return {}
        median = float(usual.median())
        most = median * (LONGEST**2 if kind == STATS else LONGEST)
        name = f"its {kind}" if kind else "it"
        return {
            client: f"{name} is {length:.3g} long, {length / median:.3g} times the usual upload"
            for client, length in lengths.items()
            if not length <= most
        }

    def _latest(self, kind: str) -> Tensor:
        return self.lengths.get(kind, torch.zeros(0, dtype=torch.float64))


def _outline(upload: Payload) -> dict[str, str]:
    """Return the form of everything that an upload holds: type and shape of each row, values as `"#name"`."""
    found = upload.layers | {entry("", name): value for name, value in upload.values.items()}
    return {key: f"{rows.dtype} {tuple(rows.shape[1:])}" for key, rows in found.items()}


def _unusual(algorithm: Algorithm[Any], upload: Payload, outline: dict[str, str], usual: dict[str, str]) -> str | None:
    """Return in what an upload differs from the usual; None if in nothing."""
    sent = {name for name, yes in zip(upload.names, upload.sent[0].tolist(), strict=True) if yes}
    names = {key: key if layer_of(key) else f"the value {kind_of(key)}" for key in outline.keys() | usual}
    lacks = [names[key] for key in usual.keys() - outline if not layer_of(key) or layer_of(key) in sent]
    if lacks:
        return f"it lacks {', '.join(sorted(lacks)[:3])}"
    kinds = {kind_of(key) for key in usual if layer_of(key)}
    for key, form in sorted(outline.items()):
        layer = layer_of(key)
        if key in usual and form != usual[key]:
            return f"{names[key]} is {form}, not {usual[key]}"
        if key not in usual and not (layer and kind_of(key) in kinds and algorithm.shares(layer)):
            return f"it holds {names[key]}, which others do not send"
    return None


def _lengths(upload: Payload) -> dict[str, float]:
    """Return the Euclidean length of all entries of a kind together."""
    parts: dict[str, list[Tensor]] = {}
    for key, rows in upload.layers.items():
        parts.setdefault(kind_of(key), []).append(torch.linalg.vector_norm(rows.double()))
    return {kind: float(torch.linalg.vector_norm(torch.stack(found))) for kind, found in parts.items()}
