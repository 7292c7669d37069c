from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pfedla.errors import RunError
from pfedla.storage import is_mapped, mapped, zeros
from pfedla.tree import convert, flatten, restore, transform
from tests.world import same


class Inner(NamedTuple):
    rows: dict[str, Tensor]
    steps: Tensor


class Outer(NamedTuple):
    inner: Inner
    pair: tuple[Tensor, Tensor]
    nothing: dict[str, Tensor]


def nested() -> Outer:
    inner = Inner({"bn#stats": torch.tensor([[1.5]]), "a.b": torch.arange(6.0).view(2, 3)}, torch.tensor([1, 2]))
    return Outer(inner, (torch.tensor(True), torch.zeros(0, 3)), {})


PATHS = ["inner/rows/bn#stats", "inner/rows/a.b", "inner/steps", "pair/0", "pair/1"]


def test_every_tensor_has_an_address() -> None:
    value = nested()
    found = flatten(value)
    assert list(found) == PATHS
    assert found["inner/rows/a.b"] is value.inner.rows["a.b"]
    assert found["pair/1"] is value.pair[1]


def test_every_leaf_is_changed_and_the_nesting_stays() -> None:
    seen: list[str] = []

    def name(path: str, leaf: Any) -> str:
        assert isinstance(leaf, Tensor)
        seen.append(path)
        return path.upper()

    found = transform(nested(), name, "state")
    assert seen == [f"state/{path}" for path in PATHS]
    rows = {"bn#stats": "STATE/INNER/ROWS/BN#STATS", "a.b": "STATE/INNER/ROWS/A.B"}
    assert found == Outer(Inner(rows, "STATE/INNER/STEPS"), ("STATE/PAIR/0", "STATE/PAIR/1"), {})  # type: ignore[arg-type]
    assert (type(found), type(found.inner), type(found.pair)) == (Outer, Inner, tuple)


def test_only_leaves_of_a_kind_are_converted() -> None:
    value = {"a": (torch.ones(2), "text", 3), "b": [torch.ones(1)]}
    found = convert(value, Tensor, Tensor.numpy)
    assert isinstance(found["a"][0], np.ndarray)
    assert found["a"][1:] == ("text", 3)
    assert found["b"] is value["b"]  # a list is a leaf
    back = convert(found, (np.ndarray, int), torch.as_tensor)
    assert torch.equal(back["a"][0], torch.ones(2))
    assert torch.equal(back["a"][2], torch.tensor(3))


def test_what_is_flattened_is_restored_in_its_types() -> None:
    value, like = nested(), transform(nested(), lambda _, leaf: torch.zeros_like(leaf))
    for path in ("", "state"):
        tensors = {f"{path}/{key}" if path else key: tensor for key, tensor in flatten(value).items()}
        found = restore(like, {**tensors, "another": torch.ones(1)}, path)
        assert isinstance(found, Outer)
        assert isinstance(found.inner, Inner)
        same(found, value)


def test_a_checkpoint_of_another_configuration_is_refused() -> None:
    like = {"a": torch.zeros(2)}
    with pytest.raises(RunError, match="does not hold 'a': it belongs to another configuration"):
        restore(like, {})
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(RunError, match=r"the checkpoint's 'a' is .* needs torch\.float32 \(2,\)"):
            restore(like, {"a": other})


def test_restored_tensors_are_aligned_as_those_of_a_run_that_never_stopped() -> None:
    odd = torch.arange(10.0)[1:]  # as from a file: products of such memory may round in another way
    assert odd.data_ptr() % 64
    found = restore({"a": torch.zeros(9)}, {"a": odd})["a"]
    assert found.data_ptr() % 64 == torch.zeros(9).data_ptr() % 64 == 0
    assert torch.equal(found, odd)


def test_what_lies_on_disk_is_restored_in_its_place(tmp_path: Path) -> None:
    with mapped(tmp_path):
        like = {"rows": zeros((2, 3)), "steps": torch.zeros(2)}
    place, found = like["rows"].data_ptr(), restore(like, {"rows": torch.ones(2, 3), "steps": torch.ones(2)})
    assert is_mapped(found["rows"])
    assert found["rows"].data_ptr() == place
    assert (found["rows"] == 1).all()
    assert (found["steps"] == 1).all()


def test_state_holds_tensors_only() -> None:
    with pytest.raises(TypeError, match="not int \\(at 'a/0'\\)"):
        flatten({"a": (3,)})
