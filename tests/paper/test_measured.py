from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

from pfedla.paper.grid import ITEMS, LITERAL, Cell, Wanted, cells_of, columns_of, methods_of, rows_of
from pfedla.paper.measured import Entry, bests, missing
from pfedla.paper.runs import Places, left
from pfedla.paper.sheets import lasting

Put = Callable[..., None]


def asked(command: str) -> tuple[str, Wanted]:
    """Read the words of a command as `pfedla paper` does."""
    words = shlex.split(command)
    assert words[:2] == ["pfedla", "paper"]
    given: dict[str, list[str]] = {}
    for option, value in zip(words[3::2], words[4::2], strict=True):
        given.setdefault(option, []).append(value)
    seeds, (scale,) = given.pop("--seeds", None), given.pop("--scale", ["laptop"])
    return words[2], Wanted(
        scale,  # type: ignore[arg-type]
        tuple(given.pop("--dataset", ())),
        tuple(map(int, given.pop("--clients", ()))),
        tuple(given.pop("-a", ())),
        int(seeds[0]) if seeds else None,
    )


@pytest.mark.parametrize("scale", ["laptop", "paper"])
@pytest.mark.parametrize("name", ITEMS)
def test_the_commands_add_what_is_missing_and_nothing_else(name: str, scale: str, places: Places, put: Put) -> None:
    item, places = ITEMS[name], places._replace(scale=scale)  # type: ignore[arg-type]
    wanted = Wanted(scale)  # type: ignore[arg-type]
    table = name in ("table1", "table2")
    rows = {
        column: rows_of(column, places.scale) if table else methods_of(item, column, wanted) for column in item.columns
    }
    put_there = [Cell(item.columns[0], method, 0) for method in rows[item.columns[0]][:2]]
    put_there += [Cell(item.columns[0], rows[item.columns[0]][0], 1)]  # a second seed, which the others lack
    if scale == "laptop":  # at the other scale nothing is there
        for cell in put_there:
            put(cell, 0.5)
    expected = {
        Cell(column, method, seed)
        for column in item.columns
        for seed in range(2 if scale == "laptop" and column.place == item.columns[0].place else 1)
        for method in rows[column]
    } - set(put_there if scale == "laptop" else [])
    found = list[Cell]()
    said = missing(item, places, wanted, rows)
    for sentence in said:
        count, command = re.match(r"(\d+) cells? (?:is|are) missing: `(.*)` adds", sentence).groups()  # type: ignore[union-attr]
        which, narrowed = asked(command)
        cells = left(places, cells_of([ITEMS[which]], narrowed))
        assert len(cells) == int(count)
        found += cells
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_nothing_is_said_where_nothing_is_missing(places: Places, put: Put) -> None:
    wanted = Wanted(datasets=("emnist",), algorithms=("pfedla",))
    (column,) = columns_of(ITEMS["table3"], wanted)
    (one,) = missing(ITEMS["table3"], places, wanted, {column: [LITERAL]})
    assert one == "1 cell is missing: `pfedla paper table3 --dataset emnist -a pfedla` adds it (about 3 min)."
    put(Cell(column, LITERAL, 0), 0.9)
    assert missing(ITEMS["table3"], places, wanted, {column: [LITERAL]}) == []


def test_equals_are_best_alike_and_one_alone_is_not() -> None:
    high, low = Entry((80.0,)), Entry((74.0, 79.0, 84.0))
    assert bests({"a": high, "b": low, "c": high}) == {"a", "c"}
    assert bests({"a": high}) == bests({}) == set()


def test_times_in_words() -> None:
    assert [lasting(seconds) for seconds in (0.4, 89, 90, 3600, 5400, 36000)] == [
        *("0 s", "89 s", "2 min", "60 min", "1.5 h", "10.0 h")
    ]
