from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfedla import ALGORITHMS, cli
from pfedla.data.splits import SPLITS
from pfedla.demo import DEMO

SMALL = [
    *("--clients", "3", "--samples-per-client", "20", "--rounds", "2", "--local-epochs", "1", "--model", "mlp"),
    *("--workers", "0"),
]
KEYS = {
    *("algorithm", "dataset", "clients", "rounds", "seed", "accuracy_mean", "accuracy_std", "accuracy_worst"),
    *("accuracy_after_training", "bytes_down", "bytes_up", "seconds", "samples_per_second"),
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PFEDLA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def pfedla(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Call the command line; return exit code, standard output and standard error."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pfedla", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert "\x1b" not in out + err  # no colour where it is piped
        return code, out, err

    return call


def test_json_is_the_summary_and_nothing_else(pfedla: Any) -> None:
    code, out, err = pfedla("run", *SMALL, "--out", "here", "--json")
    assert code == 0
    summary = json.loads(out)
    assert summary.keys() >= KEYS
    assert (summary["algorithm"], summary["dataset"], summary["clients"]) == ("pfedla", "fashion-mnist-10k", 3)
    assert summary == json.loads(Path("here/summary.json").read_text())
    assert "round 2/2" in err


def test_a_run_leaves_its_directory(pfedla: Any) -> None:
    code, out, _ = pfedla("run", *SMALL, "--eval-every", "1", "--out", "here")
    assert code == 0
    assert "run directory: here" in out
    assert {path.name for path in Path("here").iterdir()} == {
        *("config.toml", "metrics.jsonl", "summary.json", "ledger.npz", "alpha.npz", "weights.png", "models"),
    }
    assert [json.loads(line)["round"] for line in Path("here/metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert np.load("here/alpha.npz")["alpha"].shape == (2, 3, 2, 3)
    assert len(list(Path("here/models").iterdir())) == 3


def test_a_run_can_be_repeated_from_its_configuration(pfedla: Any) -> None:
    pfedla("run", *SMALL, "--algorithm", "heurpfedla", "--set", "algorithm.hyper_lr=0.01", "--out", "one", "--quiet")
    pfedla("run", "one/config.toml", "--out", "two", "--quiet")
    one, two = (json.loads(Path(name, "summary.json").read_text()) for name in ("one", "two"))
    timed = {"seconds", "samples_per_second"}
    assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in two.items() if k not in timed}
    assert 'name = "heurpfedla"\nretain = 1\nhyper_lr = 0.01\n' in Path("two/config.toml").read_text()


def test_quiet_prints_nothing(pfedla: Any) -> None:
    assert pfedla("run", *SMALL, "--out", "here", "--quiet") == (0, "", "")


def test_runs_without_a_name_never_meet(pfedla: Any) -> None:
    for _ in range(2):
        assert pfedla("run", *SMALL, "--algorithm", "local")[0] == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "local-fashion-mnist-10k-seed0",
        "local-fashion-mnist-10k-seed0-2",
    ]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run", "--datset", "x"], 2, "--dataset"),
        (["run", "--dataset", "fashon-mnist"], 2, "did you mean 'fashion-mnist'?"),
        (["run", "--algorithm", "fedavgg"], 2, "did you mean 'fedavg'?"),
        (["run", "--split", "non-iid-3"], 2, "did you mean 'non-iid-"),
        (["run", "--set", "algorithm.retian=1"], 2, "did you mean 'algorithm.retain'?"),
        (["run", "--set", "algorithm.retain=many"], 2, "algorithm.retain = 'many' must be a whole number"),
        (["run", "--set", "algorithm.retain=9"], 2, "algorithm.retain = 9: this model has 5 layers"),
        (["run", "--set", "retain=9"], 2, "SECTION.KEY=VALUE"),
        (["run", "--rounds", "0"], 2, "run.rounds = 0 must be at least 1"),
        (["run", "--rounds", "x"], 2, "'x' is not a valid integer"),
        (["run", "--lr", "-1"], 2, "training.lr"),
        (["run", "--participants", "11"], 2, "participants = 11 must be from 1 to the number of clients, 10"),
        (["run", "--model", "lenett"], 2, "did you mean 'lenet'?"),
        (["run", "--model", "nowhere:make"], 2, "cannot import 'nowhere'"),
        (["run", "missing.toml"], 2, "there is no configuration file missing.toml"),
        (["run", "--samples-per-client", "9000"], 1, "lower --samples-per-client"),
        (["run", "--dataset", "cifar10"], 1, "--data-dir"),
        (["run", "--folder", "nowhere"], 1, "nowhere"),
        (["run", "--resume", "nowhere"], 1, "nowhere holds no run to go on with"),
        (["run", "--resume", "nowhere", "--rounds", "3"], 2, "takes no settings"),
        (["compare"], 2, "name at least one method"),
        (["compare", "-a", "pfedla", "-a", "pfedla"], 2, "named twice: pfedla"),
        (["compare", "-a", "pfedla,retain"], 2, "NAME,KEY=VALUE"),
        (["compare", "-a", "local", "-a", "pfedla,retain=9"], 2, "pfedla,retain=9: algorithm.retain = 9"),
        (["data", "show", "--clients", "0"], 2, "data.clients"),
    ],
)
def test_a_mistake_ends_in_one_sentence_before_any_work(pfedla: Any, words: list[str], code: int, message: str) -> None:
    found, out, err = pfedla(*words)
    assert (found, out) == (code, "")
    assert message in err
    assert not Path("runs").exists()


