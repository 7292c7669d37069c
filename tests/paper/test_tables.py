from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from pfedla.errors import RunError
from pfedla.paper.counting import chance_of, correlation, count_first, ranks, spearman
from pfedla.paper.grid import ITEMS, KEEP, Cell, Method, Wanted, columns_of, rows_of
from pfedla.paper.measured import Entry
from pfedla.paper.printed import TABLE1, TABLE2, Printed
from pfedla.paper.retained import layer_sizes, megabytes, table_of_retained
from pfedla.paper.runs import Places
from pfedla.paper.sheets import written
from pfedla.paper.tables import table_of_methods

WANTED = Wanted(datasets=("fashion-mnist",), clients=(10,))
COLUMN = columns_of(ITEMS["table1"], WANTED)[0]
ROWS = {method.name: method for method in rows_of(COLUMN, "laptop")}
Put = Callable[..., None]


def plain_ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [float(np.mean([i + 1 for i, x in enumerate(ordered) if x == value])) for value in values]


def test_ranks_and_their_correlation_are_those_of_plain_numpy() -> None:
    rng = np.random.default_rng(0)
    for size, _ in product((3, 5, 12), range(20)):
        a, b = (rng.integers(0, 6, size).astype(float).tolist() for _ in range(2))
        np.testing.assert_allclose(ranks(a), plain_ranks(a))
        if len(set(a)) > 1 and len(set(b)) > 1:
            assert spearman(a, b) == pytest.approx(np.corrcoef(plain_ranks(a), plain_ranks(b))[0, 1])
        else:
            assert spearman(a, b) is None
    assert spearman([1, 2, 3], [10, 20, 30]) == 1
    assert spearman([1, 2, 3], [3, 2, 1]) == -1
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([], []) is None


def test_firsts_of_the_paper_are_counted_as_plain_numpy_counts_them() -> None:
    for table, item in ((TABLE1, "table1"), (TABLE2, "table2")):
        columns = [
            {name: row[column.place] for name, row in table.items() if column.place in row}
            for column in ITEMS[item].columns
        ]
        first = near = 0
        for column in columns:
            names, values = list(column), np.array([tuple(entry) for entry in column.values()])
            best = values[:, 0].argmax()
            ours = [names.index(name) for name in ("pFedLA", "HeurpFedLA")]
            first += best in ours
            near += any(values[best, 0] - values[i, 0] <= max(values[best, 1], values[i, 1]) for i in ours)
        assert count_first(columns, ("pFedLA", "HeurpFedLA")) == (first, near)
        assert first == 7  # of 8: pFedHN has the other, on EMNIST or on FashionMNIST with 100 clients


def test_within_one_deviation_is_the_larger_of_the_two_and_none_with_one_seed() -> None:
    def around(mean: float, std: float | None) -> Entry:
        return Entry((mean - std, mean, mean + std) if std else (mean,))

    def counted(best: float | None, own: float | None) -> tuple[int, int]:
        return count_first([{"other": around(80, best), "mine": around(79, own)}], ("mine",))

    assert counted(1.5, 0.1) == (0, 1)
    assert counted(0.1, 1.5) == (0, 1)
    assert counted(0.5, 0.5) == (0, 0)
    assert counted(None, None) == (0, 0)
    assert count_first([{"mine": Printed(80, 0), "other": Printed(80, 0)}], ("mine",)) == (1, 1)  # a tie is a first


