"""Matrix products of a few clients' rows with a bank of many, `(N, numbers)`: memory sets their pace, not arithmetic.

The bank is read once and never copied. Where it says so, each client has a few candidates of its own in the bank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["candidates_inner", "candidates_product", "inner", "product", "write_sum"]

FEW, LARGE = 32, 2**21  # rows beside a bank, and the numbers of a bank from which on its memory sets the pace
BLOCK, WIDTH = 24, 2**17  # rows and columns of the bank that are worked on at once
GATHERED = 2**14  # columns of the candidates' rows that are gathered at once


def product(weights: Tensor, rows: Tensor) -> Tensor:
    """Return `weights @ rows`, `(n, numbers)`; a thin product is summed up in blocks of rows.

    A matrix library would gather columns from all rows first, which takes longer than the product itself.
    """
    if len(weights) > FEW or len(rows) <= BLOCK or rows.numel() < LARGE:
        return weights @ rows
    total = rows.new_empty(len(weights), rows.shape[1])
    block = -(-len(rows) // -(-len(rows) // BLOCK))  # all of a size, but the last
    parts = weights.split(block, 1)
    for out, columns in zip(total.split(WIDTH, 1), rows.split(WIDTH, 1), strict=True):
        first, *rest = zip(parts, columns.split(block), strict=True)
        torch.mm(*first, out=out)
        for weight, some in rest:
            out.addmm_(weight, some)
    return total


def inner(delta: Tensor, rows: Tensor) -> Tensor:
    """Return `delta @ rows.T`, `(n, N)`; of long rows by oneDNN where torch has it, which does not copy them first."""
    if len(delta) > FEW or rows.numel() < LARGE or not _suits_onednn(rows):
        return delta @ rows.T
    transposed: Tensor = torch.ops.mkldnn._linear_pointwise(rows, delta, None, "none", [], "")
    return transposed.T


def write_sum(rows: Tensor, ids: Tensor, one: Tensor, other: Tensor) -> None:
    """Write `one + other` into the rows `ids` of a bank, by columns whose sum lies in the cache."""
    for there, *parts in zip(rows.split(WIDTH, 1), one.split(WIDTH, 1), other.split(WIDTH, 1), strict=True):
        there.index_copy_(0, ids, torch.add(*parts))


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


def _suits_onednn(rows: Tensor) -> bool:
    """Say whether oneDNN is there and reads these rows as they are; what has gaps it copies, very slowly."""
    found = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return found and rows.is_contiguous() and rows.dtype == torch.float32 and rows.device.type == "cpu"
