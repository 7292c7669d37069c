"""What a finished run is good for."""

from __future__ import annotations

import copy
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import pfedla
from pfedla import cli
from pfedla.data.files import load_inputs
from pfedla.errors import ConfigError, DataError, RunError
from pfedla.modelfile import Description, describe, save_model
from pfedla.models import MLP, MODELS, seeded
from pfedla.record import RunRecord
from pfedla.trained import _columns, export, numbered, predict, standing

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
    return pfedla.run(pfedla.PFedLA(), lambda: MLP((5,), 2), clients, **how)


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


# ---- predictions


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on sites whose labels are 100 and 110."""
    here = tmp_path_factory.mktemp("trained")
    folder = sites(here / "sites", labels=(100, 110))
    done = invoke("run", "--folder", folder, "--rounds", 2, "--workers", 0, "--lr", 0.1, "--out", here / "run", "-q")
    assert done.exit_code == 0
    return here / "run"


def new(file: Path, **arrays: Any) -> Path:
    np.savez(file, **arrays)
    return file


def test_a_clients_model_predicts_by_name(trained: Path, tmp_path: Path) -> None:
    x = np.repeat([[4.0], [0.0], [4.0]], 5, 1).astype(np.float32)
    file = new(tmp_path / "new.npz", x=x, y=np.array([110, 100, 100]))
    done = invoke("predict", trained, "--client", "site-1", "--input", file, "-o", tmp_path / "predictions.csv")
    assert done.exit_code == 0
    assert "3 predictions in" in done.stderr
    assert "accuracy 0.6667" in done.stderr
    lines = [line.split(",") for line in (tmp_path / "predictions.csv").read_text().splitlines()]
    assert lines[0] == ["sample", "prediction", "probability"]
    assert [line[:2] for line in lines[1:]] == [["0", "110"], ["1", "100"], ["2", "110"]]
    with torch.inference_mode():
        expected = pfedla.load(trained).model("site-1")(torch.from_numpy(x)).softmax(1).max(1).values
    assert [float(line[2]) for line in lines[1:]] == pytest.approx(expected.tolist(), abs=1e-6)
    by_number = invoke("predict", trained, "--client", "1", "--input", new(tmp_path / "x.npz", x=x))
    assert by_number.stdout == (tmp_path / "predictions.csv").read_text()


def test_probabilities_of_all_classes_and_recalls_of_rare_ones(trained: Path, tmp_path: Path) -> None:
    x = np.repeat([[4.0], [0.0], [4.0], [4.0], [4.0]], 5, 1).astype(np.float32)
    file = new(tmp_path / "new.npz", x=x, y=np.array([110, 110, 110, 110, 100]))
    done = invoke("predict", trained, "--client", "site-1", "--input", file, "--probabilities")
    lines = [line.split(",") for line in done.stdout.splitlines()]
    assert lines[0] == ["sample", "prediction", "probability", "probability_100", "probability_110"]
    for line in lines[1:]:
        assert float(line[3]) + float(line[4]) == pytest.approx(1)
        assert float(line[2]) == pytest.approx(float(line[3 if line[1] == "100" else 4]), abs=1e-6)
    assert "accuracy 0.6, " in done.stderr
    assert "accuracy_balanced 0.375" in done.stderr  # of 0 and 3 / 4
    assert "recall by class: 100 0 of 1, 110 0.75 of 4" in done.stderr


MAKER = """
from torch import nn

def alone():
    return nn.Linear(5, 2)

def of(shape, outputs):
    return nn.Linear(shape[0], outputs)
