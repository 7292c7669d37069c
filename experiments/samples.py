"""How many samples a client has: Local with several numbers of them, in the columns of the paper's Tables 1 and 2.

The paper does not say. Local depends on the data, the model and SGD alone, so its printed accuracy tells. Each column
is that of `pfedla paper` with 10 clients, seed 0, and as many steps for any number of samples as 200 samples take in 60
rounds on 28x28 images, and in 20 on CIFAR. Results are collected as JSON; what is there already is not measured again.

    python -m experiments.samples --json results/samples.json --data-dir ~/data
    python -m experiments.samples --json results/samples.json --print    # the table
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfedla.errors import PfedlaError
from pfedla.experiment import run_experiment
from pfedla.paper.grid import ITEMS, METHODS, Cell, Column, Wanted, columns_of, experiment_of
from pfedla.paper.printed import TABLE1, TABLE2

SIZES = (60, 100, 200, 400)
ROUNDS = {"EMNIST": 60, "FashionMNIST": 60, "CIFAR10": 20, "CIFAR100": 20}  # with 200 samples
LOCAL = METHODS[0]


def columns() -> list[tuple[Column, float]]:
    """Return the columns with 10 clients, and what the paper prints for Local."""
    return [
        (column, printed[LOCAL.name][column.place].mean)
        for name, printed in (("table1", TABLE1), ("table2", TABLE2))
        for column in columns_of(ITEMS[name], Wanted(clients=(10,)))
    ]


def measure(column: Column, samples: int, machine: dict[str, Any]) -> dict[str, Any]:
    """Return Local's figures with so many samples per client; why there are none, if the data are too few."""
    experiment = experiment_of(Cell(column, LOCAL, 0), "laptop", machine)
    rounds = round(ROUNDS[column.place.dataset] * 200 / samples)
    experiment = replace(
        experiment,
        data=replace(experiment.data, samples_per_client=samples),
        schedule=replace(experiment.schedule, rounds=rounds, eval_every=rounds),
    )
    about = {"column": column.name, "samples": samples, "rounds": rounds}
    try:
        summary = run_experiment(experiment).summary
    except PfedlaError as error:
        return {**about, "why_not": str(error)}
    return {**about, **{key: summary[key] for key in ("accuracy_mean", "commit", "compiled_loop")}}


def table(found: list[dict[str, Any]]) -> str:
    """Return what was collected as a Markdown table, in %."""
    known = {(row["column"], row["samples"]): row for row in found}
    lines = [f"| Local | {' | '.join(f'{samples} samples' for samples in SIZES)} | paper |", "| --- |" + " --- |" * 5]
    for column, printed in columns():
        rows = [known.get((column.name, samples), {}) for samples in SIZES]
        cells = [f"{100 * row['accuracy_mean']:.2f}" if "accuracy_mean" in row else "-" for row in rows]
        lines.append(f"| {column.name} | {' | '.join(cells)} | {printed:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is missing, collect it, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--data-dir")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--print", action="store_true", help="run nothing")
    options = parser.parse_args()
    found: list[dict[str, Any]] = json.loads(options.json.read_text()) if options.json.exists() else []
    machine = {key: value for key in ("data_dir", "workers") if (value := getattr(options, key)) is not None}
    done = {(row["column"], row["samples"]) for row in found}
    for samples in () if options.print else SIZES:
        for column, _ in columns():
            if (column.name, samples) not in done:
                found.append(measure(column, samples, machine))
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(table(found))


if __name__ == "__main__":
    main()
