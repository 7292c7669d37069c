from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from torch.nn import functional

from pfedla import ALGORITHMS, Custom, FedAvg, cli, comparison, run
from pfedla.data.splits import SPLITS
from pfedla.demo import DEMO

SMALL = [
    *("--clients", "3", "--samples-per-client", "20", "--rounds", "2", "--local-epochs", "1", "--model", "mlp"),
    *("--workers", "0"),
]
KEYS = {
    *("algorithm", "dataset", "clients", "rounds", "seed", "accuracy_mean", "accuracy_std", "accuracy_worst"),
    *("accuracy_after_training", "bytes_down", "bytes_up", "seconds", "samples_per_second"),
    *("headline", "higher_is_better", "percent", "overhead_down", "overhead_up"),
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PFEDLA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


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
        *("config.toml", "run.json", "metrics.jsonl", "summary.json", "ledger.npz", "diagnostics.npz", "weights.png"),
        *("models", "checkpoint.safetensors"),
    }
    assert [json.loads(line)["round"] for line in Path("here/metrics.jsonl").read_text().splitlines()] == [1, 2]
    with np.load("here/diagnostics.npz") as saved:
        assert saved["alpha"].shape == (2, 3, 2, 3)
    assert len(list(Path("here/models").iterdir())) == 3


def test_a_run_can_be_repeated_from_its_configuration(pfedla: Any) -> None:
    pfedla("run", *SMALL, "--algorithm", "heurpfedla", "--set", "algorithm.hyper_lr=0.01", "--out", "one", "--quiet")
    pfedla("run", "one/config.toml", "--out", "two", "--quiet")
    one, two = (json.loads(Path(name, "summary.json").read_text()) for name in ("one", "two"))
    timed = {"seconds", "samples_per_second"}
    assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in two.items() if k not in timed}
    assert (
        'name = "heurpfedla"\nretain = 1\nhyper_optimizer = "adam"\nhyper_lr = 0.01\n'
        in Path("two/config.toml").read_text()
    )


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
        (["run", "--rounds", "0"], 2, "schedule.rounds = 0 must be at least 1 (--rounds)"),
        (["run", "--rounds", "x"], 2, "'x' is not a valid integer"),
        (["run", "--lr", "-1"], 2, "training.lr = -1.0 must be above 0 (--lr)"),
        (["run", "--lr", "nan"], 2, "training.lr = nan must be finite (--lr)"),
        (["run", "--workers", "-1"], 2, "machine.workers = -1 must be at least 0 (--workers)"),
        (["run", "--participants", "11"], 2, "participants = 11 must be from 1 to the number of clients, 10 (--part"),
        (["run", "--set", "run.rounds=3"], 2, "unknown setting 'run.rounds': it is now 'schedule.rounds' (--rounds)"),
        (["run", "--set", "data.data_dir=x"], 2, "it is now 'machine.data_dir' (--data-dir)"),
        (
            ["run", "--set", "objective.name=regression"],
            2,
            "set objective.name to classification",
        ),
        (["run", "--model", "lenett"], 2, "did you mean 'lenet'?"),
        (["run", "--model", "nowhere:make"], 2, "cannot import 'nowhere'"),
        (["run", "missing.toml"], 2, "there is no configuration file missing.toml"),
        (["run", "--samples-per-client", "9000"], 1, "lower data.samples_per_client or data.clients (--clients, --s"),
        (["run", "--dataset", "cifar10"], 1, "with machine.download = true. (--data-dir, --download)"),
        (["run", "--split", "groups", "--clients", "3"], 2, "at most 3, as many as data.clients, not 4 (--clients)"),
        (["run", "--split", "classes"], 2, "for each of the 10 clients (data.clients), not 0 (--clients)"),
        (["run", "--folder", "nowhere"], 1, "nowhere"),
        (["run", "--resume", "nowhere"], 1, "nowhere holds no run to resume"),
        (["run", "--resume", "nowhere", "--lr", "3"], 2, "takes --workers, --track, --data-dir, --download and --rou"),
        (["run", "--resume", "nowhere", "--rounds", "3"], 1, "nowhere holds no run to resume"),
        (["compare"], 2, "name at least one method"),
        (["compare", "-a", "pfedla", "-a", "pfedla"], 2, "named twice: pfedla"),
        (["compare", "-a", "pfedla,retain"], 2, "NAME,KEY=VALUE"),
        (["compare", "-a", "fedprox", "--set", "algorithm.mu=5"], 2, "name it there, as in -a NAME,mu=5"),
        (["compare", "-a", "local", "-a", "pfedla,retain=9"], 2, "pfedla,retain=9: algorithm.retain = 9"),
        (["data", "show", "--clients", "0"], 2, "data.clients = 0 must be at least 1 (--clients)"),
    ],
)
def test_a_mistake_ends_in_one_sentence_before_any_work(pfedla: Any, words: list[str], code: int, message: str) -> None:
    found, out, err = pfedla(*words)
    assert (found, out) == (code, "")
    assert message in err
    assert not Path("runs").exists()


