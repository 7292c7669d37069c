"""One writer and one reader of a run's folder: what is written is read, by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import pfedla
from pfedla import Custom, Experiment, FedAvg, PFedLA, Result, RunRecord, Training
from pfedla.algorithm import Algorithm
from pfedla.algorithms.fedavg import SharedModel
from pfedla.config import Tables
from pfedla.errors import ConfigError, DataError, RunError
from pfedla.experiment import federation_of
from pfedla.record import _locks, _settle
from pfedla.rounds import Progress
from tests.troubled import Faulty
from tests.world import same, same_result

CONFIG, FACTS = "[schedule]\n", {"model": "mlp"}


def make() -> nn.Module:
    """Make a model with running statistics, a counter, and a parameter that is drawn at random and never trained."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    model[2].requires_grad_(False)
    return model


def clients(count: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(16 + i, 4)).astype(np.float32), np.arange(16 + i) % 3) for i in range(count)]


def run(algorithm: Algorithm[Any] | None = None, **settings: Any) -> Result:
    how = {"rounds": 2, "eval_every": 1, "workers": 0, "seed": 3, "training": Training(local_epochs=2, batch_size=8)}
    return pfedla.run(algorithm or PFedLA(), make, clients(), **{**how, **settings})


def stop(t: int) -> Any:
    def watch(progress: Progress) -> None:
        if progress.t == t:
            raise KeyboardInterrupt

    return watch


