"""What a run leaves on disk, and how an interrupted one goes on.

=====================  ===========================================================================
config.toml            the complete configuration; `pfedla run config.toml` repeats the run
metrics.jsonl          a line for each evaluated round
summary.json           the final figures
ledger.npz             bytes by round, client, layer and direction
alpha.npz              pFedLA's weights: `alpha (rounds, clients, layers, clients)`, `round`, `layers`;
                       with `peers = m` alpha has m + 1 columns, `candidates (rounds, clients, m + 1)`
models/                every client's personalized model, as safetensors
checkpoint.safetensors while the run is not complete: where to go on
=====================  ===========================================================================
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pfedla.checkpoint import load_tensors, restore, save_tensors
from pfedla.errors import RunError
from pfedla.layers import Layers
from pfedla.ledger import Ledger

__all__ = ["Moment", "RunDirectory"]

CONFIG, METRICS, SUMMARY, CHECKPOINT = (
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "checkpoint.safetensors",
)


class Moment(NamedTuple):
    """A run after round `t`: all that is needed to go on."""

    t: int
    state: Any
    clients: tuple[Layers, Tensor]
    ledger: Ledger
    history: list[dict[str, Any]]
    inspected: dict[int, dict[str, np.ndarray]]
    seconds: float


class RunDirectory:
    """A folder that holds one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: str, *, overwrite: bool = False) -> RunDirectory:
        """Make a new run's folder; one that holds a run already is refused unless `overwrite` is set."""
        directory = cls(path)
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file: choose another --out")
        if directory.holds_run:
            if not overwrite:
                state = "a complete" if directory.complete else "an unfinished"
                go_on = "" if directory.complete else f", --resume {path} to go on with it"
                raise RunError(f"{path} already holds {state} run: choose another --out{go_on}, or --overwrite it")
            directory._clear()
        elif path.is_dir() and any(path.iterdir()):
            raise RunError(f"{path} is not empty and holds no run: choose another --out")
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / CONFIG).write_text(config)
        except OSError as error:
            raise RunError(f"cannot write to {path}: {error.strerror}") from None
        return directory

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the folder of an unfinished run."""
        directory = cls(path)
        if not directory.holds_run:
            raise RunError(f"{path} holds no run to go on with: it has no {CONFIG}")
        if directory.complete:
            raise RunError(f"the run in {path} is complete: there is nothing to go on with")
        return directory

    @property
    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return (self.path / CONFIG).exists()

    @property
    def complete(self) -> bool:
        """Whether the run here reached its end."""
        return (self.path / SUMMARY).exists()

    def summary(self) -> dict[str, Any]:
        """Return the final figures of a complete run."""
        summary: dict[str, Any] = json.loads((self.path / SUMMARY).read_text())
        return summary

    def append(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def checkpoint(self, moment: Moment) -> None:
        """Save where the run stands."""
        ledger = {key: torch.from_numpy(x) for key, x in moment.ledger.arrays().items() if key != "layers"}
        inspected = {
            f"{t}": {name: torch.from_numpy(value) for name, value in record.items()}
            for t, record in moment.inspected.items()
        }
        value = {"state": moment.state, "clients": moment.clients, "ledger": ledger, "inspected": inspected}
        facts = {"t": moment.t, "seconds": moment.seconds, "layers": list(moment.ledger.layers)}
        save_tensors(self.path / CHECKPOINT, value, {"facts": json.dumps(facts)})

    def restore(self, state: Any, clients: tuple[Layers, Tensor]) -> Moment | None:
        """Return the saved moment, shaped as the given state, or None if there is none; later metrics are cut."""
        path = self.path / CHECKPOINT
        if not path.exists():
            (self.path / METRICS).unlink(missing_ok=True)
            return None
        tensors = load_tensors(path)
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["facts"])
        ledger = Ledger.of(
            {"layers": np.array(facts["layers"])}
            | {k.removeprefix("ledger/"): x.numpy() for k, x in tensors.items() if k.startswith("ledger/")}
        )
        inspected: dict[int, dict[str, np.ndarray]] = {}
        for key, tensor in tensors.items():
            if key.startswith("inspected/"):
                _, t, name = key.split("/", 2)
                inspected.setdefault(int(t), {})[name] = tensor.numpy()
        lines = (self.path / METRICS).read_text().splitlines() if (self.path / METRICS).exists() else []
        history = [record for record in map(_record, lines) if record and record["round"] <= facts["t"]]
        text = "".join(json.dumps(record) + "\n" for record in history)
        _write(self.path / METRICS, text)
        return Moment(
            t=facts["t"],
            state=restore(state, tensors, "state"),
            clients=restore(clients, tensors, "clients"),
            ledger=ledger,
            history=history,
            inspected=dict(sorted(inspected.items())),
            seconds=facts["seconds"],
        )

    def finish(
        self,
        summary: dict[str, Any],
        ledger: Ledger,
        inspected: dict[str, np.ndarray],
        models: Iterable[tuple[str, dict[str, Tensor]]],
    ) -> None:
        """Write the results; `summary.json` comes last, so that a folder with it is complete."""
        ledger.save(self.path / "ledger.npz")
        if "alpha" in inspected:
            layers = np.array(ledger.layers, dtype=np.str_)
            np.savez_compressed(self.path / "alpha.npz", layers=layers, **inspected)  # type: ignore[arg-type]
        (self.path / "models").mkdir(exist_ok=True)
        for name, tensors in models:
            contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(contiguous, self.path / "models" / f"{name}.safetensors")
        _write(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")
        (self.path / CHECKPOINT).unlink(missing_ok=True)

    def _clear(self) -> None:
        for name in (CONFIG, METRICS, SUMMARY, CHECKPOINT, "ledger.npz", "alpha.npz", "weights.png"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / "models", ignore_errors=True)


def _record(line: str) -> dict[str, Any] | None:
    """Read a line of metrics, unless it was cut off in the middle."""
    try:
        record: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record


def _write(path: Path, text: str) -> None:
    """Write a text file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