def test_a_broken_configuration_file_is_named(pfedla: Any) -> None:
    Path("bad.toml").write_text("[schedule\n")
    code, _, err = pfedla("run", "bad.toml")
    assert code == 2
    assert "bad.toml cannot be read as TOML" in err


def test_a_run_is_never_overwritten_silently(pfedla: Any) -> None:
    pfedla("run", *SMALL, "--out", "here", "--quiet")
    before = {path: path.stat().st_mtime_ns for path in Path("here").rglob("*")}
    code, _, err = pfedla("run", *SMALL, "--out", "here")
    assert code == 1
    assert "here already holds a complete run: choose another folder, or overwrite it (--out, --overwrite)" in err
    assert {path: path.stat().st_mtime_ns for path in Path("here").rglob("*")} == before
    assert pfedla("run", *SMALL, "--algorithm", "local", "--out", "here", "--overwrite")[0] == 0
    assert json.loads(Path("here/summary.json").read_text())["algorithm"] == "local"
    assert not Path("here/diagnostics.npz").exists()


@pytest.mark.slow
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


def test_compare_resumes_and_keeps_what_is_done(pfedla: Any) -> None:
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
    assert "another configuration (training.lr)" in err


def test_options_that_an_unset_variable_left_empty_are_refused(pfedla: Any) -> None:
    for option in ("--folder", "--data-dir", "--model"):
        code, _, err = pfedla("run", *SMALL, option, "")
        assert (code, err) == (2, f"error: {option} is empty: leave it out, or say what it is to be\n")


def test_what_a_folder_holds_of_other_methods_stays_listed(pfedla: Any) -> None:
    words = ["compare", *SMALL, "--out", "both"]
    for method in ("local", "fedavg"):
        assert pfedla(*words, "-a", method)[0] == 0

    def listed() -> list[tuple[str, int]]:
        return [(run["label"], run["seed"]) for run in json.loads(Path("both/comparison.json").read_text())]

    assert listed() == [("fedavg", 0), ("local", 0)]
    assert "local" in pfedla("table", "both")[1]
    assert pfedla(*words, "-a", "local", "--seeds", "2")[0] == 0
    assert listed() == [("local", 0), ("local", 1), ("fedavg", 0)]
    shutil.rmtree("both/fedavg-seed0")
    assert pfedla(*words, "-a", "local")[0] == 0
    assert listed() == [("local", 0), ("local", 1)]
    assert pfedla(*words, "-a", "fedavg", "--lr", "0.5")[0] == 0  # nothing to be held against
    assert listed() == [("fedavg", 0)]
    Path("both/comparison.json").write_text("{")
    assert pfedla(*words, "-a", "local")[0] == 0
    assert listed() == [("local", 0)]


def test_a_method_that_fails_does_not_keep_others_from_being_run(pfedla: Any) -> None:
    diverges = "pfedme,personal_lr=1e9"
    code, out, err = pfedla("compare", "-a", diverges, "-a", "local", *SMALL, "--out", "both")
    assert code == 1
    assert f"error: not everything could be run. {diverges}, seed 0: training diverged at client" in err
    assert "local" in out
    assert [run["label"] for run in json.loads(Path("both/comparison.json").read_text())] == ["local"]
    code, out, err = pfedla("compare", "-a", diverges, *SMALL, "--out", "none")
    assert (code, out) == (1, "")
    Path("own.py").write_text(OWN_METHOD)
    code, out, err = pfedla("compare", "-a", "own:Broken", "-a", "local", *SMALL, "--out", "own")
    assert (code, "local" in out) == (1, True)
    assert re.search(
        r"error: not everything could be run\. own\.Broken, seed 0: KeyError: 'nothing' \(.*own\.py, line 8\)", err
    )


OWN_METHOD = """
from dataclasses import dataclass
from pfedla import FedAvg

@dataclass(frozen=True)
class Broken(FedAvg):
    def update(self, state, ids, got, upload):
        raise KeyError("nothing")
"""