def test_cells_are_means_over_seeds_beside_the_papers(places: Places, put: Put) -> None:
    for seed, accuracy in enumerate((0.80, 0.90, 0.85)):
        put(Cell(COLUMN, ROWS["Local"], seed), accuracy)
    for seed, accuracy in enumerate((0.91, 0.93)):
        put(Cell(COLUMN, ROWS["pFedLA"], seed), accuracy)
    put(Cell(COLUMN, ROWS["HeurpFedLA"], 0), 0.70)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    rows = {row[0].text: row[1:] for row in sheet.rows}
    assert [cell.text for cell in rows["Local"]] == ["85.00 ± 5.00", "85.83 ± 0.17", "-0.83", "", "86.00"]
    assert rows["pFedLA"][0].text == f"92.00 ± {np.std([91, 93], ddof=1):.2f} (2 of 3)"
    assert rows["HeurpFedLA"][0].text == "70.00 (1 of 3)"
    assert rows["FedAvg"][0].text == "missing"
    assert rows["FedBN"][0].text == "-"
    assert rows["FedRep, half for the body"][1].text == "-"
    for column, best in ((0, "pFedLA"), (1, "HeurpFedLA"), (4, "pFedLA")):
        assert [name for name, row in rows.items() if row[column].best] == [best]
    assert "10 clients, fashion-mnist, 200 rounds, 300 test images each, 3 seeds" in sheet.groups[0].heading
    assert "scale laptop" in sheet.title
    text = "\n".join(sheet.notes)
    said = "first in 1 of 1 columns that have both; in the paper, in 1 of them. Not measured: FedAvg in 1,"
    assert f"{said} Per-FedAvg in 1, pFedMe in 1, pFedHN in 1, FedRep in 1, FedFomo in 1 of them." in text  # no FedBN
    assert "One seed has no deviation that others could be within." in text
    assert "FashionMNIST, 10 clients: -0.50 (p = 1) over 3 methods" in text
    assert "Measured by commit abc." in text
    assert "weights for themselves" not in text  # none are known
    (one,) = table_of_methods(ITEMS["table1"], places, WANTED._replace(seeds=1))
    assert one.rows[0][1].text == "80.00"


def test_methods_are_compared_over_the_seeds_that_all_have(places: Places, put: Put) -> None:
    for seed, accuracy in enumerate((0.60, 0.70, 0.71)):
        put(Cell(COLUMN, ROWS["Local"], seed), accuracy)
    put(Cell(COLUMN, ROWS["pFedLA"], 0), 0.62)
    put(Cell(COLUMN, ROWS["HeurpFedLA"], 0), 0.55)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    assert [row[0].text for row in sheet.rows if row[1].best] == ["pFedLA"]  # though Local's mean is 67
    assert sheet.notes[0] == "FashionMNIST, 10 clients: methods are compared over the seeds that all have, 1 of 3."
    assert any("pFedLA and HeurpFedLA is 2.00 points above the best other method, Local" in n for n in sheet.notes)
    put(Cell(COLUMN, ROWS["FedAvg"], 1), 0.9)  # no seed is everybody's
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    assert not any(row[1].best for row in sheet.rows)
    assert not any("best other method" in note for note in sheet.notes)


def test_seeds_of_different_commits_or_loops_are_named(places: Places, put: Put) -> None:
    for name, makers in {"Local": ("a", "a"), "FedAvg": ("a", "b"), "pFedLA": ("a", "a")}.items():
        for seed, commit in enumerate(makers):
            loop = "avx2" if (name, seed) != ("pFedLA", 1) else "avx512"
            put(Cell(COLUMN, ROWS[name], seed), 0.5, commit=commit, compiled_loop=loop)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    (said,) = (note for note in sheet.notes if "different commits" in note)
    assert said == "FashionMNIST, 10 clients: seeds of FedAvg, pFedLA come from different commits or compiled loops."


def test_tables_say_what_clients_keep_for_themselves(places: Places, put: Put) -> None:
    put(Cell(COLUMN, ROWS["pFedLA"], 0), 0.91, layers=["conv", "fc"], own=[[20, 40], [[0.1, 0.1], [0.2, 0.9]]])
    put(Cell(COLUMN, ROWS["pFedLA"], 1), 0.91, layers=["conv", "fc"], own=[[20, 40], [[0.1, 0.1], [0.4, 1.0]]])
    put(Cell(COLUMN, ROWS["pFedLA, Adam"], 0), 0.91, layers=["conv", "fc"], own=[[40], [[0.5, 0.6]]])
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    said = "10 clients. pFedLA: conv 0.30, fc 0.95; pFedLA, Adam: conv 0.50, fc 0.60."
    assert f"Clients' weights for themselves, FashionMNIST, {said}" in sheet.notes
    assert not any(note.startswith("Retained") for note in sheet.notes)
    for seed, shares in enumerate(([0.25, 0.75], [0.0, 1.0])):
        put(Cell(COLUMN, ROWS["HeurpFedLA"], seed), 0.9, layers=["conv", "fc"], own=[[40], [[1, 1]]], retained=shares)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    assert "Retained (share of downloads), FashionMNIST, 10 clients. HeurpFedLA: fc 88%, conv 12%." in sheet.notes


