from __future__ import annotations

import numpy as np
import pytest
import torch

from pfedla.algorithms import FedAMP
from pfedla.algorithms.fedamp import Messages, attention, heuristic_attention
from pfedla.errors import ConfigError
from pfedla.layers import Layers
from pfedla.training import Training
from tests.world import download, play, same, server_of, setting, task_of, theta_of

THETA: Layers = {
    "a": torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]]),
    "a#stats": torch.tensor([[100.0], [200.0], [300.0]]),  # no part of the distance
    "b": torch.tensor([[0.0], [1.0], [0.0]]),
}
W = torch.cat([THETA["a"], THETA["b"]], 1)


def test_attention_is_the_derivative_of_the_attracting_function() -> None:
    w, expected = W.numpy(), np.zeros((3, 3))
    for i in range(3):
        for j in range(3):
            if i != j:
                expected[i, j] = 0.5 * np.exp(-((w[i] - w[j]) ** 2).sum() / 2.0) / 2.0  # α A'(x), α = 0.5, σ = 2
        expected[i, i] = 1 - expected[i].sum()
    np.testing.assert_allclose(attention(W, torch.arange(3), 0.5, 2.0), expected, rtol=1e-6)
    np.testing.assert_allclose(attention(W, torch.tensor([2, 0]), 0.5, 2.0), expected[[2, 0]], rtol=1e-6)


def test_a_step_that_has_vanished_pulls_as_much_as_it_may() -> None:
    made = setting(method := FedAMP(decay_every=1), "mlp")
    assert method.step(400) == 0
    task, own, got = task_of(made, [0]), made.enroll().own, download(made, [0])
    found = [
        made.algorithm.train(own, got._replace(values={"alpha": torch.tensor([alpha], dtype=torch.float64)}), task)
        for alpha in (0.0, 1e-300, 1e-9)
    ]
    for kept, _ in found[1:]:
        same(kept, found[0][0])


