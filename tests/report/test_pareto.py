from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from matplotlib.image import imread

from pfedla.codec import PRESETS
from pfedla.comparison import read_comparison
from pfedla.errors import ConfigError
from pfedla.report.pareto import apart, draw_pareto, everywhere, frontier, in_words, points


def summary(label: str, accuracy: float | None, megabytes: float, seed: int = 0, **codec: str) -> dict[str, Any]:
    sides = {"bytes_down": megabytes * 5e5, "bytes_up": megabytes * 4e5}
    beside = {"overhead_down": megabytes * 5e4, "overhead_up": megabytes * 5e4}
    found = {"label": label, "seed": seed, "accuracy_mean": accuracy, "dataset": "d", "clients": 3, "rounds": 2}
    return {**found, **sides, **beside, "settings": {"codec": codec}}


ROOT = Path(__file__).parents[2]
RUNS = [
    summary("local", 0.99, 0),
    summary("pfedla", 0.64, 100),
    summary("pfedla", 0.62, 100, seed=1),
    summary("pfedla,codec=int8", 0.625, 25, up="int8", down="int8"),
    summary("pfedla,retain=1,codec.up=int4", 0.60, 25, up="int4"),
    summary("pfedla,retain=1,codec=int4", 0.61, 12, up="int4", down="int4"),
    summary("pfedla,broken", None, 1),
]
RUNS += [{**run, "seed": 1} for run in RUNS if "codec" in run["label"]]


def test_a_point_is_a_method_with_a_codec_over_its_seeds() -> None:
    found = points(RUNS)
    assert [(point.method, point.codec) for point in found] == [
        ("pfedla", "no codec"),
        ("pfedla", "int8"),
        ("pfedla,retain=1", "up=int4"),
        ("pfedla,retain=1", "int4"),
    ]
    assert found[0].megabytes == pytest.approx(100)  # layers, values and headers
    assert found[0].score == pytest.approx(63)
    assert found[0].spread == pytest.approx(2**0.5)
    (alone,) = points(RUNS[1:2])
    assert (found[0].seeds, alone.seeds, alone.spread) == (2, 1, None)


def test_what_is_good_enough_is_so_over_the_seeds_of_the_reference() -> None:
    """A second seed that was easier for all says nothing of the method that alone was run with it."""
    runs = [summary("pfedla", 0.60, 100), summary("pfedla,codec=int8", 0.57, 25)]
    easy = summary("pfedla,codec=int8", 0.66, 25, seed=1)
    assert [choice.label for choice in everywhere([points([*runs, easy])], "pfedla", 1.0)] == ["pfedla"]
    both = [*runs, easy, summary("pfedla", 0.64, 100, seed=1)]
    found = everywhere([points(both)], "pfedla", 1.0)
    assert [(choice.label, round(choice.worst, 6)) for choice in found] == [("pfedla,codec=int8", -0.5), ("pfedla", 0)]
    other = [summary("pfedla", 0.60, 100, seed=2), *runs[1:]]  # no seed in common
    assert [choice.label for choice in everywhere([points(other)], "pfedla", 9.0)] == ["pfedla"]


def test_the_frontier_is_what_no_other_beats() -> None:
    found = points(RUNS)
    labels = ["pfedla,retain=1,codec=int4", "pfedla,codec=int8", "pfedla"]
    assert [point.label for point in frontier(found)] == labels
    assert [point.label for point in frontier(found, higher_is_better=False)] == [
        "pfedla,retain=1,codec=int4",
        "pfedla,retain=1,codec.up=int4",
    ]


def test_the_least_traffic_is_within_what_is_allowed() -> None:
    found = [points(RUNS)]
    assert everywhere(found, "pfedla", 1.0)[0].label == "pfedla,codec=int8"
    assert everywhere(found, "pfedla", 0.4)[0].label == "pfedla"
    assert everywhere(found, "pfedla", 2.5)[0].label == "pfedla,retain=1,codec=int4"
    assert everywhere(found, "pfedla,codec=int8", 0.0, higher_is_better=False)[0].label == "pfedla,retain=1,codec=int4"
    with pytest.raises(ConfigError, match="unknown method 'fedavg'"):
        everywhere(found, "fedavg", 1.0)


def test_a_lucky_seed_is_no_choice() -> None:
    lucky = summary("pfedla,codec=tiny", 0.9, 1, up="int4")
    assert everywhere([points([*RUNS, lucky])], "pfedla", 1.0)[0].label == "pfedla,codec=int8"
    assert frontier(points([*RUNS, lucky])) == frontier(points(RUNS))
    again = {**lucky, "seed": 1}
    assert everywhere([points([*RUNS, lucky, again])], "pfedla", 1.0)[0].label == "pfedla,codec=tiny"
    assert [point.label for point in frontier(points([*RUNS, lucky, again]))] == ["pfedla,codec=tiny"]


OTHER = [
    summary("pfedla", 0.80, 50),
    summary("pfedla,codec=int8", 0.795, 13, up="int8", down="int8"),
    summary("pfedla,retain=1,codec=int4", 0.78, 6, up="int4", down="int4"),
    summary("pfedla,codec.up=top-k", 0.80, 1, up="top-k"),  # in one of the comparisons alone
]


def test_what_is_good_enough_everywhere_comes_by_all_its_traffic() -> None:
    both = [points(RUNS), points(OTHER)]
    found = everywhere(both, "pfedla", 1.0)
    assert [(choice.label, choice.codec) for choice in found] == [("pfedla,codec=int8", "int8"), ("pfedla", "no codec")]
    assert [choice.megabytes for choice in found] == [pytest.approx(38), pytest.approx(150)]
    assert found[0].worst == pytest.approx(-0.5)
    assert everywhere(both, "pfedla", 2.0)[0].codec == "int4"
    assert everywhere(both, "pfedla", 1.99)[0].codec == "int8"
    worse = everywhere(both, "pfedla", 0.0, higher_is_better=False)
    assert [choice.codec for choice in worse] == ["int4", "int8", "no codec"]
    with pytest.raises(ConfigError, match=re.escape("unknown method 'pfedla,codec.up=top-k'")):
        everywhere(both, "pfedla,codec.up=top-k", 1.0)


