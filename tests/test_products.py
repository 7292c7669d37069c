from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pfedla import products
from pfedla.products import candidates_inner, candidates_product, inner, product, write_sum


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(params=["large", "small", "no oneDNN"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all products done in each of the ways that depend on size and machine."""
    monkeypatch.setattr(products, "LARGE", 10**9 if request.param == "small" else 0)
    monkeypatch.setattr(products, "WIDTH", 64)
    if request.param == "no oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "clients", "numbers"), [(1, 1, 1), (3, 7, 64), (10, 100, 65), (2, 49, 200), (40, 50, 9)])
def test_they_are_matrix_products(n: int, clients: int, numbers: int, dtype: torch.dtype) -> None:
    shapes = (clients, numbers), (n, clients), (n, numbers)
    bank, weights, delta = (draw(*shape, dtype=dtype) for shape in shapes)
    for found, wanted in (
        (product(weights, bank), weights.double() @ bank.double()),
        (inner(delta, bank), delta.double() @ bank.double().T),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted.to(dtype), rtol=1e-5, atol=1e-4)


def test_a_bank_may_be_a_part_of_a_larger_one() -> None:
    bank, weights, delta = draw(60, 300)[:, 17:230], draw(4, 60), draw(4, 213)
    torch.testing.assert_close(product(weights, bank), weights @ bank.contiguous(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(inner(delta, bank), delta @ bank.contiguous().T, rtol=1e-4, atol=1e-4)


def test_sums_are_written_into_rows() -> None:
    bank, one, other, ids = draw(5, 200), draw(2, 200), draw(3, 200)[:2], torch.tensor([3, 0])
    before = bank.clone()
    write_sum(bank, ids, one, other)
    assert torch.equal(bank[ids], one + other)
    assert torch.equal(bank[[1, 2, 4]], before[[1, 2, 4]])


def test_candidates_are_taken_from_the_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "GATHERED", 3)
    bank, weights, delta = draw(9, 8), draw(2, 3), draw(2, 8)
    candidates = torch.tensor([[5, 0, 8], [1, 7, 5]])
    mixed, products_of = candidates_product(weights, bank, candidates), candidates_inner(delta, bank, candidates)
    for i, who in enumerate(candidates.tolist()):
        torch.testing.assert_close(mixed[i], sum((weights[i, k] * bank[j] for k, j in enumerate(who)), torch.zeros(8)))
        torch.testing.assert_close(products_of[i], torch.stack([delta[i] @ bank[j] for j in who]))
