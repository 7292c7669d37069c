"""The scripts behind single figures of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from experiments import curvature
from pfedla import Regression
from pfedla.engine import FlatModel
from pfedla.layers import LayerSpec
from pfedla.training import Samples


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
