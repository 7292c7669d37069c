"""The command `pfedla groups`, on runs and on what it wrote before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pfedla.cli import cli
from pfedla.comparison import compare, parse_variant
from pfedla.errors import RunError
from pfedla.groups import read_groups
from pfedla.record import RunRecord


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a comparison on shifted labels: two methods with weights, and one without."""
    out = tmp_path_factory.mktemp("runs") / "shifted"
    tables: dict[str, dict[str, Any]] = {
        "data": {"clients": 4, "samples_per_client": 12, "shift": "labels", "shift_groups": 2},
        "split": {"name": "iid"},
        "model": {"name": "mlp"},
        "training": {"local_epochs": 1},
        "schedule": {"rounds": 2, "eval_every": 1},
        "machine": {"workers": 0},
    }
    compare(tables, [parse_variant(text) for text in ("fedavg", "pfedla", "pfedla-x,hold=1")], [0, 1], out)
    return out


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli, ["groups", *map(str, words)], catch_exceptions=False)


def test_the_record_knows_the_groups(compared: Path) -> None:
    assert RunRecord(compared / "fedavg-seed0").facts()["groups"] == [0, 0, 1, 1]


def test_a_comparison_is_shown_drawn_and_written(compared: Path, tmp_path: Path) -> None:
    shown = invoke(compared, "--out", tmp_path / "new" / "groups.png")
    rows = [row.split(" | ") for row in shown.stdout.splitlines()]
    assert [row[0].strip("| ") for row in rows[2:]] == ["`pfedla`"] * 2 + ["`pfedla-x,hold=1`"] * 2 + ["even weights"]
    assert rows[2][1] == "2"  # runs
    assert (tmp_path / "new" / "groups.png").stat().st_size > 10_000
    written = invoke(compared, "--json")
    runs = json.loads(written.stdout)
    assert [(run["label"], run["seed"]) for run in runs] == [
        (m, s) for m in ("pfedla", "pfedla-x,hold=1") for s in (0, 1)
    ]
    (tmp_path / "labels.json").write_text(written.stdout)
    assert invoke(tmp_path / "labels.json").stdout == shown.stdout
    (tmp_path / "inputs.json").write_text(written.stdout)
    both = invoke(tmp_path / "labels.json", tmp_path / "inputs.json").stdout
    assert "`labels, pfedla`" in both
    assert "`inputs, pfedla`" in both


def test_a_run_alone(compared: Path) -> None:
    (run,) = read_groups([compared / "pfedla-seed1"])
    assert (run["label"], run["algorithm"], run["groups"], run["rounds"]) == ("pfedla", "pfedla", [0, 0, 1, 1], [1, 2])


def test_what_has_no_weights_no_groups_or_does_not_go_together_is_refused(compared: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="fedavg-seed0 has no weights by client, or its clients have no groups"):
        read_groups([compared / "fedavg-seed0"])
    with pytest.raises(RunError, match="holds no complete run with weights by client"):
        read_groups([tmp_path])
    (tmp_path / "strange.json").write_text("[{}]")
    with pytest.raises(RunError, match=r"strange\.json is nothing that pfedla groups --json wrote: it holds no runs"):
        read_groups([tmp_path / "strange.json"])
    with pytest.raises(RunError, match="nowhere does not exist"):
        read_groups([tmp_path / "nowhere"])
    runs = read_groups([compared])
    damages: list[dict[str, Any]] = [
        {"shares": {}},
        {"pair": [1.0]},
        {"index": [[1.0]]},
        {"chance": "much"},
        {"even": {"own": None}},
    ]
    for damage in damages:
        (tmp_path / "damaged.json").write_text(json.dumps([runs[0], runs[1] | damage]))
        with pytest.raises(RunError, match=r"damaged\.json is nothing that .* wrote: its figures are damaged"):
            read_groups([tmp_path / "damaged.json"])
    runs[1]["layers"] = ["another", *runs[1]["layers"][1:]]
    (tmp_path / "mixed.json").write_text(json.dumps(runs))
    with pytest.raises(RunError, match="differ in their layers, rounds or groups"):
        read_groups([tmp_path / "mixed.json"])


def test_sources_of_one_name_are_told_apart_and_no_run_counts_twice(compared: Path, tmp_path: Path) -> None:
    runs = json.dumps(read_groups([compared]))
    files = [tmp_path / place / "labels.json" for place in ("one/x", "two/x")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text(runs)
    labels = dict.fromkeys(run["label"].split(",")[0] for run in read_groups([*files, compared]))
    assert list(labels) == ["one/x/labels", "two/x/labels", "shifted"]
    (compared.parent / "shifted.json").write_text(runs)
    labels = dict.fromkeys(
        run["label"].split(",")[0] for run in read_groups([compared, compared.parent / "shifted.json"])
    )
    assert list(labels) == ["shifted", "shifted.json"]
    for twice in ([files[0], files[0]], [compared, compared / "pfedla-seed0"]):
        with pytest.raises(RunError, match="pfedla, seed 0, is there twice: name every run once"):
            read_groups(twice)


@pytest.mark.parametrize("words", [("groups", "where-small-labels.json"), ("pareto", "demo.json"), ("data", "show")])
def test_a_picture_has_a_format_that_there_is(words: tuple[str, ...], tmp_path: Path, pfedla: Any) -> None:
    results = Path(__file__).parents[1] / "results"
    named = [str(results / word) if word.endswith(".json") else word for word in words]
    code, _, err = pfedla(*named, "--out", str(tmp_path / "x.foo"))
    assert (code, "x.foo: a picture is a .pdf, .svg or .png file" in err) == (2, True)
    (tmp_path / "file").write_text("")
    code, _, err = pfedla(*named, "--out", str(tmp_path / "file" / "x.png"))
    assert (code, "cannot write" in err) == (1, True)
