from __future__ import annotations

import numpy as np
import pytest
import torch

from pfedla.algorithms import SimilarityLayer, SimilarityModel
from pfedla.algorithms.similarity import Bank
from pfedla.wire import Payload

START = {"a": torch.tensor([[1.0, 1.0]]), "b": torch.tensor([[2.0]])}
THETA = {
    "a": torch.tensor([[2.0, 1.0], [2.0, 3.0], [0.0, 1.0], [1.0, 1.0]]),  # the last never trained
    "a#stats": torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
    "b": torch.tensor([[5.0], [6.0], [1.0], [2.0]]),
}


def slow_weights(vectors: np.ndarray, temperature: float) -> np.ndarray:
    n = len(vectors)
    alpha = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            norms = np.linalg.norm(vectors[i]) * np.linalg.norm(vectors[j])
            alpha[i, j] = np.exp((vectors[i] @ vectors[j] / norms if norms else 0.0) / temperature)
        alpha[i] /= alpha[i].sum()
    return alpha


def test_weights_by_layer_and_by_model() -> None:
    learned = [(THETA[name] - START[name]).double().numpy() for name in START]
    layer = SimilarityLayer(0.5).diagnostics(Bank(THETA, START))["alpha"]
    model = SimilarityModel(0.5).diagnostics(Bank(THETA, START))["alpha"]
    for index in range(2):
        np.testing.assert_allclose(layer[:, index], slow_weights(learned[index], 0.5), rtol=1e-9)
        np.testing.assert_allclose(model[:, index], slow_weights(np.concatenate(learned, 1), 0.5), rtol=1e-9)
    assert not torch.allclose(layer, model)


@pytest.mark.parametrize("kind", [SimilarityLayer, SimilarityModel])
def test_each_layer_is_mixed_by_its_weights(kind: type[SimilarityLayer]) -> None:
    algorithm, state, ids = kind(0.5), Bank(THETA, START), torch.tensor([2, 0])
    alpha, got = algorithm.diagnostics(state)["alpha"].numpy(), algorithm.download(state, ids)
    for key, index in (("a", 0), ("a#stats", 0), ("b", 1)):
        np.testing.assert_allclose(got.layers[key], alpha[[2, 0], index] @ THETA[key].numpy(), rtol=1e-6)


def test_with_one_layer_both_are_the_same() -> None:
    state = Bank({key: THETA[key] for key in ("a", "a#stats")}, {"a": START["a"]})
    one, other = (kind(0.3).download(state, torch.arange(4)).layers for kind in (SimilarityLayer, SimilarityModel))
    assert all(torch.equal(one[key], other[key]) for key in state.theta)


def test_cold_weights_leave_every_client_its_own_model() -> None:
    got = SimilarityModel(1e-4).download(Bank(THETA, START), torch.arange(3))
    for key, rows in THETA.items():
        torch.testing.assert_close(got.layers[key], rows[:3])


def test_update_keeps_what_was_received_plus_the_change() -> None:
    algorithm, ids = SimilarityLayer(), torch.tensor([1])
    state = Bank({key: rows.clone() for key, rows in THETA.items()}, START)
    got = algorithm.download(state, ids)
    delta = {key: torch.ones_like(rows[ids]) for key, rows in THETA.items()}
    after = algorithm.update(state, ids, got, Payload.of(delta, torch.ones(1, 2, dtype=torch.bool), ("a", "b"))).theta
    for key, rows in THETA.items():
        assert torch.equal(after[key][ids], got.layers[key] + 1)
        assert torch.equal(after[key][[0, 2, 3]], rows[[0, 2, 3]])