def test_a_broken_configuration_file_is_named(pfedla: Any) -> None:
    Path("bad.toml").write_text("[run\n")
    code, _, err = pfedla("run", "bad.toml")
    assert code == 2
    assert "bad.toml cannot be read as TOML" in err


def test_a_run_is_never_overwritten_silently(pfedla: Any) -> None:
    pfedla("run", *SMALL, "--out", "here", "--quiet")
    before = {path: path.stat().st_mtime_ns for path in Path("here").rglob("*")}
    code, _, err = pfedla("run", *SMALL, "--out", "here")
    assert code == 1
    assert "here already holds a complete run" in err
    assert {path: path.stat().st_mtime_ns for path in Path("here").rglob("*")} == before
    assert pfedla("run", *SMALL, "--algorithm", "local", "--out", "here", "--overwrite")[0] == 0
    assert json.loads(Path("here/summary.json").read_text())["algorithm"] == "local"
    assert not Path("here/alpha.npz").exists()


def test_compare_lists_every_run(pfedla: Any) -> None:
    words = ["compare", "-a", "local", "-a", "pfedla,retain=1,hyper_lr=0.01", "--seeds", "2", *SMALL, "--out", "both"]
    code, out, _ = pfedla(*words)
    assert code == 0
    listed = json.loads(Path("both/comparison.json").read_text())
    assert [(run["algorithm"], run["seed"]) for run in listed] == [
        ("local", 0),
        ("local", 1),
        ("pfedla", 0),
        ("pfedla", 1),
    ]
    assert Path("both/local-seed1/summary.json").exists()
    assert "hyper_lr = 0.01" in Path("both/pfedla,retain=1,hyper_lr=0.01-seed0/config.toml").read_text()
    assert "means over 2 seeds" in out
    assert "*" in out


def test_compare_goes_on_and_keeps_what_is_done(pfedla: Any) -> None:
    words = ["compare", "-a", "local", "-a", "fedavg", *SMALL, "--out", "both"]
    pfedla(*words)
    Path("both/fedavg-seed0/summary.json").unlink()  # as if it had stopped before its end
    kept = Path("both/local-seed0/summary.json").stat().st_mtime_ns
    code, _, err = pfedla(*words)
    assert code == 0
    assert "both/local-seed0 is complete: kept" in err
    assert Path("both/local-seed0/summary.json").stat().st_mtime_ns == kept
    assert Path("both/fedavg-seed0/summary.json").exists()
    Path("both/comparison.json").unlink()
    assert pfedla(*words)[0] == 0  # nothing to do, and still everything is listed
    assert [run["algorithm"] for run in json.loads(Path("both/comparison.json").read_text())] == ["local", "fedavg"]
    code, _, err = pfedla(*words, "--lr", "0.5")
    assert code == 1
    assert "another configuration" in err


def test_table_reads_what_compare_wrote(pfedla: Any) -> None:
    pfedla("compare", "-a", "local", "-a", "fedavg", *SMALL, "--out", "both")
    code, out, _ = pfedla("table", "both", "both/comparison.json", "--value", "mb-up")
    assert code == 0
    assert out.splitlines()[0] == "| method | both | comparison |"
    assert out.splitlines()[2].startswith("| `local` | 0.0 | 0.0 |")
    code, out, _ = pfedla("table", "both", "--value", "mb-up", "--against", "local")
    assert (code, out.splitlines()[0]) == (0, "| above `local` | both |")
    assert out.splitlines()[2].startswith("| `fedavg` | +")
    code, _, err = pfedla("table", "both/local-seed0/config.toml")
    assert code == 1
    assert "is no comparison that pfedla compare wrote" in err


def test_compare_runs_all_methods_that_the_model_allows(pfedla: Any) -> None:
    code, out, err = pfedla("compare", "--all", *SMALL, "--local-epochs", "2", "--out", "every", "--json")
    assert code == 0
    assert {run["algorithm"] for run in json.loads(out)} | set(re.findall(r"(\S+) is left out", err)) == set(ALGORITHMS)


