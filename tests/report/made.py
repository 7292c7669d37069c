"""Run folders that look as if somebody had trained for hours, made in a moment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from pfedla.ledger import Ledger
from pfedla.record import RunRecord
from pfedla.result import Result


def line(rng: np.random.Generator, t: int, clients: int, size: int, headline: str = "accuracy") -> dict[str, Any]:
    """Make the metrics of a round."""
    before = np.clip(0.9 - 0.5 / t + rng.normal(0, 0.05, clients), 0, 1)
    after = np.clip(before + rng.normal(0, 0.02, clients), 0, 1)
    return {
        "round": t,
        f"{headline}_mean": float(before.mean()),
        f"{headline}_std": float(before.std()),
        f"{headline}_class_prior": float(before.mean()) + 0.01,
        f"{headline}_worst": float(before.min()),
        f"{headline}_after_training": float(after.mean()),
        "bytes_down": t * size,
        "bytes_up": t * size,
        "seconds": 1.5 * t,
        "clients": {headline: before.round(4).tolist(), f"{headline}_after_training": after.round(4).tolist()},
    }


def create(path: Path, *, algorithm: str = "pfedla", seed: int = 0, rounds: int = 6, **facts: Any) -> RunRecord:
    """Begin a run."""
    clients, classes = len(facts["names"]), 4
    settings = {
        "algorithm": {"name": algorithm},
        "data": {"dataset": "fashion-mnist-10k", "clients": clients},
        "split": {"name": "non-iid-1"},
        "schedule": {"seed": seed, "rounds": rounds},
    }
    known = {
        "version": "0",
        "model": "mlp",
        "classes": [f"class {c}" for c in range(classes)],
        "samples": [[20, 12]] * clients,
        "holdings": [{str(i % classes): [15, 9], str((i + 1) % classes): [5, 3]} for i in range(clients)],
        "headline": "accuracy",
        "percent": True,
        "higher_is_better": True,
        "scored_on": "test",
        "settings": settings,
        **facts,
    }
    return RunRecord.create(path, tomli_w.dumps(settings), known)


def made(
    path: Path,
    *,
    clients: int = 6,
    rounds: int = 6,
    every: int = 1,
    layers: Sequence[str] = ("conv", "fc"),
    names: Sequence[str] | None = None,
    weights: bool = True,
    retained: bool = False,
    seed: int = 0,
    **more: Any,
) -> RunRecord:
    """Make a complete run."""
    rng = np.random.default_rng(seed)
    names = list(names or (f"client-{i}" for i in range(clients)))
    record = create(path, seed=seed, rounds=rounds, names=names, **more)
    size = 4 * 10 * len(layers) * len(names)
    history = [line(rng, t, len(names), size) for t in range(every, rounds + 1, every)]
    for one in history:
        record.append(one)
    diagnostics: dict[str, np.ndarray] = {}
    if weights:
        kept = np.array([one["round"] for one in history])[-200:]
        alpha = rng.dirichlet(np.ones(len(names)), (len(kept), len(names), len(layers))).astype(np.float32)
        diagnostics = {"round": kept, "alpha": alpha}
        if retained:
            diagnostics["retained"] = rng.random((len(kept), len(names), len(layers))) < 0.5
    lines = len(names) * min(rounds, 3)
    arrays = {
        "round": np.repeat(np.arange(1, min(rounds, 3) + 1), len(names)),
        "client": np.tile(np.arange(len(names)), min(rounds, 3)),
        **{way: np.full((lines, len(layers)), 40, np.int64) for way in ("down", "up")},
        **{f"{way}:header": np.full(lines, 7, np.int64) for way in ("down", "up")},
        "layers": np.array(layers, dtype=np.str_),
    }
    ledger = Ledger.of(arrays)
    summary = {**{key: x for key, x in history[-1].items() if key != "clients"}, "seed": seed}
    record.finish(Result(summary, history, diagnostics, ledger, tuple(names), None, None, dict))
    return record
