"""Walk nested tuples and dictionaries: server state, messages, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from pfedla.errors import RunError
from pfedla.storage import is_mapped

__all__ = ["convert", "flatten", "restore", "transform"]

T = TypeVar("T")


def transform(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return the same nesting with `change(path, leaf)` for every leaf; a path reads `"theta/conv1"`."""
    if isinstance(value, dict):
        return {name: transform(part, change, _join(path, name)) for name, part in value.items()}
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        parts = [transform(part, change, _join(path, name)) for name, part in zip(names, value, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return change(path, value)


def flatten(value: object) -> dict[str, Tensor]:
    """Return every tensor by its path."""
    found: dict[str, Tensor] = {}

    def collect(path: str, leaf: object) -> None:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"state may hold tensors, tuples and dictionaries, not {type(leaf).__name__} (at {path!r})")
        found[path] = leaf

    transform(value, collect)
    return found


def restore(like: T, tensors: dict[str, Tensor], path: str = "") -> T:
    """Return a value shaped as `like` with the tensors of the same paths, checked for shape and type.

    Tensors of `like` that lie on disk are overwritten and returned, so that there is no second copy of them.
    """

    def find(path: str, expected: Tensor) -> Tensor:
        if path not in tensors:
            raise RunError(f"the checkpoint does not hold {path!r}: it belongs to another configuration")
        found = tensors[path]
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise RunError(
                f"the checkpoint's {path!r} is {found.dtype} {tuple(found.shape)}, "
                f"this configuration needs {expected.dtype} {tuple(expected.shape)}"
            )
        return expected.copy_(found) if is_mapped(expected) else found.clone()  # aligned: products round by that, too

    restored: T = transform(like, find, path)
    return restored


def convert(value: Any, kind: type | tuple[type, ...], to: Callable[[Any], Any]) -> Any:
    """Replace the leaves of a kind."""
    return transform(value, lambda _, leaf: to(leaf) if isinstance(leaf, kind) else leaf)


def _join(path: str, name: object) -> str:
    return f"{path}/{name}" if path else str(name)
