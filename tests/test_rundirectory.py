from __future__ import annotations

from pathlib import Path

import pytest

from pfedla.errors import RunError
from pfedla.rundirectory import RunDirectory


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    return RunDirectory.create(tmp_path / "deep" / "run", "[run]\n").path


@pytest.fixture
def complete(unfinished: Path) -> Path:
    (unfinished / "summary.json").write_text('{"seed": 3}')
    return unfinished


def test_a_new_run_has_its_configuration(unfinished: Path) -> None:
    assert (unfinished / "config.toml").read_text() == "[run]\n"
    directory = RunDirectory.open(unfinished)
    assert directory.holds_run
    assert not directory.complete


def test_an_unfinished_run_is_not_overwritten(unfinished: Path) -> None:
    with pytest.raises(
        RunError, match=r"unfinished run: choose another --out, --resume .* to go on with it, or --overwrite it"
    ):
        RunDirectory.create(unfinished, "")
    assert (unfinished / "config.toml").read_text() == "[run]\n"


def test_a_complete_run_is_neither_overwritten_nor_resumed(complete: Path) -> None:
    with pytest.raises(RunError, match="already holds a complete run: choose another --out, or --overwrite it"):
        RunDirectory.create(complete, "")
    with pytest.raises(RunError, match="is complete: there is nothing to go on with"):
        RunDirectory.open(complete)
    assert RunDirectory(complete).summary() == {"seed": 3}


def test_overwriting_removes_what_the_run_left_and_nothing_else(complete: Path) -> None:
    (complete / "models").mkdir()
    for name in ("metrics.jsonl", "checkpoint.safetensors", "ledger.npz", "alpha.npz", "models/a.safetensors", "notes"):
        (complete / name).write_text("old")
    RunDirectory.create(complete, "new", overwrite=True)
    assert sorted(file.name for file in complete.iterdir()) == ["config.toml", "notes"]
    assert (complete / "config.toml").read_text() == "new"


def test_a_folder_with_other_things_is_refused_even_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(RunError, match="is not empty and holds no run"):
            RunDirectory.create(tmp_path, "", overwrite=overwrite)


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path, "x").holds_run


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file: choose another --out"):
        RunDirectory.create(tmp_path / "file", "")
    with pytest.raises(RunError, match="cannot write to"):
        RunDirectory.create(tmp_path / "file" / "run", "")


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match=r"holds no run to go on with: it has no config\.toml"):
            RunDirectory.open(path)
