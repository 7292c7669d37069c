"""How well newcomers do: some clients of a federation are left out, the others train, and each of them joins.

Beside pFedLA's newcomer stand FedAvg's model, as it is and trained on by the newcomer, and a client that trains alone
from the first model, as many rounds. Every line is the mean over newcomers; results are collected as JSON.

    python -m experiments.newcomers experiments/methods-cifar10-non-iid-1.toml --seeds 3 --json results/newcomers.json
    python -m experiments.newcomers --json results/newcomers.json    # the table
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, Local, PFedLA
from pfedla.config import Experiment
from pfedla.data.federation import Federation
from pfedla.experiment import federation_of, run_experiment
from pfedla.newcomer import join_with
from pfedla.version import commit

ROUNDS = (0, 1, 5)


def without(federation: Federation, clients: Sequence[int]) -> Federation:
    """Return a federation without some of its clients."""
    kept = [client for client in federation.data if client not in clients]
    groups = tuple(federation.groups[client] for client in kept) if federation.groups else None
    return federation._replace(
        data={place: federation.data[client] for place, client in enumerate(kept)},
        counts=federation.counts[kept],
        names=tuple(federation.names[client] for client in kept),
        groups=groups,
    )


def measure(experiment: Experiment, newcomers: int, gradients: int) -> list[dict[str, Any]]:
    """Return a line for each method: the newcomers' mean headline after 0, 1 and 5 rounds."""
    federation = federation_of(experiment)
    left_out = [place * len(federation.data) // newcomers for place in range(newcomers)]
    others, headline = without(federation, left_out), experiment.objective.headline
    rows = []
    settings: dict[str, tuple[Algorithm[Any], int]] = {
        "pfedla": (PFedLA(), gradients),
        "pfedla, no gradients": (PFedLA(), 0),
        "fedavg": (FedAvg(), 0),
        "local": (Local(), 0),
    }
    with tempfile.TemporaryDirectory() as folder:
        for label, (algorithm, few) in settings.items():
            out = Path(folder, type(algorithm).__name__)
            if not out.exists():
                schedule = replace(
                    experiment.schedule, rounds=1 if isinstance(algorithm, Local) else experiment.schedule.rounds
                )
                run_experiment(replace(experiment, algorithm=algorithm, schedule=schedule), out, federation=others)
            found = [
                join_with(
                    out, federation.data[client], name=federation.names[client], rounds=max(ROUNDS), gradients=few
                )
                for client in left_out
            ]
            rows.append(
                {"method": label}
                | {str(t): round(float(np.mean([x.history[t][headline] for x in found])), 4) for t in ROUNDS}
            )
    return rows


def table(found: dict[str, Any]) -> str:
    """Return what was collected as a Markdown table: mean ± standard deviation over seeds, in %."""
    columns = list(dict.fromkeys(key.partition(", seed")[0] for key in found))
    methods = list(dict.fromkeys(row["method"] for one in found.values() for row in one["rows"]))
    head = [f"{column}, after {t}" for column in columns for t in ROUNDS]
    lines = [f"| newcomer of | {' | '.join(head)} |", "| --- |" + " --- |" * len(head)]
    for method in methods:
        cells = []
        for column in columns:
            rows = [row for key, one in found.items() if key.startswith(f"{column},") for row in one["rows"]]
            for t in ROUNDS:
                values = [100 * row[str(t)] for row in rows if row["method"] == method]
                spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
                cells.append(f"{np.mean(values):.2f}{spread}" if values else "-")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--newcomers", type=int, default=3)
    parser.add_argument("--gradients", type=int, default=10)
    parser.add_argument("--validation", type=float, help="score on this share of the training samples, not on test")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--data-dir")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    if not options.configs:
        sys.stdout.write(table(found))
    for config in options.configs:
        for seed in range(options.seeds):
            key = f"{config.stem}, seed {seed}"
            if key in found:
                continue
            experiment = Experiment.load(config)
            schedule = replace(experiment.schedule, seed=seed, rounds=options.rounds or experiment.schedule.rounds)
            machine = replace(experiment.machine, workers=options.workers, data_dir=options.data_dir)
            data = replace(experiment.data, validation=options.validation)
            rows = measure(
                replace(experiment, schedule=schedule, machine=machine, data=data), options.newcomers, options.gradients
            )
            found[key] = {"commit": commit(), "rounds": schedule.rounds, "newcomers": options.newcomers, "rows": rows}
            sys.stdout.write("\n  ".join([key, *map(str, rows)]) + "\n")
            if options.json:
                options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
