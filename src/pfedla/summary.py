"""A run summed up: its final figures, what they were measured with, and what was sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pfedla import kernels
from pfedla.client import Setting
from pfedla.config import Experiment, algorithm_name
from pfedla.data.federation import FEW
from pfedla.facts import settings_of
from pfedla.layers import Layers
from pfedla.ledger import Ledger
from pfedla.models import PYTHON
from pfedla.privacy import DELTA, epsilon
from pfedla.result import Result
from pfedla.rounds import Outcome
from pfedla.version import __version__, commit

__all__ = ["result_of"]


def result_of(
    setting: Setting,
    experiment: Experiment,
    names: Sequence[str],
    samples: Sequence[Sequence[int]],  # each client's: to train on, to be scored on; 0 if that is not known
    outcome: Outcome,
    scored_on: str = "test",
) -> Result:
    """Sum a run up. The headline is the last round; the best round stands beside it as what it is."""
    history, ledger, objective = outcome.history, outcome.ledger, experiment.objective
    headline = f"{objective.headline}_mean"
    known = [record for record in history if record[headline] is not None]
    pick = max if objective.higher_is_better else min
    best = pick(known, key=lambda record: record[headline]) if known else {"round": None, headline: None}
    passes = (
        int(np.array([train for train, _ in samples])[ledger.arrays()["client"]].sum()) * setting.training.local_epochs
    )
    beside = ("round", "bytes_down", "bytes_up", "seconds", "clients", "missing")
    summary = {
        "algorithm": algorithm_name(experiment.algorithm),
        "dataset": "own data" if experiment.model.name == PYTHON else experiment.data.name,
        "clients": len(names),
        "rounds": experiment.schedule.rounds,
        "seed": experiment.schedule.seed,
        "scored_on": scored_on,
        "headline": objective.headline,
        "higher_is_better": objective.higher_is_better,
        "percent": objective.percent,
        **{key: figure for key, figure in history[-1].items() if key not in beside},
        f"{objective.headline}_weighted": _weighted(history[-1]["clients"].get(objective.headline, []), samples),
        "few_test_samples": sum(0 < test < FEW for _, test in samples),
        "best_round": best["round"],
        f"best_round_{headline}": best[headline],
        "bytes_down": ledger.down,
        "bytes_up": ledger.up,
        "overhead_down": ledger.overhead_down,
        "overhead_up": ledger.overhead_up,
        **_guarantee(setting, ledger),
        "seconds": round(outcome.seconds, 3),
        "samples_per_second": round(passes / outcome.seconds, 1),
        "version": __version__,
        "commit": commit(),
        "settings": settings_of(experiment),
        "compiled_loop": kernels.level(),
    }
    template, spec = setting.template, setting.spec
    models: Callable[[], Layers] = partial(dict, outcome.personalized)
    return Result(summary, history, outcome.diagnostics, ledger, tuple(names), template, spec, models)


def _guarantee(setting: Setting, ledger: Ledger) -> dict[str, Any]:
    """Return what a client's uploads reveal of it at most, if they are clipped: of who was asked most often."""
    privacy, algorithm = setting.privacy, setting.algorithm
    if privacy.clip is None:
        return {}
    asked = np.bincount(ledger.arrays()["client"], minlength=1).max()
    uploads = int(asked) if any(map(algorithm.uploads, setting.spec.names)) else 0
    delta = privacy.delta or DELTA
    spent = 0.0 if not uploads else epsilon(uploads, privacy.noise, delta) if privacy.noise else None
    return {"epsilon": spent, "delta": delta, "uploads_per_client": uploads}


def _weighted(values: list[float | None], samples: Sequence[Sequence[int]]) -> float | None:
    """Return the mean over clients weighted by the samples they are scored on; None if nobody has a value."""
    known = [(value, test) for value, (_, test) in zip(values, samples, strict=False) if value is not None]
    total = sum(test for _, test in known)
    return sum(value * test for value, test in known) / total if total else None
