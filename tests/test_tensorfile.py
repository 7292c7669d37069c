from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file
from torch import Tensor

from pfedla.tensorfile import TYPES, header, write


def strange() -> dict[str, Tensor]:
    """Make tensors of every type and of every awkward kind."""
    return {
        **{f"type {i}": torch.tensor([[0, 1], [1, 0]]).to(dtype) for i, dtype in enumerate(TYPES)},
        "values": torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45]]),
        "scalar": torch.tensor(True),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "strided": torch.arange(8)[::3],
        "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "part/of#a 'name' \"é\"": torch.ones(1),
    }


def test_what_is_written_comes_back_to_the_bit(tmp_path: Path) -> None:
    path, tensors = tmp_path / "state.safetensors", strange()
    with path.open("wb") as file:
        write(file, tensors, {"facts": '{"t": 3}'})
    found = load_file(path)
    assert set(found) == set(tensors)
    for key, tensor in tensors.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        bits = [x.contiguous().view(-1).view(torch.uint8) for x in (found[key], tensor) if x.numel()]
        assert not bits or torch.equal(*bits), key
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"facts": '{"t": 3}'}


def test_the_header_is_what_stands_before_the_tensors() -> None:
    tensors = strange()
    for metadata in (None, {"a": "b"}):
        file = io.BytesIO()
        write(file, tensors, metadata)
        start = header(tensors, metadata)
        assert file.getvalue().startswith(start)
        assert len(file.getvalue()) == len(start) + sum(tensor.nbytes for tensor in tensors.values())
        assert int.from_bytes(start[:8], "little") == len(start) - 8
        assert len(start) % 8 == 0


def test_every_tensor_is_aligned_to_its_type() -> None:
    entries = json.loads(header(strange())[8:])
    for key, tensor in strange().items():
        assert entries[key]["data_offsets"][0] % tensor.element_size() == 0, key


def test_nothing_at_all_is_a_file_too() -> None:
    file = io.BytesIO()
    write(file, {})
    assert load(file.getvalue()) == {}


def test_the_order_of_the_tensors_does_not_matter() -> None:
    one, other, tensors = io.BytesIO(), io.BytesIO(), strange()
    write(one, tensors)
    write(other, dict(reversed(tensors.items())))
    assert one.getvalue() == other.getvalue()


def test_a_type_that_the_format_does_not_have_is_refused() -> None:
    with pytest.raises(KeyError, match="complex64"):
        header({"a": torch.zeros(1, dtype=torch.complex64)})
