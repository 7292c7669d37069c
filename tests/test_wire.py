from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from pfedla.layers import Layers
from pfedla.wire import Payload, decode, encode
from tests.world import same

NAMES = ("a", "b")
SENT = torch.tensor([[True, False], [True, True]])
VALUES = {
    "examples": torch.tensor([5, 6]),
    "vector": torch.tensor([[1.5, -0.0, float("nan")], [float("inf"), 2.0, 3.0]]),
    "flags": torch.tensor([[True, False], [False, True]]),
    "flag": torch.tensor([False, True]),
}


def some_layers() -> Layers:
    return {
        "a": torch.arange(4.0).view(2, 2),
        "b": torch.arange(6.0).view(2, 3) + 10,
        "b#stats": torch.ones(2, 1, dtype=torch.float64),
    }


def test_what_is_not_sent_is_blank() -> None:
    layers = some_layers()
    payload = Payload.of(layers, SENT, NAMES)
    assert torch.equal(payload.layers["a"], layers["a"])
    for key in ("b", "b#stats"):
        assert payload.layers[key][0].isnan().all()
        assert torch.equal(payload.layers[key][1], layers[key][1])
    assert payload.values == {}
    assert not layers["b"].isnan().any()


def test_what_nobody_is_sent_is_absent() -> None:
    assert list(Payload.of(some_layers(), torch.tensor([[True, False]] * 2), NAMES).layers) == ["a"]


def test_not_sent_means_keep_yours() -> None:
    layers = some_layers()
    own = {key: rows * 0 - 1 for key, rows in layers.items()}
    own |= {"b#counters": torch.tensor([[3], [4]]), "#alpha": torch.tensor([[0.5], [0.6]])}
    filled = Payload.of(layers, SENT, NAMES, alpha=torch.zeros(2)).fill(own)
    assert list(filled) == list(own)
    assert torch.equal(filled["a"], layers["a"])
    assert filled["b"].tolist() == [[-1, -1, -1], [13, 14, 15]]
    assert filled["b#stats"].tolist() == [[-1], [1]]
    assert filled["b#counters"].tolist() == [[3], [4]]
    assert filled["#alpha"] is own["#alpha"]


def test_values_are_sent_in_every_row_under_their_own_name() -> None:
    payload = Payload.of(some_layers(), SENT, NAMES, **VALUES)
    assert list(payload.values) == list(VALUES)
    assert payload.examples.tolist() == [5, 6]
    assert set(payload.tensors(0)) == {"a", "#examples", "#vector", "#flags", "#flag"}
    assert set(payload.tensors(1)) == {"a", "b", "b#stats", "#examples", "#vector", "#flags", "#flag"}


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(1, 2), torch.tensor(1.0), 0.5])
def test_a_value_without_a_row_for_each_client_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="value 'strength' must be a tensor with one row for each of 2 clients"):
        Payload.of(some_layers(), SENT, NAMES, strength=wrong)


def test_rows_and_stack_are_inverse() -> None:
    payload = Payload.of(some_layers(), SENT, NAMES, **VALUES)
    alone = decode(encode(payload.rows([0])), NAMES)  # knows nothing of layer b
    assert list(alone.layers) == ["a"]
    joined = Payload.stack([alone, payload.rows(slice(1, 2))])
    same(joined, payload)
    assert joined.names == payload.names
    assert joined.examples.tolist() == [5, 6]
    same(payload.rows([1, 0]), Payload.stack([payload.rows([1]), alone]))


def test_values_survive_the_wire_to_the_bit() -> None:
    payload = Payload.of(some_layers(), SENT, NAMES, **VALUES)
    for row in range(2):
        found = decode(encode(payload.rows([row])), NAMES)
        assert set(found.values) == set(VALUES)
        for name, tensor in VALUES.items():
            assert found.values[name].dtype == tensor.dtype
            assert found.values[name].shape == tensor[[row]].shape
            assert found.values[name].numpy().tobytes() == tensor[[row]].numpy().tobytes()


def test_payloads_of_different_models_cannot_be_joined() -> None:
    payload = Payload.of(some_layers(), SENT, NAMES)
    with pytest.raises(ValueError, match="different models"):
        Payload.stack([payload, payload._replace(names=("a", "c"))])


def test_payloads_with_different_values_cannot_be_joined() -> None:
    one, other = (Payload.of(some_layers(), SENT, NAMES, **{name: torch.zeros(2)}) for name in ("alpha", "beta"))
    for pair in ([one, other], [one, Payload.of(some_layers(), SENT, NAMES)]):
        with pytest.raises(ValueError, match="different models or methods cannot be joined"):
            Payload.stack(pair)