def test_where_data_lies_decides_nothing(pfedla: Any) -> None:
    words = ["compare", "-a", "local", *SMALL, "--out", "one"]
    assert pfedla(*words)[0] == 0
    assert "kept" in pfedla(*words, "--data-dir", "elsewhere")[2]


def test_compare_prints_json_alone(pfedla: Any) -> None:
    code, out, _ = pfedla("compare", "-a", "local", *SMALL, "--out", "one", "--json")
    assert code == 0
    assert [run["algorithm"] for run in json.loads(out)] == ["local"]


def test_own_data_from_a_folder(pfedla: Any) -> None:
    rng = np.random.default_rng(0)
    Path("sites").mkdir()
    for name in ("a", "b"):
        x = rng.normal(size=(30, 5)).astype(np.float32)
        np.savez(Path("sites", f"{name}.npz"), x=x, y=(x[:, 0] > 0).astype(np.int64))
    words = ["run", "--folder", "sites", "--rounds", "2", "--workers", "0", "--out", "here", "--json"]
    code, out, _ = pfedla(*words)
    assert code == 0
    assert json.loads(out)["dataset"] == "sites"
    assert {path.name for path in Path("here/models").iterdir()} == {"a.safetensors", "b.safetensors"}


def test_own_data_with_a_client_column(pfedla: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5)).astype(np.float32)
    np.savez("wards.npz", x=x, y=(x[:, 0] > 0).astype(np.int64), client=np.arange(60) % 3)
    words = ["run", "--folder", "wards.npz", "--rounds", "2", "--workers", "0", "--out", "here", "--json"]
    code, out, _ = pfedla(*words)
    assert code == 0
    assert (json.loads(out)["dataset"], json.loads(out)["clients"]) == ("wards", 3)
    assert "FILE.npz" in pfedla("run", "--split", "column")[2]


@pytest.mark.parametrize("split", sorted(set(SPLITS) - {"classes", "column"}))
def test_data_show_prints_and_draws(pfedla: Any, split: str) -> None:
    code, out, _ = pfedla("data", "show", "--split", split, "--clients", "4", "--out", "deep/who.png")
    assert code == 0
    assert "560" in out  # training samples of all clients
    assert Path("deep/who.png").read_bytes().startswith(b"\x89PNG")


def test_lists(pfedla: Any) -> None:
    assert "heurpfedla" in pfedla("algorithms")[1]
    assert "emnist-balanced" in pfedla("data", "list")[1]
    assert pfedla("--version")[1].startswith("pfedla, version ")
    assert "--test-samples-per-client" in pfedla("run", "--help")[1]


def test_ctrl_c_stops_cleanly_and_the_run_goes_on(pfedla: Any) -> None:
    settings = ["--clients", "4", "--samples-per-client", "40", "--rounds", "12", "--local-epochs", "1"]
    settings += ["--eval-every", "1", "--workers", "2", "--set", "run.checkpoint_every=0"]
    command = [sys.executable, "-c", "from pfedla.cli import main; main()", "run", *settings, "--out", "stopped"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # the server's threads, as in this process
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    metrics = Path("stopped/metrics.jsonl")
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "pfedla run --resume stopped" in err
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody of its group is left
    assert not Path("stopped/summary.json").exists()
    assert pfedla("run", "--resume", "stopped", "--workers", "1", "--quiet")[0] == 0
    assert pfedla("run", *settings, "--out", "straight", "--quiet")[0] == 0

    def figures(name: str) -> Any:
        records = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in record.items() if key != "seconds"} for record in records]

    assert figures("stopped") == figures("straight")
    for name in ("alpha.npz", "ledger.npz"):
        with np.load(Path("stopped", name)) as one, np.load(Path("straight", name)) as two:
            assert all(np.array_equal(one[key], two[key]) for key in two)
    assert not Path("stopped/checkpoint.safetensors").exists()
    assert pfedla("run", "--resume", "stopped")[0] == 1  # complete: nothing to go on with


def test_the_demo_ends_in_a_table_and_a_picture(pfedla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"run": {"rounds": 2}, "training": {"local_epochs": 1}, "model": {"name": "mlp"}}
    monkeypatch.setattr("pfedla.cli.DEMO", {**DEMO, **few})
    code, out, _ = pfedla("demo", "--workers", "0")
    assert code == 0
    for method in ("local", "fedavg", "pfedla", "heurpfedla"):
        assert method in out
    assert "runs/demo/pfedla-seed0/weights.png" in out
    assert Path("runs/demo/pfedla-seed0/weights.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(Path("runs/demo/comparison.json").read_text())) == 4
