from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pfedla.checkpoint import load_tensors, restore, save_tensors, tensors_of
from pfedla.errors import RunError


class Inner(NamedTuple):
    rows: dict[str, Tensor]
    steps: Tensor


class Outer(NamedTuple):
    inner: Inner
    pair: tuple[Tensor, Tensor]
    nothing: dict[str, Tensor]


@pytest.fixture
def value() -> Outer:
    strange = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45]])
    inner = Inner({"bn#stats": strange, "a.b": torch.arange(6.0).view(2, 3).T}, torch.tensor([1, 2]))
    return Outer(inner, (torch.tensor(True), torch.zeros(0, 3)), {})


def test_every_tensor_has_an_address(value: Outer) -> None:
    assert [path for path, _ in tensors_of(value)] == [
        "inner/rows/bn#stats",
        "inner/rows/a.b",
        "inner/steps",
        "pair/0",
        "pair/1",
    ]


def test_what_is_saved_comes_back_to_the_bit(value: Outer, tmp_path: Path, same: Callable[..., None]) -> None:
    path = tmp_path / "state.safetensors"
    save_tensors(path, value)
    loaded = restore(value, load_tensors(path))
    assert isinstance(loaded, Outer)
    assert isinstance(loaded.inner, Inner)
    same(loaded, value)
    assert loaded.inner.rows["bn#stats"].view(torch.int32).equal(value.inner.rows["bn#stats"].view(torch.int32))
    save_tensors(path, loaded)  # over the file it came from
    same(restore(value, load_tensors(path)), value)
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_checkpoint_of_another_configuration_is_refused() -> None:
    like = {"a": torch.zeros(2)}
    with pytest.raises(RunError, match="does not hold 'a'"):
        restore(like, {})
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(RunError, match=r"the checkpoint's 'a' is .* needs torch\.float32 \(2,\)"):
            restore(like, {"a": other})


def test_state_holds_tensors_only() -> None:
    with pytest.raises(TypeError, match="not int \\(at 'a/0'\\)"):
        dict(tensors_of({"a": (3,)}))


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all"])
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunError, match=r"cannot read .*broken\.safetensors"):
        load_tensors(path)
