"""Codecs: layers that travel in fewer bytes than they hold.

`Coding.pack` and `Coding.unpack` stand around every payload, on the server and at the clients: what is packed travels
and is counted, what is unpacked is what the other side works with. A payload changes nowhere else.

Coded are the trained parameters, each client's layer by itself. All else travels as it is: running statistics, whose
variances rounding would make negative; named values; and entries of a method's own, of which nothing is known here.

==================  ==================================================================================================
float16, bfloat16   the nearest number of that type
int8, int4          255 or 15 equal steps from the layer's least value to its greatest, both sent as they are; rounded
                    up or down at random, so that the mean is right. Two values of 4 bits share a byte
top-k               the largest values of a change, and where they stand: as a bit for each value of the layer, or as
                    four bytes for each that is sent, whichever is shorter
random-k            values of a change drawn at random, and the number that they were drawn with
==================  ==================================================================================================

Error feedback: what a codec loses of a client's change the client still owes, and adds to its next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from pfedla.errors import ConfigError, RunError
from pfedla.layers import Layers, kind_of
from pfedla.randomness import seed_of, stream
from pfedla.settings import Range, Settings
from pfedla.wire import Payload

__all__ = [
    "AS_IT_IS",
    "PRESETS",
    "SPARSE",
    "Affine",
    "Cast",
    "Code",
    "Codec",
    "Coding",
    "RandomK",
    "TopK",
    "owed_after",
    "with_owed",
]

Way = Literal["up", "down"]  # seen from the client

SPARSE = ("top-k", "random-k")
PRESETS: dict[str, dict[str, str | float]] = {  # one word for settings of `Codec`; a name alone means both ways
    **{name: {"up": name, "down": name} for name in ("float16", "bfloat16", "int8", "int4")},
    "small": {"up": "int4", "down": "int8"},  # the least traffic within a point of pFedLA: docs/paper.md
}


class Code(Protocol):
    """A way to write a layer's values; `number` decides what is random about it."""

    def code(self, x: Tensor, number: int) -> Tensor:
        """Return what travels for the values `(n,)`; a `ValueError` if they cannot be coded."""

    def decode(self, code: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Return the `n` values behind a code; a `ValueError` if it is none."""


@dataclass(frozen=True)
class Cast:
    """Values in a shorter floating-point type."""

    short: torch.dtype

    def code(self, x: Tensor, number: int) -> Tensor:  # noqa: ARG002
        """Round to the nearest."""
        code = x.to(self.short)
        if not torch.isfinite(code).all():
            raise ValueError(f"it holds {float(x.abs().max()):g}, beyond {torch.finfo(self.short).max:g}")
        return code

    def decode(self, code: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Return the same in the model's type."""
        return _checked(code, n, self.short).to(dtype)


@dataclass(frozen=True)
class Affine:
    """Values as whole numbers of a few bits, which count equal steps from the least value to the greatest."""

    bits: Literal[4, 8]

    def code(self, x: Tensor, number: int) -> Tensor:
        """Round up or down, each with the probability that makes the mean right."""
        ends = torch.stack([x.min(), x.max()]) if len(x) else x.new_zeros(2)
        low, high = ends.double()
        if not torch.isfinite(high - low):
            raise ValueError("its values lie too far apart")
        top = 2**self.bits - 1
        steps = (x.double() - low) / (high - low) * top if high > low else torch.zeros(len(x))
        chance = torch.rand(len(x), generator=stream(number, "rounding"), dtype=torch.float64)
        whole = (steps + chance).floor().clamp(0, top).to(torch.uint8)
        if self.bits == 4:
            whole = torch.cat([whole, whole.new_zeros(len(whole) % 2)])
            whole = whole[0::2] | whole[1::2] << 4
        return torch.cat([_bytes(ends), whole])

    def decode(self, code: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Return low + steps (high - low) / 255, or 15, which is never below the least or above the greatest."""
        before = 2 * dtype.itemsize
        whole = _checked(code, before + -(-n * self.bits // 8), torch.uint8)[before:]
        low, high = _values(code[:before], dtype).double()
        if not (torch.isfinite(high - low) and low <= high):
            raise ValueError(f"values from {float(low):g} to {float(high):g}")
        if self.bits == 4:
            whole = torch.stack([whole & 15, whole >> 4], 1).flatten()[:n]
        x: Tensor = low + whole.double() / (2**self.bits - 1) * (high - low)
        return x.clamp(low, high).to(dtype)


@dataclass(frozen=True)
class TopK:
    """The share `keep` of the values that are largest in size; the others become 0."""

    keep: float

    def code(self, x: Tensor, number: int) -> Tensor:  # noqa: ARG002
        """Return the places of the largest values, then the values."""
        n, k = len(x), _count(self.keep, len(x))
        places = x.abs().topk(k).indices.sort().values
        where = torch.zeros(n, dtype=torch.bool).index_fill_(0, places, True)
        index = torch.from_numpy(np.packbits(where.numpy())) if _as_bits(n, k) else _bytes(places.int())
        return torch.cat([index, _bytes(x[places])])

    def decode(self, code: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Put the values in their places."""
        k = _count(self.keep, n)
        before = -(-n // 8) if _as_bits(n, k) else 4 * k
        index = _checked(code, before + k * dtype.itemsize, torch.uint8)[:before]
        if _as_bits(n, k):
            places = torch.from_numpy(np.unpackbits(index.numpy())).nonzero().flatten()
        else:
            places = _values(index, torch.int32).long()
        if len(places) != k or (k and not (places[0] >= 0 and (places.diff() > 0).all() and places[-1] < n)):
            raise ValueError(f"places that are not {k} of {n}")
        return torch.zeros(n, dtype=dtype).index_copy_(0, places, _values(code[before:], dtype))


@dataclass(frozen=True)
class RandomK:
    """The share `keep` of the values, drawn at random; the others become 0."""

    keep: float

    def code(self, x: Tensor, number: int) -> Tensor:
        """Return the number that decides the places, then the values."""
        return torch.cat([_bytes(torch.tensor([number])), _bytes(x[self._places(number, len(x))])])

    def decode(self, code: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Put the values in their places."""
        _checked(code, 8 + _count(self.keep, n) * dtype.itemsize, torch.uint8)
        places = self._places(int(_values(code[:8], torch.int64)), n)
        return torch.zeros(n, dtype=dtype).index_copy_(0, places, _values(code[8:], dtype))

    def _places(self, number: int, n: int) -> Tensor:
        return torch.randperm(n, generator=stream(number, "places"))[: _count(self.keep, n)]


@dataclass(frozen=True)
class Codec(Settings):
    """How layers travel: as they are by default.

    Of the server's models nothing can be left out: a client does not hold what the rest would be measured against.
    """

    section: ClassVar[str] = "codec"
    up: Literal["float16", "bfloat16", "int8", "int4", "top-k", "random-k"] | None = None
    down: Literal["float16", "bfloat16", "int8", "int4"] | None = None
    keep: Annotated[float, Range(above=0, most=1)] | None = (
        None  # the share of values that top-k and random-k send; 0.1
    )

    def __post_init__(self) -> None:
        """Say why a download cannot be a part of the values; check the rest."""
        if str(self.down) in SPARSE:
            raise ConfigError(
                f"codec.down = {self.down!r}: the server sends models, no changes, and a part of a model's values "
                "is no model; choose one of float16, bfloat16, int8, int4"
            )
        super().__post_init__()
        if self.keep is not None and self.up not in SPARSE:
            raise ConfigError(f"codec.keep = {self.keep:g} is for codec.up = 'top-k' or 'random-k'")

    def code(self, way: Way) -> Code | None:
        """Return how layers are written on their way up or down, None if they travel as they are."""
        name, keep = getattr(self, way), self.keep or 0.1
        codes: dict[str, Code] = {
            "float16": Cast(torch.float16),
            "bfloat16": Cast(torch.bfloat16),
            "int8": Affine(8),
            "int4": Affine(4),
            "top-k": TopK(keep),
            "random-k": RandomK(keep),
        }
        return codes[name] if name else None


@dataclass(frozen=True)
class Coding:
    """A run's codecs, with what both sides know: the model's layers, and the seed of what is random."""

    codec: Codec = field(default_factory=Codec)
    sizes: Mapping[str, int] = field(default_factory=dict)  # how many parameters each layer has
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def pack(self, payload: Payload, way: Way, ids: Sequence[int], t: int) -> Payload:
        """Return what travels in round `t` for a payload from or to the clients `ids`, row by row."""
        code = self.codec.code(way)
        if code is None:
            return payload
        layers: Layers = {}
        for key, rows in payload.layers.items():
            if kind_of(key):
                layers[key] = rows
                continue
            codes: dict[int, Tensor] = {}
            for row in payload.sent[:, payload.names.index(key)].nonzero().flatten().tolist():
                try:
                    if not torch.isfinite(rows[row]).all():
                        raise ValueError("it is not finite")
                    codes[row] = code.code(rows[row], seed_of(self.seed, "codec", way, t, ids[row], key))
                except ValueError as error:
                    of = f"{key} of client {ids[row]} in round {t}"
                    raise RunError(f"{of} cannot travel as {getattr(self.codec, way)} (codec.{way}): {error}") from None
            if codes:
                blank = torch.zeros_like(next(iter(codes.values())))
                layers[key] = torch.stack([codes.get(row, blank) for row in range(len(rows))])
        return payload._replace(layers=layers)

    def unpack(self, packed: Payload, way: Way) -> Payload:
        """Return the payload as the other side sees it; a `ValueError` if it was not packed in this way."""
        code = self.codec.code(way)
        if code is None:
            return packed
        layers: Layers = {}
        for key, rows in packed.layers.items():
            if kind_of(key):
                layers[key] = rows
                continue
            if key not in self.sizes or key not in packed.names:
                raise ValueError(f"the model has no layer {key}")
            n = self.sizes[key]
            layers[key] = torch.full((len(rows), n), torch.nan, dtype=self.dtype)  # blank, if it is not sent
            for row in packed.sent[:, packed.names.index(key)].nonzero().flatten().tolist():
                try:
                    layers[key][row] = code.decode(rows[row], n, self.dtype)
                except ValueError as error:
                    raise ValueError(f"{key} is no {getattr(self.codec, way)}: {error}") from None
        return packed._replace(layers=layers)


AS_IT_IS = Coding()


def with_owed(upload: Payload, owed: Layers) -> Payload:
    """Return a client's change with what it owes of earlier ones added."""
    due = {key: upload.layers[key] + rows for key, rows in owed.items() if key in upload.layers}
    return upload._replace(layers=upload.layers | due)


def owed_after(due: Payload, taken: Payload, owed: Layers) -> Layers:
    """Return what a client still owes: what was due, less what the server takes."""
    return {key: due.layers[key] - taken.layers[key] if key in due.layers else rows for key, rows in owed.items()}


def _count(keep: float, n: int) -> int:
    """Return how many of `n` values are sent: at least one, if there are any."""
    return min(n, max(1, round(keep * n)))


def _as_bits(n: int, k: int) -> bool:
    """Say whether a bit for each of `n` values is shorter than four bytes for each of `k`."""
    return n <= 32 * k


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _values(code: Tensor, dtype: torch.dtype) -> Tensor:
    return code.clone().view(dtype)  # a copy is aligned


def _checked(code: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    if code.shape != (length,) or code.dtype != dtype:
        raise ValueError(f"{code.dtype} {tuple(code.shape)}, not {dtype} ({length},)")
    return code
