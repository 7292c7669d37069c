from __future__ import annotations

import ast
import json
import logging
import struct
import sys
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import pfedla
from pfedla import FedAvg, PFedLA, Training
from pfedla.config import Experiment, Machine
from pfedla.elsewhere import open_run, run_on
from pfedla.errors import ConfigError, RunError
from pfedla.report.weights import picture
from pfedla.result import weights_of
from pfedla.rounds import Progress, Schedule
from pfedla.trackers import TRACKERS, End, Tracked, tracked, trackers_of
from tests.world import data, fleet_of, same_result, setting

SOURCE = Path(pfedla.__file__).parent


class Notes:
    """A tracker that writes down what it is told, and may fail at a round."""

    def __init__(self, known: Collection[int] = (), fails_at: int | None = None) -> None:
        self.known, self.fails_at = known, fails_at
        self.runs: list[Tracked] = []
        self.lines: dict[int, dict[str, float]] = {}
        self.pictures: dict[int, np.ndarray] = {}
        self.ends: list[End] = []

    def begin(self, run: Tracked) -> Collection[int]:
        self.runs.append(run)
        return self.known

    def log(self, t: int, figures: Mapping[str, float], pictures: Mapping[str, np.ndarray]) -> None:
        if t == self.fails_at:
            raise ConnectionError("the server is gone\nand this is a traceback")
        assert t not in self.lines
        self.lines[t] = dict(figures)
        if pictures:
            self.pictures[t] = pictures["weights"]

    def end(self, end: End) -> None:
        self.ends.append(end)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: a picture takes half a second."""
    monkeypatch.setattr("pfedla.report.weights.picture", lambda *_: np.zeros((4, 6, 3), np.uint8))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


def clients(count: int = 3) -> list[Any]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(20, 4)).astype(np.float32), np.arange(20) % 3) for _ in range(count)]


def run(**settings: Any) -> pfedla.Result:
    how: dict[str, Any] = {"rounds": 4, "eval_every": 2, "workers": 0, "training": Training(1, 8), **settings}
    return pfedla.run(how.pop("algorithm", PFedLA()), model, clients(), **how)


def shown(line: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a line of metrics."""
    return {key: value for key, value in line.items() if isinstance(value, int | float) and key != "round"}


def stop_at(t: int, error: type[BaseException]) -> Any:
    def watch(progress: Progress) -> None:
        if progress.t == t:
            raise error

    return watch


# ---- what any tracker is told


@pytest.mark.usefixtures("quick")
def test_a_tracker_is_told_of_settings_figures_and_weights_and_changes_nothing(tmp_path: Path) -> None:
    notes = Notes()
    plain, found = run(), run(track=notes, out=tmp_path / "mine")
    same_result(plain, found)
    (begun,) = notes.runs
    assert (begun.name, begun.folder, begun.settings["schedule.rounds"]) == ("mine", tmp_path / "mine", 4)
    assert begun.id == pfedla.RunRecord(tmp_path / "mine").facts()["id"]
    assert begun.config == (tmp_path / "mine" / "config.toml").read_text()
    assert notes.lines == {line["round"]: shown(line) for line in found.history}
    assert list(notes.lines) == list(notes.pictures) == [2, 4]
    assert notes.ends == ["done"]


def test_a_picture_is_bytes_of_three_colours() -> None:
    image = picture(np.eye(3, dtype=np.float32)[:, None], ["fc"], "weights")
    assert (image.ndim, image.shape[2], str(image.dtype)) == (3, 3, "uint8")
    assert len(np.unique(image)) > 10


def test_a_picture_shows_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[np.ndarray] = []

    def draw(alpha: np.ndarray, *_: Any) -> np.ndarray:
        drawn.append(alpha)
        return np.zeros((2, 2, 3), np.uint8)

    monkeypatch.setattr("pfedla.report.weights.picture", draw)
    result = run(track=Notes(), algorithm=pfedla.PFedLAPeers(peers=1))
    assert result.alpha is not None
    np.testing.assert_array_equal(np.stack(drawn), result.alpha)  # candidates spread over everybody
    assert weights_of({}) is None


@pytest.mark.usefixtures("quick")
def test_pictures_are_few_over_many_rounds_and_one_is_of_the_last() -> None:
    notes, schedule = Notes(), Schedule(rounds=1001, eval_every=5)
    alpha = np.full((2, 1, 2), 0.5, np.float32)
    with tracked([notes], Tracked("1", "one", None, "", {}), schedule, ["fc"]) as track:
        for t in [*range(5, 1001, 5), 1001]:
            track({"round": t, "seconds": 1.0}, {"alpha": alpha})
    assert 15 <= len(notes.pictures) <= 21
    assert list(notes.pictures)[-1] == 1001
    assert len(notes.lines) == 201


