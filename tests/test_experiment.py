from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import pfedla
from pfedla import Experiment, FedAvg, PFedLA, Training, resume, run_experiment
from pfedla.algorithms import ALGORITHMS
from pfedla.config import Tables, merge
from pfedla.errors import ConfigError, DataError, ModelError, PfedlaError, RunError
from pfedla.experiment import federation_of
from pfedla.record import RunRecord
from pfedla.rounds import Progress
from pfedla.storage import is_mapped
from pfedla.version import code, commit
from tests.world import METHODS, same_result, timeless

QUICK = Training(local_epochs=2, batch_size=8)
ISSUE_KEYS = {
    *("algorithm", "dataset", "clients", "rounds", "seed"),
    *("accuracy_mean", "accuracy_std", "accuracy_worst", "accuracy_after_training"),
    *("bytes_down", "bytes_up", "seconds", "samples_per_second"),
    *("headline", "higher_is_better", "percent", "overhead_down", "overhead_up"),
}


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


def arrays(count: int = 20, seed: int = 0, width: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, width)).astype(np.float32), np.arange(count) % 3


def run(clients: Any, model: Any = linear, algorithm: Any = None, **settings: Any) -> pfedla.Result:
    how = {"rounds": 2, "training": QUICK, "workers": 0, **settings}
    return pfedla.run(algorithm or PFedLA(), model, clients, **how)


# ---- own data


def test_a_codec_makes_messages_smaller_and_the_models_a_little_different() -> None:
    pairs = [arrays(seed=i) for i in range(3)]
    plain, coded = run(pairs), run(pairs, codec=pfedla.Codec(up="int8", down="float16"))
    assert coded.summary["settings"]["codec"] == {"up": "int8", "down": "float16"}
    assert coded.summary["bytes_down"] * 2 == plain.summary["bytes_down"]
    assert coded.summary["bytes_up"] == 2 * 3 * (8 + 15)  # rounds x clients x (least, greatest, and a byte per value)
    for key, rows in coded.personalized.items():
        torch.testing.assert_close(rows, plain.personalized[key], atol=0.01, rtol=0.01)
        assert not torch.equal(rows, plain.personalized[key])


def test_arrays_and_tensors_give_the_same_run() -> None:
    pairs = [arrays(seed=i) for i in range(3)]
    one = run(pairs)
    other = run([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pairs])
    assert set(one.summary) >= ISSUE_KEYS
    assert (one.summary["algorithm"], one.summary["dataset"], one.summary["clients"]) == ("pfedla", "own data", 3)
    same_result(one, other)
    assert one.alpha is not None
    assert one.alpha.shape == (1, 3, 1, 3)


def test_where_models_lie_and_whether_they_are_kept_do_not_change_a_run() -> None:
    pairs = [arrays(seed=i) for i in range(3)]
    memory, disk, dropped = run(pairs), run(pairs, storage="disk"), run(pairs, keep_models=False)
    assert timeless(memory.summary) == timeless(disk.summary) == timeless(dropped.summary)
    for key, rows in memory.personalized.items():
        assert torch.equal(rows, disk.personalized[key])
        assert (is_mapped(rows), is_mapped(disk.personalized[key])) == (False, True)
    with pytest.raises(ConfigError, match="not kept"):
        dropped.model(0)


def test_own_test_data_are_used_for_the_test_alone() -> None:
    x, y = arrays()
    flipped = (y + 1) % 3
    model, long = nn.Linear(4, 3, bias=False), Training(local_epochs=200, lr=0.5)
    model.weight.data.zero_()
    x = (np.eye(3)[y] @ np.eye(3, 4) * 3).astype(np.float32)
    good, bad = (run([(x, y, x, test)], model, FedAvg(), rounds=1, training=long) for test in (y, flipped))
    assert good.summary["accuracy_mean"] == 1
    assert bad.summary["accuracy_mean"] == 0


def test_the_given_module_and_data_are_left_alone() -> None:
    model, (x, y) = linear(), arrays()
    before, data = model.get_parameter("0.weight").detach().clone(), (torch.from_numpy(x), torch.from_numpy(y))
    state = torch.random.get_rng_state()
    run([(*data, *data)] * 2, model)
    assert torch.equal(model.get_parameter("0.weight"), before)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not data[0].is_shared()


