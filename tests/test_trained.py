"""What a finished run is good for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import pfedla
from pfedla import cli
from pfedla.errors import RunError
from pfedla.trained import standing

NAMES = ("Hôpital Saint-Jean", "b", "Ärztehaus/3")


def sites(folder: Path, counts: tuple[int, ...] = (60, 40, 20), labels: tuple[int, ...] = (0, 1)) -> Path:
    """Write a client's file for each number of samples: two classes, far apart."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for site, count in enumerate(counts):
        y = np.arange(count) % 2
        x = (rng.normal(size=(count, 5)) + 4 * y[:, None]).astype(np.float32)
        np.savez(folder / f"site-{site}.npz", x=x, y=np.array(labels)[y])
    return folder


def invoke(*words: object) -> Any:
    return CliRunner(env={"COLUMNS": "150"}).invoke(cli.cli, [str(word) for word in words], catch_exceptions=False)


def quick(clients: Any, **settings: Any) -> pfedla.Result:
    how = {"rounds": 3, "training": pfedla.Training(local_epochs=1, lr=0.1), "workers": 0, "eval_every": 1, **settings}
    return pfedla.run(pfedla.PFedLA(), lambda: pfedla.models.MLP((5,), 2), clients, **how)


def pairs(*counts: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    made = []
    for count in counts:
        y = np.arange(count) % 2
        made.append(((rng.normal(size=(count, 5)) + y[:, None]).astype(np.float32), y))
    return made


# ---- clients by name


def test_clients_have_their_names_everywhere(tmp_path: Path) -> None:
    result = quick(dict(zip(NAMES, pairs(60, 40, 20), strict=True)), out=str(tmp_path / "run"))
    assert result.names == NAMES
    assert {row["client"] for row in result.rows()} == set(NAMES)
    one, same = (result.model(client).state_dict() for client in ("Hôpital Saint-Jean", 0))
    assert all(one[key].equal(same[key]) for key in one)
    done = invoke("clients", tmp_path / "run")
    assert done.exit_code == 0
    assert all(name in done.output for name in NAMES)
    assert "only 6 test samples" in done.output


def test_clients_are_listed_best_first_and_as_json(tmp_path: Path) -> None:
    quick(pairs(60, 40, 20), out=tmp_path / "run")
    found = standing(tmp_path / "run")
    assert (found.t, found.headline, found.percent, found.scored_on) == (3, "accuracy", True, "test")
    assert [row["test_samples"] for row in found.rows] == [18, 12, 6]
    listed = json.loads(invoke("clients", tmp_path / "run", "--json").output)
    assert listed == found.rows
    lines = [line for line in invoke("clients", tmp_path / "run").output.splitlines() if "client-" in line]
    scores = [float(line.split()[3]) for line in lines]
    assert scores == sorted(scores, reverse=True)
    assert scores == sorted((round(100 * row["accuracy"], 2) for row in found.rows), reverse=True)


def test_an_unfinished_run_has_clients_and_an_empty_folder_has_none(tmp_path: Path) -> None:
    quick(pairs(30, 30), out=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    assert len(standing(tmp_path / "run").rows) == 2
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match="has not been evaluated yet"):
        standing(tmp_path / "run")
    with pytest.raises(RunError, match="holds no run"):
        standing(tmp_path / "nowhere")


def test_rows_of_another_version_are_refused(tmp_path: Path) -> None:
    quick(pairs(30, 30), out=tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    del facts["samples"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))
    with pytest.raises(RunError, match="damaged or of an earlier version"):
        standing(tmp_path / "run")


def test_the_headline_is_also_weighted_by_samples() -> None:
    result = quick(pairs(60, 40, 20))
    final = result.history[-1]["clients"]["accuracy"]
    expected = sum(value * count for value, count in zip(final, (18, 12, 6), strict=True)) / 36
    assert result.summary["accuracy_weighted"] == pytest.approx(expected)
    assert result.summary["few_test_samples"] == 1


def test_classes_and_messages_go_by_names(tmp_path: Path) -> None:
    folder = sites(tmp_path / "sites", labels=(100, 110))
    done = invoke("run", "--folder", folder, "--rounds", 2, "--workers", 0, "--lr", 0.1, "--out", tmp_path / "run")
    assert done.exit_code == 0
    assert "the labels 100, 110 are taken for names of 2 classes" in done.stderr
    result = pfedla.load(tmp_path / "run")
    assert result.summary["accuracy_mean"] > 0.9
    shown = invoke("data", "show", "--folder", folder, "--out", tmp_path / "who.png")
    assert "site-0" in shown.output
    assert "21 100" in shown.output  # training samples of that class
