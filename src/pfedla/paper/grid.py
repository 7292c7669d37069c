"""What is run for each table and figure: columns, methods, seeds, and how much of it at which scale.

A column is an experiment, one of the files in `experiments/`, and its results are one file of the same name. A cell is
one method with one seed in one column. Tables and figures share cells: Table 3 starts from those of Table 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pfedla.comparison import Variant, parse_variant
from pfedla.config import Experiment, Tables, merge, read_tables
from pfedla.data.datasets import DATASETS as IMAGES
from pfedla.data.datasets import DEFAULT_DATASET
from pfedla.errors import ConfigError, unknown_name
from pfedla.paper.printed import CLIENTS, DATASETS, Place

__all__ = [
    "ADAM",
    "ITEMS",
    "KEEP",
    "LITERAL",
    "METHODS",
    "PER_ROUND",
    "SCALES",
    "SIMILARITY",
    "SLUGS",
    "Cell",
    "Column",
    "Item",
    "Method",
    "Scale",
    "Wanted",
    "cells_of",
    "check_methods",
    "columns_of",
    "experiment_of",
    "facts_of",
    "methods_of",
    "rows_of",
    "seconds_of",
]

Scale = Literal["smoke", "laptop", "paper"]
SCALES: dict[Scale, str] = {
    "smoke": f"a trial of the machinery: {DEFAULT_DATASET} in place of every data set, 2 rounds, 4 local epochs",
    "laptop": "the paper's settings, with fewer rounds and more test images",
    "paper": "the paper's settings and rounds, with more test images",
}
SLUGS = dict(zip(DATASETS, ("emnist", "fashion-mnist", "cifar10", "cifar100"), strict=True))
TELLING = ("CIFAR10", "FashionMNIST", "EMNIST", "CIFAR100")  # the order in which columns are run
FIGURE = "fig"  # how figures' names begin, and those of their own columns
ROUNDS = {10: 600, 100: 2500}  # the paper's; its figures' are not printed: 600


class Method(NamedTuple):
    """A row: what tables call it, how `pfedla compare` is asked for it, and whether the paper has it."""

    name: str
    spec: str
    printed: bool = True

    @property
    def variant(self) -> Variant:
        """The method's settings, under the label that results have."""
        return parse_variant(self.spec)

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return self.spec.partition(",")[0]


class Column(NamedTuple):
    """An experiment: the name of its file, and of that of its results; and what the paper calls it."""

    name: str
    place: Place

    @property
    def drawn(self) -> bool:
        """Whether it is a figure's own."""
        return self.name.startswith(FIGURE)


class Cell(NamedTuple):
    """One run."""

    column: Column
    method: Method
    seed: int


class Item(NamedTuple):
    """A table or a figure."""

    name: str
    title: str
    columns: tuple[Column, ...]

    @property
    def drawn(self) -> bool:
        """Whether it is a figure."""
        return self.name.startswith(FIGURE)


class Wanted(NamedTuple):
    """What of the grid is asked for; all of it where nothing is said."""

    scale: Scale = "laptop"
    datasets: tuple[str, ...] = ()
    clients: tuple[int, ...] = ()
    algorithms: tuple[str, ...] = ()
    seeds: int | None = None  # 1 when runs are made, all that there are when results are shown
    at: tuple[int, ...] = ()  # rounds to look at


