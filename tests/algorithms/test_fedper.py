from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from pfedla.algorithms import FedAvg, FedPer, FedRep, LGFedAvg
from pfedla.algorithms.fedavg import PersonalLayers
from pfedla.errors import ModelError
from pfedla.layers import LayerSpec
from tests.world import download, net, play, same, setting, shared_and_own, task_of, theta_of


def test_the_head_stays_and_the_body_is_averaged() -> None:
    shared, personalized, own = shared_and_own(FedPer())
    assert shared == {"conv", "bn", "bn#stats"}
    assert torch.equal(personalized["fc"], own["fc"])
    assert len(own["fc"].unique(dim=0)) == 3


def test_head_and_body_are_trained_together() -> None:
    made, plain = setting(FedPer()), setting(FedAvg())
    one, other = (s.algorithm.train(theta_of(s), download(s, [0]), task_of(s, [0])) for s in (made, plain))
    same(one[0], other[0])
    assert "fc" not in one[1].layers
    same({**one[1].layers, "fc": other[1].layers["fc"]}, other[1].layers)


def test_without_personal_layers_it_is_fedavg() -> None:
    made, averaged = setting(FedPer()), play(FedAvg())
    found = play(replace(made, algorithm=FedPer(personal=())))
    same((found.state, found.own), (averaged.state, averaged.own))
    with pytest.raises(AssertionError):
        same(play(made).own, averaged.own)


@pytest.mark.parametrize(("patterns", "head"), [((), ("fc",)), (("bn", "fc"), ("bn", "fc")), (("?c",), ("fc",))])
def test_the_head_is_the_last_layer_or_what_is_named(patterns: tuple[str, ...], head: tuple[str, ...]) -> None:
    spec = LayerSpec.of(net("conv"))
    assert FedPer(patterns).for_model(spec).personal == head
    assert FedRep(patterns).for_model(spec).personal == head
    assert LGFedAvg(patterns).for_model(spec).personal == tuple(n for n in ("conv", "bn", "fc") if n not in head)


@pytest.mark.parametrize("kind", [FedPer, FedRep, LGFedAvg])
def test_a_head_that_matches_nothing_or_everything_is_refused(kind: Callable[..., PersonalLayers]) -> None:
    spec = LayerSpec.of(net("conv"))
    with pytest.raises(ModelError, match=r"algorithm.head 'fcc' matches no layer: did you mean 'fc'"):
        kind(head=("fcc",)).for_model(spec)
    with pytest.raises(ModelError, match=r"all layers of this model \(conv, bn, fc\)"):
        kind(head=("*",)).for_model(spec)
    with pytest.raises(ModelError, match="all layers"):
        kind().for_model(LayerSpec.of(nn.Linear(2, 2)))
