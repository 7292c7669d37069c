"""Runs as pages and figures see them: where they lie, what they are called, how they stand.

Nothing here imports what a configuration names: a run's folder need not be trusted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonpath
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.config import read_tables
from pfedla.errors import RunError
from pfedla.record import RunRecord

__all__ = ["Run", "find_runs", "spread"]

DEPTH = 6  # folders below the one that is given, in which runs are looked for


@dataclass(frozen=True)
class Run:
    """A run's record, with a name among others."""

    record: RunRecord
    name: str  # its folder, from the one that all have in common
    alone: bool = False  # no other run differs from it in the seed alone, whatever its folder is called

    @property
    def id(self) -> str:
        """A short word for the run's folder that is safe anywhere."""
        return hashlib.sha256(str(self.record.path).encode(errors="surrogateescape")).hexdigest()[:16]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What was known from the start."""
        return self.record.facts()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the result, as plain tables."""
        found = self.facts.get("settings") or read_tables(self.record.config)
        return {name: table for name, table in found.items() if isinstance(table, dict)}

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """All evaluated rounds so far."""
        return self.record.history()

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """Return one setting."""
        return self.settings.get(section, {}).get(key, default)

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.setting("schedule", "seed", 0))

    @property
    def algorithm(self) -> str:
        """The method's name."""
        return str(self.setting("algorithm", "name", "pfedla"))

    @property
    def label(self) -> str:
        """The name that runs share which differ in the seed alone."""
        return (not self.alone and re.sub(rf"-seed{self.seed}$", "", self.name)) or self.name

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        known = [str(name) for name in self.facts.get("names", ())]
        clients: list[Any] = next(iter(self.history[-1]["clients"].values()), []) if self.history and not known else []
        return known or [f"client-{i}" for i in range(len(clients))]

    @property
    def headline(self) -> str:
        """The metric that counts; of older runs, the one whose worst client is known."""
        if known := self.facts.get("headline"):
            return str(known)
        last = self.history[-1] if self.history else {}
        return next((key.removesuffix("_worst") for key in last if key.endswith("_worst")), "accuracy")

    @property
    def percent(self) -> bool:
        """Whether the headline is shown as a percentage."""
        return bool(self.facts.get("percent", self.headline == "accuracy"))

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the headline is better."""
        return bool(self.facts.get("higher_is_better", self.headline == "accuracy"))

    @property
    def dataset(self) -> str:
        """What the data is called."""
        if self.facts.get("model") == "python":
            return "own data"
        folder = self.setting("data", "folder")
        return (
            Path(str(folder)).name.removesuffix(".npz")
            if folder
            else str(self.setting("data", "dataset", "fashion-mnist-10k"))
        )

    def groups(self) -> np.ndarray | None:
        """Return the hidden group of each client, None where there are none."""
        known = self.facts.get("groups")
        return np.array(known) if isinstance(known, list) and len(known) == len(self.names) else None


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs in folders and below them.

    Symbolic links to folders are not followed, and a run with a file that leads out of the given folder is left out.
    """
    found: dict[Path, RunRecord] = {}
    for path in paths:
        if not path.is_dir():
            raise RunError(f"{path} is no folder that holds runs")
        here = list(_below(path, path.resolve(), DEPTH))
        if not here and len(paths) > 1:
            raise RunError(f"{path} holds no run")
        found |= {record.path.resolve(): record for record in here}
    if not found:
        return []
    common = Path(commonpath([folder.parent for folder in found]))
    return _apart(
        [Run(record, str(folder.relative_to(common))) for folder, record in sorted(found.items(), key=_natural)]
    )


def _apart(runs: Sequence[Run]) -> list[Run]:
    """Return runs, those of one label but other settings under names of their own."""
    kinds: dict[str, set[str]] = {}
    settings = [_kind(run) for run in runs]
    for label, kind in settings:
        kinds.setdefault(label, set()).add(kind)
    return [
        replace(run, alone=True) if len(kinds[label]) > 1 else run
        for run, (label, _) in zip(runs, settings, strict=True)
    ]


def _kind(run: Run) -> tuple[str, str]:
    """Return a run's label, and the settings that runs of one label share; none if it cannot be read."""
    try:
        schedule = {key: value for key, value in run.settings.get("schedule", {}).items() if key != "seed"}
        return run.label, json.dumps(run.settings | {"schedule": schedule}, sort_keys=True, default=str)
    except Exception:  # a damaged record can raise nearly anything
        return run.name, ""


def _natural(item: tuple[Path, RunRecord]) -> list[tuple[int, str]]:
    """Order as people do: `seed10` comes after `seed9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(item[0]))]


def _below(folder: Path, root: Path, depth: int) -> Iterator[RunRecord]:
    record = RunRecord(folder)
    try:
        entries = sorted(folder.iterdir())
        if record.exists:
            links = (entry.resolve() for entry in entries if entry.is_symlink())
            if all(link.is_relative_to(root) for link in links):
                yield record
            return
        for entry in entries if depth else ():
            if not entry.name.startswith(".") and entry.is_dir() and not entry.is_symlink():
                yield from _below(entry, root, depth - 1)
    except OSError:  # not ours to read, or gone meanwhile
        return


def spread(count: int, most: int) -> list[int]:
    """Return at most so many of `count` places, the first and the last among them, evenly spread."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist())) if count else []