def test_lists_are_settings_of_variants(pfedla: Any) -> None:
    words = ["-a", "clustered,groups=[0,0,1,1]", *SMALL, "--clients", "4", "--out", "lists"]
    assert pfedla("compare", *words)[0] == 0
    (run,) = json.loads(Path("lists/comparison.json").read_text())
    assert run["settings"]["algorithm"]["groups"] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("1 +", ["--model", "broken:make"], "'broken' ends in SyntaxError: invalid syntax"),
        ("{}['nothing']", ["--model", "broken:make"], "'broken' ends in KeyError: 'nothing'"),
        ("def make(shape, outputs):\n    assert not shape", ["--model", "broken:make"], "gave (1, 28, 28)"),
    ],
)
def test_mistakes_in_modules_of_ones_own_are_one_line(pfedla: Any, text: str, words: list[str], message: str) -> None:
    Path("broken.py").write_text(text + "\n")
    sys.modules.pop("broken", None)
    code, out, err = pfedla("run", *SMALL, *words, "--out", "here")
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert message.replace("gave (1, 28, 28)", "cannot be called with (1, 28, 28) and 10: AssertionError") in err


def test_a_configuration_with_a_folder_and_a_split_is_refused(pfedla: Any) -> None:
    Path("mine.toml").write_text('[data]\nfolder = "sites"\nclients = 7\n[split]\nname = "iid"\n')
    code, _, err = pfedla("run", "mine.toml")
    assert (code, "data.clients, split.name cannot be set with data.folder" in err) == (2, True)


def test_results_outlive_the_folders_of_their_runs(pfedla: Any) -> None:
    words = ["compare", *SMALL, "--results", "kept/all.json"]
    assert pfedla(*words, "-a", "local", "--out", "first")[0] == 0
    shutil.rmtree("first")
    code, _, err = pfedla(*words, "-a", "local", "-a", "fedavg", "--out", "second")
    assert code == 0
    assert "local, seed 0, is in kept/all.json: kept" in err
    assert not Path("second/local-seed0").exists()
    held = json.loads(Path("kept/all.json").read_text())
    assert [run["label"] for run in held] == ["local", "fedavg"]
    assert held == json.loads(Path("second/comparison.json").read_text())
    assert pfedla(*words, "-a", "pfedla", "--out", "third")[0] == 0  # what is not named stays
    assert [run["label"] for run in json.loads(Path("kept/all.json").read_text())] == ["local", "fedavg", "pfedla"]
    code, _, err = pfedla(*words, "-a", "local", "--lr", "0.5", "--out", "fourth")
    assert code == 1
    assert "kept/all.json holds local, seed 0, with other settings" in err
    del held[0]["settings"]["training"]["momentum"]  # of a version without this setting: it had the default
    Path("kept/all.json").write_text(json.dumps(held))
    assert pfedla(*words, "-a", "local", "--out", "fifth")[0] == 0
    held[0]["settings"] = None
    Path("kept/all.json").write_text(json.dumps(held))
    assert pfedla(*words, "-a", "local", "--out", "sixth")[0] == 1


def test_codecs_are_options_and_parts_of_variants(pfedla: Any) -> None:
    code, out, _ = pfedla("run", *SMALL, "--codec", "up=int8", "--codec", "down=float16", "--json", "--out", "one")
    assert code == 0
    assert json.loads(out)["settings"]["codec"] == {"up": "int8", "down": "float16"}
    code, _, err = pfedla("run", *SMALL, "--codec", "down=top-k")
    assert code == 2
    assert "codec.down = 'top-k': the server sends models, no changes" in err
    assert err.rstrip().endswith("(--codec)")
    methods = ("fedavg", "fedavg,codec=int8", "pfedla,retain=1,codec.up=top-k,codec.keep=0.05")
    code, _, err = pfedla("compare", *(word for method in methods for word in ("-a", method)), *SMALL, "--out", "few")
    assert code == 0, err
    totals = [found["bytes_up"] for found in json.loads(Path("few/comparison.json").read_text())]
    assert totals[0] > 3.9 * totals[1] > 3.9 * 1.5 * totals[2]


def test_pareto_draws_a_comparison_and_names_the_least_traffic(pfedla: Any) -> None:
    pfedla("compare", "-a", "local", "-a", "fedavg", "-a", "fedavg,codec=int8", *SMALL, "--out", "some")
    code, out, _ = pfedla("pareto", "some", "--within", "100", "--out", "made/pareto.png")
    assert code == 0
    assert "least traffic within 100 of fedavg: fedavg,codec=int8, " in out
    assert Path("made/pareto.png").read_bytes().startswith(b"\x89PNG")
    pfedla("compare", "-a", "fedavg", "-a", "fedavg,codec=int8", *SMALL, "--seed", "1", "--out", "other")
    code, out, _ = pfedla("pareto", "some", "other", "--within", "100")
    assert code == 0
    assert "within 100 of fedavg in all 2 comparisons" in out
    assert out.rstrip().splitlines()[-2].endswith(" MB; codec: int8")
    code, _, err = pfedla("pareto", "some", "--against", "fedavgg")
    assert (code, "unknown method 'fedavgg': did you mean 'fedavg'" in err) == (2, True)
    for within in ("-1", "nan"):
        code, _, err = pfedla("pareto", "some", "--within", within)
        assert (code, "--within" in err) == (2, True)
    code, _, err = pfedla("pareto", "some/local-seed0")
    assert (code, "does not exist" in err) == (1, True)


