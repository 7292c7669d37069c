"""How a peer's process waits for its turn, and says that a round is done."""

from __future__ import annotations

import sys

__all__ = ["DONE", "GO", "done", "wait"]

GO, DONE = "go", "<done>"


def wait() -> bool:
    """Wait for the next turn; return whether there is one."""
    return sys.stdin.readline().strip() == GO


def done() -> None:
    """Say that the round is over."""
    print(f"\n{DONE}", flush=True)
