from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfedla.algorithms import HeurPFedLA, Local, PFedLA
from pfedla.comparison import parse_variant
from pfedla.config import Experiment, merge, read_tables
from pfedla.data.datasets import DATASETS, DEFAULT_DATASET
from pfedla.data.partition import partition
from pfedla.errors import ConfigError, DataError
from pfedla.paper.grid import (
    ADAM,
    ITEMS,
    LITERAL,
    PER_ROUND,
    SCALES,
    Cell,
    Scale,
    Wanted,
    cells_of,
    check_methods,
    columns_of,
    experiment_of,
    facts_of,
    methods_of,
    rows_of,
    seconds_of,
)

ROOT = Path(__file__).parents[2]
COLUMNS = list({column: None for item in ITEMS.values() for column in item.columns})
FILES = {path.stem for path in (ROOT / "experiments" / "paper").glob("*.toml")}


@pytest.mark.parametrize("name", sorted(FILES - {"fig1"}))
def test_files_take_the_printed_step_and_other_methods_their_own(name: str) -> None:
    """Eqs. 10-11 without a rate: a plain step of size 1."""
    path = ROOT / "experiments" / "paper" / f"{name}.toml"
    assert Experiment.load(path).algorithm == PFedLA(hyper_optimizer="sgd", hyper_lr=1.0)
    for spec, method in (("local", Local()), ("heurpfedla", HeurPFedLA()), ("pfedla,retain=2", None)):
        tables = merge(read_tables(path), parse_variant(spec).changes)
        expected = method or PFedLA(hyper_optimizer="sgd", hyper_lr=1.0, retain=2)
        assert Experiment.from_tables(tables).algorithm == expected


def test_there_is_a_file_for_every_column_and_no_other() -> None:
    assert {column.name for column in COLUMNS} == FILES


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_columns_have_the_settings_of_the_paper(column: Any) -> None:
    found, full = facts_of(column, "laptop"), facts_of(column, "paper")
    many, colour = column.place.clients == 100, column.place.dataset.startswith("CIFAR")
    assert found.training.batch_size == 32
    assert found.training.lr == (0.01 if colour else 0.005)
    assert found.training.local_epochs == (20 if many else 10)
    assert found.schedule.participants == (10 if many else None)
    assert found.schedule.rounds == (200 if many or not colour else 100)
    assert full.schedule.rounds == (2500 if many else 600)
    assert full.decisive() == {
        **found.decisive(),
        "schedule": {**found.decisive()["schedule"], "rounds": full.schedule.rounds},
    }
    assert found.data.clients == column.place.clients
    few = column.name in ("fig5-cifar100", "fig6-cifar100")
    assert found.data.samples_per_client == (120 if few else 200)
    assert found.data.test_samples_per_client == (None if few else 300)
    wanted = {"EMNIST": "emnist-digits", "FashionMNIST": "fashion-mnist", "CIFAR10": "cifar10", "CIFAR100": "cifar100"}
    stand_in = {"emnist-100-non-iid-1": "mnist", "emnist-100-non-iid-2": "mnist"}
    assert found.data.dataset == stand_in.get(column.name, wanted[column.place.dataset])
    if column.name.startswith("fig"):
        assert found.split.name == "classes"
    else:
        assert column.name.endswith(found.split.name)


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_data_sets_of_the_size_of_the_smallest_subset_in_use_suffice(column: Any) -> None:
    """796 images of a class of EMNIST digits, half of CIFAR-10, and a third of CIFAR-100, too few for 100 clients."""
    found = facts_of(column, "laptop")
    each = {"emnist-digits": 796, "cifar10": 2925, "cifar100": 180}.get(found.data.dataset, 6000)
    labels = np.repeat(np.arange(len(DATASETS[found.data.dataset].classes)), each)

    def split() -> int:
        data = found.data
        how = {"clients": data.clients, "samples_per_client": data.samples_per_client, "seed": 0}
        return len(partition(labels, found.split, **how, test_samples_per_client=data.test_samples_per_client))  # type: ignore[arg-type]

    if found.data.dataset == "cifar100" and column.place.clients == 100:
        with pytest.raises(DataError):
            split()
    else:
        assert split() == found.data.clients


def test_figures_have_the_classes_that_the_paper_describes() -> None:
    toy, five, six = (facts_of(ITEMS[name].columns[0], "laptop").split.classes for name in ("fig1", "fig5", "fig6"))  # type: ignore[attr-defined]
    assert len(toy) == 6
    assert len({c for row in toy for c in row}) == 9
    shared = [len(set(five[0]) & set(row)) for row in five]
    assert shared == [4, 4, 3, 0, 0, 0, 0, 0]
    assert [len(row) for row in (*five, *six)] == [4] * 16
    assert all(len(set(a) & set(b)) == 3 for a, b in pairwise(six))
    assert len({tuple(row) for row in five}) == 7


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_is_a_valid_experiment_and_none_comes_twice(scale: Scale) -> None:
    cells = cells_of(list(ITEMS.values()), Wanted(scale, seeds=2))
    labels = [(cell.column.name, cell.method.variant.label, cell.seed) for cell in cells]
    assert len(set(labels)) == len(labels)
    for cell in cells:
        experiment = experiment_of(cell, scale)
        assert experiment.schedule.seed == cell.seed
        if scale == "smoke":
            assert experiment.data.dataset == DEFAULT_DATASET
            assert experiment.schedule.rounds == 2
            assert seconds_of(cell, scale) < 30


