from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from pfedla import cli
from pfedla.errors import ConfigError, RunError
from pfedla.report.figures import KINDS
from tests.report.made import create, made


def call(*words: object) -> None:
    done = CliRunner().invoke(cli.cli, ["plot", *map(str, words)])
    if done.exception is not None:
        raise done.exception


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn(tmp_path: Path, kind: str) -> None:
    for seed in (0, 1):
        made(tmp_path / "runs" / f"pfedla-seed{seed}", seed=seed)
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
    create(tmp_path / "begun", names=["a"]).release()
    with pytest.raises(RunError, match="none of these runs has been evaluated yet"):
        call(tmp_path / "begun", "-o", tmp_path / "fig.png")
