"""Signals that end a run: Ctrl-C, and what schedulers (SIGTERM) and closing terminals (SIGHUP) send."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["SIGNALS", "Stopped", "stoppable", "uninterrupted"]

OTHERS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
SIGNALS = (signal.SIGINT, *OTHERS)


class Stopped(KeyboardInterrupt):
    """A signal other than Ctrl-C asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what is inside as Ctrl-C does, unless somebody else handles or ignores them."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise Stopped(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            number: signal.signal(number, stop) for number in OTHERS if signal.getsignal(number) == signal.SIG_DFL
        }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold these signals back until the block is done, so that state and its record change together or not at all."""
    asked: list[tuple[int, FrameType | None]] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (number for number in SIGNALS if callable(signal.getsignal(number))):
            before[number] = signal.signal(number, lambda got, frame: asked.append((got, frame)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if asked:
            before[asked[-1][0]](*asked[-1])
