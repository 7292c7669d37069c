from __future__ import annotations

import csv
import io
from collections.abc import Callable

import pytest

from pfedla.errors import ConfigError
from pfedla.paper.grid import ITEMS, Cell, Wanted, cells_of, columns_of, rows_of
from pfedla.paper.order import changes, marks, order_by_rounds
from pfedla.paper.runs import Places
from pfedla.paper.sheets import written

ROUNDS = ITEMS["rounds"]
WANTED = Wanted("paper", datasets=("cifar10",))
COLUMN = columns_of(ROUNDS, WANTED)[0]
ROWS = {method.name: method for method in rows_of(COLUMN, "paper")}


@pytest.fixture
def places(places: Places) -> Places:
    return places._replace(scale="paper")


def curve(values: dict[int, float]) -> list[list[float]]:
    every = sorted({*range(20, 601, 20), *values})
    return [list(every), [values.get(t, 0.1) for t in every], [0.0] * len(every)]


def test_what_is_run_is_five_methods_in_the_telling_columns() -> None:
    cells = cells_of([ROUNDS], Wanted("paper"))
    assert len(cells) == 5 * 4
    assert {cell.method.name for cell in cells} == {"Local", "FedAvg", "FedRep", "pFedLA", "HeurpFedLA"}
    assert {cell.column.name for cell in cells} <= {
        cell.column.name for cell in cells_of([ITEMS["table1"], ITEMS["table2"]], Wanted("paper", clients=(10,)))
    }
    assert {cell.method.name for cell in cells_of([ROUNDS], Wanted(algorithms=("pfedme",)))} == {"pFedMe"}


def test_rounds_to_look_at() -> None:
    every = dict.fromkeys(range(20, 601, 20), 0.0)
    assert marks({"a": every}) == [60, 200, 600]
    assert marks({"a": every, "b": {t: 0.0 for t in every if t <= 100}}) == [60, 100]
    assert marks({"a": dict.fromkeys(range(20, 2501, 20), 0.0)}) == [60, 200, 600, 2500]
    assert marks({"a": {1: 0.0, 2: 0.0, 3: 0.0}}) == [1, 3]
    assert marks({"a": every}, at=(100, 20, 7)) == [20, 100]
    assert marks({"a": every}, at=(7,)) == [60, 200, 600]


def test_rounds_that_are_asked_for(places: Places, put: Callable[..., None]) -> None:
    for name, accuracy in {"Local": 0.3, "FedAvg": 0.4}.items():
        put(Cell(COLUMN, ROWS[name], 0), 0.5, curve=curve({40: accuracy, 100: 0.7 - accuracy}))
    (sheet,) = order_by_rounds(ROUNDS, places, WANTED._replace(at=(100, 40)))
    assert sheet.head == ("method", "round 40: % (rank)", "round 100: % (rank)")
    assert [cell.text for cell in sheet.rows[0]] == ["Local", "30.00 (2)", "40.00 (1)"]
    with pytest.raises(ConfigError, match=r"no curve has round 50: they have 20, 40, "):
        order_by_rounds(ROUNDS, places, WANTED._replace(at=(40, 50)))


def test_who_overtakes_whom() -> None:
    curves = {"a": {1: 3.0, 2: 1.0}, "b": {1: 2.0, 2: 2.0}, "c": {1: 2.0, 2: 3.0}}
    assert changes(curves, 1, 2) == [("a", "b"), ("a", "c")]  # b and c were equal
    assert changes(curves, 2, 1) == [("b", "a"), ("c", "a")]


