"""pFedLA-X with hypernetworks: its weights and its steps against autograd through a plain network."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pfedla.algorithms.pfedla_x_hyper import HyperOthers, PFedLAXHyper
from pfedla.layers import Layers
from pfedla.wire import Payload
from tests.world import play, same

N, NAMES, SIZES = 5, ("a", "b"), {"a": 6, "b": 3}


def draw(rows: int, seed: int) -> Layers:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(rows, size, generator=generator) for key, size in SIZES.items()}


def started(algorithm: PFedLAXHyper, trained: list[int]) -> HyperOthers:
    """Return a state whose clients hold different models, and some of which have trained."""
    state = algorithm.init(draw(1, 0), N, torch.Generator().manual_seed(0))
    state.members.trained[trained] = True
    return state._replace(members=state.members._replace(theta=draw(N, 1)))


def plain(state: HyperOthers, i: int, able: list[int], parameters: dict[str, Tensor]) -> Tensor:
    """Return q_i on the clients that it learns from, `(L, able)`, by a network written out."""
    h = torch.relu(parameters["v"] @ parameters["weight1"] + parameters["bias1"])
    h = torch.relu(h @ parameters["weight2"] + parameters["bias2"])  # (1, hidden)
    rows = range(i * len(NAMES), (i + 1) * len(NAMES))
    logits = [h @ parameters["weight"][row] + parameters["bias"][row] for row in rows]
    return torch.cat(logits)[:, able].softmax(-1)


@pytest.mark.parametrize("trained", [[0, 1, 3], []])
def test_weights_and_steps_are_those_of_a_plain_network(trained: list[int]) -> None:
    algorithm, ids = PFedLAXHyper(hyper_optimizer="sgd", hyper_lr=0.3, embedding=4, hidden=6), [3, 1]
    state, delta, path = started(algorithm, trained), draw(2, 7), torch.tensor([0.5, 2.0])
    got = algorithm.download(state, torch.tensor(ids))
    expected = []
    for row, i in enumerate(ids):
        able = [j for j in trained if j != i] or [j for j in range(N) if j != i]
        parts: dict[str, Tensor] = {key: x[i].clone() for key, x in state.body.value.items()}
        parts |= {key: x.clone() for key, x in state.heads.value.items()}
        for x in parts.values():
            x.requires_grad_()
        q = plain(state, i, able, parts)
        for layer, name in enumerate(NAMES):
            torch.testing.assert_close(got.layers[name][row], q[layer] @ state.members.theta[name][able])
        gain = sum(
            (q[layer] * (state.members.theta[name][able] @ delta[name][row])).sum() / path[row]
            for layer, name in enumerate(NAMES)
        )
        assert isinstance(gain, Tensor)
        gain.backward()
        expected.append({key: x.detach() + 0.3 * (x.grad if x.grad is not None else 0) for key, x in parts.items()})
    shares = {"start": torch.full((2,), 0.1), "serve": torch.full((2, 2), 0.1)}
    sent = torch.ones(2, 2, dtype=torch.bool)
    upload = Payload.of(delta, sent, NAMES, examples=torch.ones(2, dtype=torch.int64), path=path, **shares)
    before = {key: x.clone() for key, x in state.heads.value.items()}
    after = algorithm.update(state, torch.tensor(ids), got, upload)
    for row, i in enumerate(ids):
        mine = slice(i * len(NAMES), (i + 1) * len(NAMES))
        for key, x in after.body.value.items():
            torch.testing.assert_close(x[i], expected[row][key], atol=1e-5, rtol=1e-4)
        for key, x in after.heads.value.items():
            torch.testing.assert_close(x[mine], expected[row][key][mine], atol=1e-5, rtol=1e-4)
            assert not torch.equal(x[mine], before[key][mine])
            if trained:  # what says nothing stays as it is
                assert torch.equal(x[mine][..., [2, 4, i]], before[key][mine][..., [2, 4, i]])


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_any_number_of_clients(n: int, rule: Literal["sgd", "adam"]) -> None:
    rounds: Any = [[i for i in ids if i < n] for ids in ([0, 1], [0, 1, 2, 3], [0, 3])]
    played = play(PFedLAXHyper(hold=1, hyper_optimizer=rule), rounds, n)
    alpha = played.setting.algorithm.diagnostics(played.state)["alpha"]
    torch.testing.assert_close(alpha.sum(-1), torch.ones(n, 3))
    if n == 1:
        same(alpha, torch.ones(1, 3, 1))
