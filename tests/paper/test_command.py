from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pfedla.options import with_options
from pfedla.paper import command
from pfedla.paper.grid import ITEMS, METHODS, Cell, Wanted, columns_of

SMOKE = ("--scale", "smoke", "--dataset", "emnist", "--workers", "0")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PFEDLA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.slow
def test_without_names_it_lists_what_there_is_and_what_it_costs(pfedla: Any) -> None:
    code, out, _ = pfedla("paper", "--seeds", "3", "--clients", "10")
    assert code == 0
    for name in ("table1", "table2", "table3", "fig1", "fig5", "fig6", "fig7"):
        assert name in out
    assert "Scale laptop" in out
    assert "estimated" in out


def test_nothing_measured_is_shown_as_missing(pfedla: Any) -> None:
    code, out, _ = pfedla("paper", "table3", "fig5", "--print")
    assert code == 0
    assert "| 2 | missing | 93.94 |  |  | 312.52 | 312.52 |  |  | fc3, fc1 |" in out
    assert "- 4 cells are missing: `pfedla paper table3 --dataset emnist` adds them" not in out  # of both data sets
    assert "- 8 cells are missing: `pfedla paper table3` adds them" in out
    assert (
        "fig5: nothing is measured at scale laptop. 8 cells are missing: `pfedla paper fig5` adds them (about " in out
    )
    assert "\n\nfig5:" in out  # not within the list before it
    code, out, err = pfedla("paper", "fig5", "--print", "--format", "csv", "--dataset", "emnist")
    assert (code, out) == (0, "")
    assert "fig5: nothing is measured" in err
    out = pfedla("paper", "table3", "--print", "--format", "csv", "--dataset", "emnist")[1]
    assert len(list(csv.DictReader(io.StringIO(out)))) == 4
    out = pfedla("paper", "table1", "table3", "--print", "--clients", "100")[1]
    assert out.endswith("table3 has no such columns: it has cifar10 with 10 clients, emnist with 10 clients.\n")


def test_mistakes_end_in_one_line(pfedla: Any) -> None:
    for words, said in (
        (("tabel1",), "did you mean 'table"),
        (("table1", "--dataset", "cifar"), "did you mean 'cifar10"),
        (("table1", "-a", "pfedl"), "did you mean 'pfedla'"),
        (("table1", "--clients", "11"), "10 and 100 clients"),
        (("table1", "-a", "pfedl", "--print"), "did you mean 'pfedla'"),
        (("table1", "-a", "similarity-layer", "--print"), "table1 has none of similarity-layer"),
        (("table3", "fig5", "-a", "local", "-a", "fedavg"), "table3 and fig5 have none of local, fedavg"),
        (("table1", "table3", "--format", "csv", "--print"), "name one of them at a time"),
        (("table3", "--print", "--clients", "100"), "table3 has no such columns"),
        (("fig1", "--print", "--dataset", "emnist"), "fig1 has no such columns: it has cifar10 with 6 clients."),
        (("fig5", "fig6", "--print", "--clients", "10"), "the figures' clients are fixed: --clients is for tables"),
        (("table1", "--print", "--overwrite"), "--print runs nothing: leave out --overwrite"),
        (("table1", "--print", "--jobs", "2"), "--print runs nothing: leave out --jobs"),
        (("table1", "--print", "--at", "20"), "--at is for rounds"),
        (("table1", "--print", "--quiet"), "--print and --quiet together show nothing"),
        (("table1", "--workers", "-1"), "--workers -1 must be at least 0"),
        (("--cell", "no-column", "local", "0"), "unknown column"),
    ):
        code, _, err = pfedla("paper", *words)
        assert code == 2
        assert said in " ".join(err.split())
        assert len(err.strip().splitlines()) == 1


