from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from pfedla.report.weights import draw_weights


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


def test_groups_are_outlined(tmp_path: Path) -> None:
    alpha, names = weights(4, 1), ["fc"]
    draw_weights(tmp_path / "without.png", alpha, names, "title")
    draw_weights(tmp_path / "with.png", alpha, names, "title", np.array([0, 0, 1, 1]))
    assert not np.array_equal(imread(tmp_path / "without.png"), imread(tmp_path / "with.png"))
