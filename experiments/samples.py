"""How many samples a client has, and how many more of its dominant classes: Local with several numbers of both.

The paper does not say. Local depends on the data, the model and SGD alone, so its printed accuracy tells. Columns are
those of `pfedla paper` with 10 clients, seed 0, and as many passes over samples for any number of them as 200 take in
60 rounds on 28x28 images, and in 20 on CIFAR. Results are collected as JSON; what is there is not measured again.

    python -m experiments.samples --json results/samples.json --data-dir ~/data
    python -m experiments.samples --json results/samples.json --print    # the tables
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pfedla.data.splits import NonIID2
from pfedla.errors import ConfigError
from pfedla.experiment import federation_of, run_experiment
from pfedla.paper.grid import ITEMS, METHODS, Cell, Column, Wanted, columns_of, experiment_of, facts_of
from pfedla.paper.printed import TABLE1, TABLE2

SIZES = (60, 100, 200, 400)
DOMINANCES = (3.0, 6.0, 10.0, 15.0)  # above 17, clients of 200 samples cannot hold all of 100 classes
ROUNDS = {"EMNIST": 60, "FashionMNIST": 60, "CIFAR10": 20, "CIFAR100": 20}  # with 200 samples
LOCAL = METHODS[0]


class Point(NamedTuple):
    """What is tried in a column: a number of samples, and in non-IID_2 how many times others' a dominant class has."""

    column: str
    samples: int
    dominance: float | None


def columns() -> dict[Column, float]:
    """Return the columns with 10 clients, and what the paper prints for Local."""
    return {
        column: printed[LOCAL.name][column.place].mean
        for name, printed in (("table1", TABLE1), ("table2", TABLE2))
        for column in columns_of(ITEMS[name], Wanted(clients=(10,)))
    }


def own_dominance(column: Column) -> float | None:
    """Return how many times the others' samples a dominant class has in a column, None if none is dominant."""
    split = facts_of(column, "laptop").split
    return split.dominance if isinstance(split, NonIID2) else None


def plan() -> list[tuple[Column, Point]]:
    """Return what is tried: all sizes as the columns are, then 200 samples with every dominance."""
    known = columns()
    found = [(column, Point(column.name, size, own_dominance(column))) for size, column in product(SIZES, known)]
    skewed = [column for column in known if own_dominance(column)]
    found += [(column, Point(column.name, 200, times)) for times, column in product(DOMINANCES, skewed)]
    return list(dict.fromkeys(found))


def measure(column: Column, point: Point, machine: dict[str, Any]) -> dict[str, Any]:
    """Return Local's figures at a point; why there are none, if the split refuses so few samples."""
    experiment = experiment_of(Cell(column, LOCAL, 0), "laptop", machine)
    rounds = round(ROUNDS[column.place.dataset] * 200 / point.samples)
    split = experiment.split
    if isinstance(split, NonIID2) and point.dominance:
        split = replace(split, dominance=point.dominance)
    experiment = replace(
        experiment,
        data=replace(experiment.data, samples_per_client=point.samples),
        split=split,
        schedule=replace(experiment.schedule, rounds=rounds, eval_every=rounds),
    )
    about = {**point._asdict(), "rounds": rounds}
    try:
        federation = federation_of(experiment)
    except ConfigError as error:  # the split refuses so few
        return {**about, "why_not": str(error)}
    summary = run_experiment(experiment, federation=federation).summary
    return {**about, **{key: summary[key] for key in ("accuracy_mean", "commit", "compiled_loop")}}


def table(found: list[dict[str, Any]]) -> str:
    """Return what was collected as two Markdown tables, in %: by the number of samples, and by the dominance."""
    known = {point_of(row): 100 * row["accuracy_mean"] for row in found if "accuracy_mean" in row}

    def line(column: Column, printed: float, points: list[Point]) -> str:
        cells = [f"{known[point]:.2f}" if point in known else "-" for point in points]
        return f"| {' | '.join([column.name, *cells, f'{printed:.2f}'])} |\n"

    text = f"| Local | {' | '.join(f'{samples} samples' for samples in SIZES)} | paper |\n"
    text += f"{'| --- ' * (len(SIZES) + 2)}|\n"
    for column, printed in columns().items():
        text += line(column, printed, [Point(column.name, samples, own_dominance(column)) for samples in SIZES])
    text += f"\n| Local, 200 samples | {' | '.join(f'{times:g} times' for times in DOMINANCES)} | paper |\n"
    text += f"{'| --- ' * (len(DOMINANCES) + 2)}|\n"
    for column, printed in columns().items():
        if own_dominance(column):
            text += line(column, printed, [Point(column.name, 200, times) for times in DOMINANCES])
    return text


def point_of(row: dict[str, Any]) -> Point:
    """Return what a row was measured at."""
    return Point(*(row[key] for key in Point._fields))


def main() -> None:
    """Measure what is missing, collect it, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--data-dir")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--print", action="store_true", help="run nothing")
    options = parser.parse_args()
    found: list[dict[str, Any]] = json.loads(options.json.read_text()) if options.json.exists() else []
    machine = {key: value for key in ("data_dir", "workers") if (value := getattr(options, key)) is not None}
    done = set(map(point_of, found))
    for column, point in () if options.print else plan():
        if point not in done:
            found.append(measure(column, point, machine))
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(table(found))


if __name__ == "__main__":
    main()
