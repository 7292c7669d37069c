from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from pfedla.algorithms import PFedHN
from pfedla.algorithms.pfedhn import generate, hypernetwork_gradient
from pfedla.layers import Layers, LayerSpec
from pfedla.optimizer import Rows
from pfedla.wire import Payload
from tests.world import same, server_of, setting, theta_of


def test_generated_parameters_of_a_tiny_hypernetwork() -> None:
    phi: Rows = {
        "v": torch.tensor([[1.0, -1.0], [2.0, 0.5]]),
        "hidden0": torch.tensor([[[1.0, 0.0, -2.0], [0.0, 1.0, 1.0], [0.5, 0.0, 0.0]]]),
        "hidden1": torch.tensor([[[1.0, 2.0, 3.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, -1.0, 0.0]]]),
        "conv#head": torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [10.0, 20.0]]]),
        "fc#head": torch.tensor([[[2.0], [0.0], [0.0], [-1.0]]]),
    }
    made = generate(phi)
    x = {key: value.numpy()[0] for key, value in phi.items()}
    for i in range(2):
        h = phi["v"][i].numpy() @ x["hidden0"][:-1] + x["hidden0"][-1]
        h = np.maximum(h, 0) @ x["hidden1"][:-1] + x["hidden1"][-1]
        for layer in ("conv", "fc"):
            np.testing.assert_allclose(made[layer][i], h @ x[f"{layer}#head"][:-1] + x[f"{layer}#head"][-1], rtol=1e-6)
    assert made["fc"].tolist() == [[2.0], [4.0]]  # by hand: h_1 = [1.5, 2, 4.5], so 2 * 1.5 - 1; then 2 * 2.5 - 1


def parameters(theta: Layers, spec: LayerSpec, row: int) -> dict[str, Tensor]:
    return {slot.name: slot.view(theta[name][row]) for name in spec.names for slot in spec.slots[name]}


def test_the_gradient_is_that_of_the_clients_losses_through_all_they_were_given() -> None:
    made = setting(PFedHN(hidden=6, hidden_layers=1), "mlp")
    draw = torch.Generator().manual_seed(1)
    phi = made.algorithm.init(theta_of(made), 4, draw).phi
    phi = {key: x + 0.1 * torch.randn(x.shape, generator=draw) for key, x in phi.items()}
    phi["v"] = phi["v"][:2]
    x, y = torch.randn(2, 5, 2, 6, 6, generator=draw), torch.tensor([[0, 1, 2, 0, 1], [2, 2, 1, 0, 0]])

    def loss(theta: Layers) -> Tensor:
        losses = [
            functional.cross_entropy(functional_call(made.template, parameters(theta, made.spec, i), (x[i],)), y[i])
            for i in range(2)
        ]
        return torch.stack(losses).sum()

    theta = {name: rows.detach().requires_grad_() for name, rows in generate(phi).items()}
    delta = {n: -g for n, g in zip(theta, torch.autograd.grad(loss(theta), list(theta.values())), strict=True)}
    leaves = {key: value.clone().requires_grad_() for key, value in phi.items()}
    expected = dict(zip(leaves, torch.autograd.grad(loss(generate(leaves)), list(leaves.values())), strict=True))
    for key, direction in hypernetwork_gradient(phi, delta).items():
        assert direction.abs().max() > 0, key
        torch.testing.assert_close(direction, -expected[key], rtol=1e-4, atol=1e-6)  # up the change is down the loss


def test_everybody_starts_from_the_common_model() -> None:
    made = setting(PFedHN())
    theta, state = theta_of(made), server_of(made, 7).state
    assert state.phi["v"].shape == (7, 2)
    assert sum(key.startswith("hidden") for key in state.phi) == 4
    same(
        made.algorithm.download(state, torch.arange(7)).fill({key: row.repeat(7, 1) for key, row in theta.items()}),
        {key: row.repeat(7, 1) for key, row in theta.items()},
    )


