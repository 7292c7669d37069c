"""How things are measured: in turns, in fresh processes, by peak memory."""

from __future__ import annotations

import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = [
    "Bystanders",
    "Row",
    "copy_bandwidth",
    "fresh",
    "in_turns",
    "matmul_rate",
    "reset_peak",
    "resident",
    "seconds",
]

Row = dict[str, str | float | int | None]  # a line of a table: {column: value}
T = TypeVar("T")


def seconds(work: Callable[[], object]) -> float:
    """Return how long something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(contestants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return everyone's median seconds; they take turns, after a first turn that is not counted."""
    times = [{name: seconds(work) for name, work in contestants.items()} for _ in range(repeats + 1)]
    return {name: statistics.median(turn[name] for turn in times[1:]) for name in contestants}


def fresh(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new process, so that its memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class Bystanders:
    """How busy the cores were with other processes' work, from creation on. Linux only."""

    def __init__(self) -> None:
        self._start = self._counts()

    def share(self) -> float:
        """Return the share of the cores' time; children count as other processes until they have ended."""
        busy, everything, own = (after - before for before, after in zip(self._start, self._counts(), strict=True))
        return max(0.0, (busy - own) / everything)

    @staticmethod
    def _counts() -> tuple[float, float, float]:
        numbers = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
        idle = numbers[3] + numbers[4]
        return (sum(numbers) - idle) / tick, sum(numbers) / tick, sum(os.times()[:4])


def resident(what: str = "VmRSS", process: int | str = "self") -> int:
    """Return a process's resident bytes: now (`VmRSS`) or at most since `reset_peak` (`VmHWM`). Linux only."""
    text = Path(f"/proc/{process}/status").read_text()
    found = re.search(rf"^{what}:\s+(\d+) kB", text, flags=re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Start the peak of resident memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def matmul_rate(size: int) -> float:
    """Return the floating-point operations a second of a dense square product, with torch's threads."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    out = torch.empty(size, size)
    best = min(seconds(lambda: torch.mm(a, b, out=out)) for _ in range(7))
    return 2 * size**3 / best


def copy_bandwidth(size: int) -> float:
    """Return the bytes a second that a copy of `size` bytes reads and writes, with torch's threads."""
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    best = min(seconds(lambda: target.copy_(source)) for _ in range(7))
    return 2 * size / best
