from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, PFedLA
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.layers import LayerSpec, layer_of
from pfedla.ledger import Ledger
from pfedla.models import make_model
from pfedla.rounds import Server, run_round
from pfedla.training import Samples
from pfedla.wire import EXAMPLES, Payload, encode

N = 4


class Recording(SimulatedFleet):
    """A fleet that serialises what crosses it, and loses some clients' answers."""

    lost: tuple[int, ...] = ()
    wire: list[tuple[int, int, str, dict[str, int]]]

    def train(self, ids: Sequence[int], got: Payload, t: int) -> tuple[list[int], Payload]:
        answered, upload = super().train(ids, got, t)
        rows = [row for row, client in enumerate(answered) if client not in self.lost]
        answered, upload = [answered[row] for row in rows], upload.rows(rows)
        for direction, clients, payload in (("down", list(ids), got), ("up", answered, upload)):
            for row, client in enumerate(clients):
                self.wire.append((t, client, direction, layer_bytes(encode(payload.rows([row])))))
        self._staged = {client: own for client, own in self._staged.items() if client in answered}
        return answered, upload


def layer_bytes(message: bytes) -> dict[str, int]:
    """Return the bytes of tensors in a message, by layer."""
    sizes: dict[str, int] = {}
    for key, tensor in load(message).items():
        if key != EXAMPLES:
            sizes[layer_of(key)] = sizes.get(layer_of(key), 0) + tensor.numel() * tensor.element_size()
    return sizes


@pytest.fixture
def play(
    setting: Callable[..., Setting], data: Callable[..., list[Samples]]
) -> Callable[..., tuple[Ledger, Recording]]:
    def run(algorithm: Algorithm[Any], lost: tuple[int, ...] = ()) -> tuple[Ledger, Recording]:
        made, samples = setting(algorithm), data(N)
        server = Server(made.algorithm.init(made.spec.read(made.template), N, torch.Generator()))
        ledger, fleet = Ledger(made.spec.names), Recording(made, samples, samples, workers=0)
        fleet.lost, fleet.wire = lost, []
        for ids in ([0, 1, 3], [1, 2], [0, 1, 2, 3]):
            run_round(made.algorithm, server, fleet, ledger, ids)
        return ledger, fleet

    return run


def test_the_ledger_counts_the_serialised_bytes(
    algorithm: Algorithm[Any], play: Callable[..., tuple[Ledger, Recording]]
) -> None:
    ledger, fleet = play(algorithm)
    table = ledger.arrays()
    assert table["round"].tolist() == [1] * 3 + [2] * 2 + [3] * 4
    assert table["client"].tolist() == [0, 1, 3, 1, 2, 0, 1, 2, 3]
    lines = {(t, i): line for line, (t, i) in enumerate(zip(table["round"], table["client"], strict=True))}
    for t, client, direction, sizes in fleet.wire:
        expected = [sizes.get(name, 0) for name in ledger.layers]
        assert table[direction][lines[t, client]].tolist() == expected
    for direction, total in (("down", ledger.down), ("up", ledger.up)):
        assert total == sum(sum(sizes.values()) for _, _, d, sizes in fleet.wire if d == direction)


def test_a_client_that_drops_out_downloads_and_uploads_nothing(play: Callable[..., tuple[Ledger, Recording]]) -> None:
    ledger, fleet = play(PFedLA(), lost=(1,))
    table = ledger.arrays()
    gone = table["client"] == 1
    assert (table["down"] > 0).all()
    assert (table["up"][gone] == 0).all()
    assert (table["up"][~gone] > 0).all()
    assert fleet.trained.tolist() == [True, False, True, True]


def test_bytes_of_a_layer_are_its_parameters_and_statistics(play: Callable[..., tuple[Ledger, Recording]]) -> None:
    table = play(FedAvg())[0].arrays()
    assert table["layers"].tolist() == ["conv", "bn", "fc"]
    assert table["down"][0].tolist() == [4 * (3 * 2 * 9 + 3), 4 * (6 + 6), 4 * (48 * 3 + 3)]


def test_retaining_fc1_saves_its_bytes_of_every_download() -> None:
    spec = LayerSpec.of(make_model("lenet-bn", (3, 32, 32), 10))
    theta = {key: torch.zeros(1, slots[-1].stop) for key, slots in spec.slots.items()}
    full, saving = PFedLA(embedding=2, hidden=2), PFedLA(retain=1, embedding=2, hidden=2)
    state = full.init(theta, 3, torch.Generator())
    state.heads.value["bias"].view(3, len(spec.names), 3)[:, spec.names.index("fc1")] += 20 * torch.eye(3)
    ids = torch.arange(3)
    difference = full.download(state, ids).size() - saving.download(state, ids).size()
    assert difference.sum(1).tolist() == [96_120 * 4] * 3
    assert difference[:, spec.names.index("fc1")].tolist() == [96_120 * 4] * 3


def test_a_ledger_survives_its_file(play: Callable[..., tuple[Ledger, Recording]], tmp_path: Path) -> None:
    ledger = play(FedAvg())[0]
    ledger.save(tmp_path / "ledger.npz")
    loaded = Ledger.load(tmp_path / "ledger.npz")
    for key, values in ledger.arrays().items():
        assert np.array_equal(loaded.arrays()[key], values)
    assert (loaded.layers, loaded.down, loaded.up) == (ledger.layers, ledger.down, ledger.up)


def test_an_empty_ledger_has_its_shapes(tmp_path: Path) -> None:
    ledger = Ledger(["a", "b"])
    assert ledger.arrays()["down"].shape == (0, 2)
    assert (ledger.down, ledger.up) == (0, 0)
