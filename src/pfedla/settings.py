"""Typed settings: every field's type and range stands with the field, and one place checks them.

::

    @dataclass(frozen=True)
    class Training(Settings):
        section: ClassVar[str] = "training"
        local_epochs: Count = 10
        momentum: Annotated[float, Range(least=0, below=1)] = 0.0
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np

from pfedla.errors import ConfigError, unknown_name

__all__ = [
    "RESOLVED",
    "Count",
    "NonNegative",
    "Positive",
    "Range",
    "Settings",
    "Share",
    "build",
    "described",
    "name_of",
    "names_of",
]

T = TypeVar("T", bound="Settings")
RESOLVED = {"resolved": True}  # metadata of a field that a method fills in itself and configuration does not show
LARGEST = float(np.finfo(np.float32).max)  # models compute in 32 bits
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list", dict: "a table"}


@dataclass(frozen=True)
class Range:
    """The values a number may have; floating-point ones must be finite, too."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {bound:.15g}" for word, bound in bounds.items() if bound is not None)


Count = Annotated[int, Range(least=1)]
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]


@dataclass(frozen=True)
class Settings:
    """A section of the configuration; what does not fit a field's type or range is refused when it is made."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        """Check every field, and bring whole numbers and lists into the type that is asked for."""
        hints = _hints(type(self))  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
        for name in names_of(self):
            value = _fit(getattr(self, name), hints[name], f"{self.section}.{name}")
            object.__setattr__(self, name, value)


def names_of(settings: Settings | type[Settings]) -> list[str]:
    """Return the names of the settings, without what a method fills in itself."""
    return [field.name for field in dataclasses.fields(settings) if "resolved" not in field.metadata]


def name_of(settings: Settings, known: Mapping[str, type]) -> str:
    """Return the name by which configuration knows a class of settings: a short one, or `package.module:Class`."""
    kind = type(settings)
    return next((name for name, other in known.items() if other is kind), f"{kind.__module__}:{kind.__qualname__}")


def build(kind: type[T], table: Mapping[str, Any]) -> T:
    """Make settings from a table, strictly: unknown names are refused with the nearest valid one."""
    names = names_of(kind)
    for key in table:
        if key not in names:
            of = f" (of {kind.__name__})" if kind.section in ("algorithm", "split", "objective") else ""
            raise unknown_name(f"setting{of}", f"{kind.section}.{key}", [f"{kind.section}.{name}" for name in names])
    try:
        return kind(**table)
    except TypeError as error:
        raise ConfigError(f"{kind.section}: {kind.__name__} cannot be made from a table: {error}") from None


def described(kind: type[Settings]) -> list[tuple[str, str, str]]:
    """Return the name of each setting, what it may be, and its default, in words."""
    hints, fields = _hints(kind), {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]

    def default(field: dataclasses.Field[Any]) -> str:
        value = field.default_factory() if callable(field.default_factory) else field.default
        if value is dataclasses.MISSING:
            return "none: it must be set"
        if value is None or value in ((), {}):
            return "-"
        return str(value).lower() if isinstance(value, bool) else str(value)

    return [(name, _in_words(hints[name]), default(fields[name])) for name in names_of(kind)]


def _in_words(hint: Any) -> str:
    """Return what a setting may be, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits = [str(limit) for limit in arguments[1:] if isinstance(limit, Range)]
        return " ".join([_in_words(arguments[0]), *limits])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_in_words(argument) for argument in arguments if argument is not type(None))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"a list, each {_in_words(arguments[0])}"
    return KINDS.get(origin or hint, "an object, from Python alone")


@cache
def _hints(kind: Callable[..., Settings]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise ConfigError(f"the settings of {kind.__qualname__} have a type that is not known there: {error}") from None


def _fit(value: Any, hint: Any, where: str) -> Any:
    """Return `value` as the type `hint` asks for, or refuse it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, np.generic):
        value = value.item()
    if origin is Annotated:
        value, limits = _fit(value, arguments[0], where), [limit for limit in arguments[1:] if isinstance(limit, Range)]
        for limit in limits:
            if value is not None and value not in limit:
                raise ConfigError(f"{where} = {value} must be {limit}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        *others, last = (argument for argument in arguments if argument is not type(None))
        for other in others:
            with suppress(ConfigError):
                return _fit(value, other, where)
        return _fit(value, last, where)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where} = {value!r}: choose one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_fit(part, arguments[0], where) for part in value)
    if origin is dict and isinstance(value, Mapping):
        return {str(key): _fit(part, arguments[1], where) for key, part in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{where} = {str(value)[:20]}... must fit into 64 bits")
    wanted = origin or hint
    if wanted not in KINDS:
        return value  # of a method's own type, which no file can hold
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{where} = {value!r} must be {KINDS[wanted]}")
    if wanted is float and not abs(value) <= LARGEST:
        raise ConfigError(f"{where} = {value} must be finite" + (", in 32 bits, too" if math.isfinite(value) else ""))
    return value
