from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pfedla.algorithms import FedAvg, FedPer, FedRep, LGFedAvg
from pfedla.algorithms.fedavg import PersonalLayers
from pfedla.errors import ModelError
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.layers import LayerSpec
from pfedla.ledger import Ledger
from pfedla.rounds import Server, run_round
from pfedla.training import Samples, Task


def test_the_head_stays_and_the_body_is_averaged(shared_and_own: Callable[..., Any]) -> None:
    shared, personalized, own = shared_and_own(FedPer())
    assert shared == {"conv", "bn", "bn#stats"}
    assert torch.equal(personalized["fc"], own["fc"])
    assert len(own["fc"].unique(dim=0)) == 3


def test_head_and_body_are_trained_together(
    setting: Callable[..., Setting], task_of: Callable[..., Task], same: Callable[..., None]
) -> None:
    made, plain = setting(FedPer()), setting(FedAvg())
    theta = made.spec.read(made.template)
    one, other = (
        s.algorithm.train(
            theta,
            s.algorithm.download(s.algorithm.init(theta, 1, torch.Generator()), torch.tensor([0])),
            task_of(s, [0]),
        )
        for s in (made, plain)
    )
    same(one[0], other[0])
    assert "fc" not in one[1].layers
    same({**one[1].layers, "fc": other[1].layers["fc"]}, other[1].layers)


def test_without_personal_layers_it_is_fedavg(
    setting: Callable[..., Setting], data: Callable[..., list[Samples]], same: Callable[..., None]
) -> None:
    def play(made: Setting) -> tuple[object, object]:
        samples = data(3)
        server = Server(made.algorithm.init(made.spec.read(made.template), 3, torch.Generator()))
        with SimulatedFleet(made, samples, samples, workers=0) as fleet:
            for ids in ([0, 1], [1, 2]):
                run_round(made.algorithm, server, fleet, Ledger(made.spec.names), ids)
            return server.state, fleet.own

    made = setting(FedPer())
    same(play(replace(made, algorithm=FedPer(personal=()))), play(setting(FedAvg())))
    with pytest.raises(AssertionError):
        same(play(made), play(setting(FedAvg())))


@pytest.mark.parametrize(("patterns", "head"), [((), ("fc",)), (("bn", "fc"), ("bn", "fc")), (("?c",), ("fc",))])
def test_the_head_is_the_last_layer_or_what_is_named(
    patterns: tuple[str, ...], head: tuple[str, ...], net: Callable[[str], nn.Module]
) -> None:
    spec = LayerSpec.of(net("conv"))
    assert FedPer(patterns).for_model(spec).personal == head
    assert FedRep(patterns).for_model(spec).personal == head
    assert LGFedAvg(patterns).for_model(spec).personal == tuple(n for n in ("conv", "bn", "fc") if n not in head)


@pytest.mark.parametrize("kind", [FedPer, FedRep, LGFedAvg])
def test_a_head_that_matches_nothing_or_everything_is_refused(
    kind: Callable[..., PersonalLayers], net: Callable[[str], nn.Module]
) -> None:
    spec = LayerSpec.of(net("conv"))
    with pytest.raises(ModelError, match=r"algorithm.head 'fcc' matches no layer: did you mean 'fc'"):
        kind(head=("fcc",)).for_model(spec)
    with pytest.raises(ModelError, match=r"all layers of this model \(conv, bn, fc\)"):
        kind(head=("*",)).for_model(spec)
    with pytest.raises(ModelError, match="all layers"):
        kind().for_model(LayerSpec.of(nn.Linear(2, 2)))