@pytest.mark.usefixtures("quick")
def test_weights_that_no_picture_can_hold_are_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on candidates become a weight for every pair of clients."""
    monkeypatch.setattr("pfedla.trackers.weights_of", None)  # it would be called
    monkeypatch.setattr("pfedla.report.weights.MOST", 2)
    notes = Notes()
    run(track=notes)
    assert not notes.pictures


@pytest.mark.usefixtures("quick")
def test_a_method_without_weights_has_no_pictures_and_many_are_told_at_once() -> None:
    one, other = Notes(), Notes()
    run(track=[one, other], algorithm=FedAvg())
    assert one.lines == other.lines
    assert not one.pictures
    assert one.runs[0].folder is None
    assert one.runs[0].id == other.runs[0].id


@pytest.mark.usefixtures("quick")
def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Notes(fails_at=4), Notes()
    with caplog.at_level(logging.WARNING, "pfedla"):
        result = run(track=[broken, sound], rounds=8)
    same_result(result, run(rounds=8))
    assert list(broken.lines) == [2]
    assert broken.ends == []
    assert list(sound.lines) == [2, 4, 6, 8]
    assert sound.ends == ["done"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "Notes is left out of the rest of the run, it failed: the server is gone"


def test_a_tracker_that_cannot_begin_is_an_error_before_any_round() -> None:
    class Closed(Notes):
        def begin(self, run: Tracked) -> Collection[int]:
            raise ConnectionError("nobody answers")

    before = Notes()
    with pytest.raises(RunError, match="Closed cannot track the run: nobody answers"):
        run(track=[before, Closed()])
    assert (before.lines, before.ends) == ({}, ["failed"])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("error", "end"), [(KeyboardInterrupt, "stopped"), (ValueError, "failed")])
def test_a_resumed_run_is_the_same_and_tells_only_what_is_not_known(
    tmp_path: Path, error: type[BaseException], end: str
) -> None:
    """Stopped, it has a checkpoint of round 5; failed, it has none and begins again."""
    first, out = Notes(), tmp_path / "run"
    with pytest.raises(error):
        run(track=first, rounds=8, out=out, watch=stop_at(5, error))
    assert (list(first.lines), first.ends) == ([2, 4], [end])
    second, third = Notes(known=[2, 4]), Notes()
    result = run(track=[second, third], rounds=8, out=out, resume=True)
    same_result(result, run(rounds=8))
    assert second.runs[0].id == first.runs[0].id
    assert list(second.lines) == [6, 8]
    assert list(third.lines) == list(third.pictures) == [2, 4, 6, 8]  # it gets what it missed, pictures too


# ---- names and packages


def test_configuration_knows_every_tracker() -> None:
    hint = typing.get_type_hints(Machine)["track"]
    assert typing.get_args(typing.get_args(hint)[0]) == tuple(TRACKERS)
    assert Experiment.from_tables({"machine": {"track": ["mlflow"]}}).machine.track == ("mlflow",)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_one_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    for module in [found for found in sys.modules if found.partition(".")[0] == name or found.endswith(f".{name}")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RunError, match=rf"^machine.track = '{name}' needs its extra: pip install 'pfedla\[{name}\]'"):
        run(track=name, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_wrong_names_and_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"machine.track = 'tensorbord': choose one of tensorboard, mlflow, wandb"):
        run(track="tensorbord")
    with pytest.raises(ConfigError, match=r"have the methods of pfedla.Tracker: 3"):
        run(track=[3])


@pytest.mark.usefixtures("quick")
def test_the_command_line_names_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pfedla: Any) -> None:
    made: list[Notes] = []

    def make() -> Notes:
        made.append(Notes())
        return made[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TRACKERS, "mlflow", make)
    small = ["--clients", "2", "--samples-per-client", "20", "--local-epochs", "1", "--model", "mlp", "--workers", "0"]
    assert pfedla("run", *small, "--rounds", "1", "--track", "mlflow", "--out", "one")[0] == 0
    assert 'track = [\n    "mlflow",\n]' in Path("one/config.toml").read_text()
    assert pfedla("run", "--resume", "one", "--rounds", "2")[0] == 0
    told = [notes for notes in made if notes.runs]  # others are made to see whether they can be
    assert [(list(notes.lines), notes.runs[0].name) for notes in told] == [([1], "one"), ([2], "one")]
    made.clear()
    methods = ["-a", "local", "-a", "pfedla", "--out", "both"]
    assert pfedla("compare", *methods, *small, "--rounds", "1")[0] == 0
    assert not made
    assert pfedla("compare", *methods, *small, "--rounds", "2", "--track", "mlflow")[0] == 0
    assert [notes.runs[0].name for notes in made if notes.runs] == ["local-seed0", "pfedla-seed0"]
    code, _, error = pfedla("run", "--track", "mlflov")
    assert code == 2
    assert "error: machine.track = 'mlflov': choose one of tensorboard, mlflow, wandb (--track)" in error


def test_a_deployment_is_tracked_where_its_server_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, made = Notes(), setting(FedAvg())
    monkeypatch.setitem(TRACKERS, "mlflow", lambda: notes)
    experiment = Experiment(FedAvg(), schedule=Schedule(rounds=2, eval_every=1), machine=Machine(track=("mlflow",)))
    record = open_run(experiment, ["north", "south"], [7, 8], tmp_path / "run")
    result = run_on(fleet_of(made, data(2)), made, experiment, record)
    assert notes.lines == {line["round"]: shown(line) for line in result.history}
    assert notes.ends == ["done"]


def test_no_package_is_imported_unless_it_is_asked_for() -> None:
    """The names stand in no import outside a function."""
    for path in (path for path in SOURCE.rglob("*.py") if any(name in path.read_text() for name in TRACKERS)):
        for node in ast.parse(path.read_text()).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(tracker in name.split(".") for name in names for tracker in TRACKERS), path


# ---- the packages themselves


def events(run: Path) -> Any:
    found = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return found.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "images": 0}).Reload()


@pytest.mark.slow
def test_tensorboard_reads_what_a_run_wrote(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(track="tensorboard", rounds=8, out=out, watch=stop_at(5, KeyboardInterrupt))
    assert [event.step for event in events(out).Scalars("accuracy_mean")] == [2, 4]
    result, found = run(track="tensorboard", rounds=8, out=out, resume=True), events(out)
    for name in shown(result.history[0]):
        told = [(event.step, event.value) for event in found.Scalars(name)]
        assert [t for t, _ in told] == [2, 4, 6, 8], name
        np.testing.assert_allclose([x for _, x in told], [line[name] for line in result.history], rtol=1e-6)
    images = found.Images("weights")
    assert [image.step for image in images] == [2, 4, 6, 8]
    assert images[0].encoded_image_string.startswith(b"\x89PNG")
    (text,) = found.Tensors("configuration/text_summary")
    assert b"rounds = 8" in text.tensor_proto.string_val[0]
    run(track="tensorboard", rounds=2, out=out, overwrite=True)
    assert [event.step for event in events(out).Scalars("accuracy_mean")] == [2]  # nothing is left of the run before


def test_tensorboard_needs_a_folder() -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(ConfigError, match=r"'tensorboard' writes into the run's folder: name one \(out\)"):
        run(track="tensorboard")


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of SQLAlchemy, inside MLflow
def test_mlflow_reads_what_a_run_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    mlflow = pytest.importorskip("mlflow")
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(track="mlflow", rounds=8, out=out, watch=stop_at(5, KeyboardInterrupt))
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("pfedla").experiment_id
    (stopped,) = client.search_runs([experiment])
    assert (stopped.info.status, stopped.info.run_name) == ("KILLED", "run")
    result = run(track="mlflow", rounds=8, out=out, resume=True)
    (found,) = client.search_runs([experiment])  # the same run
    assert found.info.run_id == stopped.info.run_id
    assert found.info.status == "FINISHED"
    for name in shown(result.history[0]):
        told = {metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, name)}
        assert len(client.get_metric_history(found.info.run_id, name)) == 4
        np.testing.assert_allclose([told[line["round"]] for line in result.history], [x[name] for x in result.history])
    assert found.data.params["schedule.rounds"] == "8"
    assert found.data.params["algorithm.name"] == "pfedla"
    assert "rounds = 8" in mlflow.artifacts.load_text(f"{found.info.artifact_uri}/config.toml")
    pictures = [file.path for file in client.list_artifacts(found.info.run_id, "images")]
    steps = [path.split("+")[2] for path in pictures if path.endswith(".png")]
    assert sorted(map(int, steps)) == [2, 4, 6, 8]


def records(file: Path) -> Iterator[bytes]:
    """Yield the messages of a log of wandb's: seven bytes, then LevelDB's blocks of checksum, length, type and data."""
    data, message = file.read_bytes(), b""
    place, block = 7, 2**15
    while place < len(data):
        if block - place % block < 7:  # too little for another head
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield message
            message = b""


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of wandb's own modules
def test_wandb_keeps_what_a_run_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a resumed run's folders holds the whole run up to its end, under one id."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(track="wandb", rounds=8, out=out, watch=stop_at(5, KeyboardInterrupt))
    result = run(track="wandb", rounds=8, out=out, resume=True)
    files, told = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")), list[dict[int, float]]()
    for file in files:
        found = [Record.FromString(message) for message in records(file)]
        begun = next(record.run for record in found if record.HasField("run"))
        assert begun.run_id == pfedla.RunRecord(out).facts()["id"]
        assert {item.key: item.value_json for item in begun.config.update}["schedule.rounds"] == "8"
        lines = [
            {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for record in found
            if record.HasField("history")
        ]
        told.append({line["round"]: line["accuracy_mean"] for line in lines})
        assert all(line["weights._type"] == "image-file" for line in lines)
    expected = {line["round"]: line["accuracy_mean"] for line in result.history}
    assert told == [{t: x for t, x in expected.items() if t <= 4}, expected]


def test_trackers_are_made_by_name() -> None:
    pytest.importorskip("tensorboard")
    assert [type(tracker) for tracker in trackers_of(["tensorboard"])] == [TRACKERS["tensorboard"]]