def test_the_step_of_adam_is_no_rival_of_the_literal_one(places: Places, put: Put) -> None:
    for name, accuracy in {"Local": 0.5, "FedAvg": 0.6, "pFedLA": 0.7, "HeurpFedLA": 0.65, "pFedLA, Adam": 0.8}.items():
        put(Cell(COLUMN, ROWS[name], 0), accuracy)
    put(Cell(COLUMN, ROWS["HeurpFedLA, Adam"], 0), 0.55)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    text = "\n".join(sheet.notes)
    assert "Among the methods measured here, without the rows with Adam: first in 1 of 1" in text
    assert "With Adam in place of the literal step: first in 1 of 1 columns that have both rows; a tie counts." in text
    for column in (1, 5):  # the best of all, and the best of what is counted
        assert [row[0].text for row in sheet.rows if row[column].best] == ["pFedLA", "pFedLA, Adam"]
    put(Cell(COLUMN, ROWS["FedRep, half for the body"], 0), 0.75)  # this one is
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    assert "Among the methods measured here, without the rows with Adam: first in 0 of 1" in "\n".join(sheet.notes)


def test_what_is_within_a_deviation_is_counted_where_there_are_deviations(places: Places, put: Put) -> None:
    for name, accuracy in {"Local": 0.5, "FedAvg": 0.6, "pFedLA": 0.59, "HeurpFedLA": 0.55}.items():
        for seed, more in enumerate((0.0, 0.02)):
            put(Cell(COLUMN, ROWS[name], seed), accuracy + more)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    assert "first in 0 of 1 columns that have both; in the paper, in 1 of them." in "\n".join(sheet.notes)
    near = "First or within one standard deviation: in 1 of 1 columns of several seeds; in the paper, in 1 of them."
    assert near in sheet.notes
    other = next(
        c for c in ITEMS["table1"].columns if c.name == "cifar10-10-non-iid-1"
    )  # one seed hides none elsewhere
    for name in ("Local", "FedAvg", "pFedLA", "HeurpFedLA"):
        put(Cell(other, ROWS[name], 0), 0.5)
    *_, last = table_of_methods(ITEMS["table1"], places, WANTED._replace(datasets=("fashion-mnist", "cifar10")))
    assert "columns that have both; in the paper, in 2 of them." in "\n".join(last.notes)
    assert near in last.notes


def test_fewer_methods_are_shown_and_the_best_is_that_of_all(places: Places, put: Put) -> None:
    for name, accuracy in {"Local": 0.5, "FedAvg": 0.6, "pFedLA": 0.6, "HeurpFedLA": 0.55}.items():
        put(Cell(COLUMN, ROWS[name], 0), accuracy)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED._replace(algorithms=("local", "pfedla")))
    assert [row[0].text for row in sheet.rows] == ["Local", "pFedLA", "pFedLA, Adam"]
    assert {record["method"] for record in sheet.records} == {"Local", "pFedLA", "pFedLA, Adam"}
    assert [row[1].best for row in sheet.rows] == [False, True, False]
    text = "\n".join(sheet.notes)
    assert (
        "Among the methods measured here, without the rows with Adam: first in 1 of 1" in text
    )  # FedAvg is as good, shown or not
    assert "over 4 methods" in text
    assert (
        "1 cell is missing: `pfedla paper table1 --dataset fashion-mnist --clients 10 -a pfedla` adds it (about 3 min)."
        in sheet.notes
    )
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    assert [row[0].text for row in sheet.rows if row[1].best] == ["FedAvg", "pFedLA"]


def test_each_column_says_what_the_class_prior_leaves_of_a_lead(places: Places, put: Put) -> None:
    put(Cell(COLUMN, ROWS["pFedLA"], 0), 0.70, accuracy_class_prior=0.72)
    put(Cell(COLUMN, ROWS["HeurpFedLA"], 0), 0.71, accuracy_class_prior=0.715)
    put(Cell(COLUMN, ROWS["HeurpFedLA, Adam"], 0), 0.99, accuracy_class_prior=0.99)  # no rival
    put(Cell(COLUMN, ROWS["FedAvg"], 0), 0.50, accuracy_class_prior=0.725)
    put(Cell(COLUMN, ROWS["Local"], 0), 0.65, accuracy_class_prior=0.66)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    said = "FashionMNIST, 10 clients: the better of pFedLA and HeurpFedLA is 6.00 points above the best other method, "
    said += "Local; with the class prior, 0.50 points below the best other method, FedAvg."
    assert said in sheet.notes


