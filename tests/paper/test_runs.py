from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import numpy as np
import pytest

from pfedla.config import Experiment
from pfedla.errors import RunError
from pfedla.paper import runs
from pfedla.paper.grid import ITEMS, KEEP, LITERAL, Cell, Method, Wanted, cells_of, columns_of
from pfedla.paper.runs import Places, finished, left, run_all, run_cell
from pfedla.record import RunRecord, locked

COLUMN = columns_of(ITEMS["table1"], Wanted("smoke", datasets=("emnist",), clients=(10,)))[0]
LOCAL = Cell(COLUMN, Method("Local", "local"), 0)


@pytest.fixture
def smoke(places: Places) -> Places:
    return places._replace(scale="smoke")


def test_scales_have_files_of_their_own(places: Places) -> None:
    assert places.file("x") == places.results / "x.json"
    assert places._replace(scale="paper").file("x") == places.results / "paper" / "x.json"
    assert places.folder(LOCAL) == places.runs / "laptop" / COLUMN.name / "local-seed0"


@pytest.mark.slow
def test_a_finished_cell_outlives_its_run_and_is_never_run_again(
    smoke: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [Cell(COLUMN, method, 0) for method in (LITERAL, KEEP[2])]
    seen: list[tuple[str, int]] = []
    assert run_all(smoke, cells, report=lambda cell, t: seen.append((cell.method.name, t))) == []
    assert [t for name, t in seen if name == "pFedLA"][-1] == 2
    record = RunRecord(smoke.folder(cells[1]))
    kept = finished(smoke, cells[1])
    assert kept is not None
    assert kept["accuracy_mean"] == record.summary()["accuracy_mean"]
    assert "commit" in kept
    assert kept["curve"][0] == [1, 2]
    np.testing.assert_allclose(
        kept["curve"][2], [line["clients"]["accuracy"][0] for line in record.history()], atol=1e-5
    )
    np.testing.assert_allclose(kept["losses"], [line["loss_mean"] for line in record.history()], atol=1e-5)
    np.testing.assert_allclose(kept["alpha"], record.diagnostics()["alpha"][-1], atol=1e-5)
    rounds, own = kept["own"]
    alpha = record.diagnostics()["alpha"]  # (records, clients, layers, clients)
    assert rounds == [1, 2]
    by_hand = [[np.mean([some[i, place, i] for i in range(len(some))]) for place in range(5)] for some in alpha]
    np.testing.assert_allclose(own, by_hand, atol=1e-5)
    assert kept["layers"] == ["conv1", "conv2", "fc1", "fc2", "fc3"]
    assert sum(kept["retained"]) == pytest.approx(2, abs=1e-4)  # k = 2 of every download
    sets = (record.ledger().arrays()["down"] == 0).reshape(2, -1, 5)  # (rounds, clients, layers): everybody takes part
    assert kept["retained_changes"] == pytest.approx((sets[0] != sets[1]).any(-1).mean(), abs=1e-5)
    shutil.rmtree(smoke.runs)
    assert left(smoke, cells) == []
    assert left(smoke, cells, overwrite=True) == cells
    table = cells_of([ITEMS["table3"]], Wanted("smoke", datasets=("emnist",)))
    assert [cell.method for cell in left(smoke, table)] == [KEEP[1], KEEP[3]]
    monkeypatch.setattr(runs, "carry_out", None)  # it would be called
    assert run_cell(smoke, cells[1]) == kept  # another process may have run it meanwhile
    with pytest.raises(TypeError):
        run_cell(smoke, cells[1], overwrite=True)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_cell_that_another_process_runs_is_left_to_it(
    smoke: Places, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(runs, "carry_out", None)
    monkeypatch.setattr(runs, "_start", None)
    record = RunRecord(smoke.folder(LOCAL))
    record.path.mkdir(parents=True)
    record.config.write_text("")
    told: list[str] = []
    with locked(record.path):
        assert run_all(smoke, [LOCAL], jobs=jobs, tell=told.append) == []
    assert told == [f"Local on {COLUMN.name}, seed 0 is left to the process that runs it already"]


def test_own_weights_are_kept_of_many_clients_and_weights_among_them_are_not() -> None:
    alpha = np.random.default_rng(0).random((2, 12, 3, 12)).astype(np.float32)
    found = {"alpha": alpha, "round": np.array([1, 2]), "layers": np.array(["a", "b", "c"])}
    kept = runs.kept_of(Record([], found), over_time=False)  # type: ignore[arg-type]
    assert "alpha" not in kept
    rounds, own = kept["own"]
    assert rounds == [1, 2]
    expected = [[np.mean([alpha[t, i, place, i] for i in range(12)]) for place in range(3)] for t in range(2)]
    np.testing.assert_allclose(own, expected, atol=1e-5)


class Record(NamedTuple):
    """What `kept_of` reads of a record."""

    lines: list[Any]
    arrays: dict[str, np.ndarray]

    def history(self) -> list[Any]:
        return self.lines

    def diagnostics(self) -> dict[str, np.ndarray]:
        return self.arrays


def test_a_damaged_cell_is_named(places: Places, put: Callable[..., None]) -> None:
    put(LOCAL, 0.5, accuracy_mean=None, bytes_up=None)
    with pytest.raises(
        RunError, match=r"json is damaged: Local on .*, seed 0 is there without accuracy_mean, bytes_up"
    ):
        finished(places, LOCAL)


def test_changes_of_the_retained_set_are_counted_client_by_client() -> None:
    sets = np.array([[1, 0], [0, 1], [1, 0], [1, 0], [0, 1]], bool)
    assert runs._changes(sets, np.array([0, 1, 0, 1, 0])) == pytest.approx(2 / 3)  # 0 keeps, then changes; 1 changes
    assert runs._changes(sets[:2], np.array([0, 1])) == 0  # one download each: nothing to compare


@pytest.mark.slow
def test_a_stopped_cell_is_resumed_and_ends_the_same(smoke: Places) -> None:
    def stop(cell: Cell, t: int) -> None:
        if t == 1:
            raise KeyboardInterrupt

    cell = Cell(COLUMN, LITERAL, 1)
    with pytest.raises(KeyboardInterrupt):
        run_all(smoke, [cell], report=stop)
    assert [line["round"] for line in RunRecord(smoke.folder(cell)).history()] == [1]
    assert RunRecord(smoke.folder(cell)).state == "resumable"
    assert finished(smoke, cell) is None
    rounds: list[int] = []
    run_all(smoke, [cell], report=lambda _, t: rounds.append(t))
    assert rounds == [1, 2]  # where it stood, and the last
    stopped = finished(smoke, cell)
    whole = run_cell(smoke._replace(runs=smoke.runs / "whole", results=smoke.results / "whole"), cell)
    assert stopped is not None
    for key in ("accuracy_mean", "alpha", "curve", "bytes_down"):
        assert stopped[key] == whole[key]


@pytest.mark.slow
def test_a_complete_run_that_was_not_collected_yet_is(smoke: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cell(smoke, LOCAL)
    smoke.file(COLUMN.name).unlink()
    monkeypatch.setattr(runs, "carry_out", None)
    run_cell(smoke, LOCAL)
    assert left(smoke, [LOCAL]) == []


def test_other_settings_are_refused_with_what_differs_and_who_measured_it(
    places: Places, put: Callable[..., None]
) -> None:
    put(LOCAL, 0.5)
    assert left(places, [LOCAL]) == []
    path = places.file(COLUMN.name)
    held: list[dict[str, Any]] = json.loads(path.read_text())
    held[0]["settings"]["training"]["lr"] = 0.5
    path.write_text(json.dumps(held))
    with pytest.raises(RunError, match=r"local, seed 0, with other settings \(training\.lr\), measured by abc"):
        left(places, [LOCAL])
    assert left(places, [LOCAL], overwrite=True) == [LOCAL]


def test_what_cannot_be_run_is_left_out_and_said(smoke: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(experiment: Experiment) -> None:
        raise RunError("no such data")

    monkeypatch.setattr(runs, "federation_of", refuse)
    told: list[str] = []
    gone: list[int] = []
    cells = [LOCAL, LOCAL._replace(seed=1)]
    failed = run_all(smoke, cells, leave=lambda cell: gone.append(cell.seed), tell=told.append)
    assert gone == [0, 1]
    assert failed == [f"Local on {COLUMN.name}, seed 0, Local on {COLUMN.name}, seed 1: no such data"]
    assert len(told) == 2


def test_a_cell_that_is_run_anew_is_unfinished_until_it_ends(smoke: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cell(smoke, LOCAL)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "carry_out", stop)
    with pytest.raises(KeyboardInterrupt):
        run_cell(smoke, LOCAL, overwrite=True)
    assert left(smoke, [LOCAL]) == [LOCAL]


def test_cells_of_a_column_are_of_the_same_data(smoke: Places) -> None:
    run_cell(smoke, LOCAL)
    file = smoke.file(COLUMN.name)
    (row,) = json.loads(file.read_text())
    file.write_text(json.dumps([row | {"data": "of another day"}]))
    other = Cell(COLUMN, Method("FedAvg", "fedavg"), 0)
    (why,) = run_all(smoke, [other])
    assert "local, seed 0, holds a run on other data than are found now" in why
    assert run_all(smoke, [other], overwrite=True) == []


def test_progress_of_what_is_run_anew_is_not_that_of_the_old_run(
    smoke: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cell(smoke, LOCAL)

    class Process:
        """One that has not begun yet when it is asked first, and has ended when it is asked again."""

        returncode, asked = 0, 0

        def poll(self) -> int | None:
            self.asked += 1
            return None if self.asked == 1 else 0

    def start(_places: Places, _cell: Cell, _overwrite: bool, said: IO[str]) -> Process:
        said.write("note: half of the images\nanother line\n")
        return Process()

    monkeypatch.setattr(runs, "_start", start)
    seen, told = list[int](), list[str]()
    run_all(smoke, [LOCAL], jobs=2, overwrite=True, report=lambda _, t: seen.append(t), tell=told.append)
    assert seen == [0, 2]
    assert told == ["half of the images"]


def test_a_cell_that_says_much_is_not_held_up(smoke: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe takes that nobody reads until the process has ended."""
    much = "import sys; sys.stderr.write('x' * 80 + chr(10)) and [sys.stderr.write('y' * 1000) for _ in range(300)]"

    def start(_places: Places, _cell: Cell, _overwrite: bool, said: IO[str]) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", f"{much}; sys.exit(3)"], stderr=said, text=True)

    monkeypatch.setattr(runs, "_start", start)
    (why,) = run_all(smoke, [LOCAL], jobs=2)
    assert len(why) > 300_000
