"""Choices of α, and of the retained layers, that make pFedLA another method; and what it finds out by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pfedla
from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, HeurPFedLA, Local, PFedLA, PFedLAPeers
from pfedla.layers import Layers, kind_of
from pfedla.rounds import run_round
from pfedla.training import Training
from tests.world import Played, data, fleet_of, same, server_of, setting

N, ROUNDS = 4, 3


def rounds(algorithm: Algorithm[Any], heads_bias: Tensor | None = None) -> Played:
    """Run rounds of everybody; with `heads_bias`, α is the softmax of that alone."""
    made = setting(algorithm)
    played = Played(made, server_of(made, N), fleet_of(made, data(N)), N)
    if heads_bias is not None:
        heads = played.state.heads.value
        heads["weight"].zero_()
        heads["bias"].view(N, len(made.spec.names), N).copy_(heads_bias)
    for _ in range(ROUNDS):
        run_round(made.algorithm, played.server, played.fleet, list(range(N)))
    return played


def served(played: Played) -> Layers:
    """Return the parameters of the personalized models; of running statistics each method has its own idea."""
    return {key: rows for key, rows in played.personalized().items() if not kind_of(key)}


def still(retain: int = 0) -> PFedLA:
    """Return pFedLA whose weights do not move."""
    return PFedLA(retain=retain, hyper_optimizer="sgd", hyper_lr=1e-20)


def test_all_weight_on_oneself_is_local_training() -> None:
    same(served(rounds(still(), 200 * torch.eye(N)[:, None])), served(rounds(Local())), atol=1e-6)


def test_weights_by_examples_are_federated_averaging() -> None:
    examples = torch.tensor([7.0, 8.0, 9.0, 10.0])
    averaged = served(rounds(FedAvg()))
    same(served(rounds(still(), (examples / examples.sum()).log())), averaged, atol=2e-6)
    with pytest.raises(AssertionError):
        same(served(rounds(still(), torch.zeros(N))), averaged, atol=2e-6)


@pytest.mark.parametrize("algorithm", [PFedLA(retain=3), PFedLAPeers(retain=3, peers=2)])
def test_retaining_all_layers_is_local_training_to_the_bit(algorithm: Algorithm[Any]) -> None:
    played = rounds(algorithm)
    same(served(played), served(rounds(Local())))
    assert played.server.ledger.down == 0
    assert played.server.ledger.up > 0


def test_retaining_no_layer_is_pfedla_to_the_bit() -> None:
    heuristic, plain = rounds(HeurPFedLA(retain=0)), rounds(PFedLA())
    same(heuristic.personalized(), plain.personalized())
    same(heuristic.state, plain.state)


def test_retained_layers_save_download_and_no_upload() -> None:
    full, saved = (rounds(method).server.ledger.arrays() for method in (PFedLA(), HeurPFedLA(retain=1)))
    assert np.array_equal(full["up"], saved["up"])
    assert ((saved["down"] == 0).sum(1) == 1).all()
    assert np.array_equal(saved["down"][saved["down"] > 0], full["down"][saved["down"] > 0])


def twins(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return three pairs of clients: a pair shares a rule from inputs to labels, and its clients differ in samples."""
    rng = np.random.default_rng(seed)
    clients = []
    for pair in range(3):
        rule = np.roll(np.arange(3), pair)
        for _ in range(2):
            y = rng.integers(0, 3, 60)
            x = 2 * np.eye(3)[y] + 0.7 * rng.normal(size=(60, 3))
            clients.append((x.astype(np.float32), rule[y]))
    return clients


@pytest.mark.parametrize("seed", range(3))
def test_of_twins_own_weight_is_above_the_twins_and_that_above_the_others(seed: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))

    training = Training(local_epochs=2, batch_size=16, lr=0.05)
    result = pfedla.run(
        PFedLA(hyper_lr=1e-3), make, twins(seed), 25, training=training, eval_every=25, seed=seed, workers=0
    )
    assert result.alpha is not None
    head = result.alpha[-1, :, -1]  # (clients, clients)
    client = np.arange(6)
    own, twin = head[client, client].mean(), head[client, client ^ 1].mean()
    others = (1 - own - twin) / 4
    assert own > twin + 0.03
    assert twin > 5 * others