def test_leads_after_local_training_are_said_too(places: Places, put: Put) -> None:
    for name, accuracy, after in (("pFedLA", 0.7, 0.72), ("HeurpFedLA", 0.6, 0.6), ("FedAvg", 0.5, 0.75)):
        put(Cell(COLUMN, ROWS[name], 0), accuracy, accuracy_after_training=after, accuracy_class_prior=None)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    said = (
        "HeurpFedLA is 20.00 points above the best other method, FedAvg; after local training, 3.00 points below the "
    )
    assert any(note.endswith(f"{said}best other method, FedAvg.") for note in sheet.notes)
    assert [row[0].text for row in sheet.rows if row[4].best] == ["FedAvg"]
    assert {record["method"]: record["ours_after_training"] for record in sheet.records}["FedAvg"] == 75


def test_what_is_run_on_request_alone_is_not_missing(places: Places, put: Put) -> None:
    wanted = Wanted(datasets=("fashion-mnist",), clients=(100,))
    (column,) = columns_of(ITEMS["table1"], wanted)
    put(Cell(column, ROWS["Local"], 0), 0.5)
    (sheet,) = table_of_methods(ITEMS["table1"], places, wanted)
    shown = {row[0].text: row[1].text for row in sheet.rows}
    assert (shown["FedAvg"], shown["pFedMe"], shown["FedBN"]) == ("missing", "not run", "-")


def test_as_many_right_answers_are_a_tie_however_they_were_added_up(places: Places, put: Put) -> None:
    for name, accuracy in (("Local", 0.5705555555555555), ("pFedLA", 0.5705555555555556), ("HeurpFedLA", 0.4)):
        put(Cell(COLUMN, ROWS[name], 0), accuracy)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    assert [row[0].text for row in sheet.rows if row[1].best] == ["Local", "pFedLA"]
    assert any("without the rows with Adam: first in 1 of 1" in note for note in sheet.notes)


@pytest.mark.parametrize("n", [5, 9])
def test_chance_is_the_share_of_orders_that_are_as_far_from_0(n: int) -> None:
    """Of 5 all 120 orders are tried, of 9 some are drawn; the shares are those of tables of Spearman's correlation."""
    a = list(range(n))
    assert chance_of(a, a) == pytest.approx(2 / math.factorial(n), abs=2e-4)  # this order and the reverse
    worst = {5: [1, 0, 2, 3, 4], 9: [2, 1, 0, 5, 4, 3, 8, 7, 6]}[n]  # correlations of 0.9 and 0.8
    assert (spearman(a, worst) or 0) == pytest.approx({5: 0.9, 9: 0.8}[n])
    assert chance_of(a, worst) == pytest.approx({5: 0.083, 9: 0.0138}[n], abs=0.003)
    assert correlation(a[:2], a[:2]) is None


def test_a_lead_is_taken_seed_by_seed(places: Places, put: Put) -> None:
    found = {"pFedLA": (0.70, 0.74), "HeurpFedLA": (0.65, 0.69), "FedAvg": (0.50, 0.56), "Local": (0.60, 0.40)}
    for name, accuracies in found.items():
        for seed, accuracy in enumerate(accuracies):
            put(Cell(COLUMN, ROWS[name], seed), accuracy)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    lead = f"{np.mean([20, 18]):.2f} ± {np.std([20, 18], ddof=1):.2f} points above the best other method, FedAvg"
    said = f"FashionMNIST, 10 clients: the better of pFedLA and HeurpFedLA is {lead}; with the class prior, {lead}."
    assert said in sheet.notes


def test_figures_of_other_settings_are_refused_with_their_commit(places: Places, put: Put) -> None:
    put(Cell(COLUMN, ROWS["Local"], 0), 0.5, settings={"schedule": {"rounds": 7}})
    with pytest.raises(RunError, match=r"other settings \(.*schedule\.rounds.*\), measured by abc"):
        table_of_methods(ITEMS["table1"], places, WANTED)


