from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfedla.paper.counting import spearman
from pfedla.paper.drawings import drawings_of, in_percent, save
from pfedla.paper.figures import by_chance, falls_with_distance, order_holds, periods, roles_of, sheets_of
from pfedla.paper.grid import ADAM, ITEMS, LITERAL, SIMILARITY, Cell, Wanted, cells_of, columns_of
from pfedla.paper.retained import layer_sizes
from pfedla.paper.runs import Places, left

Put = Callable[..., None]


def near_is_more(n: int, layers: int, sharpness: float) -> np.ndarray:
    """Return weights that fall with the distance in number: (clients, layers, clients)."""
    distance = np.abs(np.arange(n)[:, None] - np.arange(n))
    weights = np.exp(-sharpness * distance)
    return np.repeat((weights / weights.sum(1, keepdims=True))[:, None], layers, 1)


@pytest.fixture
def drawn(places: Places, put: Put) -> Wanted:
    """Put made-up results of every figure in place, of one data set."""
    wanted = Wanted(datasets=("cifar10",))
    for name in ("fig1", "fig5", "fig6", "fig7"):
        for column in columns_of(ITEMS[name], wanted):
            layers, n = list(layer_sizes(column)), column.place.clients
            alpha = near_is_more(n, len(layers), 1.0)
            over = [near_is_more(n, len(layers), t / 30)[0].tolist() for t in range(1, 31)]
            more: dict[str, Any] = {"layers": layers, "alpha": alpha.tolist()}
            more |= {"alpha_over_time": [list(range(1, 31)), over], "curve": [[10, 20], [0.3, 0.5], [0.2, 0.6]]}
            for method in (m for pair in SIMILARITY.values() for m in pair) if name == "fig1" else (LITERAL, ADAM):
                put(Cell(column, method, 0), 0.5, **more)
    return wanted


def test_thirds_of_the_rounds() -> None:
    early, middle, late = periods([1, 10, 11, 20, 21, 30])
    assert (early.tolist(), middle.tolist(), late.tolist()) == ([0, 1], [2, 3], [4, 5])


def test_roles_are_the_target_its_equal_the_similar_one_and_the_mean_other() -> None:
    weights = np.array([[[0.4, 0.2, 0.1, 0.06, 0.06, 0.06, 0.06, 0.06]]])
    rounds, found = roles_of({"alpha_over_time": [[5], weights.tolist()]})
    np.testing.assert_allclose(found, [[[0.4, 0.2, 0.1, 0.06]]])
    assert rounds.tolist() == [5]
    assert order_holds(found[0, 0].tolist())
    assert not order_holds([0.4, 0.1, 0.2, 0.06])
    assert not order_holds([0.4, 0.2, 0.2, 0.06])


def test_weights_that_fall_with_distance_are_seen_to() -> None:
    weights = near_is_more(8, 1, 0.5)[:, 0]
    unscaled = np.exp(-np.abs(np.arange(8)[:, None] - np.arange(8)).astype(float))
    assert falls_with_distance(unscaled) == pytest.approx(-1)
    assert (falls_with_distance(weights) or 0) < -0.8
    assert (falls_with_distance(1 - weights) or 0) > 0.8
    own = weights + 100 * np.eye(8)  # own weights are left out
    assert falls_with_distance(own) == falls_with_distance(weights)


def test_how_much_a_client_gives_away_says_nothing_of_to_whom() -> None:
    weights = np.exp(-np.abs(np.arange(8)[:, None] - np.arange(8)).astype(float))
    scaled = weights * np.logspace(0, -6, 8)[:, None]
    assert falls_with_distance(scaled) == pytest.approx(-1)
    scaled[:4] = 0.1  # half of the clients treat all alike
    assert falls_with_distance(scaled) == pytest.approx(-0.5)
    assert falls_with_distance(np.full((8, 8), 0.125)) is None
    assert falls_with_distance(np.eye(3) + np.arange(3)) is None  # two others have no ranks to speak of


def test_a_clients_correlation_is_spearmans() -> None:
    weights = np.random.default_rng(0).random((8, 8)).round(1)  # with ties
    others = [np.delete(np.arange(8), i) for i in range(8)]
    found = [spearman(weights[i, some].tolist(), np.abs(i - some).tolist()) or 0 for i, some in enumerate(others)]
    assert falls_with_distance(weights) == pytest.approx(np.mean(found))


def test_claims_are_computed(places: Places, drawn: Wanted) -> None:
    notes = {
        name: "\n".join(sheets_of(ITEMS[name], places, drawn)[0].notes) for name in ("fig1", "fig5", "fig6", "fig7")
    }
    assert "for client 0 in 0 of 1 seeds" in notes["fig1"]  # both have the same curve
    assert "in 7 of 7 cases" in notes["fig5"]
    assert "in 7 of 7 layers" in notes["fig6"]
    assert "(paper: fc1)" in notes["fig7"]
    five = sheets_of(ITEMS["fig5"], places, drawn)
    assert len(five) == 2  # the literal step, and Adam
    assert "scale laptop" in five[0].title
    late = next(record for record in five[0].records if record["period"] == "late")
    expected = np.mean([near_is_more(8, 1, t / 30)[0, 0] for t in range(21, 31)], 0)
    assert [late[key] for key in ("own", "same_classes", "similar")] == pytest.approx(expected[:3].tolist())
    assert late["others"] == pytest.approx(expected[3:].mean())


