"""Every method's settings: what is out of range, not finite or of another kind is refused, and the range is named."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import pytest

from pfedla.algorithm import Algorithm
from pfedla.algorithms import (
    ALGORITHMS,
    APFL,
    Clustered,
    Ditto,
    FedALA,
    FedAMP,
    FedAvgFT,
    FedFomo,
    FedPer,
    FedProx,
    FedRep,
    HeurPFedLA,
    LGFedAvg,
    PerFedAvg,
    PFedHN,
    PFedLA,
    PFedLAPeers,
    PFedLAX,
    PFedLAXPeers,
    PFedMe,
    Scaffold,
    SimilarityLayer,
    SimilarityModel,
)
from pfedla.errors import ConfigError
from pfedla.settings import build, names_of
from tests.world import setting

Method = type[Algorithm[Any]]
TINY = 5e-324  # the smallest number above 0


class Allowed(NamedTuple):
    """A setting's range in words, values just outside of it, and values at its ends."""

    text: str
    refused: tuple[float, ...]
    accepted: tuple[float, ...]


COUNT = Allowed("at least 1", (0, -1), (1, 10**9))
WHOLE = Allowed("at least 0", (-1,), (0,))
POSITIVE = Allowed("above 0", (0.0, -0.0, -TINY, -1.0), (TINY, 1e30))
NON_NEGATIVE = Allowed("at least 0", (-TINY, -1.0), (0.0, 1e30))
SHARE = Allowed("at least 0 and at most 1", (-TINY, 1 + 1e-15), (0.0, 1.0))
BELOW_1 = Allowed("at least 0 and below 1", (-TINY, 1.0, 1.5), (0.0, 1 - 1e-15))

HYPERNETWORKS = {"retain": WHOLE, "hyper_lr": POSITIVE, "embedding": COUNT, "hidden": COUNT}
JUDGED = {
    "folds": Allowed("at least 2", (1, 0, -2), (2,)),
    "hold": COUNT,
    "first": Allowed("at least -1000 and at most 1000", (-1000.1, 1000.1), (-1000.0, 1000.0)),
    "eta": NON_NEGATIVE,
    "eta_serve": NON_NEGATIVE,
    "serve_steps": COUNT,
}
RANGES: dict[Method, dict[str, Allowed]] = {
    APFL: {"alpha": SHARE},
    Ditto: {"lam": NON_NEGATIVE},
    FedALA: {
        "p": COUNT,
        "s": Allowed("above 0 and at most 1", (0.0, -TINY, 1 + 1e-15), (TINY, 1.0)),
        "eta": POSITIVE,
        "threshold": POSITIVE,
        "start_epochs": COUNT,
    },
    FedAMP: {"alpha": POSITIVE, "alpha_decay": POSITIVE, "decay_every": COUNT, "lam": POSITIVE, "sigma": POSITIVE},
    FedAvgFT: {"finetune_epochs": COUNT},
    FedFomo: {
        "models": Allowed("at least 2", (1, 0, -2), (2,)),
        "epsilon": SHARE,
        "epsilon_decay": NON_NEGATIVE,
        "held_out": Allowed("above 0 and below 1", (0.0, 1.0, 1.5), (TINY, 1 - 1e-15)),
    },
    FedProx: {"mu": NON_NEGATIVE},
    FedRep: {"head_epochs": COUNT, "body_epochs": COUNT},
    PerFedAvg: {"alpha": NON_NEGATIVE, "beta": POSITIVE, "delta": POSITIVE},
    PFedHN: {
        "hidden": COUNT,
        "hidden_layers": WHOLE,
        "hyper_lr": POSITIVE,
        "hyper_momentum": BELOW_1,
        "hyper_weight_decay": NON_NEGATIVE,
    },
    PFedMe: {"lam": NON_NEGATIVE, "k": COUNT, "beta": POSITIVE, "personal_lr": POSITIVE, "mu": NON_NEGATIVE},
    Scaffold: {"server_lr": POSITIVE},
    SimilarityLayer: {"temperature": POSITIVE},
    SimilarityModel: {"temperature": POSITIVE},
    PFedLA: HYPERNETWORKS,
    HeurPFedLA: HYPERNETWORKS,
    PFedLAPeers: {**HYPERNETWORKS, "peers": COUNT, "refresh": COUNT},
    PFedLAX: JUDGED,
    PFedLAXPeers: {**JUDGED, "peers": COUNT, "refresh": COUNT},
}
CHOICES: dict[Method, dict[str, str]] = {
    PerFedAvg: {"variant": "fo, hf"},
    **{kind: {"hyper_optimizer": "sgd, mean-sgd, adam"} for kind in (PFedLA, HeurPFedLA, PFedLAPeers)},
}
OTHERS: dict[Method, dict[str, str]] = {
    APFL: {"adaptive": "true or false"},
    FedAMP: {"heuristic": "true or false"},
    FedPer: {"head": "a list"},
    FedRep: {"head": "a list"},
    LGFedAvg: {"head": "a list"},
}
ELSEWHERE = {(Clustered, "groups")}  # a number or a list: tests/algorithms/test_clustered.py
NUMBERS = [(kind, name) for kind, settings in RANGES.items() for name in settings]