def test_formats_say_the_same(places: Places, put: Put) -> None:
    put(Cell(COLUMN, ROWS["Local"], 0), 0.8125)
    put(Cell(COLUMN, ROWS["pFedLA"], 0), 0.9)
    sheets = table_of_methods(ITEMS["table1"], places, WANTED)
    markdown, latex = written(sheets, "markdown"), written(sheets, "latex")
    records = list(csv.DictReader(io.StringIO(written(sheets, "csv"))))
    assert "| Local | 81.25 | 85.83 ± 0.17 | -4.58 |  | 82.25 |" in markdown
    assert "| pFedLA | **90.00** | 94.34 ± 0.29 |" in markdown
    assert r"Local & 81.25 & 85.83 $\pm$ 0.17 & $-$4.58 &  & 82.25 \\" in latex
    assert r"pFedLA & \textbf{90.00} &" in latex
    assert r" & \multicolumn{5}{c}{10 clients, fashion-mnist, 200 rounds, 300 test images each, 1 seed} \\" in latex
    assert r"\cmidrule(lr){2-6}" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\bottomrule") == latex.count(r"\end{table*}") == 1
    assert r"\caption{Table 1, FashionMNIST, scale laptop}" in latex
    local = next(record for record in records if record["method"] == "Local")
    assert (local["ours"], local["paper"], local["scale"], local["clients"]) == ("81.25", "85.83", "laptop", "10")
    assert len(records) == len(ROWS)
    assert written([], "csv") == "\n"


def test_table_3_shows_bytes_and_the_papers_unit_for_what_was_retained(places: Places, put: Put) -> None:
    wanted = Wanted(datasets=("emnist",))
    column = columns_of(ITEMS["table3"], wanted)[0]
    sizes = layer_sizes(column)
    put(Cell(column, KEEP[0], 0), 0.90, layers=list(sizes))
    put(
        Cell(column, KEEP[1], 0), 0.94, layers=list(sizes), retained=[0, 0.004, 0.246, 0, 0.75], retained_changes=0.0234
    )
    (sheet,) = table_of_retained(ITEMS["table3"], places, wanted)
    first, second, third, fourth = ([cell.text for cell in row] for row in sheet.rows)
    assert first == ["0", "90.00", "90.65", "2.0 / 3.0", "491.08", "491.08", "491.08", "none", "", "none"]
    unit = megabytes(sizes, {"conv2": 0.004, "fc1": 0.246, "fc3": 0.75})
    assert second[:4] == ["1", "94.00", "94.11", "2.0 / 3.0"]
    assert second[4:] == [f"{unit:.2f}", "488.65", "488.65", "fc3 75%, fc1 25%", "2.3%", "fc3"]
    assert third[1] == "missing"
    assert third[5:7] == ["312.52", "312.52"]
    assert fourth[1:3] == ["missing", "-"]
    put(Cell(column, KEEP[1], 0), 0.94, curve=None)  # added by hand: nobody knows what was retained
    (sheet,) = table_of_retained(ITEMS["table3"], places, wanted)
    assert [cell.text for cell in sheet.rows[1]][4:9] == ["", "488.65", "488.65", "", ""]
    assert "3 cells are missing" in sheet.notes[-1]  # it is run anew, as those of k = 2 and 3 are run
    (sheet,) = table_of_retained(ITEMS["table3"], places, wanted._replace(algorithms=("pfedla",)))
    assert [row[0].text for row in sheet.rows] == ["0"]
    assert unit == pytest.approx((2 * 85_822 - 0.004 * 12_832 - 0.246 * 61_560 - 0.75 * 850) * 750 * 4 / 2**20)


def test_methods_are_known_by_their_labels(places: Places, put: Put) -> None:
    """`pfedla compare -a pfedla,hyper_optimizer=sgd,hyper_lr=1.0 --results ...` adds to the same table."""
    put(Cell(COLUMN, Method("by hand", "pfedla,hyper_optimizer=sgd,hyper_lr=1.0"), 0), 0.66)
    (sheet,) = table_of_methods(ITEMS["table1"], places, WANTED)
    assert {row[0].text: row[1].text for row in sheet.rows}["pFedLA"] == "66.00"
