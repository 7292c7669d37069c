"""pFedLA with few candidates: the same equations, state of linear size, and candidates that resemble their client."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pfedla
from pfedla.algorithms import Local, PFedLA, PFedLAPeers
from pfedla.algorithms.pfedla import aggregate, inner_products
from pfedla.algorithms.pfedla_peers import (
    SKETCH,
    PeerClients,
    candidates_inner,
    candidates_product,
    choose,
    current,
    first_peers,
    refresh,
    sketch,
)
from pfedla.layers import Layers
from pfedla.ledger import Ledger
from pfedla.result import Result
from pfedla.training import Training
from pfedla.tree import flatten
from pfedla.wire import Payload
from tests.world import play, same

N, NAMES = 6, ("a", "b")
SIZES = {"a": 6, "b": 3, "b#stats": 4}


def draw(rows: int, seed: int) -> Layers:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(rows, size, generator=generator) for key, size in SIZES.items()}


def started(algorithm: PFedLAPeers, n: int = N) -> PeerClients:
    """Return a state whose clients hold different models."""
    state = algorithm.init(draw(1, 0), n, torch.Generator().manual_seed(0))
    return state._replace(clients=state.clients._replace(theta=draw(n, 1)))


def upload_of(delta: Layers) -> Payload:
    rows = len(delta["a"])
    examples = torch.ones(rows, dtype=torch.int64)
    return Payload.of(delta, torch.ones(rows, len(NAMES), dtype=torch.bool), NAMES, examples=examples)


# ---- the equations


def test_equations_on_candidates_are_those_on_everybody() -> None:
    theta, delta = draw(N, 1), draw(3, 2)
    alpha = torch.rand(3, 2, N, generator=torch.Generator().manual_seed(3)).softmax(-1)
    candidates = torch.stack([torch.randperm(N, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    columns = candidates[:, None].expand_as(alpha)
    mix, inner = (partial(product, candidates=candidates) for product in (candidates_product, candidates_inner))
    mixed = aggregate(alpha.gather(2, columns), theta, NAMES, mix)
    for key, rows in aggregate(alpha, theta, NAMES).items():
        torch.testing.assert_close(mixed[key], rows)
    g = inner_products(delta, theta, NAMES, inner)
    torch.testing.assert_close(g, inner_products(delta, theta, NAMES).gather(2, columns))


def test_products_with_few_candidates_are_sums_over_them() -> None:
    weights, rows = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)), draw(N, 1)["a"]
    candidates, delta = torch.tensor([[4, 0, 5], [1, 3, 2]]), draw(2, 2)["a"]
    mixed, inner = candidates_product(weights, rows, candidates), candidates_inner(delta, rows, candidates)
    for i in range(2):
        expected = sum(float(weights[i, k]) * rows[j].double().numpy() for k, j in enumerate(candidates[i].tolist()))
        np.testing.assert_allclose(mixed[i], expected, rtol=1e-5)
        for k, j in enumerate(candidates[i].tolist()):
            assert float(inner[i, k]) == pytest.approx(float(delta[i].double() @ rows[j].double()), rel=1e-5, abs=1e-6)


def test_how_much_is_gathered_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    delta, rows, candidates = draw(2, 2)["a"], draw(N, 1)["a"], torch.tensor([[4, 0, 5], [1, 3, 2]])
    whole = candidates_inner(delta, rows, candidates)
    monkeypatch.setattr("pfedla.algorithms.pfedla_peers.GATHERED", 4)  # of 6 values
    torch.testing.assert_close(candidates_inner(delta, rows, candidates), whole)


@pytest.mark.parametrize("rule", ["adam", "sgd"])
@pytest.mark.parametrize("retain", [0, 1])
@pytest.mark.parametrize(("n", "peers"), [(N, N - 1), (N, N), (N, 99), (2, 1), (2, 20), (1, 20)])
def test_a_round_with_everybody_as_candidate_is_the_exact_method(
    n: int, peers: int, retain: int, rule: Literal["adam", "sgd"]
) -> None:
    """From the same first draw, whichever clients take part and however often they would choose."""
    settings: dict[str, Any] = {"retain": retain, "hyper_lr": 1e-3, "hyper_optimizer": rule}
    sparse, exact = PFedLAPeers(peers=peers, refresh=1, **settings), PFedLA(**settings)
    state = started(sparse, n)
    first = state.peers.candidates.clone()
    assert torch.equal(first, torch.arange(n).expand(n, n))
    dense = exact.init(draw(1, 0), n, torch.Generator().manual_seed(0))._replace(theta=draw(n, 1))
    same(state.clients, dense)
    for t, ids in enumerate(([n - 1], list(range(n)), sorted({0, n // 2}), list(range(n)))):
        who, upload = torch.tensor(ids), upload_of(draw(len(ids), 10 + t))
        got, wanted = sparse.download(state, who), exact.download(dense, who)
        assert torch.equal(got.sent, wanted.sent)
        same(got.layers, wanted.layers, atol=1e-5)
        state, dense = sparse.update(state, who, got, upload), exact.update(dense, who, wanted, upload)
    assert torch.equal(state.peers.candidates, first)
    same(state.clients, dense, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_clients_are_enough(n: int) -> None:
    """Alone a client trains locally; of two, each mixes both models."""
    played = play(PFedLAPeers(refresh=1), [list(range(n))] * 3, n=n)
    alone = play(Local(), [list(range(n))] * 3, n=n)
    alpha = played.setting.algorithm.diagnostics(played.state)["alpha"]
    assert alpha.shape == (n, 3, n)
    assert torch.isfinite(alpha).all()
    found, local = played.personalized(), alone.personalized()
    differ = max(float((found[name] - local[name]).abs().max()) for name in played.setting.spec.names)
    assert differ < 1e-5 if n == 1 else differ > 1e-2


def test_state_grows_linearly() -> None:
    def values(n: int) -> int:
        clients, peers = PFedLAPeers(peers=3).init(draw(1, 0), n, torch.Generator())
        return sum(x.numel() for x in (*flatten(clients).values(), *peers[:3]))

    assert values(40) == 2 * values(20)


# ---- sketches


def test_a_sketch_keeps_cosines() -> None:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(1, 70_000, generator=generator)
    rows = torch.cat([common + s * torch.randn(1, 70_000, generator=generator) for s in (0.1, 0.5, 1, 3)])
    found, wanted = (x @ x.T for x in (sketch({"a": rows}, ("a",), 7), nn.functional.normalize(rows)))
    assert (found - wanted).abs().max() < 0.15  # five standard deviations, 1 / sqrt(1024) each
    assert found[0, 1] > found[0, 2] > found[0, 3]


def test_every_layer_has_one_voice_in_a_sketch() -> None:
    delta = draw(2, 1)
    scaled = {key: rows * (1000 if key == "a" else 1) for key, rows in delta.items()}
    torch.testing.assert_close(sketch(delta, NAMES, 0), sketch(scaled, NAMES, 0))
    assert torch.equal(sketch(delta, NAMES, 0), sketch(delta, NAMES, 0))
    assert not torch.equal(sketch(delta, NAMES, 0), sketch(delta, NAMES, 1))


def test_a_clients_sketch_is_the_mean_of_its_updates_over_about_a_period() -> None:
    peers, ids, every = first_peers(N, 2, torch.Generator()), torch.tensor([0, 3]), 3
    updates = [draw(2, t) for t in range(5)]
    drawn = [sketch(update, NAMES, int(peers.seed)) for update in updates]
    for update in updates:
        refresh(peers, ids, peers.candidates[ids], update, NAMES, every)
    expected = (drawn[0] + drawn[1] + drawn[2]) / 3
    for latest in drawn[3:]:
        expected = expected + (latest - expected) / 3
    torch.testing.assert_close(peers.sketches[ids], expected)
    assert not peers.sketches[[1, 2, 4, 5]].any()


def test_an_update_of_nothing_has_a_sketch_of_nothing() -> None:
    assert torch.equal(sketch({"a": torch.zeros(2, 5)}, ("a",), 0), torch.zeros(2, SKETCH))


# ---- the choice


def check(candidates: Tensor) -> None:
    assert torch.equal(candidates[:, 0], torch.arange(len(candidates)))
    for row in candidates.tolist():
        assert len(set(row)) == len(row)
        assert all(0 <= j < len(candidates) for j in row)


@pytest.mark.parametrize(("n", "m"), [(3, 1), (7, 2), (7, 5), (200, 20)])
def test_first_candidates_are_oneself_and_others(n: int, m: int) -> None:
    peers = first_peers(n, m, torch.Generator().manual_seed(0))
    assert peers.candidates.shape == (n, m + 1)
    check(peers.candidates)
    assert torch.equal(peers.candidates, first_peers(n, m, torch.Generator().manual_seed(0)).candidates)


def test_the_nearest_that_took_part_are_chosen_and_those_that_stay_keep_their_column() -> None:
    similar = torch.tensor([0.1, 0.9, 1.0, -0.5, 0.8, 0.99])
    took_part = torch.tensor([True, True, True, True, True, False])
    chosen = choose(2, torch.tensor([2, 3, 4, 0]), similar, took_part, seed=0, t=1)
    assert chosen.tolist() == [2, 1, 4, 0]
    everybody_else = choose(2, torch.tensor([2, 3, 4, 0, 1]), similar, took_part & False, seed=0, t=1)
    assert 2 not in everybody_else[1:]


def test_some_candidates_are_drawn_at_random() -> None:
    similar, took_part = torch.linspace(1, 0, 100), torch.ones(100, dtype=torch.bool)
    first = torch.arange(11)
    one, other = (choose(0, first, similar, took_part, 0, t) for t in (1, 2))
    assert not torch.equal(one, other)
    for chosen in (one, other):
        assert set(range(9)) <= set(chosen.tolist())  # the eight nearest, and itself
        assert len(set(chosen.tolist())) == 11


def test_those_that_never_took_part_have_candidates_that_did() -> None:
    peers = first_peers(60, 5, torch.Generator().manual_seed(0))
    assert torch.equal(current(peers, torch.arange(60)), peers.candidates)  # as yet nobody did
    peers.rounds[10:30] = 1
    before, found = copy.deepcopy(peers), current(peers, torch.arange(60))
    check(found)
    assert torch.equal(found[10:30], peers.candidates[10:30])
    newcomers = torch.cat([found[:10, 1:], found[30:, 1:]])
    assert ((newcomers >= 10) & (newcomers < 30)).all()
    assert len(newcomers.unique()) == 20  # drawn at random
    for one, other in zip(peers, before, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(current(peers, torch.tensor([40, 3])), found[[40, 3]])


def test_if_too_few_took_part_candidates_are_all_of_them_and_some_others() -> None:
    peers = first_peers(9, 4, torch.Generator().manual_seed(0))
    peers.rounds[[2, 7]] = 1
    found = current(peers, torch.arange(9))
    check(found)
    for i in (0, 1, 3, 4, 5, 6, 8):
        assert {2, 7} <= set(found[i].tolist())


def test_candidates_are_chosen_in_the_first_round_of_a_client_and_then_after_every_few() -> None:
    peers, ids = first_peers(N, 2, torch.Generator()), torch.tensor([0, 1, 2, 3])
    strange, changes = torch.tensor([[0, 4, 5], [1, 4, 5], [2, 4, 5], [3, 4, 5]]), []
    for t in range(7):
        peers.candidates[ids] = strange  # two that never took part: they are left as soon as may be
        changes.append(not torch.equal(refresh(peers, ids, strange, draw(4, t), NAMES, 3), strange))
    assert changes == [True, False, False, True, False, False, True]
    assert peers.rounds.tolist() == [7, 7, 7, 7, 0, 0]


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_a_new_peer_starts_with_the_mean_logit_and_without_memory(rule: Literal["adam", "sgd"]) -> None:
    settings: dict[str, Any] = {"peers": 3, "hyper_optimizer": rule, "hyper_lr": 1e-3}
    algorithm, still, ids = PFedLAPeers(refresh=1, **settings), PFedLAPeers(refresh=1000, **settings), torch.arange(N)
    state = started(algorithm)
    for t in range(4):
        before = copy.deepcopy(state)
        before.peers.rounds.fill_(1)  # not due
        got, upload = algorithm.download(state, ids), upload_of(draw(N, t))
        stepped = still.update(before, ids, got, upload)
        state = algorithm.update(state, ids, got, upload)
        check(state.peers.candidates)
        changed = state.peers.candidates != stepped.peers.candidates  # (N, m + 1)
        assert changed.any()
        logits = [algorithm.diagnostics(s)["alpha"].log() for s in (stepped, state)]  # up to a constant a row
        for i in range(N):
            old, new = logits[0][i] - logits[0][i, :, :1], logits[1][i] - logits[1][i, :, :1]  # (L, m + 1)
            torch.testing.assert_close(new[:, ~changed[i]], old[:, ~changed[i]], rtol=1e-4, atol=1e-5)
            mean = old[:, 1:].mean(1, keepdim=True).expand(-1, int(changed[i].sum()))
            torch.testing.assert_close(new[:, changed[i]], mean, rtol=1e-4, atol=1e-5)
            for moments in (state.clients.heads.first, state.clients.heads.second):
                for x in moments.values():
                    assert (x.unflatten(0, (N, -1))[i][..., changed[i]] == 0).all()


def test_weights_on_candidates_are_spread_over_everybody() -> None:
    alpha = np.random.default_rng(0).random((2, 4, 3, 2))
    candidates = np.array([[[0, 2], [1, 0], [2, 3], [3, 1]], [[0, 1], [1, 2], [2, 0], [3, 0]]])
    seen = {"round": np.arange(2), "alpha": alpha, "candidates": candidates}
    result = Result({}, [], seen, Ledger([]), (), None, None, dict)
    square, last = result.alpha, result.final_alpha
    assert square is not None
    assert last is not None
    assert square.shape == (2, 4, 3, 4)
    assert np.array_equal(square[1, 2, :, [2, 0]], alpha[1, 2].T)
    assert square[0, 0, :, [1, 3]].sum() == 0
    assert np.array_equal(last, square[-1])


def groups(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return twelve clients in three groups, each with its own rule from inputs to labels."""
    rng = np.random.default_rng(seed)
    clients = []
    for client in range(12):
        y = rng.integers(0, 3, 60)
        x = 2 * np.eye(3)[y] + 0.7 * rng.normal(size=(60, 3))
        clients.append((x.astype(np.float32), np.roll(np.arange(3), client // 4)[y]))
    return clients


def test_clients_find_those_of_their_kind() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))

    training = Training(local_epochs=2, batch_size=16, lr=0.05)
    algorithm = PFedLAPeers(peers=4, refresh=5)
    result = pfedla.run(algorithm, make, groups(0), 20, training=training, eval_every=20, workers=0)
    candidates = result.diagnostics["candidates"][-1]  # (12, 5)
    assert result.diagnostics["alpha"].shape == (1, 12, 2, 5)
    friends = (candidates[:, 1:] // 4 == np.arange(12)[:, None] // 4).sum(1)
    assert friends.mean() > 2.5  # of three; by chance it were 1.1
    assert result.alpha is not None
    assert result.alpha.shape == (1, 12, 2, 12)
    np.testing.assert_allclose(result.alpha.sum(-1), 1, rtol=1e-5)
