"""Matrix products of a few clients' rows with a bank of many, `(N, numbers)`: memory sets their pace, not arithmetic.

The bank is read once and never copied. Where it says so, each client has a few candidates of its own in the bank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pfedla import kernels

__all__ = ["candidates_inner", "candidates_product", "inner", "product", "write_sum"]

GATHERED = 2**14  # columns of the candidates' rows that are gathered at once


def product(weights: Sequence[Tensor], banks: Sequence[Tensor]) -> list[Tensor]:
    """Return `weights @ rows`, `(n, numbers)`, of each layer."""
    weights = [some.contiguous() for some in weights]
    if _thin(weights, banks):
        return kernels.product(weights, banks)
    return [some @ rows for some, rows in zip(weights, banks, strict=True)]


def inner(delta: Sequence[Tensor], banks: Sequence[Tensor]) -> list[Tensor]:
    """Return `delta @ rows.T`, `(n, N)`, of each layer."""
    if _thin(delta, banks):
        return kernels.inner(delta, banks)
    return [some @ rows.T for some, rows in zip(delta, banks, strict=True)]


def write_sum(banks: Sequence[Tensor], ids: Tensor, one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    """Write `one + other` into the rows `ids` of each layer's bank."""
    if kernels.usable(*banks, *one, *other):
        return kernels.write_sum(banks, ids, one, other)
    for rows, *parts in zip(banks, one, other, strict=True):
        rows.index_copy_(0, ids, torch.add(*parts))
    return None


def candidates_product(weights: Tensor, rows: Tensor, candidates: Tensor) -> Tensor:
    """Return Σ_j weights_ij rows_j over the candidates j of each client i, `(n, numbers)`."""
    return functional.embedding_bag(candidates, rows, per_sample_weights=weights, mode="sum")


def candidates_inner(delta: Tensor, rows: Tensor, candidates: Tensor) -> Tensor:
    """Return <delta_i, rows_j> for the candidates j of each client i, gathering a piece of their rows at a time."""
    products = rows.new_zeros(candidates.shape)
    for piece, columns in zip(delta.split(GATHERED, 1), rows.split(GATHERED, 1), strict=True):
        for found, own, who in zip(products, piece, candidates, strict=True):
            found.addmv_(columns.index_select(0, who), own)
    return products


def _thin(some: Sequence[Tensor], banks: Sequence[Tensor]) -> bool:
    """Say whether there are loops for this: a matrix library would copy the bank piece by piece before it reads it."""
    return len(some[0]) <= kernels.FEW and kernels.usable(*some, *banks)