def test_first_seeds_and_telling_columns_come_first() -> None:
    cells = cells_of([ITEMS["table1"], ITEMS["table2"]], Wanted(seeds=2))
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    of_one = [cell.column.place for cell in cells if cell.seed == 0]
    assert of_one[0].dataset == "CIFAR10"
    assert [place.clients for place in of_one] == sorted(place.clients for place in of_one)


def test_tables_share_cells() -> None:
    both = cells_of([ITEMS["table1"], ITEMS["table3"], ITEMS["fig7"]], Wanted())
    alone = cells_of([ITEMS["table1"]], Wanted())
    assert len(both) == len(alone) + 4  # k = 2 and 3 on two data sets


def test_steps_and_budgets_are_set_explicitly() -> None:
    ten = columns_of(ITEMS["table1"], Wanted(datasets=("cifar10",), clients=(10,)))[0]
    hundred = columns_of(ITEMS["table1"], Wanted(datasets=("cifar10",), clients=(100,)))[0]
    for column, half in ((ten, 5), (hundred, 10)):
        found = {method.name: method.variant.changes["algorithm"] for method in rows_of(column, "laptop")}
        assert found["FedRep"]["body_epochs"] == 1
        assert found["FedRep, half for the body"]["body_epochs"] == half
        for name in ("pFedLA", "HeurpFedLA"):
            assert (found[name]["hyper_optimizer"], found[name]["hyper_lr"]) == ("sgd", 1.0)
            assert (found[f"{name}, Adam"]["hyper_optimizer"], found[f"{name}, Adam"]["hyper_lr"]) == ("adam", 0.0003)
        assert found["HeurpFedLA"]["retain"] == found["HeurpFedLA, Adam"]["retain"] == 1
    assert "fedbn" in {method.algorithm for method in methods_of(ITEMS["table1"], ten, Wanted())}
    emnist = columns_of(ITEMS["table1"], Wanted(datasets=("emnist",), clients=(10,)))[0]
    assert "fedbn" not in {method.algorithm for method in methods_of(ITEMS["table1"], emnist, Wanted())}


def test_of_a_hundred_clients_a_laptop_runs_few_methods_unless_asked() -> None:
    column = columns_of(ITEMS["table1"], Wanted(datasets=("cifar10",), clients=(100,)))[0]
    few = {method.algorithm for method in methods_of(ITEMS["table1"], column, Wanted())}
    assert few == {"local", "fedavg", "fedrep", "pfedla", "heurpfedla"}
    asked = methods_of(ITEMS["table1"], column, Wanted(algorithms=("pfedme",)))
    assert [method.algorithm for method in asked] == ["pfedme"]
    assert len(methods_of(ITEMS["table1"], column, Wanted("paper"))) == 13


def test_what_is_asked_for_narrows_and_unknown_names_are_refused() -> None:
    cells = cells_of([ITEMS["table2"]], Wanted(datasets=("cifar100",), clients=(10,), algorithms=("pfedla",)))
    assert [cell.method for cell in cells] == [LITERAL, ADAM]
    assert {cell.column.name for cell in cells} == {"cifar100-10-non-iid-2"}
    assert len(cells_of([ITEMS["fig5"]], Wanted(clients=(10,)))) == 8  # figures have clients of their own
    for wrong in (Wanted(datasets=("cifar",)), Wanted(clients=(20,))):
        with pytest.raises(ConfigError):
            cells_of([ITEMS["table1"]], wrong)
    with pytest.raises(ConfigError, match="did you mean 'pfedme'"):
        check_methods([ITEMS["table1"]], Wanted(algorithms=("pfedhm",)))
    check_methods([ITEMS["table1"], ITEMS["fig5"]], Wanted(algorithms=("local",)))  # one of them has it


def test_estimated_costs_are_those_of_the_benchmark() -> None:
    """It times the same rounds: of ten clients with 140 images, on two cores."""
    found = json.loads((ROOT / "results" / "benchmarks.json").read_text())["kernels"]
    assert found["cores"] == 2
    took = {row["setting"]: row["with, s per round"] for row in found["rows"] if row["left to torch"] == "all loops"}
    assert PER_ROUND[3] == pytest.approx(took["10 clients, 3x32x32"], rel=0.25)
    assert PER_ROUND[1] == pytest.approx(took["10 clients, 1x28x28"], rel=0.25)


def test_pfedme_costs_as_much_more_than_others_as_it_was_measured_to() -> None:
    """Against FedProx, which was measured beside it and costs what Local does."""
    held = json.loads((ROOT / "results" / "seeds-fashion-mnist-non-iid-2.json").read_text())
    seconds = {run["label"]: run["seconds"] for run in held if run["seed"] == 2}
    column = columns_of(ITEMS["table1"], Wanted(datasets=("fashion-mnist",), clients=(10,)))[0]
    methods = {method.algorithm: method for method in rows_of(column, "laptop")}
    local, pfedme = (seconds_of(Cell(column, methods[method], 0), "laptop") for method in ("local", "pfedme"))
    assert pfedme / local == pytest.approx(seconds["pfedme"] / seconds["fedprox"], rel=0.35)
