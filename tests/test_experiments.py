"""The scripts behind single figures of the documentation."""

from __future__ import annotations

import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments import curvature
from pfedla import Regression
from pfedla.comparison import parse_variant
from pfedla.config import Experiment, merge, read_tables
from pfedla.engine import FlatModel
from pfedla.layers import LayerSpec
from pfedla.training import Samples

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