def test_a_round_is_one_step_on_the_sum_and_momentum_carries_over() -> None:
    theta = {"a": torch.tensor([[1.0, 2.0]]), "a#stats": torch.tensor([[3.0]])}
    algorithm = PFedHN(hidden=3, hidden_layers=0, hyper_lr=0.1, hyper_momentum=0.5, hyper_weight_decay=0.01)
    state, ids = algorithm.init(theta, 4, torch.Generator().manual_seed(0)), torch.tensor([2, 0])
    delta = {"a": torch.tensor([[1.0, 0.0], [0.0, 3.0]]), "a#stats": torch.tensor([[1.0], [4.0]])}
    upload = Payload.of(delta, torch.ones(2, 1, dtype=torch.bool), ("a",), examples=torch.tensor([1, 2]))
    v = state.phi["v"].clone()
    bias, velocity = np.array([1.0, 2.0]), np.zeros(2)
    for _ in range(2):
        velocity = 0.5 * velocity + np.array([1.0, 3.0]) - 0.01 * bias  # the bias's gradient is the sum of the changes
        bias = bias + 0.1 * velocity
        state = algorithm.update(state, ids, algorithm.download(state, ids), upload)
    np.testing.assert_allclose(state.phi["a#head"][0, -1], bias, rtol=1e-6)
    assert state.stats["a#stats"].item() == 9.0  # 3, and twice the mean change, (1 + 2 * 4) / 3
    assert torch.equal(state.phi["v"][[1, 3]], v[[1, 3]])
    assert not torch.equal(state.phi["v"][ids], v[ids])


def test_who_rests_keeps_embedding_and_momentum() -> None:
    theta = {"a": torch.tensor([[1.0, 2.0]])}
    algorithm = PFedHN(hidden=3, hidden_layers=0)
    state = algorithm.init(theta, 4, torch.Generator().manual_seed(0))
    state.phi["a#head"] += 1  # or embeddings would have no gradient yet
    delta, before = {"a": torch.tensor([[1.0, 3.0]])}, {}
    for client in (2, 0):
        before = {part: getattr(state, part)["v"].clone() for part in ("phi", "velocity")}
        ids = torch.tensor([client])
        upload = Payload.of(delta, torch.ones(1, 1, dtype=torch.bool), ("a",), examples=torch.tensor([1]))
        state = algorithm.update(state, ids, algorithm.download(state, ids), upload)
    assert before["velocity"][2].any()
    for part, rows in before.items():
        assert torch.equal(getattr(state, part)["v"][1:], rows[1:])
        assert not torch.equal(getattr(state, part)["v"][0], rows[0])


def test_the_first_draw_is_that_of_the_authors_layers() -> None:
    state = PFedHN(hidden=50).init({"a": torch.zeros(1, 2)}, 80, torch.Generator().manual_seed(0))
    assert state.phi["v"].shape == (80, 21)
    assert float(state.phi["v"].std()) == pytest.approx(1, abs=0.1)
    for i, width in enumerate((21, 50, 50, 50)):
        drawn = state.phi[f"hidden{i}"]
        assert drawn.shape == (1, width + 1, 50)
        assert 0.95 * width**-0.5 < float(drawn.abs().max()) <= width**-0.5


def test_a_long_gradient_is_cut_to_a_length_of_50_as_a_whole_and_weight_decay_is_not() -> None:
    theta, noise = {"a": torch.tensor([[1.0, 2.0]])}, torch.Generator().manual_seed(1)
    algorithm = PFedHN(hidden=3, hidden_layers=0, hyper_lr=0.1, hyper_momentum=0.0, hyper_weight_decay=0.02)
    state, ids = algorithm.init(theta, 4, torch.Generator().manual_seed(0)), torch.tensor([2, 0])
    for x in state.phi.values():
        x += torch.randn(x.shape, generator=noise)
    before = {key: x.clone() for key, x in state.phi.items()}
    delta = {"a": 1e2 * torch.tensor([[1.0, 0.0], [0.0, 3.0]])}
    gradient = hypernetwork_gradient({**before, "v": before["v"][ids]}, delta)
    scale = 50 / np.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
    assert scale < 0.5
    assert all(scale * float(g.norm()) > 1 for g in gradient.values())  # of all parts something is left
    upload = Payload.of(delta, torch.ones(2, 1, dtype=torch.bool), ("a",), examples=torch.tensor([1, 1]))
    state = algorithm.update(state, ids, algorithm.download(state, ids), upload)
    for key, x in state.phi.items():
        rows = ids if key == "v" else torch.tensor([0])
        expected = 0.1 * (scale * gradient[key] - 0.02 * before[key][rows])
        torch.testing.assert_close((x - before[key])[rows], expected, rtol=1e-4, atol=1e-5)
