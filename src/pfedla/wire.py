"""What crosses the wire: a `Payload`, and its bytes.

A payload carries layers for some clients, says which of them are really sent, and carries named values beside them,
such as the number of examples behind an update. "Not sent" means "keep yours". What is not in a payload, the other side
cannot see.

`Coding.pack` and `Coding.unpack` (`codec.py`) stand around every payload; `encode` and `decode` turn a packed payload
of one client into bytes and back.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from torch import Tensor

from pfedla import tensorfile
from pfedla.layers import STATS, Layers, entry, kind_of, layer_of

__all__ = ["EXAMPLES", "Payload", "decode", "encode"]

EXAMPLES = "examples"

Values = dict[str, Tensor]  # {name: (clients,) or (clients, ...)}


class Payload(NamedTuple):
    """Layers and values on their way between server and clients, one row per client."""

    layers: Layers  # {entry: (clients, values)}
    sent: Tensor  # (clients, layers) bool: a row that is not sent holds no information
    names: tuple[str, ...]  # the layers behind the columns of `sent`
    values: Values  # what is sent for no layer, in every row

    @classmethod
    def of(cls, layers: Layers, sent: Tensor, names: Sequence[str], **values: Tensor) -> Payload:
        """Build a payload, blanking out (NaN) whatever is not sent."""
        column = {name: index for index, name in enumerate(names)}
        kept = {}
        for key, tensor in layers.items():
            mask = sent[:, column[layer_of(key)]]  # (clients,)
            if mask.all():
                kept[key] = tensor
            elif mask.any():
                kept[key] = torch.where(mask[:, None], tensor, torch.nan)
        for name, value in values.items():
            found: object = value  # whatever a method passes
            if not isinstance(found, Tensor) or found.shape[:1] != sent.shape[:1]:
                raise ValueError(f"value {name!r} must be a tensor with one row for each of {len(sent)} clients")
        return cls(kept, sent, tuple(names), values)

    @property
    def examples(self) -> Tensor:
        """The training examples behind each row: `(clients,)`."""
        return self.values[EXAMPLES]

    def fill(self, own: Layers) -> Layers:
        """Return what was sent, and a client's own entry where it was not."""
        filled = dict(own)
        for key, mine in own.items():
            if kind_of(key) not in ("", STATS):
                continue
            mask = self.sent[:, self.names.index(layer_of(key))]  # (clients,)
            if mask.all():
                filled[key] = self.layers[key]
            elif mask.any():
                filled[key] = torch.where(mask[:, None], self.layers[key], mine)
        return filled

    def rows(self, index: slice | Sequence[int]) -> Payload:
        """Return the payload of some of its clients."""
        layers, values = ({key: x[index] for key, x in part.items()} for part in (self.layers, self.values))
        return Payload(layers, self.sent[index], self.names, values)

    @staticmethod
    def stack(payloads: Sequence[Payload]) -> Payload:
        """Join payloads client after client; a layer that only some of them send is blank in the others."""
        first = payloads[0]
        if any(p.names != first.names or p.values.keys() != first.values.keys() for p in payloads):
            raise ValueError("payloads of different models or methods cannot be joined")
        like = {key: tensor for payload in payloads for key, tensor in payload.layers.items()}

        def rows(payload: Payload, key: str) -> Tensor:
            if key in payload.layers:
                return payload.layers[key]
            blank = torch.nan if like[key].is_floating_point() else 0  # there is no NaN among the bytes of a codec
            return torch.full((len(payload.sent), like[key].shape[1]), blank, dtype=like[key].dtype)

        return Payload(
            {key: torch.cat([rows(payload, key) for payload in payloads]) for key in like},
            torch.cat([p.sent for p in payloads]),
            first.names,
            {name: torch.cat([p.values[name] for p in payloads]) for name in first.values},
        )

    def tensors(self, row: int) -> dict[str, Tensor]:
        """Return what a message to or from one client holds: the layers that are sent, and values as `"#name"`."""
        sent = {name for name, yes in zip(self.names, self.sent[row].tolist(), strict=True) if yes}
        layers = {key: tensor[row] for key, tensor in self.layers.items() if layer_of(key) in sent}
        return layers | {entry("", name): tensor[row] for name, tensor in self.values.items()}

    def layer_bytes(self) -> np.ndarray:
        """Return the bytes of each client's layers: `(clients, layers)` int64."""
        width = np.zeros(len(self.names), dtype=np.int64)
        for key, tensor in self.layers.items():
            width[self.names.index(layer_of(key))] += tensor[:1].nbytes
        return self.sent.numpy() * width

    def value_bytes(self) -> dict[str, int]:
        """Return the bytes of each value in one client's message."""
        return {name: tensor[:1].nbytes for name, tensor in self.values.items()}

    def header_bytes(self) -> np.ndarray:
        """Return the bytes that each client's message takes beside layers and values: `(clients,)` int64."""
        _, first, inverse = np.unique(self.sent.numpy(), axis=0, return_index=True, return_inverse=True)
        sizes = np.array([len(tensorfile.header(self.tensors(int(row)))) for row in first], dtype=np.int64)
        return sizes[inverse.reshape(-1)]


def encode(packed: Payload) -> bytes:
    """Return one client's message as safetensors: only what is sent."""
    if len(packed.sent) != 1:
        raise ValueError(f"one client's payload is encoded at a time, not {len(packed.sent)}")
    message = io.BytesIO()
    tensorfile.write(message, packed.tensors(0))
    return message.getvalue()


def decode(message: bytes, names: Sequence[str]) -> Payload:
    """Return the payload that `encode` wrote, for a model with these layers."""
    try:
        tensors = {key: tensor.unsqueeze(0) for key, tensor in sorted(from_safetensors(message).items())}
    except SafetensorError as error:
        raise ValueError(f"the message is no payload: {error}") from error
    layers = {key: tensor for key, tensor in tensors.items() if layer_of(key)}
    values = {kind_of(key): tensor for key, tensor in tensors.items() if not layer_of(key)}
    sent = {layer_of(key) for key in layers}
    if unknown := sent - set(names):
        raise ValueError(f"the payload holds layers that the model does not have: {', '.join(sorted(unknown))}")
    layers = dict(sorted(layers.items(), key=lambda item: names.index(layer_of(item[0]))))  # in the model's order
    return Payload(layers, torch.tensor([[name in sent for name in names]]), tuple(names), values)