"""


@pytest.mark.parametrize("maker", ["alone", "of"])
def test_a_model_is_made_from_nothing_or_from_shape_and_outputs(
    maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "makers_of_models.py").write_text(MAKER)
    monkeypatch.syspath_prepend(tmp_path)
    x = np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32)
    clients = [(x, (x[:, 0] > 0).astype(np.int64))] * 2
    pfedla.run(pfedla.FedAvg(), partial(nn.Linear, 5, 2), clients, rounds=1, workers=0, out=tmp_path / "run")
    file = new(tmp_path / "new.npz", x=x[:3])
    done = invoke("predict", tmp_path / "run", "--client", 0, "--input", file, "--model", f"makers_of_models:{maker}")
    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 4)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 4), np.float32)}, r"inputs must have the shape \(samples, 5\), not \(2, 4\)"),
        ({"x": np.zeros((2, 5)), "y": np.array([100, 7])}, "label 7 is none of the classes 100, 110"),
        ({"x": np.full((2, 5), np.nan)}, "finite numbers in x"),
        ({"X": np.zeros((2, 5))}, "an array 'x', found X"),
        ({"x": np.zeros((2, 5)), "y": np.zeros(3)}, "y as numbers, one for each x"),
    ],
)
def test_inputs_that_a_model_does_not_know_are_refused(
    trained: Path, tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        predict(trained, "site-1", *load_inputs(new(tmp_path / "new.npz", **arrays)))


def test_models_of_images_of_bytes_take_no_others(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = RunRecord(trained).facts() | {"pixels": True}
    monkeypatch.setattr(RunRecord, "facts", lambda _: facts)
    with pytest.raises(DataError, match="was trained on images of type uint8, and the inputs are float32"):
        predict(trained, "site-1", np.zeros((2, 5), np.float32), None)


def test_labels_of_classes_with_names_are_their_numbers() -> None:
    named = ["T-shirt/top", "Trouser", "3"]
    assert numbered(np.array([2, 0]), named).tolist() == [2, 0]
    assert numbered(np.array(["Trouser", "3"]), named).tolist() == [1, 2]
    with pytest.raises(DataError, match="label 3 is none of the classes T-shirt/top, Trouser, 3"):
        numbered(np.array([3]), named)
    assert numbered(np.array([110]), ["100", "110"]).tolist() == [1]  # names that are numbers stay names


def test_what_a_model_cannot_take_is_one_line(trained: Path) -> None:
    with pytest.raises(DataError, match=r"^the model cannot take inputs of type int64: .*dtype[^\n]*$"):
        predict(trained, "site-1", np.zeros((2, 5), np.int64))


def test_a_ratio_of_nothing_is_no_number(tmp_path: Path) -> None:
    x, y = np.ones((10, 2), np.float32), np.zeros((10, 3), np.int64)
    make = partial(nn.Linear, 2, 3)
    pfedla.run(pfedla.FedAvg(), make, [(x, y)], 5, objective=pfedla.MultiLabel(), out=tmp_path / "run", workers=0)
    assert np.isnan(predict(tmp_path / "run", 0, x, y, model=make).metrics["f1"])


def test_a_client_that_there_is_not_is_refused(trained: Path) -> None:
    with pytest.raises(ConfigError, match="unknown client 'site-7': did you mean 'site-"):
        predict(trained, "site-7", np.zeros((1, 5)))


def test_what_is_predicted_is_the_objectives(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 5)).astype(np.float32)
    how: dict[str, Any] = {"rounds": 1, "workers": 0}
    targets: dict[str, tuple[pfedla.Objective, np.ndarray, list[str]]] = {
        "regression": (pfedla.Regression(), x[:, :2], ["prediction_0", "prediction_1"]),
        "binary": (pfedla.Binary(), (x[:, 0] > 0).astype(np.int64), ["prediction", "probability"]),
        "own": (pfedla.Custom(functional.l1_loss), x[:, :1], ["output"]),
    }
    for name, (objective, y, columns) in targets.items():
        make = partial(nn.Linear, 5, 1 if y.ndim == 1 else y.shape[1])
        pfedla.run(pfedla.FedAvg(), make, [(x, y)] * 2, objective=objective, out=tmp_path / name, **how)
        found = predict(tmp_path / name, 0, x[:3], None if name == "own" else y[:3], model=make)
        assert list(found.columns) == columns
        assert found.csv().splitlines()[0] == ",".join(["sample", *columns])
        assert (objective.headline in found.metrics) == (name != "own")
        with pytest.raises(ConfigError, match="only where a run was trained for classification"):
            predict(tmp_path / name, 0, x[:3], model=make, probabilities=True)
    assert set(predict(tmp_path / "binary", 0, x, model=partial(nn.Linear, 5, 1)).columns["prediction"]) <= {0, 1}
    with pytest.raises(ConfigError, match="this run's model came from Python"):
        predict(tmp_path / "binary", 0, x)


# ---- model files and other formats


def test_a_model_file_rebuilds_its_model(trained: Path) -> None:
    file = trained / "models" / "2.safetensors"
    about = describe(file)
    assert about == ("site-2", "mlp", (5,), 2, ("100", "110"), ("fc1", "fc2"), False)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    model = pfedla.load_model(str(file))
    assert not model.training
    assert model(x).equal(pfedla.load(trained).model("site-2")(x))


def test_a_model_file_brings_no_code(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    for factory, made in ((None, "came from Python"), ("os:system", "is made by os:system")):
        file = tmp_path / "model.safetensors"
        save_model(file, model, Description("a", factory, (2,), 1, (), ("(root)",), False))
        with pytest.raises(ConfigError, match=made):
            pfedla.load_model(file)
        for given in (model, partial(nn.Linear, 2, 1)):
            assert pfedla.load_model(file, model=given)(torch.ones(1, 2)).equal(model(torch.ones(1, 2)))
        with pytest.raises(RunError, match="into the model"):
            pfedla.load_model(file, model=nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "its header has no 'pfedla'"),
        ("{}", "its header has no 'format'"),
        ('{"format": 2}', "another version, 2"),
        ("[", "cannot read"),
        ('{"format": 1, "client": "a", "factory": "mlp", "shape": 3}', "cannot read"),
    ],
)
def test_other_files_are_no_model_files(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(1)}, file, None if content is None else {"pfedla": content})
    with pytest.raises(RunError, match=message):
        pfedla.load_model(file)
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(RunError, match="cannot read"):
        pfedla.load_model(file)


def test_a_model_is_exported(trained: Path, tmp_path: Path) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    expected = pfedla.load(trained).model("site-0")(x)
    done = invoke("export", trained, "--client", "site-0", "-o", tmp_path / "model.safetensors")
    assert done.exit_code == 0
    assert "the model of site-0 is in" in done.stderr
    assert "outputs stand for 100, 110" in done.stderr
    assert pfedla.load_model(tmp_path / "model.safetensors")(x).equal(expected)
    done = invoke("export", trained, "--client", "0", "--format", "torchscript", "-o", tmp_path / "model.pt")
    assert done.exit_code == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.load(str(tmp_path / "model.pt"))
    assert torch.allclose(scripted(x), expected)
    with pytest.raises(RunError, match="cannot write to"):
        export(trained, 0, tmp_path / "nowhere" / "model.safetensors")


def test_what_cannot_be_scripted_is_told(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs[0])

    quick_run = {"rounds": 1, "workers": 0, "out": tmp_path / "run"}
    pfedla.run(pfedla.FedAvg(), lambda: Odd(5, 2), pairs(30, 30), **quick_run)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be written as TorchScript"):
        export(tmp_path / "run", 0, tmp_path / "model.pt", "torchscript", model=lambda: Odd(5, 2))
    with pytest.raises(ConfigError, match="unknown format 'pickle'"):
        export(tmp_path / "run", 0, tmp_path / "model.pt", "pickle")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_our_models_can_be_scripted(name: str, training: bool) -> None:
    model = seeded(lambda: MODELS[name]((3, 20, 20), 4), 0).train(training)
    x = torch.randn(4, 3, 20, 20, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(copy.deepcopy(model))
    with torch.no_grad():
        assert torch.allclose(model(x), scripted(x), atol=1e-5)
    for key, value in model.state_dict().items():  # running statistics follow the batch alike
        assert torch.allclose(value, scripted.state_dict()[key], atol=1e-5), key


@pytest.mark.slow
def test_our_models_can_be_written_as_onnx(trained: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    done = invoke("export", trained, "--client", "site-0", "--format", "onnx", "-o", tmp_path / "model.onnx")
    assert done.exit_code == 0
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    model = pfedla.load(trained).model("site-0")
    for count in (1, 7):
        x = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], model(x).numpy(), atol=1e-5)


def test_onnx_without_its_packages_says_what_to_install(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'pfedla\[onnx\]'"):
        export(trained, 0, tmp_path / "model.onnx", "onnx")


def test_sizes_of_a_damaged_run_reach_no_code(trained: Path) -> None:
    file = trained / "run.json"
    facts = json.loads(file.read_text())
    for damage in ({"shape": ["sh", "-c", "true"]}, {"shape": [True]}, {"outputs": -1}):
        file.write_text(json.dumps(facts | damage))
        with pytest.raises(RunError, match="is damaged"):
            pfedla.load(trained)
    file.write_text(json.dumps(facts))


def test_labels_in_two_dimensions_are_refused() -> None:
    with pytest.raises(DataError, match="in one dimension, not"):
        numbered(np.zeros((3, 1), np.int64), ["0", "1"])


def test_outputs_beyond_the_classes_are_numbers() -> None:
    found = _columns({"prediction": torch.tensor([1, 7])}, ["cat", "dog"])
    assert found == {"prediction": ["dog", "7"]}


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).relu())
        return out


def test_models_with_shared_parameters_are_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(20, 4)).astype(np.float32), rng.integers(0, 4, 20)) for _ in range(2)]
    result = pfedla.run(pfedla.FedAvg(), Tied, clients, rounds=1, out=tmp_path / "tied")
    again = pfedla.load(tmp_path / "tied", model=Tied).model(1)
    assert isinstance(again, Tied)
    assert again.a.weight is again.b.weight
    torch.testing.assert_close(again.state_dict(), result.model(1).state_dict())