def test_table_reads_what_compare_wrote(pfedla: Any) -> None:
    pfedla("compare", "-a", "local", "-a", "fedavg", *SMALL, "--out", "both")
    code, out, _ = pfedla("table", "both", "both/comparison.json", "--value", "mb-up")
    assert code == 0
    assert out.splitlines()[0] == "| method | both | comparison |"
    assert out.splitlines()[2].startswith("| `local` | 0.0 | 0.0 |")
    code, out, _ = pfedla("table", "both", "--value", "headline", "--value", "class-prior", "--value", "mb-up")
    assert out.splitlines()[0] == "| method | accuracy % | class-prior | mb-up |"
    for line, found in zip(out.splitlines()[2:], json.loads(Path("both/comparison.json").read_text()), strict=True):
        shown = [f"{100 * found[key]:.2f}" for key in ("accuracy_mean", "accuracy_class_prior")]
        cells = [f"`{found['algorithm']}`", *shown, f"{found['bytes_up'] / 1e6:,.1f}"]
        assert line.replace("*", "") == f"| {' | '.join(cells)} |"
    code, out, _ = pfedla("table", "both", "--value", "mb-up", "--against", "local")
    assert (code, out.splitlines()[0]) == (0, "| above `local` | both |")
    assert out.splitlines()[2].startswith("| `fedavg` | +")
    for words in (["table", "both"], ["table", "both", "--value", "headline"]):
        code, out, _ = pfedla(*words)
        means = {run["algorithm"]: run["accuracy_mean"] for run in json.loads(Path("both/comparison.json").read_text())}
        assert code == 0
        assert [line.replace("*", "") for line in out.splitlines()[2:]] == [
            f"| `{name}` | {100 * mean:.2f} |" for name, mean in means.items()
        ]
    code, _, err = pfedla("table", "both", "--value", "accuracy")
    assert code == 2
    assert "'accuracy' is not one of 'headline'" in err
    code, _, err = pfedla("table", "both/local-seed0/config.toml")
    assert code == 1
    assert "is no comparison that pfedla compare wrote" in err


@pytest.mark.slow
def test_compare_runs_all_methods_that_the_model_allows(pfedla: Any) -> None:
    code, out, err = pfedla("compare", "--all", *SMALL, "--local-epochs", "2", "--out", "every", "--json")
    assert code == 0
    done, refused = {run["algorithm"] for run in json.loads(out)}, set(re.findall(r"(\S+) is left out", err))
    assert done | refused == set(ALGORITHMS) - {"pfedla-peers", "pfedla-x-peers"}
    assert refused == {"fedbn", "clustered"}  # there are no norms, and nobody tells the groups


def test_where_data_lies_decides_nothing(pfedla: Any) -> None:
    words = ["compare", "-a", "local", *SMALL, "--out", "one"]
    assert pfedla(*words)[0] == 0
    assert "kept" in pfedla(*words, "--data-dir", "elsewhere")[2]


def test_runs_on_other_data_are_not_set_beside_each_other(pfedla: Any) -> None:
    words = ["compare", *SMALL, "--out", "one"]
    assert pfedla(*words, "-a", "local")[0] == 0
    file = Path("one/local-seed0/run.json")
    facts = json.loads(file.read_text())
    file.write_text(json.dumps(facts | {"data": "of another day"}))
    code, _, err = pfedla(*words, "-a", "local", "-a", "fedavg")
    assert code == 1
    assert "one/local-seed0 holds a run on other data than are found now" in err
    assert not Path("one/fedavg-seed0").exists()
    code, _, err = pfedla(*words, "-a", "fedavg", "-a", "local")  # kept after a new one
    assert code == 1
    assert "one/local-seed0 holds a run on other data than are found now" in err
    code, _, err = pfedla(*words, "-a", "fedavg", "-a", "local")  # all are complete
    assert code == 1
    assert "one/local-seed0 holds a run on other data than one/fedavg-seed0 does" in err


def test_figures_measured_on_other_data_are_not_set_beside_ours(pfedla: Any) -> None:
    words = ["compare", *SMALL, "--results", "all.json"]
    assert pfedla(*words, "-a", "local", "--out", "one")[0] == 0
    file = Path("all.json")
    (row,) = json.loads(file.read_text())
    assert row["data"] == json.loads(Path("one/local-seed0/run.json").read_text())["data"]
    file.write_text(json.dumps([row | {"data": "of another day"}]))
    code, _, err = pfedla(*words, "-a", "local", "-a", "fedavg", "--out", "two")
    assert code == 1
    assert "all.json, local, seed 0, holds a run on other data than are found now" in err
    del row["data"]  # of an earlier version
    file.write_text(json.dumps([row]))
    assert pfedla(*words, "-a", "local", "-a", "fedavg", "--out", "two")[0] == 0


