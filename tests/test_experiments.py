"""The scripts behind single figures of the documentation."""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from experiments import curvature, left_out, newcomers, over_rounds, per_fedavg, samples
from pfedla import PFedLA, Regression
from pfedla.comparison import parse_variant
from pfedla.config import Experiment, merge, read_tables
from pfedla.data.datasets import Dataset
from pfedla.data.splits import NonIID2
from pfedla.engine import FlatModel
from pfedla.errors import ConfigError, DataError
from pfedla.experiment import run_experiment
from pfedla.layers import LayerSpec
from pfedla.training import Samples, Task, Training, score

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.mark.parametrize("name", ["cifar10", "fashion-mnist"])
def test_the_command_for_codecs_names_every_one_with_every_method(name: str, tmp_path: Path) -> None:
    """The comment in the file is a command for bash: have it print its words."""
    text = (EXPERIMENTS / f"codecs-{name}.toml").read_text()
    comment = [line.removeprefix("#") for line in text.splitlines() if line.startswith("#   ")]
    program = tmp_path / "pfedla"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    words = subprocess.run(
        ["bash", "-c", "\n".join(comment)],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    labels = [value for option, value in pairwise(words) if option == "-a"]
    parsed = [
        Experiment.from_tables(merge(read_tables(EXPERIMENTS / f"codecs-{name}.toml"), parse_variant(label).changes))
        for label in labels
    ]
    retained = [getattr(experiment.algorithm, "retain", 0) for experiment in parsed]
    assert sorted(set(retained)) == [0, 1, 2, 3]
    for k in range(4):
        codecs = [experiment.codec for experiment, found in zip(parsed, retained, strict=True) if found == k]
        assert len(codecs) == len(set(codecs)) == 10
        assert {codec.up for codec in codecs} == {None, "float16", "bfloat16", "int8", "int4", "top-k", "random-k"}
        assert {codec.down for codec in codecs} == {None, "float16", "bfloat16", "int8", "int4"}
    pareto = words[words.index("pareto") + 1 :]
    assert pareto[:4] == ["results/codecs-cifar10.json", "results/codecs-fashion-mnist.json", "--against", labels[0]]
    assert f"results/codecs-{name}.json" in words[: words.index("pareto")]


def test_the_largest_curvature_is_the_largest_eigenvalue_of_the_hessian() -> None:
    torch.manual_seed(0)
    x, module = torch.randn(40, 3) * torch.tensor([1.0, 2.0, 5.0]), nn.Linear(3, 1, bias=False)
    model = FlatModel(module, LayerSpec.of(module), Regression())
    before = model.weights.clone()
    found = curvature.largest_curvature(model, Samples(x, torch.zeros(40)))
    hessian = 2 * x.double().T @ x.double() / 40  # of the mean squared error
    assert found == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-3)
    assert torch.equal(model.weights, before)


