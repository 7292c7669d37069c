from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pfedla import kernels, products
from pfedla.products import candidates_inner, candidates_product, inner, product, write_sum

SHAPES = [(1, 1, 1), (3, 7, 64), (10, 100, 65), (2, 49, 200), (4, 6, 5000), (10, 31, 20001), (32, 9, 33), (40, 50, 9)]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(params=[kernels.OFF, *kernels.available()], autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have all products done by torch and by the loops for each instruction set."""
    with kernels.switch(request.param):
        yield


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "clients", "numbers"), SHAPES)
def test_they_are_matrix_products(n: int, clients: int, numbers: int, dtype: torch.dtype) -> None:
    shapes = (clients, numbers), (n, clients), (n, numbers)
    bank, weights, delta = (draw(*shape, dtype=dtype) for shape in shapes)
    (mixed,), (products_of,) = product([weights], [bank]), inner([delta], [bank])
    for found, wanted in (
        (mixed, weights.double() @ bank.double()),
        (products_of, delta.double() @ bank.double().T),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted.to(dtype), rtol=1e-5, atol=1e-5 * numbers**0.5)


@pytest.mark.usefixtures("threads")
def test_layers_of_all_sizes_are_multiplied_at_once() -> None:
    banks = [draw(60, numbers) for numbers in (1, 20, 9000, 700)]
    weights, delta = [draw(4, 60) for _ in banks], [draw(4, rows.shape[1]) for rows in banks]
    for found, w, rows in zip(product(weights, banks), weights, banks, strict=True):
        torch.testing.assert_close(found, w @ rows, rtol=1e-4, atol=1e-4)
    for found, change, rows in zip(inner(delta, banks), delta, banks, strict=True):
        torch.testing.assert_close(found, change @ rows.T, rtol=1e-4, atol=1e-3)


def test_a_bank_may_be_a_part_of_a_larger_one() -> None:
    bank, weights, delta = draw(60, 300)[:, 17:230], draw(4, 60), draw(4, 213)
    torch.testing.assert_close(product([weights], [bank])[0], weights @ bank.contiguous(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(inner([delta], [bank])[0], delta @ bank.contiguous().T, rtol=1e-4, atol=1e-4)


def test_weights_may_be_a_part_of_all_layers_weights() -> None:
    alpha, bank = draw(4, 3, 60), draw(60, 300)
    torch.testing.assert_close(product([alpha[:, 1]], [bank])[0], alpha[:, 1] @ bank, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("threads")
def test_sums_are_written_into_rows() -> None:
    ids, sizes = torch.tensor([3, 0]), (200, 1, 400_000)
    banks, one, other = ([draw(rows, size) for size in sizes] for rows in (5, 2, 3))
    other = [rows[:2] for rows in other]
    before = [bank.clone() for bank in banks]
    write_sum(banks, ids, one, other)
    for bank, was, x, y in zip(banks, before, one, other, strict=True):
        assert torch.equal(bank[ids], x + y)
        assert torch.equal(bank[[1, 2, 4]], was[[1, 2, 4]])


def test_candidates_are_taken_from_the_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "GATHERED", 3)
    bank, weights, delta = draw(9, 8), draw(2, 3), draw(2, 8)
    candidates = torch.tensor([[5, 0, 8], [1, 7, 5]])
    mixed, products_of = candidates_product(weights, bank, candidates), candidates_inner(delta, bank, candidates)
    for i, who in enumerate(candidates.tolist()):
        torch.testing.assert_close(mixed[i], sum((weights[i, k] * bank[j] for k, j in enumerate(who)), torch.zeros(8)))
        torch.testing.assert_close(products_of[i], torch.stack([delta[i] @ bank[j] for j in who]))
