"""What crosses the wire: a `Payload`.

A payload carries layers for some clients, says which of them are really sent, and how many examples stand
behind them. "Not sent" means "keep yours". The ledger counts payloads and a transport serialises them; what is
not in a payload, the other side cannot see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from pfedla.layers import STATS, Layers, kind_of, layer_of

__all__ = ["Payload", "decode", "encode"]

EXAMPLES = "#examples"


class Payload(NamedTuple):
    """Layers on their way between server and clients, one row a client."""

    layers: Layers  # {entry: (clients, numbers)}
    sent: Tensor  # (clients, layers) bool: a row that is not sent holds no information
    names: tuple[str, ...]  # the layers behind the columns of `sent`
    examples: Tensor  # (clients,) int64: training examples behind each row

    @classmethod
    def of(cls, layers: Layers, sent: Tensor, names: Sequence[str], examples: Tensor | None = None) -> Payload:
        """Build a payload, blanking out (NaN) whatever is not sent."""
        column = {name: index for index, name in enumerate(names)}
        kept = {}
        for key, tensor in layers.items():
            mask = sent[:, column[layer_of(key)]]  # (clients,)
            if mask.all():
                kept[key] = tensor
            elif mask.any():
                kept[key] = torch.where(mask[:, None], tensor, torch.nan)
        if examples is None:
            examples = torch.zeros(len(sent), dtype=torch.int64)
        return cls(kept, sent, tuple(names), examples)

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
        layers = {key: tensor[index] for key, tensor in self.layers.items()}
        return Payload(layers, self.sent[index], self.names, self.examples[index])

    @staticmethod
    def stack(payloads: Sequence[Payload]) -> Payload:
        """Join payloads client after client; a layer that only some of them send is blank in the others."""
        first = payloads[0]
        if any(p.names != first.names for p in payloads):
            raise ValueError("payloads of different models cannot be joined")
        like = {key: tensor for payload in payloads for key, tensor in payload.layers.items()}

        def rows(payload: Payload, key: str) -> Tensor:
            if key in payload.layers:
                return payload.layers[key]
            return torch.full((len(payload.sent), like[key].shape[1]), torch.nan, dtype=like[key].dtype)

        return Payload(
            {key: torch.cat([rows(payload, key) for payload in payloads]) for key in like},
            torch.cat([p.sent for p in payloads]),
            first.names,
            torch.cat([p.examples for p in payloads]),
        )

    def size(self) -> np.ndarray:
        """Return the bytes that each client's layers take on the wire: `(clients, layers)` int64."""
        width = np.zeros(len(self.names), dtype=np.int64)
        for key, tensor in self.layers.items():
            width[self.names.index(layer_of(key))] += tensor.shape[1] * tensor.element_size()
        return self.sent.numpy() * width


def encode(payload: Payload) -> bytes:
    """Return one client's payload as safetensors: only what is sent, and the number of examples."""
    if len(payload.sent) != 1:
        raise ValueError(f"one client's payload is encoded at a time, not {len(payload.sent)}")
    sent = {name for name, yes in zip(payload.names, payload.sent[0].tolist(), strict=True) if yes}
    tensors = {key: tensor[0].contiguous() for key, tensor in payload.layers.items() if layer_of(key) in sent}
    return to_safetensors({**tensors, EXAMPLES: payload.examples})


def decode(data: bytes, names: Sequence[str]) -> Payload:
    """Return the payload that `encode` wrote, for a model with these layers."""
    tensors = from_safetensors(data)
    examples = tensors.pop(EXAMPLES)
    sent = {layer_of(key) for key in tensors}
    if unknown := sent - set(names):
        raise ValueError(f"the payload holds layers that the model does not have: {', '.join(sorted(unknown))}")
    layers = {key: tensor.unsqueeze(0) for key, tensor in tensors.items()}
    return Payload(layers, torch.tensor([[name in sent for name in names]]), tuple(names), examples)