def test_arrays_that_cannot_be_written_or_run_backwards_are_used() -> None:
    x, y = arrays()
    x.flags.writeable = False
    assert run([(x, y, x[::-1], y[::-1])] * 2).summary["clients"] == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_model_of_double_precision_can_be_run(algorithm: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()

    result = run([arrays()] * 2, make, METHODS[algorithm]())
    assert {rows.dtype for key, rows in result.personalized.items() if "counters" not in key} == {torch.float64}


def test_layers_can_be_joined_by_name() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))

    result = run([arrays()] * 2, make, layers={"all": ["0", "2"]})
    assert result.ledger.layers == ("all",)
    assert result.alpha is not None
    assert result.alpha.shape == (1, 2, 1, 2)


def test_one_client_alone_and_partial_participation_work() -> None:
    assert run([arrays()]).summary["clients"] == 1
    ledger = run([arrays()] * 5, participants=2, rounds=3).ledger.arrays()
    assert np.bincount(ledger["round"]).tolist() == [0, 2, 2, 2]


X, Y = arrays()


class Whole(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


class Fails(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: dict[str, torch.Tensor] = {"something": super().forward(x)}
        return outputs["nothing"]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "there are no clients"),
        ([(X, Y), (X, Y - 1)], "client-1: label -1: labels are numbered from 0"),
        ([(X, Y.astype(float))], "client-0: labels must be whole numbers in one dimension, not float64"),
        ([(X, Y[:, None])], "labels must be whole numbers in one dimension"),
        ([(X, Y[:-1])], "client-0: 20 inputs but 19 labels"),
        ([(X[:0], Y[:0])], "client-0 has no samples"),
        ([(X, Y, X)], r"client-0 must be \(x, y\) or \(x, y, x_test, y_test\), not 3 values"),
        ([(X, Y, X, Y - 1)], "client-0: label -1: labels are numbered from 0"),
        ([(X, Y), arrays(width=5)], r"must have one shape, not \(4,\) and \(5,\)"),
        ([(X[:1], Y[:1])], "client-0: "),
        ([(X, Y), (X.astype(np.int64), Y)], "some of client-1's are, and some of client-0's are not"),
        ([(X, Y, X.astype(np.int64), Y)], "some of client-0's are, and some of client-0's are not"),
    ],
)
def test_data_that_do_not_fit_are_refused(clients: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        run(clients)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(4, 2), "client-0: labels go from 0 to 2, but the model has 2 outputs"),
        (lambda: nn.Linear(5, 3), r"the model does not take the data: a batch of shape \(2, 4\)"),
        (lambda: "model", "the model factory returned str, not a torch.nn.Module"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (3, 1))), r"not a tensor of shape \(2, 3, 1\)"),
        (lambda: nn.LSTM(4, 3), "the model must return a tensor, not tuple"),
        (lambda: Whole(4, 3), r"a row for each sample: 2 gave a tensor of \(\)"),
        (lambda: Fails(4, 3), r"gave: KeyError: 'nothing' \(.*test_experiment\.py, line \d+\)"),
    ],
)
def test_models_that_do_not_fit_the_data_are_refused(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        run([arrays()] * 2, model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"codec": "int8"}, r"codec must be a pfedla\.Codec or one derived from it, not 'int8'"),
        ({"training": {"lr": 0.1}}, r"training must be a pfedla\.Training"),
        ({"privacy": 1.0}, r"privacy must be a pfedla\.Privacy"),
        ({"seed": None}, r"schedule\.seed = None must be a whole number"),
        ({"model": "mlp"}, r"model must be a torch\.nn\.Module or a function without arguments, not 'mlp'"),
        ({"model": nn.Linear}, "a function without arguments"),
        ({"out": 5}, "out must be a folder's path, not 5"),
        ({"track": 5}, "track must name a tracker"),
        ({"watch": 5}, r"watch must be a function of a pfedla\.Progress, not 5"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run([arrays()] * 2, **settings)


def test_a_client_is_named_or_numbered() -> None:
    with pytest.raises(ConfigError, match=r"named, or numbered from 0 to 1: not 1\.0"):
        run([arrays()] * 2).model(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["pfedla", PFedLA])
def test_what_is_no_algorithm_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"algorithm must be one such as pfedla\.PFedLA\(\)"):
        run([arrays()], algorithm=wrong)


