"""Save and load state: NamedTuples and dictionaries of tensors, as safetensors, written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pfedla.errors import RunError
from pfedla.storage import is_mapped

__all__ = ["load_tensors", "restore", "save_tensors", "tensors_of"]

T = TypeVar("T")
TYPES = {torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bool: "BOOL"}


def tensors_of(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested tuples and dictionaries with its address, `"theta/conv1"`."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors_of(part, f"{path}/{key}" if path else str(key))
    elif isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        for key, part in zip(names, value, strict=True):
            yield from tensors_of(part, f"{path}/{key}" if path else str(key))
    else:
        raise TypeError(f"state may hold tensors, tuples and dictionaries, not {type(value).__name__} (at {path!r})")


def restore(like: T, tensors: dict[str, Tensor], path: str = "") -> T:
    """Return a value shaped as `like` with the tensors of the same addresses, checked for shape and type.

    Tensors of `like` that lie on disk are overwritten and returned, so that there is no second copy of them.
    """
    if isinstance(like, Tensor):
        if path not in tensors:
            raise RunError(f"the checkpoint does not hold {path!r}: it belongs to another configuration")
        found = tensors[path]
        if found.shape != like.shape or found.dtype != like.dtype:
            raise RunError(
                f"the checkpoint's {path!r} is {found.dtype} {tuple(found.shape)}, "
                f"this configuration needs {like.dtype} {tuple(like.shape)}"
            )
        return like.copy_(found) if is_mapped(like) else found  # type: ignore[return-value]
    if isinstance(like, dict):
        return {k: restore(v, tensors, f"{path}/{k}" if path else str(k)) for k, v in like.items()}  # type: ignore[return-value]
    assert isinstance(like, tuple)
    names = getattr(like, "_fields", range(len(like)))
    parts = [restore(part, tensors, f"{path}/{k}" if path else str(k)) for k, part in zip(names, like, strict=True)]
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def save_tensors(path: Path, value: object, metadata: dict[str, str] | None = None) -> None:
    """Write every tensor of `value` to `path`; a reader sees the old file or the new one, never half of it."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            _write(file, dict(tensors_of(value)), metadata or {})
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None
    part.replace(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError(f"cannot read {path}: {error}") from error


def _write(file: BinaryIO, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write safetensors tensor after tensor; the library's own function copies all of them to memory first."""
    wide_first = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # so that all are aligned
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key, tensor in wide_first.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in wide_first.values():
        if tensor.numel():
            file.write(tensor.contiguous().view(-1).numpy().data)
