"""Each equation of the paper against slow, obvious loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pfedla.algorithms.hypernetwork import draw_hypernetworks, hypernetwork, hypernetwork_gradient
from pfedla.algorithms.pfedla import aggregate, inner_products, retained
from pfedla.layers import Layers
from pfedla.optimizer import Rows

N, CLIENTS, EMBEDDING, HIDDEN = 4, 3, 5, 6  # N models in the bank, of which CLIENTS are at hand
NAMES = ("conv", "bn", "fc")
SIZES = {"conv": 7, "bn": 4, "bn#stats": 4, "fc": 5}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_body() -> Rows:
    return {
        "v": draw(CLIENTS, 1, EMBEDDING, seed=1),
        "weight1": draw(CLIENTS, EMBEDDING, HIDDEN, seed=2),
        "bias1": draw(CLIENTS, 1, HIDDEN, seed=3),
        "weight2": draw(CLIENTS, HIDDEN, HIDDEN, seed=4),
        "bias2": draw(CLIENTS, 1, HIDDEN, seed=5),
    }


def draw_heads() -> Rows:
    rows = CLIENTS * len(NAMES)
    return {"weight": draw(rows, HIDDEN, N, seed=6) / 3, "bias": draw(rows, N, seed=7)}


def draw_theta() -> Layers:
    return {key: draw(N, size, seed=8 + i) for i, (key, size) in enumerate(SIZES.items())}


def draw_delta() -> Layers:
    return {key: draw(CLIENTS, size, seed=20 + i) for i, (key, size) in enumerate(SIZES.items())}


def slow_hypernetwork(body: Rows, heads: Rows) -> np.ndarray:
    alpha = np.zeros((CLIENTS, len(NAMES), N))
    for i in range(CLIENTS):
        b = {name: x[i].numpy() for name, x in body.items()}
        h = np.maximum(b["v"] @ b["weight1"] + b["bias1"], 0)
        h = np.maximum(h @ b["weight2"] + b["bias2"], 0)
        for layer in range(len(NAMES)):
            row = i * len(NAMES) + layer
            logits = h[0] @ heads["weight"][row].numpy() + heads["bias"][row].numpy()
            alpha[i, layer] = np.exp(logits) / np.exp(logits).sum()
    return alpha


def test_hypernetwork_is_a_softmax_of_two_hidden_layers() -> None:
    body, heads = draw_body(), draw_heads()
    alpha = hypernetwork(body, heads)
    assert alpha.shape == (CLIENTS, len(NAMES), N)
    np.testing.assert_allclose(alpha.numpy(), slow_hypernetwork(body, heads), rtol=1e-12)
    np.testing.assert_allclose(alpha.sum(-1).numpy(), 1, rtol=1e-12)


def test_hypernetworks_are_drawn_for_each_client_as_linear_layers_are() -> None:
    n, layers, columns, embedding, hidden = 30, 2, 7, 16, 25
    rng = torch.Generator().manual_seed(0)
    body, heads = draw_hypernetworks(n, layers, columns, embedding, hidden, rng)
    assert float(body["v"].std()) == pytest.approx(1, abs=0.1)
    assert float(body["v"].abs().max()) > 2.5  # a normal distribution's
    bounds = {name: 1 / 4 if name.endswith("1") else 1 / 5 for name in (*body, *heads) if name != "v"}
    for name, bound in bounds.items():
        drawn = {**body, **heads}[name]
        assert 0.95 * bound < float(drawn.abs().max()) <= bound, name
        assert float(drawn.std()) == pytest.approx(bound / 3**0.5, rel=0.1), name
        assert drawn.flatten(1).unique(dim=0).shape[0] == len(drawn), name  # nobody's is another's


def test_aggregate_mixes_each_layer_and_its_statistics_by_its_weights() -> None:
    alpha, theta = hypernetwork(draw_body(), draw_heads()), draw_theta()
    mixed = aggregate(alpha, theta, NAMES)
    assert list(mixed) == list(theta)
    for key, layer in (("conv", 0), ("bn", 1), ("bn#stats", 1), ("fc", 2)):
        for i in range(CLIENTS):
            expected = np.zeros(SIZES[key])
            for j in range(N):
                expected += float(alpha[i, layer, j]) * theta[key][j].numpy()
            np.testing.assert_allclose(mixed[key][i].numpy(), expected, rtol=1e-12)


def test_inner_products_are_of_the_trained_parameters() -> None:
    delta, theta = draw_delta(), draw_theta()
    g = inner_products(delta, theta, NAMES)
    assert g.shape == (CLIENTS, len(NAMES), N)
    for i in range(CLIENTS):
        for layer, name in enumerate(NAMES):
            for j in range(N):
                expected = sum(float(a) * float(b) for a, b in zip(delta[name][i], theta[name][j], strict=True))
                assert float(g[i, layer, j]) == pytest.approx(expected, rel=1e-12)


def objective(body: Rows, heads: Rows, theta: Layers, delta: Layers) -> Tensor:
    """Σ_i <θ̄_i, Δθ_i> over the trained parameters, θ̄ written out."""
    alpha, total = hypernetwork(body, heads), torch.zeros((), dtype=torch.float64)
    for i in range(CLIENTS):
        for layer, name in enumerate(NAMES):
            theta_bar = torch.stack([alpha[i, layer, j] * theta[name][j] for j in range(N)]).sum(0)
            total = total + (theta_bar * delta[name][i]).sum()
    return total


def test_gradient_is_the_product_of_the_jacobian_of_theta_bar_and_delta() -> None:
    body, heads, theta, delta = draw_body(), draw_heads(), draw_theta(), draw_delta()
    to_body, to_heads = hypernetwork_gradient(body, heads, inner_products(delta, theta, NAMES))
    leaves = [x.clone().requires_grad_() for x in (*body.values(), *heads.values())]
    copy_body, copy_heads = dict(zip(body, leaves, strict=False)), dict(zip(heads, leaves[len(body) :], strict=True))
    alpha = hypernetwork(copy_body, copy_heads)
    theta_bar = [alpha[:, layer] @ theta[name] for layer, name in enumerate(NAMES)]
    expected = torch.autograd.grad(theta_bar, leaves, grad_outputs=[delta[name] for name in NAMES])
    assert [*to_body, *to_heads] == [*body, *heads]
    for found, wanted in zip((*to_body.values(), *to_heads.values()), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["v", "weight1", "bias1", "weight2", "bias2", "weight", "bias"])
def test_gradient_agrees_with_finite_differences(name: str) -> None:
    body, heads, theta, delta = draw_body(), draw_heads(), draw_theta(), draw_delta()
    to_body, to_heads = hypernetwork_gradient(body, heads, inner_products(delta, theta, NAMES))
    gradient = {**to_body, **to_heads}[name].flatten()
    flat = {**body, **heads}[name].view(-1)
    step, entries = 1e-6, {int(gradient.abs().argmax()), 0, len(flat) // 2}
    assert gradient.abs().max() > 1e-3
    for k in entries:
        kept = float(flat[k])
        flat[k] = kept + step
        above = float(objective(body, heads, theta, delta))
        flat[k] = kept - step
        below = float(objective(body, heads, theta, delta))
        flat[k] = kept
        assert float(gradient[k]) == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-7)


def test_gradient_leaves_the_hypernetwork_as_it_is() -> None:
    body, heads, theta, delta = draw_body(), draw_heads(), draw_theta(), draw_delta()
    before = {name: x.clone() for name, x in {**body, **heads}.items()}
    hypernetwork_gradient(body, heads, inner_products(delta, theta, NAMES))
    for name, x in {**body, **heads}.items():
        assert torch.equal(x, before[name])
        assert not x.requires_grad


@pytest.mark.parametrize("k", range(4))
def test_retained_are_the_layers_with_the_largest_self_weights(k: int) -> None:
    alpha, ids = draw(3, 3, 5, seed=1).softmax(-1), torch.tensor([4, 0, 2])
    mask = retained(alpha, ids, k)
    for row in range(3):
        weights = [float(alpha[row, layer, ids[row]]) for layer in range(3)]
        largest = sorted(range(3), key=lambda layer: -weights[layer])[:k]
        assert mask[row].tolist() == [layer in largest for layer in range(3)]


def test_of_equal_self_weights_the_earlier_layer_is_retained() -> None:
    alpha = torch.full((2, 40, 2), 0.5)
    alpha[1, 7, 1] = 0.6
    mask = retained(alpha, torch.tensor([0, 1]), 2)
    assert mask[0].nonzero().flatten().tolist() == [0, 1]
    assert mask[1].nonzero().flatten().tolist() == [0, 7]
