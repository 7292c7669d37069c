"""Choices of α, and of the retained layers, that make pFedLA another method; and what it finds out by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pfedla
from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, HeurPFedLA, Local, PFedLA
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.layers import Layers
from pfedla.ledger import Ledger
from pfedla.randomness import stream
from pfedla.rounds import Server, run_round
from pfedla.training import Samples, Training

N, ROUNDS = 4, 3

Play = Callable[..., tuple[Layers, Ledger, Any]]
Same = Callable[..., None]


@pytest.fixture
def play(setting: Callable[..., Setting], data: Callable[..., list[Samples]]) -> Play:
    """Run rounds; return the personalized models, what was sent, and the state."""

    def run(algorithm: Algorithm[Any], heads_bias: Tensor | None = None) -> tuple[Layers, Ledger, Any]:
        made, samples = setting(algorithm), data(N)
        state = made.algorithm.init(made.spec.read(made.template), N, stream(0, "init"))
        if heads_bias is not None:  # α is the softmax of the bias alone
            state.heads.value["weight"].zero_()
            state.heads.value["bias"].view(N, len(made.spec.names), N).copy_(heads_bias)
        server, ledger = Server(state), Ledger(made.spec.names)
        with SimulatedFleet(made, samples, samples, workers=0) as fleet:
            for _ in range(ROUNDS):
                run_round(made.algorithm, server, fleet, ledger, list(range(N)))
            got = made.algorithm.download(server.state, torch.arange(N))
            return fleet.personalize(range(N), got, server.t), ledger, server.state

    return run


def still(retain: int = 0) -> PFedLA:
    """Return pFedLA whose weights do not move."""
    return PFedLA(retain=retain, hyper_optimizer="sgd", hyper_lr=1e-20)


def test_all_weight_on_oneself_is_local_training(play: Play, same: Same) -> None:
    models, _, _ = play(still(), 200 * torch.eye(N)[:, None])
    same(models, play(Local())[0], atol=1e-6)


def test_weights_by_examples_are_federated_averaging(play: Play, same: Same) -> None:
    examples = torch.tensor([7.0, 8.0, 9.0, 10.0])
    models, _, _ = play(still(), (examples / examples.sum()).log())
    same(models, play(FedAvg())[0], atol=2e-6)
    with pytest.raises(AssertionError):
        same(play(still(), torch.zeros(N))[0], play(FedAvg())[0], atol=2e-6)


def test_retaining_all_layers_is_local_training_to_the_bit(play: Play, same: Same) -> None:
    models, ledger, _ = play(PFedLA(retain=3))
    same(models, play(Local())[0])
    assert ledger.down == 0
    assert ledger.up > 0


def test_retaining_no_layer_is_pfedla_to_the_bit(play: Play, same: Same) -> None:
    heuristic, plain = play(HeurPFedLA(retain=0)), play(PFedLA())
    same(heuristic[0], plain[0])
    same(heuristic[2], plain[2])


def test_retained_layers_save_download_and_no_upload(play: Play) -> None:
    full, saved = play(PFedLA())[1].arrays(), play(HeurPFedLA(retain=1))[1].arrays()
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
    result = pfedla.run(PFedLA(), make, twins(seed), 25, training=training, eval_every=25, seed=seed, workers=0)
    assert result.alpha is not None
    head = result.alpha[-1, :, -1]  # (clients, clients)
    client = np.arange(6)
    own, twin = head[client, client].mean(), head[client, client ^ 1].mean()
    others = (1 - own - twin) / 4
    assert own > twin + 0.03
    assert twin > 5 * others