def test_ranks_after_60_200_and_600_rounds(places: Places, put: Callable[..., None]) -> None:
    measured = {
        "Local": {60: 0.58, 200: 0.59, 600: 0.60},
        "FedAvg": {60: 0.41, 200: 0.42, 600: 0.43},
        "pFedLA": {60: 0.55, 200: 0.61, 600: 0.61},
        "HeurpFedLA": {60: 0.54, 200: 0.60, 600: 0.59},
    }
    for name, values in measured.items():
        own = [[60, 600], [[0.1, 0.2], [0.3, 0.4]]]  # (rounds, layers); of round 200 nothing is known
        more = {"layers": ["conv", "fc"], "own": own} if name == "pFedLA" else {}
        put(Cell(COLUMN, ROWS[name], 0), values[600], curve=curve(values), **more)
    put(Cell(COLUMN, ROWS["pFedLA"], 1), 0.6, curve=curve({60: 0.57, 200: 0.61, 600: 0.62}))
    put(Cell(COLUMN, ROWS["FedRep"], 0), 0.9, curve=None)  # added by hand
    (sheet,) = order_by_rounds(ROUNDS, places, WANTED)
    assert [cell.text for cell in sheet.rows[2]] == ["pFedLA", "55.00 (2)", "61.00 (1)", "61.00 (1)"]  # seed 0
    assert [cell.text for cell in sheet.rows[0]] == ["Local", "58.00 (1)", "59.00 (3)", "60.00 (2)"]
    assert [cell.best for cell in sheet.rows[2][1:]] == [False, True, True]
    assert "600 rounds, 300 test images each, 1 seed), scale paper" in sheet.title
    first, second, third, own_weights, paper, *rest = sheet.notes
    said = "round 60 conv 0.10, fc 0.20; round 600 conv 0.30, fc 0.40."
    assert own_weights == f"pFedLA, clients' weights for themselves: {said}"
    assert first == (
        "Rounds 60 and 200: rank correlation +0.40 over 4 methods; 2 of 6 pairs change places, most clearly: "
        "pFedLA overtakes Local (-3.00, then +2.00); HeurpFedLA overtakes Local (-4.00, then +1.00)."
    )
    assert "rank correlation +0.80" in second
    assert "1 of 6 pairs" in second
    assert "Rounds 200 and 600: rank correlation +0.80" in third
    assert paper == (
        "Rank correlation with the paper's order: +0.40 (p = 0.75) in round 60, +1.00 (p = 0.083) in round 200, "
        "+0.80 (p = 0.33) in round 600, over 4 methods."
    )
    assert rest[0] == "Measured by commit abc."
    records = list(csv.DictReader(io.StringIO(written([sheet], "csv"))))
    assert [record["rank"] for record in records if record["method"] == "pFedLA"] == ["2.0", "1.0", "1.0"]
    assert "missing: `pfedla paper rounds --dataset cifar10 --seeds 2 --scale paper` adds them" in rest[1]


def test_orders_that_stay_are_said_to(places: Places, put: Callable[..., None]) -> None:
    for name, at in (("Local", 0.5), ("FedAvg", 0.4), ("pFedLA", 0.6)):
        put(Cell(COLUMN, ROWS[name], 0), at, curve=curve({60: at, 200: at + 0.01, 600: at + 0.02}))
    (sheet,) = order_by_rounds(ROUNDS, places, WANTED)
    assert sheet.notes[1] == "Rounds 60 and 600: rank correlation +1.00 over 3 methods; no two methods change places."
    assert order_by_rounds(ROUNDS, places, WANTED._replace(algorithms=("local",))) == []  # nothing to compare


def test_test_losses_are_told_where_they_are_known(places: Places, put: Callable[..., None]) -> None:
    for seed, losses in enumerate(([1.5, 1.0, 2.0], [1.5, 2.0, 4.0])):
        put(Cell(COLUMN, ROWS["Local"], seed), 0.5, curve=[[20, 40, 60], [0.5] * 3, [0.5] * 3], losses=losses)
        put(Cell(COLUMN, ROWS["FedAvg"], seed), 0.6, curve=[[20, 40, 60], [0.6] * 3, [0.6] * 3])
    notes = order_by_rounds(ROUNDS, places, WANTED)[0].notes
    (said,) = (note for note in notes if "loss" in note)
    assert said == "Mean test loss, lowest and last: Local 1.50 in round 20, 3.00 in round 60."