LITERAL = Method("pFedLA", "pfedla,hyper_optimizer=sgd,hyper_lr=1.0")  # Eqs. 10-11 as printed
ADAM = Method("pFedLA, Adam", "pfedla,hyper_optimizer=adam,hyper_lr=0.0003", printed=False)
KEEP = (  # Table 3: k = 0, 1, 2, 3
    LITERAL,
    Method("HeurpFedLA", "heurpfedla,hyper_optimizer=sgd,hyper_lr=1.0,retain=1"),
    Method("HeurpFedLA, k = 2", "heurpfedla,hyper_optimizer=sgd,hyper_lr=1.0,retain=2"),
    Method("HeurpFedLA, k = 3", "heurpfedla,hyper_optimizer=sgd,hyper_lr=1.0,retain=3"),
)
SIMILARITY = {  # Figure 1, by temperature: the paper names none, and the outcome hangs on it
    0.05: (Method("layer-wise", "similarity-layer"), Method("model-wise", "similarity-model")),
    0.1: (
        Method("layer-wise, 0.1", "similarity-layer,temperature=0.1"),
        Method("model-wise, 0.1", "similarity-model,temperature=0.1"),
    ),
}
_SIMILAR = tuple(method for pair in SIMILARITY.values() for method in pair)
METHODS = (  # Tables 1 and 2
    Method("Local", "local"),
    Method("FedAvg", "fedavg"),
    Method("Per-FedAvg", "per-fedavg"),
    Method("pFedMe", "pfedme"),
    Method("pFedHN", "pfedhn"),
    Method("FedBN", "fedbn"),
    Method("FedRep", "fedrep,body_epochs=1"),
    Method("FedRep, half for the body", "fedrep,body_epochs={half}", printed=False),
    Method("FedFomo", "fedfomo"),
    LITERAL,
    KEEP[1],
    ADAM,
    Method("HeurpFedLA, Adam", "heurpfedla,hyper_optimizer=adam,hyper_lr=0.0003,retain=1", printed=False),
)
FEW = ("local", "fedavg", "fedrep", "pfedla", "heurpfedla")  # of 100 clients and over rounds, unless more are asked for


def _columns(names: str, clients: Iterable[int], datasets: Sequence[str] = DATASETS) -> tuple[Column, ...]:
    places = [Place(dataset, n) for n in clients for dataset in sorted(datasets, key=TELLING.index)]
    return tuple(Column(names.format(slug=SLUGS[place.dataset], n=place.clients), place) for place in places)


_RETAINING = _columns("{slug}-{n}-non-iid-1", [10], ("EMNIST", "CIFAR10"))
_OVER_ROUNDS = (
    *_columns("{slug}-{n}-non-iid-1", [10], ("CIFAR10", "FashionMNIST")),
    *_columns("{slug}-{n}-non-iid-2", [10], ("CIFAR10", "FashionMNIST")),
)
ITEMS = {
    item.name: item
    for item in (
        Item("table1", "accuracy of all methods, a few classes per client", _columns("{slug}-{n}-non-iid-1", CLIENTS)),
        Item("table2", "accuracy of all methods, dominant classes", _columns("{slug}-{n}-non-iid-2", CLIENTS)),
        Item("table3", "accuracy and traffic by the number of retained layers", _RETAINING),
        Item("fig1", "aggregation by similarity, of layers or of models", _columns("fig1", [6], ["CIFAR10"])),
        Item("fig5", "a client's weights for others, over the rounds", _columns("fig5-{slug}", [8])),
        Item("fig6", "weights among clients that overlap with their neighbours", _columns("fig6-{slug}", [8])),
        Item("fig7", "a client's weights by layer", _RETAINING),
        Item("rounds", "does the order of methods change with the rounds?", _OVER_ROUNDS),
    )
}


@cache
def _read(column: str) -> Tables:
    """Read a column's file."""
    with resources.as_file(resources.files("pfedla.paper") / "experiments" / f"{column}.toml") as path:
        return read_tables(Path(path))


def _settings(column: Column, scale: Scale) -> Tables:
    """Return what all cells of a column share at a scale."""
    tables = _read(column.name)
    if scale == "laptop":
        return tables
    if scale == "paper":
        return merge(tables, {"schedule": {"rounds": ROUNDS.get(column.place.clients, ROUNDS[10])}})
    data = {key: value for key, value in tables["data"].items() if key != "test_samples_per_client"}
    clients = min(data["clients"], 12)
    colour = IMAGES[data["dataset"]].shape[0] == 3
    data |= {"dataset": DEFAULT_DATASET, "clients": clients, "samples_per_client": 40}
    changes: Tables = {
        "model": {"name": "lenet-bn" if colour else "lenet"},
        "training": {"local_epochs": 4},
        "schedule": {"rounds": 2, "eval_every": 1, **({"participants": 4} if column.place.clients == 100 else {})},
    }
    if tables["split"]["name"] == "classes":  # of ten classes there are
        held = [sorted({c % 10 for c in row}) for row in tables["split"]["classes"]]
        changes["split"] = {"classes": held}
    return merge({**tables, "data": data}, changes)


def experiment_of(cell: Cell, scale: Scale, machine: dict[str, Any] | None = None) -> Experiment:
    """Return a cell's configuration."""
    tables = merge(_settings(cell.column, scale), cell.method.variant.changes)
    return Experiment.from_tables(merge(tables, {"schedule": {"seed": cell.seed}, "machine": machine or {}}))