def test_size_is_the_bytes_of_what_is_encoded() -> None:
    payload = Payload.of(some_layers(), SENT, NAMES, **VALUES)
    assert np.array_equal(payload.layer_bytes(), [[8, 0], [8, 3 * 4 + 8]])
    assert payload.value_bytes() == {"examples": 8, "vector": 12, "flags": 2, "flag": 1}
    for row in range(2):
        message = encode(payload.rows([row]))
        sizes = {key: x.numel() * x.element_size() for key, x in load(message).items()}
        assert sum(size for key, size in sizes.items() if key[0] != "#") == payload.layer_bytes()[row].sum()
        assert {key[1:]: size for key, size in sizes.items() if key[0] == "#"} == payload.value_bytes()
        assert payload.header_bytes()[row] == len(message) - sum(sizes.values())


def kinds_of(draw: Any, n: int) -> torch.Tensor:
    """Draw a value: a scalar or a short vector for each client, of one of three types."""
    shape = (n, *draw(st.sampled_from([(), (0,), (1,), (3,), (2, 2)])))
    return torch.ones(shape).to(draw(st.sampled_from([torch.int64, torch.float32, torch.bool])))


@st.composite
def payloads(draw: Any) -> Payload:
    """Draw a payload of up to 4 clients, with up to 3 layers and 3 values, of any names."""
    text = st.text('ab.é"\\/ ', min_size=1, max_size=3)
    n, names = draw(st.integers(1, 4)), draw(st.lists(text, min_size=1, max_size=3, unique=True))
    layers: Layers = {}
    for name in names:
        layers[name] = torch.rand(n, draw(st.integers(1, 4)))
        if draw(st.booleans()):
            layers[f"{name}#stats"] = torch.rand(n, draw(st.integers(1, 2)), dtype=torch.float64)
    sent = torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=len(names), max_size=len(names)), min_size=n)))
    values = {name: kinds_of(draw, n) for name in draw(st.lists(text, max_size=3, unique=True))}
    return Payload.of(layers, sent[:n], names, **values)


@settings(max_examples=60, deadline=None)
@given(payload=payloads())
def test_layers_values_and_header_are_the_whole_message(payload: Payload) -> None:
    layers, values, headers = payload.layer_bytes(), payload.value_bytes(), payload.header_bytes()
    received = []
    for row in range(len(payload.sent)):
        message = encode(payload.rows([row]))
        assert layers[row].sum() + sum(values.values()) + headers[row] == len(message)
        received.append(decode(message, payload.names))
        same(received[-1].tensors(0), payload.tensors(row))
    same(Payload.stack(received), payload)


def test_one_client_is_encoded_at_a_time() -> None:
    with pytest.raises(ValueError, match="one client's payload is encoded at a time, not 2"):
        encode(Payload.of(some_layers(), SENT, NAMES))


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    message = encode(Payload.of(some_layers(), SENT, NAMES).rows([1]))
    with pytest.raises(ValueError, match="layers that the model does not have: b"):
        decode(message, ("a",))


def test_a_damaged_message_is_refused() -> None:
    message = encode(Payload.of(some_layers(), SENT, NAMES, **VALUES).rows([1]))
    decode(message, NAMES)
    cut = [message[:length] for length in range(len(message))]
    wrong_length, wrong_type = bytes([message[0] ^ 255]) + message[1:], message.replace(b"F32", b"F99")
    for damaged in (*cut, wrong_length, wrong_type, message + b"\0", b"no payload at all"):
        with pytest.raises(ValueError, match="the message is no payload"):
            decode(damaged, NAMES)


def test_another_programs_safetensors_are_read_the_same() -> None:
    payload = Payload.of(some_layers(), SENT, NAMES, **VALUES).rows([1])
    same(decode(save(payload.tensors(0)), NAMES), payload)


def test_layers_arrive_in_the_models_order() -> None:
    names = ("z", "a", "m", "b")
    layers = {key: torch.zeros(1, 2) for name in names for key in (name, f"{name}#stats")}
    payload = Payload.of(layers, torch.tensor([[True, True, False, True]]), names, y=torch.zeros(1), x=torch.zeros(1))
    for _ in range(3):
        found = decode(encode(payload), names)
        assert list(found.layers) == [key for key in layers if not key.startswith("m")]
        assert list(found.values) == ["x", "y"]