def test_curvature_prints_a_line_every_few_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiny.toml"
    config.write_text(
        "[data]\nclients = 2\nsamples_per_client = 20\n[model]\nname = 'mlp'\n[training]\nlocal_epochs = 1\n"
    )
    curvature.main([str(config), "per-fedavg", "--rounds", "2", "--every", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 1", "| 2"]
    with pytest.raises(SystemExit, match="must be per-fedavg"):
        curvature.main([str(config), "fedavg"])


def test_left_out_scores_what_has_not_been_trained_on_for_two_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "tiny.toml"
    config.write_text(
        "[data]\nclients = 2\nsamples_per_client = 30\n[model]\nname = 'mlp'\n[training]\nlocal_epochs = 1\n"
    )
    trained, judged = dict[tuple[int, int], list[float]](), list[tuple[int, int, list[float]]]()
    fit = Task.fit

    def marks(samples: Samples) -> list[float]:
        return sorted(samples.take(slice(None), torch.empty(0))[0].flatten(1).sum(1).tolist())

    def fitted(self: Task, *words: Any, **more: Any) -> Any:
        for i, mine in zip(self.ids, self.samples, strict=True):
            trained[self.t, i] = marks(mine)
        return fit(self, *words, **more)

    def scored(model: Any, layers: Any, samples: Any) -> Any:
        judged.append((max(t for t, _ in trained), len(judged) // 6 % 2, marks(samples[0])))
        return score(model, layers, samples)

    monkeypatch.setattr(Task, "fit", fitted)
    monkeypatch.setattr("experiments.left_out.score", scored)
    left_out.main([str(config), "--rounds", "4", "--every", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 2", "| 4"]
    assert {len(line.split(" | ")) for line in lines[2:]} == {7}
    for t, client, fold in judged[::2]:  # then the test samples
        assert 0 < len(fold) < 10
        assert not {*fold} & {*trained[t, client], *trained[t - 1, client]}
    with pytest.raises(SystemExit, match="must be a multiple of 2"):
        left_out.main([str(config), "--every", "3"])


def test_half_of_per_fedavgs_users_share_five_classes_and_the_others_hold_two_each() -> None:
    held = [per_fedavg.holdings(user, 196) for user in range(per_fedavg.USERS)]
    assert held[:25] == [dict.fromkeys(range(5), 196)] * 25
    assert all(sorted(one.values()) == [98, 392] and min(one) < 5 <= max(one) for one in held[25:])
    assert len({tuple(one) for one in held[25:]}) == 25


def test_per_fedavgs_users_get_images_of_their_own(tmp_path: Path) -> None:
    y = np.repeat(np.arange(10), 160)
    x = np.arange(len(y), dtype=np.uint16).view(np.uint8).reshape(-1, 1, 1, 2)
    dataset = Dataset("numbered", x, y, tuple(map(str, range(10))), "")
    per_fedavg.divide(dataset, 4, 0.25, tmp_path)
    seen: list[bytes] = []
    for user, file in enumerate(sorted(tmp_path.iterdir())):
        parts = np.load(file)
        counts = per_fedavg.holdings(user, 4)
        assert {label: int((parts["y"] == label).sum()) for label in counts} == counts
        assert len(parts["y"]) == sum(counts.values())
        assert set(parts["y_test"]) <= set(counts)
        for name in ("x", "x_test"):
            assert (y[parts[name].view(np.uint16).ravel()] == parts["y" + name[1:]]).all()
            seen += [one.tobytes() for one in parts[name]]
    assert len(seen) == len(set(seen))
    with pytest.raises(SystemExit, match="numbered has too few images"):
        per_fedavg.divide(dataset, 8, 0.25, tmp_path)


@pytest.mark.parametrize("images", [3, 8])
def test_every_user_takes_as_many_steps(images: int) -> None:
    """A linear model with one weight, whose gradient on inputs of 1 and targets of 0 is 2w."""
    module = nn.Linear(1, 1, bias=False)
    spec, w = LayerSpec.of(module), 0.5
    samples = Samples(torch.ones(images, 1), torch.zeros(images, 1))
    task = Task(FlatModel(module, spec, Regression()), [samples], [0], Training(local_epochs=12, batch_size=2), 0, 1)
    start = {key: torch.full((1, 1), w) for key in spec.read(module)}
    beta, alpha = 0.1, 0.3
    got = per_fedavg.Steps().send(start)
    plain, _ = per_fedavg.FedAvgUpdate(tau=3, beta=beta).train(start, got, task)
    assert float(next(iter(plain.values()))) == pytest.approx(w * (1 - 2 * beta) ** 3, rel=1e-5)
    meta, _ = per_fedavg.Steps(tau=3, beta=beta, alpha=alpha).train(start, got, task)
    assert float(next(iter(meta.values()))) == pytest.approx(w * (1 - 2 * beta * (1 - 2 * alpha)) ** 3, rel=1e-5)


def test_any_number_of_samples_gets_as_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, skewed = set[tuple[str, int]](), set[tuple[str, int, float]]()

    def refuse(experiment: Experiment) -> None:
        if experiment.data.samples_per_client == 60:
            raise ConfigError("too few")

    def run(experiment: Experiment, federation: None) -> Any:
        data, schedule = experiment.data, experiment.schedule
        passes.add((data.dataset, data.samples_per_client * schedule.rounds))
        assert (data.test_samples_per_client, schedule.eval_every) == (300, schedule.rounds)
        if isinstance(experiment.split, NonIID2):
            skewed.add((data.dataset, data.samples_per_client, experiment.split.dominance))
        return SimpleNamespace(summary={"accuracy_mean": 0.5, "commit": "abc", "compiled_loop": "avx2"})

    monkeypatch.setattr(samples, "federation_of", refuse)
    monkeypatch.setattr(samples, "run_experiment", run)
    found = [samples.measure(column, point, {}) for column, point in samples.plan()]
    assert [samples.point_of(row) for row in found] == [point for _, point in samples.plan()]
    assert len(found) == 8 * len(samples.SIZES) + 4 * (len(samples.DOMINANCES) - 1)
    wanted = {"emnist-digits": 12000, "fashion-mnist": 12000, "cifar10": 4000, "cifar100": 4000}
    assert all(abs(count - wanted[dataset]) <= 60 for dataset, count in passes)
    assert skewed == {
        *((dataset, 200, times) for dataset in wanted for times in samples.DOMINANCES),
        *((dataset, size, 15 if dataset == "cifar100" else 3) for dataset in wanted for size in samples.SIZES[1:]),
    }
    by_size, by_dominance = samples.table(found).split("\n\n")
    assert "| cifar100-10-non-iid-2 | - | 50.00 | 50.00 | 50.00 | 26.29 |" in by_size
    assert by_dominance.splitlines()[2:] == [
        f"| {name}-10-non-iid-2 | 50.00 | 50.00 | 50.00 | 50.00 | {paper} |"
        for name, paper in (
            ("cifar10", "39.79"),
            ("fashion-mnist", "65.60"),
            ("emnist", "80.72"),
            ("cifar100", "26.29"),
        )
    ]
    assert "| cifar10-10-non-iid-1 | - | - | - | - | 59.44 |" in samples.table([])


def test_samples_are_not_called_too_few_where_files_are_missing(tmp_path: Path) -> None:
    column, point = samples.plan()[0]
    with pytest.raises(DataError, match="found none of its files"):
        samples.measure(column, point, {"data_dir": str(tmp_path)})


def test_newcomers_of_other_settings_are_not_put_into_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[list[str]]()

    def measure(_: Experiment, missing: list[str], *__: int) -> list[dict[str, Any]]:
        asked.append(missing)
        return [{"method": method, "settings": asdict(newcomers.METHODS[method][0]), "0": 0.5} for method in missing]

    monkeypatch.setattr(newcomers, "measure", measure)
    (tmp_path / "one.toml").write_text("[data]\nclients = 4\n")

    def call(*words: str) -> None:
        command = ["newcomers", str(tmp_path / "one.toml"), "--json", str(tmp_path / "found.json"), *words]
        monkeypatch.setattr("sys.argv", command)
        newcomers.main()

    call("--method", "pfedla")
    call("--method", "pfedla", "--method", "fedavg")
    assert asked == [["pfedla"], ["fedavg"]]
    for other, name in (
        (("--gradients", "3"), "gradients"),
        (("--validation", "0.2"), "data.validation"),
        (("--rounds", "9"), "schedule.rounds"),
    ):
        with pytest.raises(SystemExit):
            call(*other)
        assert f"measured with other settings ({name})" in capsys.readouterr().err
    monkeypatch.setitem(newcomers.METHODS, "pfedla", (PFedLA(hyper_lr=0.1), True))
    with pytest.raises(SystemExit):
        call("--method", "local")
    assert "measured with other settings (pfedla)" in capsys.readouterr().err


def test_the_course_of_a_run_is_what_it_recorded(tmp_path: Path) -> None:
    tables: dict[str, dict[str, Any]] = {
        "algorithm": {"name": "pfedla-x"},
        "data": {"clients": 3, "samples_per_client": 20},
        "model": {"name": "mlp"},
        "training": {"local_epochs": 5},
        "schedule": {"rounds": 2, "eval_every": 1, "seed": 4},
        "machine": {"workers": 1},
    }
    result = run_experiment(Experiment.from_tables(tables), tmp_path / "pfedla-x-seed4")
    found = over_rounds.course(tmp_path / "pfedla-x-seed4")
    assert (found["label"], found["seed"], found["rounds"]) == ("pfedla-x", 4, [1, 2])
    assert found["accuracy"] == [line["accuracy_mean"] for line in result.history]
    alpha = result.diagnostics["alpha"]  # (evaluations, clients, layers, clients)
    own = np.mean([[alpha[1, i, place, i] for i in range(3)] for place in range(len(found["layers"]))], axis=1)
    np.testing.assert_allclose(found["served"][1], own, atol=1e-5)
    q = [[alpha[1, i, 0, j] / (1 - alpha[1, i, 0, i]) for j in range(3) if j != i] for i in range(3)]
    assert found["others"][1][0] == pytest.approx(np.mean([1 / sum(x * x for x in row) for row in q]), abs=1e-4)
    assert found["others"][0][0] <= 2
    assert over_rounds.SHOWN == ("conv2", "fc1")
    row = over_rounds.table([{**found, "layers": ["conv2", "fc1", "fc2"]}]).splitlines()[2].split(" | ")
    assert row[:2] == ["| `pfedla-x`", "2"]
    three = {key: [*value[:1], *value] if isinstance(value, list) else value for key, value in found.items()}
    lines = over_rounds.table([{**three, "layers": ["conv2", "fc1"], "rounds": [1, 2, 3]}]).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["1", "3"]  # every second, and the last
    earlier = {key: value for key, value in found.items() if key != "others"} | {"start": [[0.5] * 3, [0.25] * 3]}
    earlier["layers"] = ["conv2", "fc1", "fc2"]
    head, _, *lines = over_rounds.table([earlier, {**found, "layers": earlier["layers"]}]).splitlines()
    assert "starts from its own, conv2" in head
    assert [line.split(" | ")[5] for line in lines] == ["0.25", "-"]
    assert lines[0].endswith(" | - | - |")
    assert row[3] == f"{100 * result.history[1]['accuracy_after_training']:.2f}"
