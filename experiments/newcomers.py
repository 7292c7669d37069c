"""How well newcomers do: some clients of a federation are left out, the others train, and each of them joins.

Beside the newcomers of pFedLA and pFedLA-X stand FedAvg's model, as it is and trained on by the newcomer, FedAvg-FT's,
which is fine-tuned before it is scored, and a client that trains alone from the first model, as many rounds. Every line
is the mean over newcomers; results are collected as JSON with their settings, and what is there already is not measured
again.

    python -m experiments.newcomers experiments/methods-cifar10-non-iid-1.toml --seeds 3 --json results/newcomers.json
    python -m experiments.newcomers --json results/newcomers.json    # the table
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from pfedla import kernels
from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, FedAvgFT, Local, PFedLA, PFedLAX
from pfedla.config import Experiment
from pfedla.data.federation import Federation
from pfedla.experiment import federation_of, run_experiment
from pfedla.facts import flat, settings_of
from pfedla.newcomer import join_with
from pfedla.version import commit

ROUNDS = (0, 1, 5)
METHODS: dict[str, tuple[Algorithm[Any], bool]] = {  # whether gradients choose where newcomers start
    "pfedla": (PFedLA(), True),
    "pfedla, no gradients": (PFedLA(), False),
    "pfedla-x": (PFedLAX(), True),
    "pfedla-x, no gradients": (PFedLAX(), False),
    "fedavg": (FedAvg(), False),
    "fedavg-ft": (FedAvgFT(), False),
    "local": (Local(), False),
}


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


def measure(experiment: Experiment, methods: Sequence[str], newcomers: int, gradients: int) -> list[dict[str, Any]]:
    """Return a line for each method: the newcomers' mean headline after 0, 1 and 5 rounds."""
    federation = federation_of(experiment)
    left_out = [place * len(federation.data) // newcomers for place in range(newcomers)]
    others, headline = without(federation, left_out), experiment.objective.headline
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for label in methods:
            algorithm, chooses = METHODS[label]
            out = Path(folder, type(algorithm).__name__)
            if not out.exists():
                schedule = replace(
                    experiment.schedule, rounds=1 if isinstance(algorithm, Local) else experiment.schedule.rounds
                )
                run_experiment(replace(experiment, algorithm=algorithm, schedule=schedule), out, federation=others)
            few = gradients if chooses else 0
            found = [
                join_with(out, federation.data[i], name=federation.names[i], rounds=max(ROUNDS), gradients=few)
                for i in left_out
            ]
            scores = {str(t): round(float(np.mean([x.history[t][headline] for x in found])), 4) for t in ROUNDS}
            about = {"commit": commit(), "compiled_loop": kernels.level(), "settings": asdict(algorithm)}
            rows.append({"method": label, **about, **scores})
    return rows


def table(found: dict[str, Any]) -> str:
    """Return what was collected as a Markdown table: mean ± standard deviation over seeds, in %."""
    columns = list(dict.fromkeys(key.partition(", seed")[0] for key in found))
    measured = {row["method"] for one in found.values() for row in one["rows"]}
    methods = [method for method in METHODS if method in measured]
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
    parser.add_argument("--method", action="append", choices=METHODS, help="by default all")
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
            experiment = Experiment.load(config)
            schedule = replace(experiment.schedule, seed=seed, rounds=options.rounds or experiment.schedule.rounds)
            machine = replace(experiment.machine, workers=options.workers, data_dir=options.data_dir)
            data = replace(experiment.data, validation=options.validation)
            experiment = replace(experiment, schedule=schedule, machine=machine, data=data)
            settings = {name: table for name, table in settings_of(experiment).items() if name != "algorithm"}
            about = {"newcomers": options.newcomers, "gradients": options.gradients, **flat(settings)}
            one = found.setdefault(key, {**about, "rows": []})
            differing = [name for name in about if one.get(name) != about[name]]
            differing += [row["method"] for row in one["rows"] if row["settings"] != asdict(METHODS[row["method"]][0])]
            if differing:
                parser.error(f"{key} was measured with other settings ({', '.join(differing)}): name another file")
            done = {row["method"] for row in one["rows"]}
            missing = [method for method in options.method or METHODS if method not in done]
            rows = measure(experiment, missing, options.newcomers, options.gradients) if missing else []
            one["rows"] += rows
            sys.stdout.write("\n  ".join([key, *map(str, rows)]) + "\n")
            if options.json:
                options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