def test_codecs_in_words_are_what_the_command_line_takes() -> None:
    assert in_words({}) == "no codec"
    assert in_words({"up": "int8", "down": "int8"}) == "int8"
    assert in_words({"keep": 0.02, "down": "int8", "up": "top-k"}) == "up=top-k down=int8 keep=0.02"


def test_the_small_preset_is_what_was_measured() -> None:
    """Of pFedLA and HeurpFedLA on both data sets, 3 seeds: the least traffic within a point of pFedLA as it is."""
    runs = [read_comparison(ROOT / "results" / f"codecs-{name}.json") for name in ("cifar10", "fashion-mnist")]
    chosen = everywhere([points(some) for some in runs], "pfedla", 1.0)[0]
    assert in_words(PRESETS["small"]) == chosen.codec
    found, alike = (
        [{point.label: point for point in points([run for run in some if run["seed"] < seeds])} for some in runs]
        for seeds in (3, 1)
    )
    assert {some[label].seeds for some in found for label in ("pfedla", chosen.label)} == {3}
    lighter = [label for label in found[0] if sum(some[label].megabytes for some in found) < chosen.megabytes]
    assert lighter
    for label in lighter:  # run as often, or far from it with the first seed
        apart = min(some[label].score - some["pfedla"].score for some in alike)
        assert min(some[label].seeds for some in found) == 3 or apart < -2, label


def test_several_comparisons_have_a_panel_each(tmp_path: Path) -> None:
    for runs in ({"one": RUNS}, {"one": RUNS, "other": OTHER}):
        draw_pareto(tmp_path / f"{len(runs)}.svg", runs, "pfedla", 1.0, "pfedla")
    one, two = ((tmp_path / f"{count}.svg").read_text() for count in (1, 2))
    assert (one.count('id="axes_'), two.count('id="axes_')) == (1, 2)


@pytest.mark.parametrize("up", [True, False])
def test_what_is_far_worse_stands_off_the_scale_with_its_figure(tmp_path: Path, up: bool) -> None:
    """So that it does not press all others into a line."""
    bad = 0.123 if up else 0.987
    runs = [{**run, "higher_is_better": up} for run in [*RUNS, summary("pfedla,codec.up=random-k", bad, 8)]]

    def said(within: float, runs: list[dict[str, Any]]) -> list[str]:
        with rc_context({"svg.fonttype": "none"}):
            draw_pareto(tmp_path / "pareto.svg", {"one": runs}, "pfedla", within, "pfedla")
        return re.findall(r"<text [^>]*>([^<]*)</text>", (tmp_path / "pareto.svg").read_text())

    words = said(1.0, runs)
    worse = 100 * bad - 64  # with the same seed
    assert {"off the scale", f"{worse:.1f}", "d, 3 clients, 2 rounds, 2 seeds (pale: fewer)"} <= set(words)
    ticks = [float(word.replace("\N{MINUS SIGN}", "-")) for word in words if re.fullmatch(r"\N{MINUS SIGN}\d", word)]
    assert ticks
    assert min(ticks) > -6
    assert "accuracy: points above pfedla, seed by seed" in words
    for within, some in ((0.0, runs), (100.0, runs), (1.0, runs[:-1])):
        assert "off the scale" not in said(within, some)


def test_runs_without_traffic_are_no_points() -> None:
    with pytest.raises(ConfigError, match="none of the runs here has both a result and traffic"):
        points(RUNS[:1])
    with pytest.raises(ConfigError, match="none of the runs of this has both"):
        points(RUNS[:1], "this")


def test_differences_are_taken_seed_by_seed() -> None:
    runs = [summary("pfedla", accuracy, 100, seed=seed) for seed, accuracy in enumerate((0.50, 0.60, 0.70))]
    runs += [summary("pfedla,codec=int8", accuracy, 25, seed=seed) for seed, accuracy in enumerate((0.49, 0.57))]
    runs += [summary("pfedla,codec=int4", 0.9, 12, seed=3)]  # no seed in common
    reference, point = apart(points(runs), "pfedla")
    assert (reference.score, reference.spread, reference.megabytes) == (0, 0, points(runs)[0].megabytes)
    assert (point.label, point.seeds) == ("pfedla,codec=int8", 2)
    assert point.score == pytest.approx(-2)
    assert point.spread == pytest.approx(2**0.5)
    assert [seed for seed, _ in point.each] == [0, 1]


@pytest.mark.parametrize("runs", [RUNS, RUNS[1:2], [{**run, "percent": False} for run in RUNS]])
def test_a_picture_is_drawn(tmp_path: Path, runs: list[dict[str, Any]]) -> None:
    draw_pareto(tmp_path / "pareto.png", {"one": runs}, "pfedla", 1.0, "pfedla")
    image = imread(tmp_path / "pareto.png")
    assert image.shape[0] > 500
    assert image.std() > 0.01


def test_there_is_a_look_for_more_codecs_than_colours(tmp_path: Path) -> None:
    runs = [summary(f"m{i}", 0.5, i + 1, up=f"c{i}") for i in range(20)]
    draw_pareto(tmp_path / "pareto.svg", {"one": [{**run, "higher_is_better": False} for run in runs]}, "m3", 1.0, "m0")
    assert (tmp_path / "pareto.svg").read_text().count("<use") > 20
