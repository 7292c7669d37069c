"""Errors that a user can cause and mend: their text is the whole message, no traceback needed."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "ConfigError",
    "DataError",
    "ModelError",
    "PfedlaError",
    "RunError",
    "known_name",
    "nearest",
    "plain",
    "told",
    "unknown_name",
]

LONGEST = 500  # signs of a stranger's words
HERE = str(Path(__file__).parent)


class PfedlaError(Exception):
    """Something the user can mend; the message says what and how."""


class ConfigError(PfedlaError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(PfedlaError):
    """A data file is missing, damaged or foreign, or there are too few samples for a split."""


class ModelError(PfedlaError):
    """A model cannot be federated as it is."""


class RunError(PfedlaError):
    """A run cannot start, continue or be read."""


def plain(text: str) -> str:
    """Return a stranger's words as one short line without anything that a terminal or a log would obey."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:LONGEST])


def told(error: BaseException) -> str:
    """Return an error of the user's own code in one line: its kind, what it says, and the line of that code."""
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and not frame.filename.startswith((HERE, "<"))
    ]
    return f"{words} ({own[-1].filename}, line {own[-1].lineno})" if own else words


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint naming the valid name closest to `name`, or listing all if none is close."""
    valid = sorted(valid)
    if not valid:
        return "there is nothing to set"
    spelled = {known.casefold(): known for known in valid}
    close = difflib.get_close_matches(name.casefold(), spelled, n=1, cutoff=0.5)
    return f"did you mean {spelled[close[0]]!r}?" if close else f"choose one of {', '.join(valid)}"


def known_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return the valid name that `name` is, but for upper and lower case; refuse what is none."""
    spelled = {known.casefold(): known for known in valid}
    if name.casefold() not in spelled:
        raise unknown_name(kind, name, spelled.values())
    return spelled[name.casefold()]


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> ConfigError:
    """Return the error for a `name` that is not a `kind`."""
    return ConfigError(f"unknown {kind} {name!r}: {nearest(name, valid)}")