@pytest.mark.parametrize("wrong", ["regression", pfedla.Regression])
def test_what_is_no_objective_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"objective must be one such as pfedla\.Regression\(\)"):
        run([arrays()], objective=wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "gpu9"}, r"machine\.device = 'gpu9' is not available"),
        ({"rounds": 0}, r"schedule\.rounds = 0 must be at least 1"),
        ({"participants": 4}, r"schedule\.participants = 4 must be from 1 to the number of clients, 3"),
        ({"participants": 0}, r"schedule\.participants = 0 must be at least 1"),
        ({"eval_every": 0}, r"schedule\.eval_every = 0 must be at least 1"),
        ({"seed": 1.5}, r"schedule\.seed = 1\.5 must be a whole number"),
        ({"train_fraction": 1}, r"data\.train_fraction = 1\.0 must be above 0 and below 1"),
        ({"workers": -1}, r"machine\.workers = -1 must be at least 0"),
        ({"storage": "disc"}, r"machine\.storage = 'disc': choose one of memory, disk"),
        ({"fleet": "slurm"}, r"machine\.fleet = 'slurm': choose one of local, ray"),
    ],
)
def test_settings_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run([arrays()] * 3, out=tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


# ---- experiments


def images(tmp_path: Path) -> Path:
    """Write own images to files, one for each client."""
    path = tmp_path / "images"
    path.mkdir()
    rng = np.random.default_rng(0)
    for client in range(4):
        x, y = rng.integers(0, 256, (12 + client, 3, 16, 16), dtype=np.uint8), np.arange(12 + client) % 3
        np.savez(path / f"phone-{client}.npz", x=x, y=y)
    return path


def tables(folder: Path, algorithm: str = "pfedla") -> Tables:
    return {
        "algorithm": {"name": algorithm, **({"groups": 2} if algorithm == "clustered" else {})},
        "data": {"folder": str(folder)},
        "training": {"local_epochs": 2, "batch_size": 4},
        "schedule": {"rounds": 4, "participants": 3, "eval_every": 2},
        "machine": {"checkpoints": False, "workers": 0},
    }


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_interrupted_experiment_resumes_from_its_directory(algorithm: str, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.t == 3:
            raise KeyboardInterrupt

    experiment = Experiment.from_tables(tables(images(tmp_path), algorithm))
    whole = run_experiment(experiment, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, tmp_path / "parts", watch=stop)
    resumed = resume(tmp_path / "parts", workers=1)
    same_result(whole, resumed)
    assert whole.summary["dataset"] == "images"
    names = sorted(str(file.relative_to(tmp_path / "whole")) for file in (tmp_path / "whole").rglob("*"))
    assert names == sorted(str(file.relative_to(tmp_path / "parts")) for file in (tmp_path / "parts").rglob("*"))
    for name in names:
        one, other = (tmp_path / part / name for part in ("whole", "parts"))
        if name.endswith(".safetensors"):
            saved = load_file(other)
            assert all(torch.equal(tensor, saved[key]) for key, tensor in load_file(one).items())
        elif name.endswith(".npz"):
            with np.load(one) as a, np.load(other) as b:
                assert all(np.array_equal(a[key], b[key]) for key in a)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Make a run that was stopped after three of four rounds."""

    def stop(progress: Progress) -> None:
        if progress.t == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(Experiment.from_tables(tables(images(tmp_path))), tmp_path / "parts", watch=stop)
    return tmp_path / "parts"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr = 0.01", "lr = 0.02", r"training\.lr is 0\.02 and was 0\.01"),
        ("seed = 0", "seed = 1", r"schedule\.seed is 1 and was 0"),
        ("participants = 3", "participants = 2", r"schedule\.participants is 2 and was 3"),
        ("participants = 3\n", "", r"schedule\.participants is not set and was 3"),
        ("rounds = 4", "rounds = 2", r"schedule\.rounds is 2 and was 4"),
        ("retain = 0", "retain = 1", r"algorithm\.retain is 1 and was 0"),
        ("train_fraction = 0.7", "train_fraction = 0.6", r"data\.train_fraction is 0\.6 and was 0\.7"),
        ("train_fraction = 0.7", "train_fraction = 0.7\nvalidation = 0.5", r"data\.validation is 0\.5 and was not set"),
        ("[codec]\n", '[codec]\nup = "int8"\n', r"codec\.up is int8 and was not set"),
    ],
)
def test_a_changed_configuration_is_not_resumed(old: str, new: str, message: str, parts: Path) -> None:
    config = parts / "config.toml"
    text = config.read_text()
    assert text.count(old) == 1
    config.write_text(text.replace(old, new))
    with pytest.raises(RunError, match=f"other settings than config.toml has: .*{message}"):
        resume(parts)
    assert RunRecord(parts).state == "resumable"
    config.write_text(text)
    assert resume(parts).summary["rounds"] == 4


def test_a_run_of_before_there_were_codecs_is_resumed(parts: Path) -> None:
    facts = json.loads((parts / "run.json").read_text())
    assert facts["settings"].pop("codec") == {}
    (parts / "run.json").write_text(json.dumps(facts))
    config = (parts / "config.toml").read_text()
    (parts / "config.toml").write_text(config.replace("[codec]\n", ""))
    assert resume(parts).summary["settings"]["codec"] == {}


def test_a_run_on_own_data_that_tells_of_a_data_set_is_made_longer_twice(tmp_path: Path) -> None:
    """Earlier versions recorded a data set and a split that were not used."""
    settings = merge(tables(images(tmp_path)), {"machine": {"checkpoints": True}})
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as before:
        before.setattr(Experiment, "own_data", property(lambda _: False))
        run_experiment(Experiment.from_tables(settings), out)
    told = json.loads((out / "run.json").read_text())["settings"]
    assert (told["data"]["dataset"], told["split"]) == ("fashion-mnist-10k", {"name": "non-iid-1"})
    assert resume(out, rounds=6).summary["rounds"] == 6
    longer = resume(out, rounds=7)
    assert "split" not in longer.summary["settings"]
    same_result(longer, run_experiment(Experiment.from_tables(merge(settings, {"schedule": {"rounds": 7}}))))


@pytest.mark.parametrize("content", ["", "\0" * 50, "[schedule"])
def test_a_configuration_that_a_full_disk_left_is_not_taken_for_the_defaults(content: str, parts: Path) -> None:
    (parts / "config.toml").write_text(content)
    with pytest.raises(PfedlaError, match=r"other settings than config\.toml has|cannot be read as TOML"):
        resume(parts)


def test_changed_data_are_not_resumed(parts: Path, tmp_path: Path) -> None:
    path = tmp_path / "images" / "phone-1.npz"
    with np.load(path) as file:
        x, y = file["x"], file["y"]
    x[3, 0, 0, 0] += 1
    np.savez(path, x=x, y=y)
    with pytest.raises(RunError, match="was started with other data"):
        resume(parts)


def test_another_version_or_commit_of_the_package_is_told(
    parts: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pfedla.record.code", lambda: "9.9 (abc)")
    resume(parts)
    assert f"checkpoint.safetensors was written by version {code()}, this is 9.9 (abc)" in caplog.text


def test_settings_changed_in_the_configuration_and_the_facts_are_not_resumed(parts: Path) -> None:
    for name, old, new in (("config.toml", "lr = 0.01", "lr = 0.02"), ("run.json", '"lr": 0.01', '"lr": 0.02')):
        text = (parts / name).read_text()
        assert text.count(old) == 1
        (parts / name).write_text(text.replace(old, new))
    with pytest.raises(RunError, match="was started with other settings or data than it has now"):
        resume(parts)
    facts = json.loads((parts / "run.json").read_text())
    for settings in (5, {"schedule": 5}, None):
        (parts / "run.json").write_text(json.dumps(facts | {"settings": settings}))
        with pytest.raises(RunError, match="was started with other settings"):
            resume(parts)


def test_every_byte_of_what_a_checkpoint_tells_of_itself_is_checked(parts: Path) -> None:
    path = parts / "checkpoint.safetensors"
    content = path.read_bytes()
    for old, new in ((b'\\"t\\": 3', b'\\"t\\": 2'), (b'\\"refused\\": 0', b'\\"refused\\": 7')):
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))
        with pytest.raises(RunError, match="is damaged: what it tells of itself is not what was written"):
            resume(parts)


def test_machine_settings_may_change_when_a_run_is_resumed(parts: Path) -> None:
    config = parts / "config.toml"
    config.write_text(config.read_text().replace("checkpoints = false", "checkpoints = true"))
    resume(parts)
    assert (parts / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("complete", [True, False])
def test_rounds_may_grow_also_those_of_a_complete_run(complete: bool, tmp_path: Path) -> None:
    settings = merge(tables(images(tmp_path)), {"machine": {"checkpoints": True}})
    long = run_experiment(Experiment.from_tables(merge(settings, {"schedule": {"rounds": 7}})))

    def stop(progress: Progress) -> None:
        if progress.t == 3 and not complete:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with suppress(KeyboardInterrupt):
        run_experiment(Experiment.from_tables(settings), out, watch=stop)
    assert RunRecord(out).complete == complete
    with pytest.raises(ConfigError, match=r"schedule\.rounds = 2: the run has 4, and can only grow"):
        resume(out, rounds=2)
    same_result(resume(out, rounds=7), long)
    assert Experiment.load(out / "config.toml").schedule.rounds == 7
    with pytest.raises(RunError, match="is complete: only more rounds"):
        resume(out)
    same_result(pfedla.load(out), long)


def test_the_last_round_of_a_shorter_run_leaves_no_line_in_a_longer_one(tmp_path: Path) -> None:
    settings = merge(tables(images(tmp_path)), {"machine": {"checkpoints": True}, "schedule": {"eval_every": 3}})
    long = run_experiment(Experiment.from_tables(merge(settings, {"schedule": {"rounds": 6}})))
    run_experiment(Experiment.from_tables(settings), tmp_path / "run")
    same_result(resume(tmp_path / "run", rounds=6), long)
    same_result(pfedla.load(tmp_path / "run"), long)


def test_a_complete_run_without_a_checkpoint_cannot_grow(tmp_path: Path) -> None:
    run_experiment(Experiment.from_tables(tables(images(tmp_path))), tmp_path / "run")
    with pytest.raises(RunError, match="has no checkpoint that more rounds could start from"):
        resume(tmp_path / "run", rounds=9)
    assert RunRecord(tmp_path / "run").complete


def test_a_run_leaves_what_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run_experiment(Experiment.from_tables(tables(images(tmp_path))), out)
    files = {"config.toml", "run.json", "metrics.jsonl", "summary.json", "ledger.npz", "diagnostics.npz", "models"}
    assert {file.name for file in out.iterdir()} == files
    facts = json.loads((out / "run.json").read_text())
    assert (facts.pop("format"), len(facts.pop("id")), len(facts.pop("data"))) == (2, 32, 64)
    decisive = merge(Experiment.load(out / "config.toml").decisive(), {"data": {"folder": "images"}})
    assert facts.pop("settings") == json.loads(json.dumps(decisive))
    assert (facts.pop("commit"), len(facts.pop("fingerprint"))) == (commit(), 64)
    assert facts == {
        "version": pfedla.__version__,
        "model": "auto",
        "factory": "lenet-bn",
        "layers": {},
        "names": ["phone-0", "phone-1", "phone-2", "phone-3"],
        "shape": [3, 16, 16],
        "outputs": 3,
        "classes": ["0", "1", "2"],
        "groups": None,
        "pixels": True,
        "samples": [[8, 4], [9, 4], [10, 4], [10, 5]],
        "holdings": [
            {"0": [2, 2], "1": [3, 1], "2": [3, 1]},
            {"0": [3, 2], "1": [3, 1], "2": [3, 1]},
            {"0": [3, 2], "1": [4, 1], "2": [3, 1]},
            {"0": [3, 2], "1": [4, 1], "2": [3, 2]},
        ],
        "headline": "accuracy",
        "higher_is_better": True,
        "percent": True,
        "scored_on": "test",
    }
    assert json.loads((out / "summary.json").read_text()) == result.summary
    assert [json.loads(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [2, 4]
    with np.load(out / "diagnostics.npz") as saved:
        assert saved["alpha"].shape == (2, 4, 7, 4)
        assert saved["layers"].tolist() == list(result.ledger.layers)
    x = torch.rand(2, 3, 16, 16)
    model = result.model(2)
    expected = model(x)
    model.load_state_dict({key: torch.zeros_like(value) for key, value in model.state_dict().items()})
    model.load_state_dict(load_file(out / "models" / "2.safetensors"))
    assert torch.equal(model(x), expected)


def test_models_need_not_be_kept(tmp_path: Path) -> None:
    wanted = tables(images(tmp_path))
    wanted["machine"]["keep_models"] = False
    result = run_experiment(Experiment.from_tables(wanted), tmp_path / "run")
    assert not list((tmp_path / "run" / "models").iterdir())
    with pytest.raises(ConfigError, match=r"not kept: set machine\.keep_models"):
        result.model(0)


def test_the_saved_configuration_repeats_the_run(tmp_path: Path) -> None:
    wanted: Tables = {
        "algorithm": {"name": "heurpfedla"},
        "data": {"clients": 3, "samples_per_client": 12},
        "model": {"name": "mlp"},
        "training": {"local_epochs": 1},
        "schedule": {"rounds": 2, "seed": 5},
        "machine": {"workers": 0},
    }
    first = run_experiment(Experiment.from_tables(wanted), tmp_path / "run")
    loaded = Experiment.load(tmp_path / "run" / "config.toml")
    assert loaded == Experiment.from_tables(wanted)
    same_result(run_experiment(loaded), first)
    assert first.summary["dataset"] == "fashion-mnist-10k"
    assert (first.summary["seed"], first.summary["rounds"]) == (5, 2)


def test_nothing_is_written_if_the_run_is_refused(tmp_path: Path) -> None:
    folder = images(tmp_path)
    wanted = tables(folder) | {"model": {"layers": {"x": "nothing"}}}
    with pytest.raises(ModelError, match="matches no module"):
        run_experiment(Experiment.from_tables(wanted), tmp_path / "run")
    wanted = tables(folder) | {"algorithm": {"name": "pfedla", "retain": 99}}
    with pytest.raises(ConfigError, match=r"algorithm\.retain = 99"):
        run_experiment(Experiment.from_tables(wanted), tmp_path / "run")
    wanted = tables(folder) | {"schedule": {"participants": 99}}
    with pytest.raises(ConfigError, match=r"schedule\.participants = 99 must be from 1 to the number of clients, 4"):
        run_experiment(Experiment.from_tables(wanted), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_federation_made_beforehand_gives_the_same_run(tmp_path: Path) -> None:
    experiment = Experiment.from_tables(tables(images(tmp_path)))
    federation = federation_of(experiment)
    assert federation.names == ("phone-0", "phone-1", "phone-2", "phone-3")
    same_result(run_experiment(experiment), run_experiment(experiment, federation=federation))


def test_a_run_on_disk_leaves_no_files_of_its_storage(tmp_path: Path) -> None:
    wanted = tables(images(tmp_path))
    memory = run_experiment(Experiment.from_tables(wanted))
    wanted["machine"]["storage"] = "disk"
    disk = run_experiment(Experiment.from_tables(wanted), tmp_path / "run")
    same_result(memory, disk)
    files = {"config.toml", "run.json", "metrics.jsonl", "summary.json", "ledger.npz", "diagnostics.npz", "models"}
    assert {file.name for file in (tmp_path / "run").iterdir()} == files


# ---- watching


def test_a_watcher_ends_a_run_and_keeps_its_result(tmp_path: Path) -> None:
    clients = [arrays(30, seed=i) for i in range(3)]
    how: dict[str, Any] = {"rounds": 9, "eval_every": 2}
    stopped = run(clients, **how, watch=lambda progress: progress.t < 3, out=str(tmp_path / "run"))
    short = run(clients, rounds=3, eval_every=2)
    same_result(stopped, short)
    assert [record["round"] for record in stopped.history] == [2, 3]
    loaded = pfedla.load(tmp_path / "run", model=linear)
    assert loaded.summary["rounds"] == 3
    longer = run(clients, **how, out=tmp_path / "run", resume=True)
    same_result(longer, run(clients, **how))


def test_a_watcher_that_says_stop_at_the_end_changes_nothing() -> None:
    clients = [arrays(30)] * 2
    same_result(run(clients, watch=lambda progress: progress.t < 2), run(clients))


def test_the_last_weights_are_kept_when_a_watcher_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.rounds.RECORDS", 2)
    result = run([arrays(30)] * 2, rounds=12, eval_every=1, watch=lambda progress: progress.t < 5)
    assert result.diagnostics["round"][-1] == 5


def test_progress_is_shown_where_somebody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = {"Hôpital Saint-Jean": arrays(20), "b": arrays(60)}
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # a program that starts kernels is none
    for shell in (None, SimpleNamespace()):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        run(clients)
        assert capsys.readouterr() == ("", "")
    run(clients, progress=True)
    err = capsys.readouterr().err
    assert "note: fewer than 10 test samples: Hôpital Saint-Jean." in err
    assert "pfedla: round 2/2  accuracy" in err
    kernel = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    run(clients, watch=lambda _: None)
    assert "pfedla: round 2/2  accuracy" in capsys.readouterr().out
    run(clients, progress=False)
    assert capsys.readouterr() == ("", "")
