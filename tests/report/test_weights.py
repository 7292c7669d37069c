from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

from pfedla.ledger import Ledger
from pfedla.report.weights import draw_result, draw_retained, draw_weights, retained_changes
from pfedla.result import Result


def weights(clients: int, layers: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    alpha: np.ndarray = rng.dirichlet(np.ones(clients), (clients, layers))
    return alpha


@pytest.mark.parametrize(("clients", "layers"), [(1, 1), (2, 3), (12, 5), pytest.param(60, 7, marks=pytest.mark.slow)])
def test_a_picture_for_any_size(tmp_path: Path, clients: int, layers: int) -> None:
    path = tmp_path / "weights.png"
    draw_weights(path, weights(clients, layers), [f"layer{i}" for i in range(layers)], "title")
    image = imread(path)
    assert image.shape[0] > 300
    assert image.std() > 0.01  # something is drawn


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "layers"), [(60, 40), (12, 7), (30, 17)])
def test_headings_and_labels_of_many_long_layers_do_not_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clients: int, layers: int
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    names = [f"backbone.encoder.layers.{i}.attention.output_projection" for i in range(layers)]
    draw_weights(tmp_path / "weights.png", weights(clients, layers), names, "title")
    FigureCanvasAgg(figures[0]).draw()  # type: ignore[no-untyped-call]
    panels = figures[0].axes[:layers]
    boxes = [panel.title.get_window_extent() for panel in panels]
    boxes += [panel.get_window_extent() for panel in panels]
    boxes += [label.get_window_extent() for panel in panels for label in (panel.xaxis.label, panel.yaxis.label)]
    boxes = [box for box in boxes if box.width > 0]
    for i, one in enumerate(boxes):
        assert all(not one.overlaps(other) for other in boxes[i + 1 :])
    for panel in panels:
        ticks = [label.get_window_extent() for label in panel.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in pairwise(ticks))


def test_groups_are_outlined(tmp_path: Path) -> None:
    alpha, names = weights(4, 1), ["fc"]
    draw_weights(tmp_path / "without.png", alpha, names, "title")
    draw_weights(tmp_path / "with.png", alpha, names, "title", np.array([0, 0, 1, 1]))
    assert not np.array_equal(imread(tmp_path / "without.png"), imread(tmp_path / "with.png"))


def result(**diagnostics: np.ndarray) -> Result:
    return Result({}, [], diagnostics, Ledger(["fc"]), ("a", "b", "c"), None, None, dict)


def test_a_result_is_drawn_as_its_final_weights(tmp_path: Path) -> None:
    alpha = np.stack([weights(3, 1), weights(3, 1)[::-1]])
    draw_result(tmp_path / "drawn.png", result(alpha=alpha, round=np.array([2, 7])), "mine")
    seen = result(alpha=alpha, round=np.array([2, 7]))
    title = "Who learns from whom: the weights of mine after round 7"
    draw_weights(tmp_path / "by-hand.png", alpha[-1], ["fc"], title, None, seen.names)
    assert np.array_equal(imread(tmp_path / "drawn.png"), imread(tmp_path / "by-hand.png"))
    draw_weights(tmp_path / "numbered.png", alpha[-1], ["fc"], title, None, ["client-0", "client-1", "client-2"])
    draw_weights(tmp_path / "without.png", alpha[-1], ["fc"], title)
    assert np.array_equal(imread(tmp_path / "numbered.png"), imread(tmp_path / "without.png"))
    assert not np.array_equal(imread(tmp_path / "numbered.png"), imread(tmp_path / "drawn.png"))


def test_a_result_without_weights_or_of_too_many_clients_is_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_result(tmp_path / "weights.png", result(other=np.ones((1, 3)), round=np.array([1])), "mine")
    monkeypatch.setattr("pfedla.report.weights.MOST", 2)
    draw_result(tmp_path / "weights.png", result(alpha=weights(3, 1)[None], round=np.array([1])), "mine")
    assert not list(tmp_path.iterdir())


def test_retained_layers_are_drawn_over_the_rounds(tmp_path: Path) -> None:
    retained = np.zeros((3, 3, 1), bool)
    retained[1:, :2] = True
    seen = result(retained=retained, round=np.array([2, 4, 6]), alpha=weights(3, 1)[None].repeat(3, 0))
    draw_retained(tmp_path / "retained.png", seen, "mine")
    assert imread(tmp_path / "retained.png").std() > 0.01
    assert retained_changes(retained) == pytest.approx(2 / 6)  # two of three clients, once in two steps
    assert retained_changes(retained[:1]) == 0
    draw_retained(tmp_path / "one.png", result(retained=retained[:1], round=np.array([1])), "mine")
    draw_retained(tmp_path / "none.png", result(alpha=weights(3, 1)[None], round=np.array([1])), "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "retained.png"]
