"""Typed settings: what fits a field's type and range, and what is refused with which words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest

from pfedla.algorithms import FedAvg
from pfedla.config import Experiment
from pfedla.errors import ConfigError
from pfedla.settings import RESOLVED, Count, NonNegative, Positive, Range, Settings, Share, build, names_of
from pfedla.training import Training

BOUNDS = {"least": 2.0, "above": 1.0, "most": 5.0, "below": 6.0}
WORDS = {"least": "at least 2", "above": "above 1", "most": "at most 5", "below": "below 6"}
MEANING: dict[str, Callable[[float], bool]] = {
    "least": lambda value: value >= 2,
    "above": lambda value: value > 1,
    "most": lambda value: value <= 5,
    "below": lambda value: value < 6,
}
COMBINATIONS = [names for count in range(5) for names in itertools.combinations(BOUNDS, count)]


@pytest.mark.parametrize("names", COMBINATIONS, ids=lambda names: "-".join(names) or "none")
def test_a_range_is_what_all_its_bounds_allow(names: tuple[str, ...]) -> None:
    limits = Range(**{name: BOUNDS[name] for name in names})
    for value in (-7, 0, 1, 1.5, 2, 3, 5, 5.5, 6, 7, 10**400, -(10**400)):
        assert (value in limits) == all(MEANING[name](value) for name in names), value
    assert math.nan not in limits
    assert math.inf not in limits
    assert -math.inf not in limits
    assert str(limits) == " and ".join(WORDS[name] for name in names)


def test_a_range_tells_its_bounds_exactly() -> None:
    assert str(Range(least=0.001, most=1e6)) == "at least 0.001 and at most 1000000"
    assert str(Range(above=-0.5, below=16_777_217)) == "above -0.5 and below 16777217"


@dataclass(frozen=True)
class All(Settings):
    """A field of every kind."""

    section: ClassVar[str] = "all"
    count: Count = 1
    whole: int = 0
    positive: Positive = 1.0
    non_negative: NonNegative = 0.0
    share: Share = 0.5
    number: float = 0.0
    maybe: Annotated[int, Range(least=0)] | None = None
    rate: float | None = None
    either: Share | Literal["auto"] | None = None
    yes: bool = False
    text: str = ""
    choice: Literal["red", "blue"] = "red"
    names: tuple[str, ...] = ()
    nested: tuple[tuple[int, ...], ...] = ()
    table: dict[str, str] = field(default_factory=dict)
    callback: Callable[[], None] | None = None
    filled: int | None = field(default=None, metadata=RESOLVED)


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "becomes"),
    [
        ("count", 1, 1),
        ("count", 2**63 - 1, 2**63 - 1),
        ("whole", -3, -3),
        ("positive", 3, 3.0),
        ("positive", 1e-300, 1e-300),
        ("non_negative", 0, 0.0),
        ("share", 1, 1.0),
        ("number", -(2**70), -(2.0**70)),
        ("maybe", None, None),
        ("maybe", 0, 0),
        ("rate", None, None),
        ("rate", 2, 2.0),
        ("either", 1, 1.0),
        ("either", "auto", "auto"),
        ("either", None, None),
        ("yes", True, True),
        ("text", "", ""),
        ("choice", "blue", "blue"),
        ("names", ["a", "b"], ("a", "b")),
        ("names", ("a",), ("a",)),
        ("nested", [[0, 1], []], ((0, 1), ())),
        ("table", {"a": "b"}, {"a": "b"}),
        ("callback", print, print),
        ("callback", None, None),
    ],
)
def test_what_fits_is_brought_into_the_type_asked_for(name: str, value: Any, becomes: Any) -> None:
    for made in (All(**{name: value}), build(All, {name: value})):
        found = getattr(made, name)
        assert (type(found), found) == (type(becomes), becomes)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "all.count = 0 must be at least 1"),
        ("count", 1.0, "all.count = 1.0 must be a whole number"),
        ("count", 2**63, "all.count = 9223372036854775808... must fit into 64 bits"),
        ("count", 10**400, "all.count = 10000000000000000000... must fit into 64 bits"),
        ("count", True, "all.count = True must be a whole number"),
        ("count", None, "all.count = None must be a whole number"),
        ("whole", "3", "all.whole = '3' must be a whole number"),
        ("positive", 0, "all.positive = 0.0 must be above 0"),
        ("positive", -1e-9, "all.positive = -1e-09 must be above 0"),
        ("positive", True, "all.positive = True must be a number"),
        ("positive", math.nan, "all.positive = nan must be finite"),
        ("positive", math.inf, "all.positive = inf must be finite"),
        ("positive", 10**400, "all.positive = inf must be finite"),
        ("non_negative", -0.5, "all.non_negative = -0.5 must be at least 0"),
        ("share", 1.5, "all.share = 1.5 must be at least 0 and at most 1"),
        ("number", -math.inf, "all.number = -inf must be finite"),
        ("number", math.nan, "all.number = nan must be finite"),
        ("number", [1.0], "all.number = [1.0] must be a number"),
        ("maybe", -1, "all.maybe = -1 must be at least 0"),
        ("maybe", "none", "all.maybe = 'none' must be a whole number"),
        ("rate", math.nan, "all.rate = nan must be finite"),
        ("either", 2, "all.either = 2: choose one of auto"),
        ("yes", 1, "all.yes = 1 must be true or false"),
        ("text", 1, "all.text = 1 must be text"),
        ("choice", "green", "all.choice = 'green': choose one of red, blue"),
        ("choice", ["red"], "all.choice = ['red']: choose one of red, blue"),
        ("names", "ab", "all.names = 'ab' must be a list"),
        ("names", [1], "all.names = 1 must be text"),
        ("nested", [[0, True]], "all.nested = True must be a whole number"),
        ("table", "a", "all.table = 'a' must be a table"),
        ("table", {"a": 1}, "all.table = 1 must be text"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_field_the_value_and_the_range(
    name: str, value: Any, message: str
) -> None:
    assert refusal(lambda: All(**{name: value})) == message
    assert refusal(lambda: build(All, {name: value})) == message


def test_unknown_names_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'all\.cuont': did you mean 'all\.count'\?"):
        build(All, {"cuont": 1})


def test_what_a_method_fills_in_itself_is_no_setting() -> None:
    assert "filled" not in names_of(All)
    assert names_of(All()) == names_of(All)
    with pytest.raises(ConfigError, match=r"unknown setting 'all\.filled'"):
        build(All, {"filled": 1})


# ---- a method of one's own


@dataclass(frozen=True)
class Mine(FedAvg):
    """Mine: a method from outside the package, whose settings say what they may be."""

    strength: Annotated[float, Range(least=0, below=1)] = 0.5
    steps: Count = 3
    kind: Literal["soft", "hard"] = "soft"
    layers: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("strength", 1, "algorithm.strength = 1.0 must be at least 0 and below 1"),
        ("strength", math.nan, "algorithm.strength = nan must be finite"),
        ("steps", 0, "algorithm.steps = 0 must be at least 1"),
        ("steps", 2.5, "algorithm.steps = 2.5 must be a whole number"),
        ("kind", "medium", "algorithm.kind = 'medium': choose one of soft, hard"),
    ],
)
def test_a_users_own_method_is_checked_from_python_and_from_tables(name: str, value: Any, message: str) -> None:
    table = {"name": f"{Mine.__module__}:Mine", name: value}
    assert refusal(lambda: Mine(**{name: value})) == message
    assert refusal(lambda: Experiment.from_tables({"algorithm": table})) == message


def test_a_users_own_method_comes_from_tables_as_from_python() -> None:
    table = {"name": f"{Mine.__module__}:Mine", "strength": 0, "layers": ["a", "b"]}
    made = Experiment.from_tables({"algorithm": table})
    assert made.algorithm == Mine(strength=0.0, layers=("a", "b"))
    assert made.tables()["algorithm"] == {**table, "strength": 0.0, "steps": 3, "kind": "soft"}
    assert Experiment.from_tables(made.tables()) == made
    with pytest.raises(ConfigError, match=r"setting \(of Mine\) 'algorithm\.step': did you mean 'algorithm\.steps'"):
        Experiment.from_tables({"algorithm": {**table, "step": 1}})


def test_numbers_of_numpy_are_numbers_and_none_is_within_no_range() -> None:
    made = Training(local_epochs=np.int64(3), lr=np.float64(0.5))  # type: ignore[arg-type]
    assert (type(made.local_epochs), made.local_epochs, type(made.lr), made.lr) == (int, 3, float, 0.5)

    @dataclass(frozen=True)
    class Optional(Settings):
        section: ClassVar[str] = "optional"
        some: Annotated[int | None, Range(least=1)] = None

    assert Optional().some is None
    with pytest.raises(ConfigError, match=r"optional\.some = 0 must be at least 1"):
        Optional(some=0)
