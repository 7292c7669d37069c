"""pFedLA-X with few candidates: with all of them it is pFedLA-X, with few its state is of linear size."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from pfedla.algorithms import PFedLAX, PFedLAXPeers
from pfedla.algorithms.pfedla_peers import Peers
from pfedla.algorithms.pfedla_x_peers import renewed
from pfedla.result import weights_of
from pfedla.rounds import run_round
from pfedla.tree import flatten
from tests.world import play, same

ROUNDS = [[0, 1], [0, 1, 2, 3], [1, 3], [0, 2, 3]]


@pytest.mark.parametrize(("n", "peers"), [(4, 3), (4, 20), (2, 1), (1, 20)])
def test_with_everybody_as_candidate_it_is_the_exact_method(n: int, peers: int) -> None:
    rounds = [[i for i in ids if i < n] or [0] for ids in ROUNDS]
    few = play(PFedLAXPeers(hold=1, peers=peers, refresh=1), rounds, n)
    exact = play(PFedLAX(hold=1), rounds, n)
    same(few.state.members, exact.state.members, atol=1e-5)
    same(few.state.z, exact.state.z, atol=1e-4)
    same(few.own, exact.own, atol=1e-4)
    mine, theirs = (p.setting.algorithm.diagnostics(p.state) for p in (few, exact))
    same(mine["alpha"], theirs["alpha"], atol=1e-4)


def test_the_equations_on_few_candidates() -> None:
    """A round of everybody with two candidates each, from plain sums over them."""
    played = play(PFedLAXPeers(hold=1, peers=2, refresh=9), [[0, 1, 2, 3, 4]] * 2, 5, "mlp")
    algorithm, state = played.setting.algorithm, played.state
    sent = algorithm.download(state, torch.arange(5))
    shown = algorithm.diagnostics(state)
    for i in range(5):
        own, *others = state.peers.candidates[i].tolist()
        assert own == i
        for layer, name in enumerate(played.setting.spec.names):
            weight = np.exp(state.z[i, layer, 1:].double().numpy())
            q = weight / weight.sum()
            m = q @ state.members.theta[name][others].double().numpy()
            np.testing.assert_allclose(sent.layers[name][i], m, atol=1e-6)
            serve = float(state.members.serve[i, layer])
            np.testing.assert_allclose(shown["alpha"][i, layer], [serve, *((1 - serve) * q)], atol=1e-6)
    assert (state.z[..., 1:] != 0).any()
    full = weights_of({name: value.numpy() for name, value in shown.items()})
    assert full is not None
    assert full.shape == (5, 2, 5)
    np.testing.assert_allclose(full.sum(-1), 1, atol=1e-5)


def test_new_candidates_start_as_the_mean_of_the_others() -> None:
    z = torch.tensor([[[0.0, 1.0, 2.0, 6.0], [0.0, -1.0, 0.0, 4.0]]])
    among = torch.tensor([[[False, True, True, True]]])
    found = renewed(z, torch.tensor([[False, False, True, False]]), among)
    assert found.tolist() == [[[0.0, 1.0, 3.0, 6.0], [0.0, -1.0, 1.0, 4.0]]]


def test_a_candidate_that_takes_anothers_place_does_not_inherit_its_logit() -> None:
    """Of seven clients that all have trained, with two candidates each, chosen again in every round."""
    played = play(PFedLAXPeers(peers=2, refresh=1, eta=0.01), [list(range(7))] * 3, 7, "mlp")
    state = played.state
    state.z[:] = torch.tensor([0.0, 4, -2])  # a step adds as much to one as it takes from the other
    before = state.peers.candidates.clone()
    run_round(played.setting.algorithm, played.server, played.fleet, list(range(7)))
    new = state.peers.candidates != before
    assert new[:, 1:].any()
    for i, column in new.nonzero().tolist():
        torch.testing.assert_close(state.z[i, :, column], torch.ones(2), atol=1e-3, rtol=0)
    for i, column in (~new[:, 1:]).nonzero().tolist():
        assert ((state.z[i, :, 1 + column] - 1).abs() > 2).all()


def test_who_never_took_part_mixes_those_that_did() -> None:
    """Its first candidates were drawn before anybody had trained."""
    played = play(PFedLAXPeers(peers=2, refresh=9), [[0, 1, 2]] * 3, 9, "mlp")
    state, algorithm, late = played.state, played.setting.algorithm, torch.arange(3, 9)
    sent, candidates = algorithm.download(state, late), algorithm.diagnostics(state)["candidates"]
    assert {j for row in state.peers.candidates[3:, 1:].tolist() for j in row} > {0, 1, 2}
    for row, i in enumerate(late.tolist()):
        own, *others = candidates[i].tolist()
        assert own == i
        assert set(others) < {0, 1, 2}
        for name in played.setting.spec.names:
            torch.testing.assert_close(sent.layers[name][row], state.members.theta[name][others].mean(0))


def test_candidates_are_chosen_again() -> None:
    first = play(PFedLAXPeers(peers=2, refresh=1), [], 7).state.peers.candidates
    later: Peers = play(PFedLAXPeers(peers=2, refresh=1), [list(range(7))] * 3, 7).state.peers
    assert not torch.equal(later.candidates, first)
    assert torch.equal(later.candidates[:, 0], torch.arange(7))
    assert later.rounds.tolist() == [3] * 7


def test_state_grows_linearly() -> None:
    def values(n: int) -> int:
        state = play(PFedLAXPeers(peers=3), [], n, "mlp").state
        return sum(tensor.numel() for tensor in flatten(copy.copy(state)).values())

    assert values(30) - values(20) == values(20) - values(10)
