"""What is trained for: losses and metrics on numbers that can be checked by hand, and whole runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pfedla
from pfedla import Binary, Classification, Custom, FedAvg, Local, MultiLabel, PerPosition, PFedLA, Regression, Training
from pfedla.engine import FlatModel
from pfedla.errors import ModelError
from pfedla.layers import LayerSpec
from pfedla.objective import OBJECTIVES, Objective
from pfedla.report.tables import comparison_table, overview
from pfedla.training import Samples, score

LOG2, LOG3 = math.log(2), math.log(3)


class Echo(nn.Module):
    """Returns its inputs times 1, so that outputs can be written down as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one


def scored(objective: Objective, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Score outputs as a client's model, batch by batch."""
    model = Echo()
    spec = LayerSpec.of(model)
    flat = FlatModel(model, spec, objective)
    found = score(flat, spec.read(model), [Samples(outputs, targets)])
    return {metric: float(values[0]) for metric, values in found.items()}


@pytest.fixture(params=[2, 3, 250], autouse=True)
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five samples are scored in batches of 2, 2 and 1, of 3 and 2, or in one: it must not matter."""
    monkeypatch.setattr("pfedla.training.EVALUATION_BATCH", request.param)
