from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from matplotlib.axes import Axes
from matplotlib.image import imread

from pfedla import cli
from pfedla.errors import ConfigError, RunError
from pfedla.report.figures import KINDS, draw
from pfedla.report.runs import find_runs
from tests.report.made import create, made


def call(*words: object) -> None:
    done = CliRunner().invoke(cli.cli, ["plot", *map(str, words)])
    if done.exception is not None:
        raise done.exception


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn(tmp_path: Path, kind: str) -> None:
    for seed in (0, 1):
        made(tmp_path / "runs" / f"pfedla-seed{seed}", seed=seed, retained=True)
    made(tmp_path / "runs" / "$_{", names=["$\\x$", *"abcde"], weights=False)
    of = (
        tmp_path / "runs"
        if kind in ("curves", "bytes")
        else tmp_path / "runs" / ("$_{" if kind == "clients" else "pfedla-seed0")
    )
    call(of, "--kind", kind, "-o", tmp_path / "fig.png")
    assert imread(tmp_path / "fig.png").std() > 0.01


def test_formats_and_widths(tmp_path: Path) -> None:
    made(tmp_path / "run")
    for columns, width in (("1", 990), ("2", 2070)):
        call(tmp_path / "run", "--columns", columns, "-o", tmp_path / "fig.png")
        assert imread(tmp_path / "fig.png").shape[1] == width
    call(tmp_path / "run", "-o", tmp_path / "fig.pdf")
    assert (tmp_path / "fig.pdf").read_bytes().startswith(b"%PDF")
    call(tmp_path / "run", "-o", tmp_path / "new" / "fig.svg")
    assert "accuracy (%)" in (tmp_path / "new" / "fig.svg").read_text()  # text stays text


def test_what_cannot_be_drawn_is_said_in_one_line(tmp_path: Path) -> None:
    for seed in (0, 1):
        made(tmp_path / "runs" / f"a-seed{seed}", seed=seed, weights=False)
    one = tmp_path / "runs" / "a-seed0"
    with pytest.raises(ConfigError, match=r"a picture is a \.pdf, \.svg or \.png file"):
        call(one, "-o", tmp_path / "fig.docx")
    with pytest.raises(ConfigError, match="clients shows one run: name one of a-seed0, a-seed1"):
        call(tmp_path / "runs", "--kind", "clients", "-o", tmp_path / "fig.png")
    with pytest.raises(RunError, match="a-seed0 has no weights to draw"):
        call(one, "--kind", "weights", "-o", tmp_path / "fig.png")
    with pytest.raises(RunError, match="a-seed0 has no retained layers to draw"):
        call(one, "--kind", "retained", "-o", tmp_path / "fig.png")
    for seed in (2, 3):
        made(tmp_path / "others" / f"a-seed{seed}", seed=seed, weights=False, data=f"{seed}")
    with pytest.raises(ConfigError, match="these runs have different data: name one of a-seed2, a-seed3"):
        call(tmp_path / "others", "--kind", "federation", "-o", tmp_path / "fig.png")
    create(tmp_path / "begun", names=["a"]).release()
    with pytest.raises(RunError, match="none of these runs has been evaluated yet"):
        call(tmp_path / "begun", "-o", tmp_path / "fig.png")


def test_a_mean_is_drawn_where_all_seeds_have_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line would jump where one of its seeds ends."""
    records = [made(tmp_path / f"x-seed{seed}", seed=seed, rounds=6) for seed in (0, 1)]
    history = records[1].path / "metrics.jsonl"
    history.write_text("".join(history.read_text().splitlines(keepends=True)[:4]))
    drawn: list[Any] = []
    plot = Axes.plot

    def seen(axis: Axes, *places: Any, **look: Any) -> Any:
        drawn.append(places)
        return plot(axis, *places, **look)

    monkeypatch.setattr(Axes, "plot", seen)
    draw("curves", find_runs([tmp_path]), tmp_path / "x.png")
    assert [x.tolist() for x, *_ in drawn] == [[1, 2, 3, 4]]


def test_weights_of_more_clients_than_a_picture_holds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pfedla.report.figures.MOST", 5)
    made(tmp_path / "run")
    with pytest.raises(RunError, match="run has 6 clients: a picture of weights can hold 5"):
        draw("weights", find_runs([tmp_path / "run"]), tmp_path / "x.png")
