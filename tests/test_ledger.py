from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, FedFomo, Local, PFedLA
from pfedla.layers import LayerSpec, layer_of
from pfedla.ledger import Ledger
from pfedla.models import make_model
from pfedla.wire import Payload
from tests.world import WireFleet, play

N = 4
ROUNDS = ([0, 1, 3], [1, 2], [0, 1, 2, 3])


def by_wire(algorithm: Algorithm[Any], lost: tuple[int, ...] = ()) -> tuple[Ledger, WireFleet]:
    """Play three rounds in which every message is bytes; return the ledger, and the fleet that has the messages."""
    played = play(algorithm, ROUNDS, N, fleet=partial(WireFleet, lost=lost))
    assert isinstance(played.fleet, WireFleet)
    return played.server.ledger, played.fleet


def tensor_bytes(message: bytes) -> dict[str, int]:
    """Return the bytes of tensors in a message, by layer; a value stands under its own name."""
    sizes: dict[str, int] = {}
    for key, tensor in load(message).items():
        name = layer_of(key) or key
        sizes[name] = sizes.get(name, 0) + tensor.numel() * tensor.element_size()
    return sizes


def test_the_ledger_counts_the_serialised_bytes(algorithm: Algorithm[Any]) -> None:
    ledger, fleet = by_wire(algorithm)
    table = ledger.arrays()
    assert table["round"].tolist() == [1] * 3 + [2] * 2 + [3] * 4
    assert table["client"].tolist() == [0, 1, 3, 1, 2, 0, 1, 2, 3]
    lines = {(t, i): line for line, (t, i) in enumerate(zip(table["round"], table["client"], strict=True))}
    assert len(fleet.messages) == 2 * len(lines)
    for t, client, direction, message in fleet.messages:
        line, sizes = lines[t, client], tensor_bytes(message)
        assert table[direction][line].tolist() == [sizes.get(name, 0) for name in ledger.layers]
        columns = [key for key in table if key.startswith(f"{direction}:#")]
        values = {key.removeprefix(f"{direction}:"): int(table[key][line]) for key in columns}
        assert {name: size for name, size in values.items() if size} == {
            name: size for name, size in sizes.items() if name.startswith("#")
        }
        header = table[f"{direction}:header"][line]
        assert header == len(message) - sum(sizes.values()) > 0


def test_the_ledger_adds_up_to_the_messages(algorithm: Algorithm[Any]) -> None:
    ledger, fleet = by_wire(algorithm)
    table = ledger.arrays()
    for direction, layers, overhead in (
        ("down", ledger.down, ledger.overhead_down),
        ("up", ledger.up, ledger.overhead_up),
    ):
        sent = sum(len(message) for _, _, way, message in fleet.messages if way == direction)
        columns = [key for key in table if key.partition(":")[0] == direction]
        assert sum(int(table[key].sum()) for key in columns) == layers + overhead == sent
        assert layers == table[direction].sum()


def test_values_are_counted_under_their_own_name() -> None:
    models = 3
    table = by_wire(FedFomo(models=models))[0].arrays()
    lines = len(table["round"])
    columns = [key for key in table if ":" in key]
    assert columns == ["down:header", "up:header", "up:#examples", "up:#gains"]
    assert table["up:#examples"].tolist() == [8] * lines
    assert table["up:#gains"].tolist() == [4 * (models - 1)] * lines
    assert np.array_equal(table["up"], by_wire(FedAvg())[0].arrays()["up"])  # the model alone


def test_a_method_that_sends_no_layer_has_overhead_alone() -> None:
    ledger, _ = by_wire(Local())
    assert (ledger.down, ledger.up) == (0, 0)
    assert ledger.overhead_up > ledger.overhead_down > 0
    assert (ledger.arrays()["up:#examples"] == 8).all()


def test_a_client_that_drops_out_downloads_and_uploads_nothing() -> None:
    ledger, fleet = by_wire(PFedLA(), lost=(1,))
    table = ledger.arrays()
    gone = table["client"] == 1
    for part in ("", ":header"):
        assert (table[f"down{part}"] > 0).all()
    for part in ("", ":header", ":#examples"):
        assert (table[f"up{part}"][gone] == 0).all()
        assert (table[f"up{part}"][~gone] > 0).all()
    assert [device.kept.rounds.item() for device in fleet.devices.values()] == [2, 0, 2, 2]


def test_bytes_of_a_layer_are_its_parameters_and_statistics() -> None:
    table = play(FedAvg(), ROUNDS, N).server.ledger.arrays()
    assert table["layers"].tolist() == ["conv", "bn", "fc"]
    assert table["down"][0].tolist() == [4 * (3 * 2 * 9 + 3), 4 * (6 + 6), 4 * (48 * 3 + 3)]


def test_retaining_fc1_saves_its_bytes_of_every_download() -> None:
    spec = LayerSpec.of(make_model("lenet-bn", (3, 32, 32), 10))
    theta = {key: torch.zeros(1, slots[-1].stop) for key, slots in spec.slots.items()}
    full, saving = (PFedLA(retain=retain, embedding=2, hidden=2).for_model(spec) for retain in (0, 1))
    state = full.init(theta, 3, torch.Generator())
    state.heads.value["bias"].view(3, len(spec.names), 3)[:, spec.names.index("fc1")] += 20 * torch.eye(3)
    ids = torch.arange(3)
    difference = full.download(state, ids).layer_bytes() - saving.download(state, ids).layer_bytes()
    assert difference.sum(1).tolist() == [96_120 * 4] * 3
    assert difference[:, spec.names.index("fc1")].tolist() == [96_120 * 4] * 3


@pytest.mark.parametrize("algorithm_", [FedAvg(), FedFomo()])
def test_a_ledger_survives_its_arrays(algorithm_: Algorithm[Any]) -> None:
    ledger = by_wire(algorithm_)[0]
    again = Ledger.of(ledger.arrays())
    assert list(again.arrays()) == list(ledger.arrays())
    for key, values in ledger.arrays().items():
        assert np.array_equal(again.arrays()[key], values)
    totals = ("layers", "down", "up", "overhead_down", "overhead_up")
    assert [getattr(again, name) for name in totals] == [getattr(ledger, name) for name in totals]


def test_a_ledger_read_back_goes_on() -> None:
    ledger = Ledger(["a"])
    down = Payload.of({"a": torch.zeros(2, 3)}, torch.ones(2, 1, dtype=torch.bool), ["a"])
    ledger.record(1, [4, 7], down, [7], down.rows([1]))
    again = Ledger.of(ledger.arrays())
    up = Payload.of({"a": torch.zeros(1, 3)}, torch.ones(1, 1, dtype=torch.bool), ["a"], more=torch.zeros(1, 5))
    again.record(2, [7], down.rows([0]), [7], up)
    again.record(3, [4], down.rows([0]), [], None)
    table = again.arrays()
    assert table["round"].tolist() == [1, 1, 2, 3]
    assert table["client"].tolist() == [4, 7, 7, 4]
    assert table["down"].tolist() == [[12]] * 4
    assert table["up"].tolist() == [[0], [12], [12], [0]]
    assert table["up:#more"].tolist() == [0, 0, 20, 0]
    assert (table["up:header"] > 0).tolist() == [False, True, True, False]


def test_an_empty_ledger_has_its_shapes() -> None:
    ledger = Ledger(["a", "b"])
    table = ledger.arrays()
    assert table["down"].shape == table["up"].shape == (0, 2)
    assert table["round"].shape == table["up:header"].shape == (0,)
    assert (ledger.down, ledger.up, ledger.overhead_down, ledger.overhead_up) == (0, 0, 0, 0)