def is_float(allowed: Allowed) -> bool:
    return isinstance(allowed.refused[0], float)


def identify(value: object) -> str | None:
    return value.__name__ if isinstance(value, type) else None


def test_every_setting_of_every_method_is_tested_here() -> None:
    found = {(kind, name) for kind in ALGORITHMS.values() for name in names_of(kind)}
    assert found - ELSEWHERE == {
        (kind, name) for table in (RANGES, CHOICES, OTHERS) for kind, names in table.items() for name in names
    }


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=identify)
def test_numbers_out_of_range_are_refused_with_the_range(kind: Method, name: str) -> None:
    allowed = RANGES[kind][name]
    for value in allowed.refused:
        with pytest.raises(ConfigError, match=rf"^algorithm\.{name} = {re.escape(str(value))} must be {allowed.text}$"):
            build(kind, {name: value})
    for value in allowed.accepted:
        assert getattr(build(kind, {name: value}), name) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=identify)
def test_numbers_that_are_not_finite_are_refused(kind: Method, name: str, value: float) -> None:
    must = "finite" if is_float(RANGES[kind][name]) else "a whole number"
    with pytest.raises(ConfigError, match=rf"^algorithm\.{name} = {value} must be {must}"):
        build(kind, {name: value})


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=identify)
def test_what_is_no_number_is_refused(kind: Method, name: str) -> None:
    must = "a number" if is_float(RANGES[kind][name]) else "a whole number"
    for value in ("1", True, (1,), *(() if is_float(RANGES[kind][name]) else (1.5,))):
        with pytest.raises(ConfigError, match=rf"^algorithm\.{name} = {re.escape(repr(value))} must be {must}"):
            build(kind, {name: value})


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in CHOICES for name in CHOICES[kind]], ids=identify)
def test_a_choice_is_one_of_those_offered(kind: Method, name: str) -> None:
    offered = CHOICES[kind][name]
    with pytest.raises(ConfigError, match=rf"^algorithm\.{name} = 'lion': choose one of {offered}$"):
        build(kind, {name: "lion"})
    for value in offered.split(", "):
        assert getattr(build(kind, {name: value}), name) == value


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in OTHERS for name in OTHERS[kind]], ids=identify)
def test_what_is_of_another_kind_is_refused(kind: Method, name: str) -> None:
    for value in (1, "fc"):
        with pytest.raises(ConfigError, match=rf"^algorithm\.{name} = {value!r} must be {OTHERS[kind][name]}$"):
            build(kind, {name: value})


@pytest.mark.parametrize("kind", ALGORITHMS.values(), ids=ALGORITHMS)
def test_unknown_settings_are_refused(kind: Method) -> None:
    with pytest.raises(ConfigError, match=rf"unknown setting \(of {kind.__name__}\) 'algorithm\.hyperr_lr'"):
        build(kind, {"hyperr_lr": 0.1})
    with pytest.raises(ConfigError, match="unknown setting"):
        build(kind, {"personal": ("fc",)})  # a method's own, not the user's


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [(APFL(), "APFL"), (PFedMe(), "pFedMe"), (PerFedAvg(), "Per-FedAvg"), (Scaffold(), "SCAFFOLD")],
    ids=identify,
)
def test_methods_of_plain_steps_refuse_momentum(algorithm: Algorithm[Any], name: str) -> None:
    made = setting(algorithm, momentum=0.9)
    with pytest.raises(ConfigError, match=rf"^training\.momentum = 0\.9: {name} takes plain steps; set it to 0$"):
        made.algorithm.check(made.training, 4)
