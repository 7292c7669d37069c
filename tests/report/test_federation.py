from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console
from rich.table import Table

from pfedla.report.federation import draw_federation, federation_table


def text(table: Table) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def holding(train: list[list[int]], test: int = 1) -> np.ndarray:
    counts = np.array(train)
    return np.stack([counts, np.full_like(counts, test) * (counts > 0)], axis=-1)


def test_the_table_names_each_clients_classes_largest_first() -> None:
    counts = holding([[5, 0, 20], [0, 1000, 0]])
    lines = text(federation_table(counts, ("bag", "coat", "dress"), title="who holds what")).splitlines()
    assert "who holds what" in lines[0]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [
        ["0", "25", "2", "20 dress, 5 bag"],
        ["1", "1,000", "1", "1000 coat"],
        ["all", "1,025", "3", "3 of 3 classes"],
    ]
    assert "validation" in text(federation_table(counts, ("bag", "coat", "dress"), scored="validation"))


def test_the_table_sums_up_the_classes_beyond_the_largest() -> None:
    counts = holding([[9, 3, 3, 3], [9, 3, 2, 1]])
    printed = text(federation_table(counts, ("a", "b", "c", "d"), most=1, groups=np.array([0, 1])))
    assert "9 a, 3 of 3 more" in printed
    assert "9 a, 1 to 3 of 3 more" in printed
    assert "group" in printed


def test_every_client_of_a_hundred_has_one_line() -> None:
    counts = holding([[1 + (i + c) % 7 for c in range(100)] for i in range(100)])
    printed = text(federation_table(counts, tuple(f"class {c}" for c in range(100)))).splitlines()
    assert len([line for line in printed if line.startswith("│")]) == 101


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (12, 10), (100, 10), (300, 40)])
def test_the_figure_grows_with_the_federation_within_bounds(tmp_path: Path, clients: int, classes: int) -> None:
    rng = np.random.default_rng(0)
    counts = holding(rng.integers(0, 4, (clients, classes)).tolist())
    path = tmp_path / "new" / "federation.png"
    names = tuple(f"class {c}" for c in range(classes))
    draw_federation(path, counts, names, "who holds what", groups=np.arange(clients) * 4 // clients)
    height, width, _ = imread(path).shape
    assert 700 < width < 2600
    assert 250 < height < 2600


def test_a_class_nobody_holds_leaves_its_row_empty(tmp_path: Path) -> None:
    full, lacking = holding([[5, 5]] * 4), holding([[5, 0]] * 4)
    pictures = []
    for name, counts in (("full", full), ("lacking", lacking)):
        draw_federation(tmp_path / f"{name}.png", counts, ("bag", "coat"), "")
        pictures.append(imread(tmp_path / f"{name}.png")[..., :3].mean(axis=2))
    dark = [(picture < 0.3).sum() for picture in pictures]
    assert dark[1] == pytest.approx(dark[0] / 2, rel=0.1)
