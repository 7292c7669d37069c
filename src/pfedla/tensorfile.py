"""Tensors as safetensors, written one after another; the library's own function copies all of them first."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import BinaryIO

import torch
from torch import Tensor

__all__ = ["checksum", "header", "write"]

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return what stands before the tensors' own bytes: its length, then names, types, shapes and places."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in _wide_first(tensors).items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a whole file."""
    file.write(header(tensors, metadata))
    for tensor in _wide_first(tensors).values():
        if tensor.numel():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0


def _wide_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sort by the size of a value, so that all are aligned, and by name."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