def test_what_is_stopped_while_it_is_overwritten_is_not_taken_for_finished(
    pfedla: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["compare", "-a", "local", "-a", "fedavg", *SMALL, "--out", "one", "--results", "all.json"]
    assert pfedla(*words)[0] == 0

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pfedla.comparison.carry_out", stop)
        _, _, err = pfedla(*words, "--overwrite")
    assert "Without --overwrite the same command resumes what was under way" in " ".join(err.split())
    assert [row["label"] for row in json.loads(Path("all.json").read_text())] == ["fedavg"]


def test_comparisons_of_one_name_are_told_apart(pfedla: Any) -> None:
    for folder, seed in (("a", "0"), ("b", "1")):
        pfedla("compare", "-a", "local", *SMALL, "--seed", seed, "--out", f"{folder}/both")
    code, out, _ = pfedla("table", "a/both", "b/both")
    assert code == 0
    assert out.splitlines()[0] == "| method | a/both | b/both |"
    code, _, err = pfedla("table", "a/both", "a/both")
    assert code == 2
    assert "named twice" in err


def test_a_split_of_ones_own_keeps_its_name(pfedla: Any) -> None:
    Path("splits_of_mine.py").write_text(
        "from dataclasses import dataclass\nfrom pfedla.data.splits import NonIID1\n\n"
        "@dataclass(frozen=True)\nclass Mine(NonIID1):\n    pass\n"
    )
    assert pfedla("run", *SMALL, "--split", "splits_of_mine:Mine", "--out", "one")[0] == 0
    assert '"splits_of_mine:Mine"' in Path("one/config.toml").read_text()
    code, out, _ = pfedla("data", "show", "--split", "splits_of_mine:Mine", "--clients", "4")
    assert code == 0
    assert "splits_of_mine:Mine" in out


def test_rounds_that_are_no_number_are_refused_on_resuming(pfedla: Any) -> None:
    assert pfedla("run", *SMALL, "--algorithm", "local", "--out", "one")[0] == 0
    code, _, err = pfedla("run", "--resume", "one", "--set", "schedule.rounds=ten")
    assert code == 2
    assert "schedule.rounds = 'ten'" in err


def test_what_cannot_be_compared_is_refused_before_the_first_run(pfedla: Any) -> None:
    words = ["compare", *SMALL, "--out", "one"]
    assert pfedla(*words, "-a", "fedavg", "--lr", "0.5")[0] == 0
    code, _, err = pfedla(*words, "-a", "local", "-a", "fedavg")
    assert (code, "one/fedavg-seed0 holds a run with another configuration" in err) == (1, True)
    code, _, err = pfedla(*words, "-a", "local", "-a", "scaffold", "--set", "training.momentum=0.9")
    assert (code, "scaffold: training.momentum = 0.9: SCAFFOLD takes plain steps" in err) == (2, True)
    assert not Path("one/local-seed0").exists()


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
    assert {path.name for path in Path("here/models").iterdir()} == {"0.safetensors", "1.safetensors"}
    facts = json.loads(Path("here/run.json").read_text())
    assert (facts["names"], facts["settings"]["data"]["folder"]) == (["a", "b"], "sites")
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    code, out, _ = pfedla("run", "--resume", "../here", "--rounds", "3", "--workers", "0", "--json")
    assert (code, json.loads(out)["rounds"]) == (0, 3)
    os.chdir("..")
    Path("sites").rename("moved")
    config = Path("here/config.toml")
    config.write_text(config.read_text().replace("sites", "moved"))
    code, out, _ = pfedla("run", "--resume", "here", "--rounds", "4", "--json")
    assert (code, json.loads(out)["rounds"]) == (0, 4)


def test_a_complete_comparison_of_own_data_that_have_changed_is_refused(pfedla: Any) -> None:
    numbers()
    words = [
        "--folder",
        "sites",
        "--set",
        "objective.name=regression",
        "--rounds",
        "1",
        "--workers",
        "0",
        "-a",
        "local",
    ]
    assert pfedla("compare", *words, "--out", "one")[0] == 0
    assert pfedla("compare", *words, "--out", "one")[0] == 0
    Path("sites/b.npz").unlink()
    code, _, err = pfedla("compare", *words, "--out", "one")
    assert (code, "one/local-seed0 holds a run on other data than are found now" in err) == (1, True)


def test_files_of_clients_are_found_whatever_the_case_of_their_ending(pfedla: Any) -> None:
    numbers()
    Path("sites/b.npz").rename("sites/b.NPZ")
    words = ["--folder", "sites", "--set", "objective.name=regression", "--rounds", "1", "--workers", "0", "--json"]
    assert json.loads(pfedla("run", *words)[1])["clients"] == 2


def numbers(folder: str = "sites") -> None:
    """Write clients whose targets are numbers."""
    rng = np.random.default_rng(0)
    Path(folder).mkdir()
    for name in ("a", "b"):
        x = rng.normal(size=(30, 5)).astype(np.float32)
        np.savez(Path(folder, f"{name}.npz"), x=x, y=x[:, 0] - 2 * x[:, 1])


def test_other_objectives_are_run_and_compared_by_their_headline(pfedla: Any) -> None:
    numbers()
    words = ["--folder", "sites", "--rounds", "3", "--workers", "0", "--set", "objective.name=regression"]
    code, out, err = pfedla("compare", "-a", "local", "-a", "fedavg", *words, "--out", "both")
    assert code == 0
    assert re.search(r"local: round 3/3  rmse [0-9.]+, worst [0-9.]+, ", err)
    listed = {run["algorithm"]: run for run in json.loads(Path("both/comparison.json").read_text())}
    best = min(listed, key=lambda name: float(listed[name]["rmse_mean"]))
    marked = re.findall(r"^ *(local|fedavg) +\*", out, re.MULTILINE)
    assert marked == [best]
    assert f"**{listed[best]['rmse_mean']:.4g}**" in pfedla("table", "both", "--value", "headline")[1]


def test_comparisons_with_different_headlines_in_one_are_refused(pfedla: Any) -> None:
    numbers()
    pfedla("compare", "-a", "local", *SMALL, "--out", "one")
    words = ["--folder", "sites", "--rounds", "1", "--workers", "0", "--set", "objective.name=regression"]
    pfedla("compare", "-a", "local", *words, "--out", "other")
    mixed = [run for name in ("one", "other") for run in json.loads(Path(name, "comparison.json").read_text())]
    Path("mixed.json").write_text(json.dumps(mixed))
    code, out, err = pfedla("table", "mixed.json")
    assert (code, out) == (2, "")
    assert "runs with different headlines cannot be compared: accuracy, rmse" in err
    assert pfedla("table", "one", "other")[0] == 0  # side by side they may stand


def test_data_show_counts_samples_where_there_are_no_classes(pfedla: Any) -> None:
    numbers()
    code, out, _ = pfedla("data", "show", "--folder", "sites", "--set", "objective.name=regression")
    assert code == 0
    assert "21 samples" in out
    assert Path("federation.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_from_python_is_not_resumed(pfedla: Any) -> None:
    rng = np.random.default_rng(0)
    clients: Any = [(rng.normal(size=(20, 2)).astype(np.float32), rng.normal(size=(20, 1)))] * 2
    run(FedAvg(), lambda: nn.Linear(2, 1), clients, 1, objective=Custom(functional.l1_loss), workers=0, out="here")
    Path("here/summary.json").unlink()
    code, out, err = pfedla("run", "--resume", "here")
    assert (code, out) == (1, "")
    assert "the run in here was started from Python" in err


def test_a_file_of_an_earlier_version_runs_and_says_what_moved(pfedla: Any, caplog: pytest.LogCaptureFixture) -> None:
    Path("old.toml").write_text('[model]\nname = "mlp"\n[run]\nrounds = 1\nparticipants = 0\nworkers = -1\n')
    few = ["--clients", "2", "--samples-per-client", "10", "--local-epochs", "1", "--workers", "0"]
    assert pfedla("run", "old.toml", *few, "--out", "here", "--quiet")[0] == 0
    assert (
        "old.toml is of an earlier version; these settings have moved: run.rounds is now schedule.rounds" in caplog.text
    )
    assert json.loads(Path("here/summary.json").read_text())["rounds"] == 1


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
    out = pfedla("algorithms", "HeurpFedLA")[1]
    assert out.startswith("HeurpFedLA: ")
    rows = [[part.strip() for part in line.split("  ") if part.strip()] for line in out.splitlines()]
    assert ["retain", "a whole number at least 0", "1"] in rows
    assert ["hyper_optimizer", "sgd or mean-sgd or adam", "adam"] in rows
    assert ["hyper_lr", "a number above 0", "-"] in rows
    assert "It has no settings." in pfedla("algorithms", "local")[1]
    code, _, err = pfedla("algorithms", "pfedl")
    assert (code, "did you mean 'pfedla'?" in err) == (2, True)
    assert "emnist-balanced" in pfedla("data", "list")[1]
    assert pfedla("--version")[1].startswith("pfedla, version ")
    assert "--test-samples-per-client" in pfedla("run", "--help")[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_and_the_like_stop_cleanly_and_the_run_is_resumed(pfedla: Any, number: signal.Signals) -> None:
    settings = ["--clients", "4", "--samples-per-client", "40", "--rounds", "12", "--local-epochs", "1"]
    settings += ["--eval-every", "1", "--workers", "2", "--set", "machine.checkpoints=false"]
    command = [sys.executable, "-c", "from pfedla.cli import main; main()", "run", *settings, "--out", "stopped"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # the server's threads, as in this process
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    metrics = Path("stopped/metrics.jsonl")
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, number)  # as a terminal or a scheduler does: to the workers, too
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
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
    for name in ("diagnostics.npz", "ledger.npz"):
        with np.load(Path("stopped", name)) as one, np.load(Path("straight", name)) as two:
            assert all(np.array_equal(one[key], two[key]) for key in two)
    code, _, err = pfedla("run", "--resume", "stopped")
    assert (code, "has no checkpoint" in err or "only more rounds" in err) == (1, True)


@pytest.mark.slow
def test_the_demo_ends_in_a_table_and_a_picture(pfedla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"schedule": {"rounds": 2}, "training": {"local_epochs": 1}, "model": {"name": "mlp"}}
    monkeypatch.setattr("pfedla.cli.DEMO", {**DEMO, **few})
    code, out, _ = pfedla("demo", "--workers", "0", "--codec", "int8")
    assert code == 0
    for found in json.loads(Path("runs/demo/comparison.json").read_text()):
        assert found["settings"]["codec"] == {"up": "int8", "down": "int8"}
    for method in ("local", "fedavg", "pfedla", "heurpfedla"):
        assert method in out
    assert "runs/demo/pfedla-seed0/weights.png" in out
    assert Path("runs/demo/pfedla-seed0/weights.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(Path("runs/demo/comparison.json").read_text())) == 4
    assert "everything on one page, for a browser: runs/demo/report.html" in out
    assert Path("runs/demo/report.html").stat().st_size > 10**6


def test_table_compares_methods_over_the_same_seeds(pfedla: Any) -> None:
    few = [("local", 0, 0.5), ("local", 1, 0.9), ("fedavg", 0, 0.6)]
    known = {"algorithm": "local", "headline": "accuracy", "higher_is_better": True, "percent": True}
    runs = [{**known, "label": label, "seed": seed, "accuracy_mean": mean} for label, seed, mean in few]
    Path("some.json").write_text(json.dumps(runs))
    assert pfedla("table", "some.json", "--seeds", "1")[1].splitlines()[2:] == [
        "| `local` | 50.00 |",
        "| `fedavg` | **60.00** |",
    ]
    assert pfedla("table", "some.json")[1].splitlines()[2:] == [
        "| `local` | 70.00 ± 28.28 |",
        "| `fedavg` | 60.00 (1 of 2) |",  # its seed may have been an easy one
    ]
    shown = pfedla("table", "some.json", "-a", "fedavg", "-a", "local", "--seeds", "1")[1].splitlines()[2:]
    assert shown == ["| `fedavg` | **60.00** |", "| `local` | 50.00 |"]
    assert pfedla("table", "some.json", "-a", "FedAvg")[1].splitlines()[2:] == ["| `fedavg` | 60.00 |"]
    shown = pfedla("table", "some.json", "-a", "local", "--against", "fedavg")[1].splitlines()[2:]
    assert shown == ["| `local` | -10.00 |"]  # of seed 0
    assert "did you mean 'fedavg'" in pfedla("table", "some.json", "-a", "fedavgg")[2]
    Path("other.json").write_text(json.dumps(runs[:2]))
    code, _, err = pfedla("table", "some.json", "other.json", "-a", "fedavg")
    assert (code, err) == (2, "error: there are none of these methods in other\n")
    Path("some.json").write_text(json.dumps(runs[1:2]))
    code, _, err = pfedla("table", "some.json", "--seeds", "1")
    assert (code, err) == (2, "error: --seeds 1: some has no run with such a seed\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--folder", "a" * 300], "error: File name too long"),
        (["run", "--dataset", "mnist", "--data-dir", "a" * 300], "error: File name too long"),
        (["data", "show", "--out", "file/x.png"], "error: cannot write file/x.png: File exists"),
        (["data", "show", "--out", "x.unknown"], "error: x.unknown: a picture is a .pdf, .svg or .png file"),
        (["compare", "-a", "local", "--results", "file/r.json"], "error: cannot write file/r.json: Not a directory"),
        (["compare", "-a", "local", "--out", "file"], "error: cannot write file/comparison.json: Not a directory"),
        (["compare", "-a", "local", "--results", "strange.json"], "strange.json is no comparison"),
        (["table", "strange.json"], "strange.json is no comparison that pfedla compare wrote: it holds no runs"),
        (["table", "deep.json"], "deep.json is no comparison that pfedla compare wrote: maximum recursion"),
    ],
)
def test_places_and_files_that_cannot_be_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "strange.json").write_text('[{"label": "local", "seed": [1]}]')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    monkeypatch.setattr(sys, "argv", ["pfedla", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (1, 2)
    assert message in capfd.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_dir() and path.name not in ("runs", "comparison")]


def test_figures_of_other_settings_than_the_configuration_are_not_kept(pfedla: Any) -> None:
    assert pfedla("compare", *SMALL, "-a", "local", "--lr", "0.01", "--out", "here")[0] == 0
    config = Path("here/local-seed0/config.toml")
    config.write_text(config.read_text().replace("lr = 0.01", "lr = 0.02"))
    code, _, err = pfedla("compare", *SMALL, "-a", "local", "--lr", "0.02", "--out", "here")
    assert code == 1
    assert "holds figures of other settings than its configuration" in err


def test_two_comparisons_write_one_file_in_turn(tmp_path: Path) -> None:
    """Each writes the same files many times; without turns, one takes away what the other is about to move."""

    def write(label: str) -> None:
        for seed in range(60):
            done = {label: [{"seed": seed}]}
            comparison._write(tmp_path / "out", done, [], tmp_path / "results.json")

    with ThreadPoolExecutor(2) as pool:
        for task in [pool.submit(write, label) for label in ("a", "b")]:
            task.result()
    found = {(run["label"], run["seed"]) for run in comparison.read_comparison(tmp_path / "results.json")}
    assert found == {(label, seed) for label in "ab" for seed in range(60)}
    assert len(comparison.read_comparison(tmp_path / "out" / "comparison.json")) == 1


# ---- the first five minutes


ROOT = Path(__file__).parent.parent


def shell(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", *words], capture_output=True, text=True, cwd=cwd)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["examples.my_algorithm:Halfway", "experiments.updated_first:UpdatedFirst"])
def test_modules_of_the_working_folder_can_be_named(tmp_path: Path, method: str) -> None:
    program = ["-c", "from pfedla.cli import main; main()", "run", "--algorithm", method, *SMALL]
    done = shell(*program, "--out", str(tmp_path / "run"), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    Path("mine.py").write_text("from pfedla.models import MLP as make\n")
    program = ["-m", "pfedla", "run", *SMALL, "--model", "mine:make", "--out", "other"]
    done = shell(*program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_python_m_pfedla_is_the_command_line() -> None:
    done = shell("-m", "pfedla", "--version", cwd=Path.cwd())
    assert done.returncode == 0
    assert done.stdout.startswith("pfedla, version")


def test_too_old_a_python_is_told() -> None:
    program = "import sys; sys.version_info = (3, 9); sys.version = '3.9.1 old'; import pfedla"
    done = shell("-c", program, cwd=Path.cwd())
    assert done.stderr.splitlines()[-1] == "ImportError: pfedla needs Python 3.11 or newer; this is 3.9.1"


def test_names_are_matched_without_case(pfedla: Any) -> None:
    words = ["--set", "split.name=IID", "--dataset", "Fashion-MNIST-10k", "--out", "here", "--json"]
    code, out, _ = pfedla("run", "--algorithm", "pFedLA", *SMALL, "--model", "MLP", *words)
    assert code == 0
    assert (json.loads(out)["algorithm"], json.loads(out)["dataset"]) == ("pfedla", "fashion-mnist-10k")
    code, _, err = pfedla("run", "here/config.toml", "--algorithm", "PFEDLA", "--set", "algorithm.retain=9")
    assert "algorithm.retain = 9" in err  # and no setting was lost on the way
    code, out, _ = pfedla("compare", "-a", "HeurpFedLA,retain=1", *SMALL, "--json")
    assert [run["label"] for run in json.loads(out)] == ["heurpfedla,retain=1"]
    assert "did you mean 'heurpfedla'?" in pfedla("run", "--algorithm", "HeurpFedLAA")[2]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--clients", "3"], "data.clients cannot be set with data.folder"),
        (["--split", "iid"], "split.name cannot be set with data.folder"),
        (["--samples-per-client", "9", "--set", "split.concentration=1"], "data.samples_per_client, split.concent"),
    ],
)
def test_a_folder_leaves_nothing_to_split(pfedla: Any, words: list[str], named: str) -> None:
    Path("mine.toml").write_text('[data]\nfolder = "sites"\n')
    for start in (["run", "--folder", "sites"], ["run", "mine.toml"], ["data", "show", "--folder", "sites"]):
        code, _, err = pfedla(*start, *words)
        assert code == 2
        assert named in err
