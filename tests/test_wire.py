from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load

from pfedla.layers import Layers
from pfedla.wire import EXAMPLES, Payload, decode, encode

NAMES = ("a", "b")
SENT = torch.tensor([[True, False], [True, True]])


@pytest.fixture
def layers() -> Layers:
    return {
        "a": torch.arange(4.0).view(2, 2),
        "b": torch.arange(6.0).view(2, 3) + 10,
        "b#stats": torch.ones(2, 1, dtype=torch.float64),
    }


def test_what_is_not_sent_is_blank(layers: Layers) -> None:
    payload = Payload.of(layers, SENT, NAMES)
    assert torch.equal(payload.layers["a"], layers["a"])
    for key in ("b", "b#stats"):
        assert payload.layers[key][0].isnan().all()
        assert torch.equal(payload.layers[key][1], layers[key][1])
    assert payload.examples.tolist() == [0, 0]
    assert not layers["b"].isnan().any()


def test_what_nobody_is_sent_is_absent(layers: Layers) -> None:
    assert list(Payload.of(layers, torch.tensor([[True, False]] * 2), NAMES).layers) == ["a"]


def test_not_sent_means_keep_yours(layers: Layers) -> None:
    own = {key: rows * 0 - 1 for key, rows in layers.items()}
    own["b#counters"] = torch.tensor([[3], [4]])
    filled = Payload.of(layers, SENT, NAMES).fill(own)
    assert list(filled) == list(own)
    assert torch.equal(filled["a"], layers["a"])
    assert filled["b"].tolist() == [[-1, -1, -1], [13, 14, 15]]
    assert filled["b#stats"].tolist() == [[-1], [1]]
    assert filled["b#counters"].tolist() == [[3], [4]]


def test_rows_and_stack_are_inverse(layers: Layers) -> None:
    payload = Payload.of(layers, SENT, NAMES, torch.tensor([5, 6]))
    alone = decode(encode(payload.rows([0])), NAMES)  # knows nothing of layer b
    joined = Payload.stack([alone, payload.rows(slice(1, 2))])
    assert set(joined.layers) == set(payload.layers)
    for key, rows in payload.layers.items():
        torch.testing.assert_close(joined.layers[key], rows, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(joined.sent, payload.sent)
    assert joined.examples.tolist() == [5, 6]


def test_payloads_of_different_models_cannot_be_joined(layers: Layers) -> None:
    payload = Payload.of(layers, SENT, NAMES)
    with pytest.raises(ValueError, match="different models"):
        Payload.stack([payload, payload._replace(names=("a", "c"))])


def test_size_is_the_bytes_of_what_is_encoded(layers: Layers) -> None:
    payload = Payload.of(layers, SENT, NAMES)
    assert np.array_equal(payload.size(), [[8, 0], [8, 3 * 4 + 8]])
    for row in range(2):
        tensors = load(encode(payload.rows([row])))
        tensors.pop(EXAMPLES)
        assert sum(x.numel() * x.element_size() for x in tensors.values()) == payload.size()[row].sum()


def test_one_client_is_encoded_at_a_time(layers: Layers) -> None:
    with pytest.raises(ValueError, match="one client's payload is encoded at a time, not 2"):
        encode(Payload.of(layers, SENT, NAMES))


def test_a_layer_that_the_model_does_not_have_is_refused(layers: Layers) -> None:
    data = encode(Payload.of(layers, SENT, NAMES).rows([1]))
    with pytest.raises(ValueError, match="layers that the model does not have: b"):
        decode(data, ("a",))