def test_heuristic_attention_prefers_models_of_the_same_direction() -> None:
    w, expected = W.numpy() + 1, np.zeros((3, 3))
    for i in range(3):
        for j in range(3):
            if i != j:
                expected[i, j] = np.exp(4 * (w[i] @ w[j]) / np.linalg.norm(w[i]) / np.linalg.norm(w[j]))
        expected[i] *= 2 / 3 / expected[i].sum()
        expected[i, i] = 1 / 3
    np.testing.assert_allclose(heuristic_attention(W + 1, torch.arange(3), 4.0), expected, rtol=1e-6)
    np.testing.assert_allclose(heuristic_attention(W + 1, torch.tensor([2]), 4.0), expected[[2]], rtol=1e-6)
    assert expected[0, 1] > 1.1 * expected[0, 2]
    assert heuristic_attention(W[1:2], torch.tensor([0]), 4.0).tolist() == [[1.0]]  # alone


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_attention_is_attention_however_close_the_cosines(scale: float) -> None:
    """Two groups of models near a common one: the weights of one's own group are those of a clear preference."""
    generator = torch.Generator().manual_seed(0)
    common, groups = 10 * torch.randn(1, 500, generator=generator), torch.randn(2, 500, generator=generator)
    w = common + scale * (groups.repeat_interleave(4, 0) + 0.3 * torch.randn(8, 500, generator=generator))
    ids = torch.arange(8)
    xi = heuristic_attention(w, ids)
    torch.testing.assert_close(xi.sum(1), torch.ones(8, dtype=torch.float64))
    same_group = (ids[:, None] // 4 == ids // 4) & (ids[:, None] != ids)
    other_group = ids[:, None] // 4 != ids // 4
    assert (xi[same_group].view(8, 3).min(1).values > 3 * xi[other_group].view(8, 4).max(1).values).all()
    even = heuristic_attention(w, ids, 25.0)  # what a fixed σ makes of them
    assert (even - 1 / 8).abs().max() < 0.02
    some = heuristic_attention(w, torch.tensor([5, 2]))
    torch.testing.assert_close(some, xi[[5, 2]], rtol=1e-5, atol=0)  # whoever else is asked for


def test_the_scale_of_attention_is_one_over_the_spread_of_the_cosines() -> None:
    w = (W + torch.tensor([1.0, 2.0, 0.5])).numpy().astype(np.float64)
    unit = w / np.linalg.norm(w, axis=1, keepdims=True)
    expected = np.full((3, 3), 1 / 3)
    for i in range(3):
        others = [j for j in range(3) if j != i]
        cosine = unit[others] @ unit[i]
        weight = np.exp(cosine / cosine.std())
        expected[i, others] = 2 / 3 * weight / weight.sum()
    np.testing.assert_allclose(heuristic_attention(torch.from_numpy(w), torch.arange(3)), expected, rtol=1e-9)


def test_models_that_are_alike_get_even_weights() -> None:
    for n, size in ((1, 40), (2, 40), (5, 40), (5, 1000), (7, 5003), (10, 1000)):  # cosines of many values are rounded
        w = torch.randn(1, size, generator=torch.Generator().manual_seed(1)).repeat(n, 1)
        torch.testing.assert_close(
            heuristic_attention(w, torch.arange(n)), torch.full((n, n), 1 / n, dtype=torch.float64)
        )


def test_fedamp_itself_needs_a_sigma() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.sigma must be given"):
        FedAMP(heuristic=False).check(Training(), 3)


@pytest.mark.parametrize("lr", [0.05, 0.01])
def test_the_pull_does_not_overshoot_however_long_a_run_is(lr: float) -> None:
    made = setting(FedAMP(decay_every=1), "mlp", lr=lr)  # twelve rounds are as many as 360 by default
    personalized = play(made, [[0, 1, 2]] * 12, 3).personalized()
    assert all(rows.isfinite().all() for rows in personalized.values())


@pytest.mark.parametrize("heuristic", [False, True])
def test_the_message_is_a_mixture_of_all_models_and_of_their_statistics(heuristic: bool) -> None:
    theta, ids = {key: rows + 1 for key, rows in THETA.items()}, torch.arange(3)
    state = Messages(theta, torch.tensor(0))
    got = FedAMP(heuristic, alpha=0.5, sigma=2.0).download(state, ids)
    xi = (heuristic_attention(W + 1, ids, 2.0) if heuristic else attention(W + 1, ids, 0.5, 2.0)).numpy()
    for key, rows in theta.items():
        np.testing.assert_allclose(got.layers[key], xi @ rows.numpy(), rtol=1e-6)


def test_models_far_apart_pass_no_messages() -> None:
    same(
        FedAMP(False, alpha=1e-6, sigma=1e-3).download(Messages(THETA, torch.tensor(0)), torch.arange(3)).layers, THETA
    )


def test_the_step_is_lowered_in_stages() -> None:
    np.testing.assert_allclose([FedAMP().step(t) for t in (1, 30, 31, 60, 61)], [1e4, 1e4, 1e3, 1e3, 1e2])
    theta = {key: rows + 1 for key, rows in THETA.items()}
    sent = [FedAMP().download(Messages(theta, torch.tensor(t)), torch.arange(2)).values["alpha"] for t in (29, 30)]
    assert [alpha.tolist() for alpha in sent] == [[1e4, 1e4], [1e3, 1e3]]  # of rounds 30 and 31


def test_a_step_of_training_is_pulled_to_the_message() -> None:
    trained = []
    for lam, alpha in ((1e-9, 1.0), (5.0, 1.0), (50.0, 10.0), (5.0, 1e9)):
        made = setting(FedAMP(alpha=alpha, lam=lam), "mlp", local_epochs=5)
        theta, got = theta_of(made), download(made, [0])
        own = {key: row + 1 for key, row in theta.items()}  # training starts from the message
        kept, upload = made.algorithm.train(own, got, task_of(made, [0]))
        torch.testing.assert_close(upload.layers["fc1"], kept["fc1"] - theta["fc1"])
        assert made.algorithm.personalize(kept, got, task_of(made, [0])) is kept
        trained.append(float(upload.layers["fc1"].norm()))
    assert trained[1] < 0.8 * trained[0]
    assert trained[1:] == pytest.approx([trained[1], trained[1], trained[0]], rel=1e-5)  # by λ/α


def test_the_server_keeps_what_the_client_trained() -> None:
    made = setting(FedAMP())
    theta, state, ids = theta_of(made), server_of(made, 3).state, torch.tensor([1])
    got = made.algorithm.download(state, ids)
    kept, upload = made.algorithm.train(theta, got, task_of(made, [1]))
    state = made.algorithm.update(state, ids, got, upload)
    for key, rows in state.theta.items():
        torch.testing.assert_close(rows[ids], kept[key])
        assert torch.equal(rows[[0, 2]], theta[key].expand(2, -1))
    assert int(state.t) == 1


def test_weights_above_1_are_refused() -> None:
    made = setting(FedAMP(heuristic=False, alpha=1.0, sigma=4.0))
    made.algorithm.check(made.training, 5)
    made.algorithm.check(made.training, 1)
    with pytest.raises(ConfigError, match=r"algorithm\.alpha = 1 must be at most algorithm\.sigma / .*, 0\.8"):
        made.algorithm.check(made.training, 6)
