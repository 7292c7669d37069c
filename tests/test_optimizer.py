from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from pfedla.optimizer import Optimizer, Rows
from tests.world import same


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters() -> Rows:
    return {"w": draw(4, 2, 3, seed=1), "b": draw(4, 3, seed=2)}


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_a_row_steps_as_torchs_optimizer_would(rule: Literal["adam", "sgd"]) -> None:
    value, optimizer = parameters(), Optimizer(rule, 0.01)
    state = optimizer.init({name: x.clone() for name, x in value.items()})
    alone = {name: x[2].clone().requires_grad_() for name, x in value.items()}
    kind = (
        torch.optim.Adam(alone.values(), 0.01, eps=1e-12) if rule == "adam" else torch.optim.SGD(alone.values(), 0.01)
    )
    for step, rows in enumerate([[2], [0, 2], [1], [3, 2, 0], [1, 2, 3]]):
        direction = {name: draw(len(rows), *x.shape[1:], seed=10 + step) for name, x in value.items()}
        optimizer.ascend(state, direction, torch.tensor(rows))
        if 2 in rows:
            for name, x in alone.items():
                x.grad = -direction[name][rows.index(2)]  # torch descends
            kind.step()
    for name, x in alone.items():
        torch.testing.assert_close(state.value[name][2], x.detach(), rtol=1e-6, atol=1e-7)
    assert state.steps.tolist() == [2, 2, 4, 2]


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_rows_that_rest_keep_everything(rule: Literal["adam", "sgd"]) -> None:
    value, optimizer = parameters(), Optimizer(rule, 0.1)
    state = optimizer.init({name: x.clone() for name, x in value.items()})
    optimizer.ascend(state, {name: x.clone() for name, x in value.items()}, torch.arange(4))
    before = {
        f"{part}.{name}": x.clone() for part in ("value", "first", "second") for name, x in getattr(state, part).items()
    }
    optimizer.ascend(state, {name: x[[1, 3]] for name, x in value.items()}, torch.tensor([1, 3]))
    for key, rows in before.items():
        part, name = key.split(".")
        after = getattr(state, part)[name]
        assert torch.equal(after[[0, 2]], rows[[0, 2]]), key
        assert not torch.equal(after[[1, 3]], rows[[1, 3]]), key


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_ascend_goes_up(rule: Literal["adam", "sgd"]) -> None:
    value, optimizer = parameters(), Optimizer(rule, 0.1)
    state = optimizer.init({name: x.clone() for name, x in value.items()})
    optimizer.ascend(state, {name: torch.ones_like(x) for name, x in value.items()}, torch.arange(4))
    for name, x in state.value.items():
        torch.testing.assert_close(x, value[name] + 0.1)


@pytest.mark.parametrize(
    ("index", "neighbours"), [([1], True), ([0, 1, 2], True), ([2, 1], False), ([0, 2], False), ([1, 1], False)]
)
def test_rows_are_those_asked_for(index: list[int], neighbours: bool) -> None:
    value = parameters()
    found = Optimizer("sgd", 0.1).init(value).rows(torch.tensor(index))
    for name, x in value.items():
        assert torch.equal(found[name], x[index])
        x.add_(1)  # neighbours are a view, others a copy
        assert torch.equal(found[name], x[index]) == neighbours


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_no_rows_take_no_step(rule: Literal["adam", "sgd"]) -> None:
    optimizer = Optimizer(rule, 0.1)
    state = optimizer.init(parameters())
    optimizer.ascend(state, {name: x[:0] for name, x in parameters().items()}, torch.tensor([], dtype=torch.int64))
    same(state, optimizer.init(parameters()))


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e4])
def test_adams_step_does_not_depend_on_the_gradients_scale(scale: float) -> None:
    optimizer, direction = Optimizer("adam", 0.1), {name: x.sign() + x for name, x in parameters().items()}
    plain, scaled = optimizer.init(parameters()), optimizer.init(parameters())
    for _ in range(3):
        optimizer.ascend(plain, direction, torch.arange(4))
        optimizer.ascend(scaled, {name: scale * x for name, x in direction.items()}, torch.arange(4))
    same(scaled.value, plain.value, atol=1e-4)