def test_where_results_cannot_be_written_nothing_is_run(pfedla: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    code, out, err = pfedla("paper", "table1", *SMOKE, "-a", "local", "--results", "taken/below")
    assert code == 1
    assert "cannot write taken/below" in err
    assert "done" not in out + err
    assert not Path("runs").exists()


def test_who_stops_what_is_run_anew_is_told_how_to_go_on(pfedla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_all", stopped)
    words = ("paper", "table1", *SMOKE, "-a", "local")
    assert "Give the same command again to resume" in pfedla(*words)[2]
    assert "Without --overwrite the same command resumes" in pfedla(*words, "--overwrite")[2]


def test_options_are_named_once_however_often_a_message_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a cell has named them to the one that started it."""
    monkeypatch.setattr(sys, "argv", ["pfedla", "paper", "table1"])
    said = with_options("x holds another run: choose another folder (out), or overwrite it")
    assert said == "x holds another run: choose another folder, or overwrite it (--runs, --overwrite)"
    assert with_options(said) == said


def test_time_left_is_that_of_the_cells_that_will_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds took a second each so far, and every round that is left costs the same."""
    column = columns_of(ITEMS["table1"], Wanted("smoke", ("emnist",), (10,)))[0]
    cells = [Cell(column, METHODS[0], seed) for seed in range(4)]  # 2 rounds each
    now = 100.0
    monkeypatch.setattr("pfedla.paper.command.time.monotonic", lambda: now)
    progress = command._Progress(Console(quiet=True), "smoke", cells, cells)
    assert progress._time_left() == ""
    for t in (1, 2):
        now += 1
        progress(cells[0], t)
    assert progress._time_left() == ", about 6 s left"
    progress.leave(cells[2])
    assert progress._time_left() == ", about 4 s left"
    now += 1
    progress(cells[1], 1)
    assert progress._time_left() == ", about 3 s left"


def test_what_an_item_lacks_is_said(pfedla: Any) -> None:
    out = pfedla("paper", "table1", "fig5", "-a", "local", "--print")[1]
    assert out.endswith("\nfig5 has none of these methods.\n")
    assert "rounds compares methods: ask for two or more." in pfedla("paper", "rounds", "-a", "local", "--print")[1]
    code, _, err = pfedla("paper", "table1", "--print", "--results", "nowhere")
    assert (code, err) == (1, "error: there are no results to print: nowhere does not exist\n")
    Path("elsewhere").mkdir()
    out = pfedla("paper", "fig7", "--print", "--results", "elsewhere")[1]
    assert "`pfedla paper fig7 --results elsewhere` adds them" in out


def test_missing_data_are_said_and_the_rest_goes_on(pfedla: Any) -> None:
    code, out, err = pfedla("paper", "table3", "--dataset", "emnist", "-a", "pfedla")
    assert code == 1
    assert "found none of its files" in err
    assert "(--data-dir, --download)" in err
    assert "| 0 | missing |" in out


@pytest.mark.slow
def test_a_table_and_a_figure_at_the_smallest_scale(pfedla: Any) -> None:
    words = ("paper", "table1", "fig7", *SMOKE, "--clients", "10", "-a", "local", "-a", "pfedla")
    code, out, err = pfedla(*words)
    assert code == 0
    assert "scale smoke: 3 cells, 0 finished" in err
    assert "3/3" in err
    assert "10 clients, fashion-mnist-10k, 2 rounds, 12 test images each, 1 seed: ours %" in out
    assert "Figure 7, EMNIST, pFedLA (10 clients" in out
    assert Path("runs/paper/smoke/figures/fig7.png").exists()
    assert Path("runs/paper/smoke/figures/fig7-adam.svg").exists()
    shutil.rmtree("runs")
    code, again, err = pfedla(*words)
    assert code == 0
    assert "3 cells, 3 finished" in err
    assert again == out
    assert not list(Path("runs/paper/smoke").glob("emnist*"))
    assert pfedla(*words, "--print", "--draw", "here")[1] == out
    assert Path("here/fig7.svg").exists()
    assert pfedla(*words, "--print", "--format", "latex")[1].startswith("% \\usepackage{booktabs, graphicx}\n")
    held = json.loads(Path("results/paper/smoke/emnist-10-non-iid-1.json").read_text())
    assert {run["label"] for run in held} == {
        "local",
        "pfedla,hyper_optimizer=sgd,hyper_lr=1.0",
        "pfedla,hyper_optimizer=adam,hyper_lr=0.0003",
    }


@pytest.mark.slow
def test_cells_may_be_run_at_the_same_time(pfedla: Any) -> None:
    words = ("paper", "table1", *SMOKE, "--clients", "10", "-a", "local", "-a", "fedavg")
    code, _, err = pfedla(*words, "--jobs", "2")
    assert code == 0
    assert "2/2" in err
    code, _, err = pfedla(*words, "-a", "fedbn", "-a", "pfedhn")
    assert "3 cells, 2 finished" in err
    assert "3/3 emnist-10-non-iid-1, pFedHN, seed 0: done" in err  # of the whole grid


@pytest.mark.slow
def test_what_goes_wrong_in_a_process_is_said(pfedla: Any) -> None:
    code, _, err = pfedla("paper", "table3", "--dataset", "emnist", "-a", "pfedla", "--jobs", "2")
    assert code == 1
    assert "found none of its files" in err