def configured(tmp_path: Path, names: list[str] | None = None, **sections: Any) -> Experiment:
    """Make an experiment on clients from a file, by any names."""
    names = names or ["a", "b", "c"]
    rng, owner = np.random.default_rng(0), np.repeat(names, 12)
    x = rng.normal(size=(len(owner), 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(len(owner)) % 3, client=owner)
    tables: Tables = {
        "data": {"folder": str(tmp_path / "data.npz")},
        "training": {"local_epochs": 1},
        "schedule": {"rounds": 3, "eval_every": 1, "seed": 5},
        "machine": {"workers": 0},
    }
    return Experiment.from_tables({**tables, **sections})


def files(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}


# ---- what is written is read


@pytest.mark.slow
def test_a_run_is_loaded_as_it_ended(algorithm: Algorithm[Any], tmp_path: Path) -> None:
    result = run(algorithm, out=tmp_path / "run")
    loaded = pfedla.load(tmp_path / "run", model=make)
    same_result(loaded, result)
    assert loaded.rows() == result.rows()
    assert loaded.names == result.names == ("client-0", "client-1", "client-2")
    x = torch.rand(7, 4)
    for client in range(3):
        one, other = loaded.model(client), result.model(f"client-{client}")
        same(one.state_dict(), other.state_dict())
        assert torch.equal(one(x), other(x))
        assert not one.training
    for a, b in ((loaded.alpha, result.alpha), (loaded.final_alpha, result.final_alpha)):
        assert (a is None) == (b is None)
        assert a is None or b is None or np.array_equal(a, b)


def test_a_configured_run_is_loaded_without_naming_its_model(tmp_path: Path) -> None:
    experiment = configured(tmp_path, model={"name": "mlp", "layers": {"all": "fc*"}})
    result = pfedla.run_experiment(experiment, tmp_path / "run")
    (tmp_path / "data.npz").unlink()  # the data is not needed
    loaded = pfedla.load(tmp_path / "run")
    same_result(loaded, result)
    assert loaded.spec is not None
    assert loaded.spec.names == ("all",)
    for name in loaded.names:
        same(loaded.model(name).state_dict(), result.model(name).state_dict())


def test_a_run_is_loaded_where_its_method_and_objective_are_unknown(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Elsewhere(FedAvg):
        """A method of a script, say, that is not at hand where the run is loaded."""

    experiment = replace(configured(tmp_path), algorithm=Elsewhere(), objective=Custom(functional.cross_entropy))
    federation = federation_of(configured(tmp_path))
    result = pfedla.run_experiment(experiment, tmp_path / "run", federation=federation)
    loaded = pfedla.load(tmp_path / "run")
    same_result(loaded, result)
    same(loaded.model("b").state_dict(), result.model("b").state_dict())


def test_layers_joined_from_python_are_loaded_so(tmp_path: Path) -> None:
    groups = {"body": ("0", "1"), "head": "4"}
    result = run(layers=groups, out=tmp_path / "run")
    loaded = pfedla.load(tmp_path / "run", model=make())
    assert loaded.spec is not None
    assert loaded.spec.names == ("body", "head")
    same_result(loaded, result)


def test_without_its_model_everything_but_models_is_loaded(tmp_path: Path) -> None:
    result = run(out=tmp_path / "run")
    loaded = pfedla.load(tmp_path / "run")
    assert (loaded.summary, loaded.history, loaded.rows()) == (result.summary, result.history, result.rows())
    assert loaded.alpha is not None
    with pytest.raises(ConfigError, match=r"came from Python: name it, pfedla\.load\(path, model=\.\.\.\)"):
        loaded.model(0)


def test_models_that_were_not_kept_are_not_there(tmp_path: Path) -> None:
    run(out=tmp_path / "run", keep_models=False)
    loaded = pfedla.load(tmp_path / "run", model=make)
    assert loaded.personalized == {}
    with pytest.raises(ConfigError, match=r"not kept: set machine\.keep_models to true"):
        loaded.model(0)


def test_a_clients_file_is_its_models_state(tmp_path: Path) -> None:
    result = run(out=tmp_path / "run")
    for client in range(3):
        same(load_file(tmp_path / "run" / "models" / f"{client}.safetensors"), dict(result.model(client).state_dict()))


def test_rows_are_every_clients_metrics_in_every_round(tmp_path: Path) -> None:
    result = run(out=tmp_path / "run")
    rows = result.rows()
    assert [(row["round"], row["client"]) for row in rows] == [(t, f"client-{i}") for t in (1, 2) for i in range(3)]
    metrics = ("accuracy", "loss", "accuracy_known_classes", "accuracy_class_prior")
    assert rows[4].keys() == {"round", "client", *metrics, *(f"{metric}_after_training" for metric in metrics)}
    assert rows[4]["accuracy"] == result.history[1]["clients"]["accuracy"][1]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result.history


def test_a_frame_holds_the_rows_and_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"a data frame needs pandas: install it, or use result\.rows\(\)"):
        result.to_frame()
    pandas: Any = ModuleType("pandas")
    pandas.DataFrame = lambda rows: ("frame of", rows)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert result.to_frame() == ("frame of", result.rows())


def test_a_client_that_is_not_there_is_refused() -> None:
    result = run()
    for client in (-1, 3):
        with pytest.raises(ConfigError, match=f"there is no client {client}: clients are numbered from 0 to 2"):
            result.model(client)
    with pytest.raises(ConfigError, match="unknown client 'client-9': did you mean 'client-"):
        result.model("client-9")


# ---- diagnostics


@dataclass(frozen=True)
class Watched(FedAvg):
    """FedAvg with diagnostics under any names: parts of the state itself, which later rounds overwrite."""

    names: tuple[str, ...] = ()

    def diagnostics(self, state: SharedModel) -> dict[str, Tensor]:
        return {name: state.theta["0"][:, : 1 + place] for place, name in enumerate(self.names)}


@dataclass(frozen=True)
class Fickle(FedAvg):
    """FedAvg with other diagnostics in other rounds."""

    grows: bool = False

    def diagnostics(self, state: SharedModel) -> dict[str, Tensor]:
        count = int(state.theta["1#stats"].abs().sum() * 1e6)  # another number in every round
        return {"one": torch.zeros(count if self.grows else 1), **({} if self.grows else {str(count): torch.ones(1)})}


NAMES = ("alpha2", "file", "allow_pickle", "arr_0", "a/b", "../../x", "round/1", "ä ☃", "x.npy", "")


def test_all_diagnostics_are_written_under_any_name(tmp_path: Path) -> None:
    result = run(Watched(NAMES), out=tmp_path / "run", rounds=3)
    loaded = pfedla.load(tmp_path / "run")
    assert set(loaded.diagnostics) == {"round", *NAMES}
    shorter = [run(Watched(NAMES), rounds=t).diagnostics for t in (1, 2)]
    for place, name in enumerate(NAMES):
        found = loaded.diagnostics[name]
        assert found.shape == (3, 1, 1 + place)
        assert np.array_equal(found, result.diagnostics[name])
        for t, earlier in enumerate(shorter):  # every round's own values, not the last one's
            assert np.array_equal(found[t], earlier[name][-1])
            assert not np.array_equal(found[t + 1], found[t])
    with np.load(tmp_path / "run" / "diagnostics.npz") as saved:
        assert saved["layers"].tolist() == ["0", "1", "4"]
        assert saved["round"].tolist() == [1, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_diagnostics_of_any_name_survive_a_stop(tmp_path: Path) -> None:
    method = {"name": f"{__name__}:WatchedMLP", "names": list(NAMES)}
    experiment = configured(tmp_path, algorithm=method)
    whole = pfedla.run_experiment(experiment)
    with pytest.raises(KeyboardInterrupt):
        pfedla.run_experiment(experiment, tmp_path / "run", watch=stop(2))
    same_result(pfedla.resume(tmp_path / "run"), whole)
    assert set(whole.diagnostics) == {"round", *NAMES}


@dataclass(frozen=True)
class WatchedMLP(Watched):
    """The same, for the network that comes with the package."""

    def diagnostics(self, state: SharedModel) -> dict[str, Tensor]:
        return {name: state.theta["fc1"][:, : 1 + place] for place, name in enumerate(self.names)}


@pytest.mark.parametrize("name", ["round", "layers"])
def test_names_that_the_record_uses_itself_are_refused_at_once(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"diagnostics cannot be named {name}"):
        run(Watched(("fine", name)), out=tmp_path / "run")
    assert len(RunRecord(tmp_path / "run").history()) <= 1


@pytest.mark.parametrize("grows", [False, True])
def test_diagnostics_that_change_their_names_or_shapes_are_refused(grows: bool) -> None:
    with pytest.raises(RunError, match="must have the same names and shapes in every round"):
        run(Fickle(grows))


# ---- clients' names

ODD = [".", "..", "../../x", "/etc/passwd", "a/b", "a\\b", "[red]b[/]", "CON", "-rf", "ä☃", "x" * 200, "0"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("x" * 201, "is longer than 200 characters"),
        ("a\nb", "has characters that cannot be printed"),
        ("a\0b", "has characters that cannot be printed"),
        ("a\u202eb", "has characters that cannot be printed"),  # would turn the text around it
        ("\udc80", "is no text that UTF-8 could write"),
        (" ", "must not be empty"),
    ],
)
def test_names_that_could_not_be_shown_are_refused_before_any_work(name: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"the client's name '.*' {fault}"):
        pfedla.run_experiment(configured(tmp_path, ["a", name]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_clients_of_any_name_never_become_file_names(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    experiment = configured(tmp_path, ODD)
    out = tmp_path / "work" / "run"
    result = pfedla.run_experiment(experiment, out)
    assert sorted(result.names) == sorted(ODD)
    assert files(tmp_path / "work") == {
        *("run/config.toml", "run/run.json", "run/metrics.jsonl", "run/summary.json", "run/ledger.npz"),
        *("run/diagnostics.npz", *(f"run/models/{client}.safetensors" for client in range(len(ODD)))),
        "run/checkpoint.safetensors",
    }
    assert {path.name for path in tmp_path.iterdir()} == {"work", "data.npz"}
    loaded = pfedla.load(out)
    assert loaded.names == result.names
    for name in ODD:
        same(loaded.model(name).state_dict(), result.model(name).state_dict())


# ---- states, and one writer at a time


def unfinished(tmp_path: Path) -> Path:
    record = RunRecord.create(tmp_path / "deep" / "run", CONFIG, FACTS)
    record.release()
    return record.path


def complete(tmp_path: Path) -> Path:
    path = unfinished(tmp_path)
    (path / "summary.json").write_text('{"seed": 3}')
    return path


def test_a_folder_without_a_run_has_no_state(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert not RunRecord(path).exists
        with pytest.raises(RunError, match="holds no run"):
            assert RunRecord(path).state


def test_a_run_is_under_way_then_done(tmp_path: Path) -> None:
    states: list[str] = []
    run(out=tmp_path / "run", watch=lambda _: states.append(RunRecord(tmp_path / "run").state))
    assert states == ["running", "running"]
    assert RunRecord(tmp_path / "run").state == "done"
    assert RunRecord(tmp_path / "run").complete
    assert not {"checkpoint-before.safetensors", "error.txt", "writer.json"} & files(tmp_path / "run")


def test_a_stopped_run_is_resumable_and_resuming_it_ends_it(tmp_path: Path) -> None:
    experiment = configured(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        pfedla.run_experiment(experiment, tmp_path / "run", watch=stop(2))
    path = tmp_path / "run"
    assert RunRecord(path).state == "resumable"
    assert not (path / "error.txt").exists()
    with pytest.raises(RunError, match="holds no complete run"):
        pfedla.load(path)
    same_result(pfedla.resume(path), pfedla.run_experiment(experiment))
    assert RunRecord(path).state == "done"


def test_a_failed_run_says_why_until_it_is_resumed(tmp_path: Path) -> None:
    experiment = configured(tmp_path, algorithm={"name": "tests.troubled:Faulty"})
    with pytest.raises(RunError, match="client b failed in round 2"):
        pfedla.run_experiment(experiment, tmp_path / "run")
    path = tmp_path / "run"
    assert RunRecord(path).state == "failed"
    text = (path / "error.txt").read_text()
    assert "client b failed in round 2" in text
    assert "ZeroDivisionError: a mistake" in text
    again = RunRecord.resume(path)
    assert RunRecord(path).state == "running"
    again.fail(MemoryError())
    assert (path / "error.txt").read_text() == "MemoryError\n"
    RunRecord.resume(path).fail(KeyboardInterrupt())
    assert not (path / "error.txt").exists()
    assert RunRecord(path).state == "resumable"


def test_whatever_ends_a_run_lets_others_write(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        run(Faulty(), out=tmp_path / "run")
    assert RunRecord(tmp_path / "run").state == "failed"
    run(out=tmp_path / "run", overwrite=True)
    assert RunRecord(tmp_path / "run").state == "done"


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    first = RunRecord.create(tmp_path / "run", CONFIG, FACTS)
    first.append({"round": 1})
    before = {name: (tmp_path / "run" / name).read_bytes() for name in files(tmp_path / "run")}
    for write in (
        lambda: RunRecord.create(tmp_path / "run", "", {}, overwrite=True),
        lambda: RunRecord.resume(tmp_path / "run"),
        lambda: run(out=tmp_path / "run", overwrite=True),
    ):
        with pytest.raises(RunError, match=rf"process {os.getpid()} on \S+ is writing to .*run: wait for it, or"):
            write()
    assert {name: (tmp_path / "run" / name).read_bytes() for name in files(tmp_path / "run")} == before
    assert RunRecord(tmp_path / "run").state == "running"
    first.release()
    assert RunRecord(tmp_path / "run").state == "resumable"
    RunRecord.resume(tmp_path / "run").release()


def test_a_writer_that_cannot_be_named_is_another_process(tmp_path: Path) -> None:
    first = RunRecord.create(tmp_path / "run", CONFIG, FACTS)
    for text in ("", "[]", '{"pid": "x", "host": 1}'):
        (tmp_path / "run" / "writer.json").write_text(text)
        with pytest.raises(RunError, match=r"^another process is writing to"):
            RunRecord.resume(tmp_path / "run")
    first.release()
    assert "writer.json" not in files(tmp_path / "run")


def test_who_looks_at_a_run_does_not_keep_it_from_being_resumed(tmp_path: Path) -> None:
    RunRecord.create(tmp_path / "run", CONFIG, FACTS).release()
    handle = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)  # as `state` does for a moment
    threading.Timer(0.2, os.close, (handle,)).start()
    RunRecord.resume(tmp_path / "run").release()


def test_a_forked_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    """As a worker does while it finishes its job after the server was killed."""
    first = RunRecord.create(tmp_path / "run", CONFIG, FACTS)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    assert first._lock is not None
    os.close(first._lock)  # as a kill does, without a word to anybody
    _locks.discard(first._lock)
    first._lock = None
    deadline = time.monotonic() + 20
    while RunRecord(tmp_path / "run").state == "running":  # the child has only just begun
        assert time.monotonic() < deadline
    assert child.is_alive()
    child.kill()
    child.join()


WRITER = """
import sys
from pfedla import RunRecord
record = RunRecord.create(sys.argv[1], "", {"model": "mlp"})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_of_another_process_is_under_way_until_that_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert RunRecord(tmp_path / "run").state == "running"
        with pytest.raises(RunError, match=f"process {process.pid} on .* is writing"):
            RunRecord.resume(tmp_path / "run")
        process.kill()
        process.wait()
        assert RunRecord(tmp_path / "run").state == "resumable"


SIMULATION = """
import sys
import numpy as np
from torch import nn
import pfedla
rng = np.random.default_rng(0)
clients = [(rng.normal(size=(30, 4)).astype("f"), np.arange(30) % 3)] * 4
pfedla.run(pfedla.FedAvg(), lambda: nn.Linear(4, 3), clients, 10**6, workers=2, out=sys.argv[1],
           watch=lambda progress: print("ready", flush=True) if progress.t == 3 else None)
"""


@pytest.mark.slow
def test_workers_whose_server_was_killed_do_not_keep_the_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIMULATION, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert RunRecord(tmp_path / "run").state == "running"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 30
    while RunRecord(tmp_path / "run").state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert RunRecord(tmp_path / "run").state == "resumable"


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_folder(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "run", CONFIG, FACTS)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    try:
        assert RunRecord(record.path).state == "running"
        record.release()
        assert child.is_alive()
        assert RunRecord(record.path).state == "resumable"
    finally:
        child.kill()
        child.join()


def test_a_folder_that_could_not_be_written_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pfedla.record.write_text", full)
        with pytest.raises(RunError, match=r"cannot write to .*run: No space left on device"):
            RunRecord.create(tmp_path / "run", CONFIG, FACTS)
    RunRecord.create(tmp_path / "run", CONFIG, FACTS).release()


def test_of_two_that_begin_at_once_the_slower_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = RunRecord._hold

    def slowly(record: RunRecord) -> None:
        monkeypatch.setattr(RunRecord, "_hold", hold)
        run(out=tmp_path / "run")  # another one is there and done before we have the lock
        hold(record)

    monkeypatch.setattr(RunRecord, "_hold", slowly)
    with pytest.raises(RunError, match="already holds a complete run"):
        run(out=tmp_path / "run")
    assert RunRecord(tmp_path / "run").complete
    other = unfinished(tmp_path / "other")

    def late(record: RunRecord) -> None:
        (other / "summary.json").write_text("{}")
        hold(record)

    monkeypatch.setattr(RunRecord, "_hold", late)
    with pytest.raises(RunError, match="is complete"):
        RunRecord.resume(other)
    monkeypatch.setattr(RunRecord, "_hold", hold)
    RunRecord.create(other, CONFIG, FACTS, overwrite=True).release()  # nobody holds it


def test_nothing_is_written_into_a_folder_that_took_the_place_of_ours(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "run", CONFIG, FACTS)
    (tmp_path / "run").rename(tmp_path / "away")
    other = RunRecord.create(tmp_path / "run", CONFIG, FACTS)
    before = {name: (tmp_path / "run" / name).read_bytes() for name in files(tmp_path / "run")}
    with pytest.raises(RunError, match="another folder has taken its place"):
        record.append({"round": 1})
    record.fail(ValueError("x"))
    assert {name: (tmp_path / "run" / name).read_bytes() for name in files(tmp_path / "run")} == before
    other.release()


def test_a_file_system_without_locks_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("pfedla.record.fcntl.flock", unsupported)
    RunRecord.create(tmp_path / "run", CONFIG, FACTS).release()


def test_a_run_that_was_killed_while_it_grew_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration may be ahead of the facts, never behind them."""
    path, written = unfinished(tmp_path), []
    monkeypatch.setattr("pfedla.record.write_text", lambda file, _: written.append(file.name))
    record = RunRecord.resume(path, "more", settings={})
    assert written == ["writer.json"]
    record.goes_on()
    record.release()
    assert written == ["writer.json", "config.toml", "run.json"]


def test_a_resume_that_cannot_write_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = unfinished(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    record = RunRecord.resume(path, "more")
    with monkeypatch.context() as patch:
        patch.setattr("pfedla.record.write_text", full)
        with pytest.raises(RunError, match=r"cannot write to .*: No space left on device"):
            record.goes_on()
    record.release()


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_a_folder_that_cannot_have_its_name_is_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot write to"):
        run(out=tmp_path / name)


def test_results_are_on_disk_before_the_summary_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[str] = []

    def seen(file: Path) -> None:
        assert not (tmp_path / "run" / "summary.json").exists()
        settled.append(file.name)
        _settle(file)

    monkeypatch.setattr("pfedla.record._settle", seen)
    run(out=tmp_path / "run")
    assert {"ledger.npz", "metrics.jsonl", "0.safetensors", "1.safetensors"} <= set(settled)


def test_where_there_are_no_locks_runs_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pfedla.record.fcntl", None)
    record = RunRecord.create(tmp_path / "run", CONFIG, FACTS)
    assert record.state == "resumable"
    record.release()
    RunRecord.resume(record.path).release()


# ---- folders


def test_a_new_run_has_its_configuration(tmp_path: Path) -> None:
    path = unfinished(tmp_path)
    assert (path / "config.toml").read_text() == CONFIG
    record = RunRecord.unfinished(path)
    assert record.exists
    assert not record.complete
    assert record.facts() == FACTS | {"format": 2, "id": record.facts()["id"]}


def test_an_unfinished_run_is_not_overwritten(tmp_path: Path) -> None:
    path = unfinished(tmp_path)
    message = r"unfinished run: choose another folder \(out\), resume it, or overwrite it"
    with pytest.raises(RunError, match=message):
        RunRecord.create(path, "", {})
    assert (path / "config.toml").read_text() == CONFIG


def test_a_complete_run_is_neither_overwritten_nor_resumed(tmp_path: Path) -> None:
    path = complete(tmp_path)
    with pytest.raises(RunError, match=r"already holds a complete run: choose another folder \(out\), or overwrite it"):
        RunRecord.create(path, "", {})
    for open_again in (RunRecord.unfinished, RunRecord.resume):
        with pytest.raises(RunError, match="is complete: only more rounds could be added to it"):
            open_again(path)
    assert RunRecord(path).summary() == {"seed": 3}


def test_overwriting_removes_what_the_run_left_and_nothing_else(tmp_path: Path) -> None:
    path = complete(tmp_path)
    (path / "models").mkdir()
    left = ("metrics.jsonl", "checkpoint.safetensors", "ledger.npz", "diagnostics.npz", "error.txt", "weights.png")
    for name in (*left, "models/0.safetensors", "notes"):
        (path / name).write_text("old")
    RunRecord.create(path, "new", {}, overwrite=True).release()
    assert files(path) == {"config.toml", "run.json", "notes"}
    assert not (path / "models").exists()
    assert (path / "config.toml").read_text() == "new"


def test_a_folder_with_other_things_is_refused_even_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(RunError, match="is not empty and holds no run"):
            RunRecord.create(tmp_path, "", {}, overwrite=overwrite)
    assert files(tmp_path) == {"thesis.tex"}


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, "x", {})
    assert record.exists
    record.release()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"is a file: choose another folder \(out\)"):
        RunRecord.create(tmp_path / "file", "", {})
    with pytest.raises(RunError, match="cannot write to"):
        RunRecord.create(tmp_path / "file" / "run", "", {})


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match=r"holds no run to resume: it has no config\.toml"):
            RunRecord.unfinished(path)
        with pytest.raises(RunError, match="holds no complete run"):
            pfedla.load(path)


def test_a_run_from_python_is_resumed_from_python(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path / "run", watch=stop(1))
    for _ in range(2):  # the refusal leaves nothing behind
        with pytest.raises(RunError, match=r"was started from Python.*pfedla\.run\(\.\.\., out=path, resume=True\)"):
            pfedla.resume(tmp_path / "run")
        for other, what in (
            ({"seed": 4}, r"other settings than the arguments has: schedule\.seed is 4 and was 3"),
            ({"layers": {"all": "*"}}, "other layers"),
            ({"train_fraction": 0.5}, r"data\.train_fraction is 0\.5 and was 0\.7"),
        ):
            with pytest.raises(RunError, match=what):
                run(out=tmp_path / "run", resume=True, **other)
    assert RunRecord(tmp_path / "run").state == "resumable"
    same_result(run(out=tmp_path / "run", resume=True), run())
    assert RunRecord(tmp_path / "run").state == "done"
    with pytest.raises(RunError, match="is complete"):
        run(out=tmp_path / "run", resume=True)
    folders: list[dict[str, Any]] = [{}, {"out": tmp_path / "run", "overwrite": True}]
    for folder in folders:
        with pytest.raises(ConfigError, match="resume needs the folder of an unfinished run"):
            run(resume=True, **folder)


def test_a_refused_resume_leaves_the_failure_on_record(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="failed in round 2"):
        run(Faulty(), out=tmp_path / "run")
    with pytest.raises(RunError, match="other settings"):
        run(Faulty(), out=tmp_path / "run", resume=True, seed=4)
    assert RunRecord(tmp_path / "run").state == "failed"
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(RunError, match="is of another version"):
        RunRecord.resume(tmp_path / "run")


def test_reading_models_leaves_the_template_alone_and_a_result_can_be_sent(tmp_path: Path) -> None:
    whole = run(out=tmp_path / "run")
    found = pfedla.load(tmp_path / "run", model=make)
    assert whole.template is not None
    assert found.template is not None
    found.model(2)
    same(dict(found.template.state_dict()), dict(whole.template.state_dict()))
    same_result(pickle.loads(pickle.dumps(found)), whole)


def test_a_client_that_did_not_answer_at_the_end_has_no_model(tmp_path: Path) -> None:
    whole = run()
    personalized = {key: rows.clone() for key, rows in whole.personalized.items()}
    for rows in personalized.values():
        rows[1] = torch.nan if rows.is_floating_point() else 0
    part = replace(whole, models=lambda: personalized)
    record = RunRecord.create(tmp_path, "", {"names": list(whole.names), "shape": [4], "outputs": 3, "model": "python"})
    record.finish(part)
    for result in (part, pfedla.load(tmp_path, model=make)):
        assert result.with_models == [0, 2]
        same(dict(result.model(2).state_dict()), dict(whole.model(2).state_dict()))
        with pytest.raises(RunError, match="client-1 did not answer at the end"):
            result.model("client-1")


# ---- damage


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", b"", "cannot read .*summary.json"),
        ("summary.json", b'{"seed": ', "cannot read .*summary.json"),
        ("summary.json", b"[]", "cannot read .*summary.json: it holds no table"),
        ("summary.json", b"\xff\xfe", "cannot read .*summary.json"),
        ("run.json", b"{", "cannot read .*run.json"),
        ("run.json", b'{"shape": [4]}', "damaged or of an earlier version: nothing tells its names, outputs"),
        ("run.json", None, "damaged or of an earlier version: nothing tells its names, outputs, shape"),
        ("metrics.jsonl", b"\xff\xfe", "cannot read .*metrics.jsonl"),
        ("metrics.jsonl", b'{"round": 1, \n{"round": 2}\n', "cannot read .*metrics.jsonl"),
        ("metrics.jsonl", b"1\n2\n", "cannot read .*metrics.jsonl: it holds other things"),
        ("metrics.jsonl", b"[" * 100_000, "cannot read .*metrics.jsonl: maximum recursion"),
        ("summary.json", b"[" * 100_000, "cannot read .*summary.json: maximum recursion"),
        ("run.json", b'{"shape": 4, "names": "x", "outputs": 3}', "nothing tells its names, shape"),
        ("ledger.npz", None, "cannot read .*ledger.npz"),
        ("ledger.npz", b"", "cannot read .*ledger.npz"),
        ("ledger.npz", b"text", "cannot read .*ledger.npz"),
        ("ledger.npz", b"PK\x03\x04", "cannot read .*ledger.npz"),
        ("diagnostics.npz", b"PK\x03\x04", "cannot read .*diagnostics.npz"),
        ("models/1.safetensors", b"nonsense", "cannot read .*models/1.safetensors"),
    ],
)
def test_a_damaged_record_is_refused_with_the_file(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    run(out=tmp_path / "run")
    if content is None:
        (tmp_path / "run" / name).unlink()
    else:
        (tmp_path / "run" / name).write_bytes(content)
    with pytest.raises(RunError, match=message):
        pfedla.load(tmp_path / "run", model=make).model(0)


@pytest.mark.parametrize("name", ["ledger.npz", "diagnostics.npz"])
def test_any_damage_to_an_archive_ends_in_a_run_error_or_in_a_result(name: str, tmp_path: Path) -> None:
    run(out=tmp_path / "run", keep_models=False)
    file, rng = tmp_path / "run" / name, np.random.default_rng(0)
    whole, refused = file.read_bytes(), 0
    for _ in range(100):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            damaged[place] = rng.integers(0, 256)
        file.write_bytes(damaged[: rng.integers(0, len(whole) + 1)] if rng.random() < 0.2 else damaged)
        try:
            pfedla.load(tmp_path / "run")
        except RunError:
            refused += 1
    assert refused > 50


def test_an_archive_without_layers_is_no_ledger(tmp_path: Path) -> None:
    run(out=tmp_path / "run")
    np.savez(tmp_path / "run" / "ledger.npz", round=np.arange(3))
    with pytest.raises(RunError, match=r"cannot read .*ledger\.npz: it has no 'layers'"):
        pfedla.load(tmp_path / "run")


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "run", CONFIG, FACTS)
    assert record.history() == []
    record.append({"round": 1})
    with (record.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "accu')
    assert record.history() == [{"round": 1}]
    record.release()


def test_another_model_than_the_runs_is_refused(tmp_path: Path) -> None:
    run(out=tmp_path / "run")
    with pytest.raises(RunError, match=r"cannot read .*0\.safetensors into the model"):
        pfedla.load(tmp_path / "run", model=lambda: nn.Linear(4, 3))


def test_a_run_of_an_earlier_version_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run]\nrounds = 3\n")
    (tmp_path / "summary.json").write_text('{"accuracy_mean": 0.5}')
    with pytest.raises(RunError, match="of an earlier version"):
        pfedla.load(tmp_path)


def test_a_folder_that_a_kill_left_before_its_run_began_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("run.json", "config.toml.part", "writer.json"):
        (tmp_path / "run" / name).write_text("{")
    assert not RunRecord(tmp_path / "run").exists
    run(out=tmp_path / "run")
    assert RunRecord(tmp_path / "run").complete