def test_figure_1_is_shown_for_every_temperature_that_is_measured(places: Places, put: Put, drawn: Wanted) -> None:
    low, high = sheets_of(ITEMS["fig1"], places, drawn)
    assert [sheet.title.partition(" (")[0] for sheet in (low, high)] == [
        "Figure 1, temperature 0.05",
        "Figure 1, temperature 0.1",
    ]
    assert [row[0].text for row in high.rows] == ["layer-wise", "model-wise"]
    assert {record["temperature"] for record in high.records} == {0.1}
    (picture,) = drawings_of(ITEMS["fig1"], places, drawn)
    assert len(picture.canvas.axes) == 4
    column = ITEMS["fig1"].columns[0]
    places.file("fig1").unlink()
    for method in (*SIMILARITY[0.1], SIMILARITY[0.05][0]):  # of the other temperature one is missing
        put(Cell(column, method, 0), 0.5)
    (only,) = sheets_of(ITEMS["fig1"], places, drawn)
    assert "temperature 0.1" in only.title
    assert "1 cell is missing: `pfedla paper fig1" in only.notes[-1]


def test_few_rounds_leave_periods_without_a_record(places: Places, put: Put) -> None:
    column = columns_of(ITEMS["fig5"], Wanted(datasets=("emnist",)))[0]
    layers = list(layer_sizes(column))
    over = [near_is_more(8, len(layers), 1.0)[0].tolist()] * 2
    put(Cell(column, LITERAL, 0), 0.5, layers=layers, alpha=[], alpha_over_time=[[1, 2], over])
    (sheet,) = sheets_of(ITEMS["fig5"], places, Wanted(datasets=("emnist",), algorithms=("pfedla",)))
    assert [row[1].text for row in sheet.rows] == ["-"] * 5
    assert not any("late than early" in note for note in sheet.notes)
    assert sheet.records[0]["own"] is None


def test_that_others_weights_fall_is_computed(places: Places, drawn: Wanted) -> None:
    assert (
        "smaller late than early, as the paper says: in 7 of 7." in sheets_of(ITEMS["fig5"], places, drawn)[0].notes[1]
    )


def test_weights_in_per_cent_have_two_digits() -> None:
    weights = (1.0, 0.994, 0.0994, 0.012, 0.0099, 0.0031, 0.0001, 0.00009, 0.0)
    assert [in_percent(weight) for weight in weights] == ["100", "99", "9.9", "1.2", "0.99", "0.31", "0.01", "0", "0"]


def test_what_was_added_by_hand_is_missing_from_a_figure(places: Places, put: Put) -> None:
    """`pfedla compare --results` knows no curves and no weights: `pfedla paper` runs such a cell."""
    wanted = Wanted()
    cells = cells_of([ITEMS["fig1"]], wanted)
    for cell in cells:
        put(cell, 0.5)
    assert left(places, cells) == []
    path = places.file("fig1")
    held = json.loads(path.read_text())
    path.write_text(json.dumps([{key: run[key] for key in run if key != "curve"} for run in held]))
    assert sheets_of(ITEMS["fig1"], places, wanted) == []
    assert left(places, cells) == cells


def test_weights_added_by_hand_are_missing_from_figures_of_a_tables_column(places: Places, put: Put) -> None:
    cells = [cell for cell in cells_of([ITEMS["fig7"]], Wanted()) if cell.method == LITERAL]
    for cell in cells:
        put(cell, 0.5, curve=None)
    assert left(places, cells) == cells
    (one,) = (cell for cell in cells_of([ITEMS["table1"]], Wanted(clients=(10,), algorithms=("local",)))[:1])
    put(one, 0.5, curve=None)  # of which no figure needs more
    assert left(places, [one]) == []


def test_chance_is_that_of_clients_in_any_order() -> None:
    """Of four clients all 24 orders can be tried."""
    rng = np.random.default_rng(1)
    weights = [rng.random((4, 4)) for _ in range(2)]
    every = []
    for order in permutations(range(4)):
        found = [falls_with_distance(some[np.ix_(order, order)]) for some in weights]
        every.append(np.mean([x for x in found if x is not None]))
    for share in (0.05, 0.5):
        assert by_chance(weights, share, 20_000) == pytest.approx(float(np.quantile(every, share)), abs=0.04)
    assert by_chance([near_is_more(8, 1, 0.5)[:, 0]]) > -0.6  # so that a fall with distance is seen to be one


def test_all_words_of_a_figure_are_on_it(places: Places, drawn: Wanted) -> None:
    for name in ("fig1", "fig5", "fig6", "fig7"):
        for drawing in drawings_of(ITEMS[name], places, drawn):
            canvas = drawing.canvas
            canvas.draw_without_rendering()
            assert len(canvas.texts) == 2  # above and below
            for text in canvas.texts:
                box = text.get_window_extent()
                assert box.x0 >= 0, text.get_text()
                assert box.x1 <= canvas.bbox.x1, text.get_text()
            assert "scale laptop" in canvas.get_supxlabel().lower()


def test_nothing_measured_is_nothing_shown(places: Places) -> None:
    for name in ("fig1", "fig5", "fig6", "fig7"):
        assert sheets_of(ITEMS[name], places, Wanted()) == []
        assert drawings_of(ITEMS[name], places, Wanted()) == []


@pytest.mark.slow
def test_pictures_are_drawn_the_same_each_time(places: Places, drawn: Wanted, tmp_path: Path) -> None:
    for name, count in (("fig1", 1), ("fig5", 2), ("fig6", 2), ("fig7", 2)):
        drawings = drawings_of(ITEMS[name], places, drawn)
        assert len(drawings) == count
        paths = save(drawings[:1], tmp_path / "first")
        assert [path.suffix for path in paths] == [".png", ".svg"]
        assert paths[0].read_bytes().startswith(b"\x89PNG")
        assert paths[1].read_text().rstrip().endswith("</svg>")
        if name in ("fig1", "fig6"):  # lines and heat maps
            again = save(drawings_of(ITEMS[name], places, drawn)[:1], tmp_path / "second")
            assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
