"""A tiny world for every test: two small networks, samples, settings, and exact comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pfedla.algorithm import Algorithm
from pfedla.algorithms import ALGORITHMS
from pfedla.checkpoint import tensors_of
from pfedla.fleet import Setting
from pfedla.layers import FlatModel, Layers, LayerSpec
from pfedla.training import Samples, Task, Training
from pfedla.wire import Payload

CLASSES = 3


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors are slower on many threads."""
    torch.set_num_threads(1)


class TinyConv(nn.Module):
    """Convolution, batch norm, dropout and a linear head, for images of 6x6."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(3 * 4 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.drop(self.bn(self.conv(x)).relu().flatten(1)))
        return out


class TinyMLP(nn.Module):
    """Two linear layers, for images of 6x6 taken flat."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2 * 6 * 6, 5)
        self.fc2 = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return out


@pytest.fixture
def net() -> Callable[[str], nn.Module]:
    """Make one of the tiny networks, always with the same weights."""

    def make(name: str = "conv") -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return TinyConv() if name == "conv" else TinyMLP()

    return make


@pytest.fixture
def data() -> Callable[..., list[Samples]]:
    """Make clients' samples: each client sees two classes, moved apart, and has a number of samples of its own."""

    def make(clients: int, count: int = 7, seed: int = 0) -> list[Samples]:
        rng = np.random.default_rng(seed)
        made = []
        for client in range(clients):
            y = (rng.integers(0, 2, count + client) + client) % CLASSES
            x = rng.normal(size=(len(y), 2, 6, 6)) + y[:, None, None, None]
            made.append(Samples(x.astype(np.float32), y))
        return made

    return make


@pytest.fixture
def setting(net: Callable[[str], nn.Module]) -> Callable[..., Setting]:
    """Make a setting around an algorithm; keywords go to `Training`."""

    def make(algorithm: Algorithm[Any], name: str = "conv", seed: int = 3, **training: Any) -> Setting:
        template = net(name)
        spec = LayerSpec.of(template)
        how = Training(**{"local_epochs": 2, "batch_size": 4, "lr": 0.05, **training})
        return Setting(template, spec, algorithm.for_model(spec), how, seed)

    return make


@pytest.fixture
def task_of(data: Callable[..., list[Samples]]) -> Callable[..., Task]:
    """Make the task of some clients in a round."""

    def make(setting: Setting, ids: list[int], t: int = 1, clients: int = 7) -> Task:
        samples = data(clients)
        model = FlatModel(copy.deepcopy(setting.template), setting.spec)
        return Task(model, [samples[i] for i in ids], ids, setting.training, setting.seed, t)

    return make


@pytest.fixture
def by_hand() -> Callable[[Task, Layers], tuple[list[Any], Callable[[np.ndarray, Any], np.ndarray]]]:
    """Give the batches that a task draws for its first client, and the loss's gradient at any weights on one."""

    def make(task: Task, theta: Layers) -> tuple[list[Any], Callable[[np.ndarray, Any], np.ndarray]]:
        batches: list[Any] = []
        task.each(theta, lambda row, _, drawn: None if row else batches.extend(drawn))

        def gradient(w: np.ndarray, batch: Any) -> np.ndarray:
            task.model.weights.copy_(torch.from_numpy(w))
            return task.model.backward(*batch).numpy().copy()

        return batches, gradient

    return make


@pytest.fixture(params=[*ALGORITHMS, "pfedla-peers", "heurpfedla-peers"])
def algorithm(request: pytest.FixtureRequest) -> Algorithm[Any]:
    """Every method, with its default settings; and pFedLA with few candidates, chosen anew in every second round."""
    name, few, _ = request.param.partition("-peers")
    return ALGORITHMS[name](**{"peers": 2, "refresh": 2} if few else {})


@pytest.fixture
def same() -> Callable[..., None]:
    """Compare nested tensors by address, exactly unless a tolerance is given; blanks equal blanks."""

    def flat(value: object) -> dict[str, Tensor]:
        if isinstance(value, Payload):
            value = {"layers": value.layers, "sent": value.sent, "examples": value.examples}
        return dict(tensors_of(value))

    def check(one: object, other: object, atol: float = 0.0) -> None:
        a, b = flat(one), flat(other)
        assert list(a) == list(b)
        for key in a:
            assert (a[key].shape, a[key].dtype) == (b[key].shape, b[key].dtype), key
            assert torch.allclose(a[key], b[key], rtol=0, atol=atol, equal_nan=True), key

    return check