def facts_of(column: Column, scale: Scale) -> Experiment:
    """Return what the heading of a column states: data set, clients, rounds, test images."""
    return Experiment.from_tables(_settings(column, scale))


def columns_of(item: Item, wanted: Wanted) -> tuple[Column, ...]:
    """Return the columns of a table or figure that are asked for."""
    for name in wanted.datasets:
        if name not in SLUGS.values():
            raise unknown_name("data set of the paper", name, SLUGS.values())
    for n in wanted.clients:
        if n not in CLIENTS:
            raise ConfigError(f"the paper's tables have {' and '.join(map(str, CLIENTS))} clients, not {n}")
    return tuple(
        column
        for column in item.columns
        if (not wanted.datasets or SLUGS[column.place.dataset] in wanted.datasets)
        and (not wanted.clients or item.drawn or column.place.clients in wanted.clients)
    )


def rows_of(column: Column, scale: Scale) -> tuple[Method, ...]:
    """Return the rows of Tables 1 and 2 that a column has."""
    half = facts_of(column, scale).training.local_epochs // 2
    found = (method._replace(spec=method.spec.format(half=half)) for method in METHODS)
    normed = column.place.dataset in ("CIFAR10", "CIFAR100")
    return tuple(method for method in found if normed or method.algorithm != "fedbn")


def methods_of(item: Item, column: Column, wanted: Wanted) -> tuple[Method, ...]:
    """Return the methods of a column that are asked for."""
    if item.name in ("table1", "table2"):
        found = rows_of(column, wanted.scale)
        if wanted.scale == "laptop" and column.place.clients == 100 and not wanted.algorithms:
            found = tuple(method for method in found if method.algorithm in FEW)
    elif item.name == "rounds":
        found = tuple(method for method in rows_of(column, wanted.scale) if method.printed)
        if not wanted.algorithms:
            found = tuple(method for method in found if method.algorithm in FEW)
    else:
        found = {"table3": KEEP, "fig1": _SIMILAR}.get(item.name, (LITERAL, ADAM))
    return tuple(method for method in found if not wanted.algorithms or method.algorithm in wanted.algorithms)


def check_methods(items: Sequence[Item], wanted: Wanted) -> None:
    """Refuse methods that the paper does not have, and tables and figures that have none of those asked for."""
    known = {method.algorithm for method in (*METHODS, *KEEP, *_SIMILAR)}
    for name in wanted.algorithms:
        if name not in known:
            raise unknown_name("method of the paper", name, known)
    if wanted.algorithms:
        without = [item.name for item in items if not any(methods_of(item, column, wanted) for column in item.columns)]
        if len(without) == len(items):
            names = ", ".join(wanted.algorithms)
            raise ConfigError(f"{' and '.join(without)} {'have' if len(without) > 1 else 'has'} none of {names}")


def cells_of(items: Sequence[Item], wanted: Wanted) -> list[Cell]:
    """Return the runs behind some tables and figures, each once: first seeds first, telling columns first."""
    found = {
        Cell(column, method, seed): None
        for seed in range(wanted.seeds or 1)
        for late in (False, True)
        for item in items
        for column in columns_of(item, wanted)
        if (column.place.clients == 100) == late
        for method in methods_of(item, column, wanted)
    }
    return list(found)


# Seconds per round of 10 clients x 10 local epochs x 140 images on two cores, with the compiled loops.
PER_ROUND = {1: 0.8, 3: 1.6}  # Local, by the images' channels
_TO_START = 2.0  # its processes
_TIMES = {"per-fedavg": 1.2, "pfedme": 5.0, "fedrep": 1.1, "pfedhn": 1.1}  # a round of Local


def seconds_of(cell: Cell, scale: Scale) -> float:
    """Estimate how long a cell takes on two cores."""
    experiment = experiment_of(cell, scale)
    data, schedule, training = experiment.data, experiment.schedule, experiment.training
    busy = (schedule.participants or data.clients) * training.local_epochs * data.samples_per_client / (10 * 10 * 200)
    each = busy * PER_ROUND[IMAGES[data.dataset].shape[0]] * _TIMES.get(cell.method.algorithm, 1.0)
    return _TO_START + schedule.rounds * each
