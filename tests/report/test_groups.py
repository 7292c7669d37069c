"""Groups read off weights: against plain loops, on planted blocks and against chance."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from pfedla.report.groups import (
    _draw_course,
    _draw_index,
    _draw_shares,
    _ratio,
    adjusted_rand_index,
    chance_of,
    draw_groups,
    embedded,
    groups_table,
    measured,
    overall,
    shares,
    spectral_clusters,
)

GROUPS = np.repeat([0, 1, 2], 4)


def planted(strength: float, seed: int = 0, groups: np.ndarray = GROUPS, own: float = 0.5) -> np.ndarray:
    """Return one layer's noisy weights, larger within groups by a factor of 1 + strength: `(clients, clients)`."""
    rng, n = np.random.default_rng(seed), len(groups)
    weights: np.ndarray = rng.uniform(0.5, 1.5, (n, n)) * (1 + strength * (groups[:, None] == groups[None]))
    np.fill_diagonal(weights, 0)
    weights *= (1 - own) / weights.sum(1, keepdims=True)
    np.fill_diagonal(weights, own)
    return weights


def test_shares_are_sums_of_weights() -> None:
    alpha = np.random.default_rng(0).dirichlet(np.ones(5), (3, 5, 2))  # (rounds, clients, layers, clients)
    groups = np.array([0, 0, 1, 1, 1])
    found = shares(alpha, groups)
    for t, layer in itertools.product(range(3), range(2)):
        own, group, rest = [], [], []
        for i in range(5):
            own.append(alpha[t, i, layer, i])
            group.append(sum(alpha[t, i, layer, j] for j in range(5) if j != i and groups[j] == groups[i]))
            rest.append(sum(alpha[t, i, layer, j] for j in range(5) if groups[j] != groups[i]))
        for part, values in (("own", own), ("group", group), ("rest", rest)):
            assert found[part][t, layer] == pytest.approx(np.mean(values))
    np.testing.assert_allclose(sum(found.values()), 1.0)


def by_pairs(one: np.ndarray, other: np.ndarray) -> float:
    """Return the adjusted Rand index, by counting pairs of clients that are together in both, one or none."""
    both = first = second = neither = 0
    for i, j in itertools.combinations(range(len(one)), 2):
        a, b = one[i] == one[j], other[i] == other[j]
        both, first, second, neither = (
            both + (a and b),
            first + (a and not b),
            second + (b and not a),
            neither + (not a and not b),
        )
    above = 2 * (both * neither - first * second)
    below = (both + first) * (first + neither) + (both + second) * (second + neither)
    return above / below if below else 1.0


def test_the_adjusted_rand_index_counts_pairs() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        one, other = rng.integers(0, 3, 12), rng.integers(0, 4, 12)
        assert adjusted_rand_index(one, other) == pytest.approx(by_pairs(one, other), abs=1e-12)
        assert adjusted_rand_index(one, other) == pytest.approx(adjusted_rand_index(other, one))
    assert adjusted_rand_index(GROUPS, (GROUPS + 1) % 3) == 1  # names do not matter
    assert adjusted_rand_index(np.zeros(4, int), np.zeros(4, int)) == 1
    assert adjusted_rand_index(np.arange(4), np.zeros(4, int)) == 0
    guesses = [adjusted_rand_index(rng.permutation(GROUPS), GROUPS) for _ in range(2000)]
    assert abs(np.mean(guesses)) < 0.02  # adjusted for chance


@pytest.mark.parametrize("own", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("groups", [GROUPS, np.array([0, 1, 0, 2, 2, 1, 0, 1, 2, 0]), np.repeat([0, 1], 2)])
def test_planted_groups_are_found_whatever_the_own_weight(own: float, groups: np.ndarray) -> None:
    for seed in range(5):
        found = spectral_clusters(planted(8.0, seed, groups, own), len(np.unique(groups)))
        assert adjusted_rand_index(found, groups) == 1


def test_points_are_those_of_the_walk_from_client_to_client() -> None:
    """D^-1 W, a walk by the weights that clients give to each other, has the eigenvectors D^-1/2 v."""
    weights = np.random.default_rng(4).dirichlet(np.full(7, 0.3), 7)
    p = np.zeros((7, 7))
    for i, j in itertools.permutations(range(7), 2):
        p[i, j] = weights[i, j] / (1 - weights[i, i])
    w = (p + p.T) / 2
    values, walks = np.linalg.eig(w / w.sum(1)[:, None])
    for k in (1, 2, 4):
        leading = walks[:, np.argsort(-values.real)[:k]].real
        v = np.sqrt(w.sum(1))[:, None] * leading
        v /= np.linalg.norm(v, axis=0)
        v /= np.linalg.norm(v, axis=1)[:, None]
        points = embedded(weights, k)
        np.testing.assert_allclose(points @ points.T, v @ v.T, atol=1e-10)


def test_even_weights_show_one_cluster() -> None:
    for n, k in ((6, 2), (12, 3), (12, 4)):
        for own in (1 / n, 0.9):
            weights = np.full((n, n), (1 - own) / (n - 1))
            np.fill_diagonal(weights, own)
            noise = np.random.default_rng(n).normal(1, 3e-8, (n, n))
            for even in (weights, weights.astype(np.float32), weights * noise):
                assert len(set(spectral_clusters(even, k).tolist())) == 1
    pairs = np.kron(np.eye(3), np.ones((2, 2)))  # of three alike, two can only be guessed
    assert adjusted_rand_index(spectral_clusters(pairs, 3), np.repeat([0, 1, 2], 2)) == 1
    assert len(set(spectral_clusters(pairs + 1, 2).tolist())) == 1


def test_clusters_are_the_cheapest_cut() -> None:
    """Of all ways to part 8 clients in two, found by trying each, it is the one with the least normalized cut."""
    ways = [np.array((0, *rest)) for rest in itertools.product((0, 1), repeat=7) if any(rest)]
    for seed in range(10):
        weights = planted(0.8, seed, np.repeat([0, 1], 4), own=0.9)
        p = weights * (1 - np.eye(8))
        p /= p.sum(1, keepdims=True)
        w = (p + p.T) / 2

        def cut(labels: np.ndarray, w: np.ndarray = w) -> float:
            return sum(float(w[labels == c][:, labels != c].sum() / w[labels == c].sum()) for c in (0, 1))

        assert adjusted_rand_index(spectral_clusters(weights, 2), min(ways, key=cut)) == 1


def test_in_weights_without_groups_none_are_found() -> None:
    found = [adjusted_rand_index(spectral_clusters(planted(0.0, seed), 3), GROUPS) for seed in range(30)]
    assert abs(np.mean(found)) < 0.1
    weak = [adjusted_rand_index(spectral_clusters(planted(0.6, seed), 3), GROUPS) for seed in range(15)]
    assert 0.2 < np.mean(weak) < 1  # and a little is found where there is a little


def test_clusters_are_the_same_for_the_same_weights_and_any_weights_have_some() -> None:
    weights = planted(0.5)
    before = weights.copy()
    assert np.array_equal(spectral_clusters(weights, 3), spectral_clusters(weights, 3))
    assert np.array_equal(weights, before)
    for strange in (np.eye(6), np.full((6, 6), 1 / 6), np.zeros((6, 6))):
        assert spectral_clusters(strange, 3).shape == (6,)
    assert spectral_clusters(np.ones((1, 1)), 1).tolist() == [0]


def test_chance_is_what_most_guesses_stay_below() -> None:
    rng = np.random.default_rng(5)
    for groups, most in ((GROUPS, 0.985), (np.arange(30) % 3, 0.97)):  # the index of few clients takes few values
        level = chance_of(groups, groups)
        guesses = np.array([adjusted_rand_index(rng.permutation(groups), groups) for _ in range(4000)])
        assert 0.93 < (guesses <= level).mean() < most
        assert 0 < level < 0.5


def run(label: str = "pfedla", seed: int = 0, strength: float = 8.0) -> dict[str, Any]:
    """Measure weights whose second layer has groups, in the second of two rounds."""
    early = np.stack([planted(0, seed), planted(0, seed + 1)], 1)
    late = np.stack([planted(0, seed + 2), planted(strength, seed)], 1)
    found = measured(np.stack([early, late]), np.array([5, 10]), ["conv", "fc"], GROUPS)
    return {"label": label, "algorithm": "pfedla", "seed": seed, **found}


def test_what_is_measured_of_a_run() -> None:
    found = run()
    assert found["even"] == {"own": 1 / 12, "group": 3 / 12, "rest": 8 / 12}
    assert found["index"][-1][1] == 1
    assert found["index"][0][1] < 0.5
    assert found["rounds"] == [5, 10]
    assert found["shares"]["own"][-1] == [0.5, 0.5]
    conv, fc = found["pair"]
    assert 0.8 < conv < 1.25
    assert fc == pytest.approx(9, rel=0.2)  # 1 + strength
    assert all(0 < chance < 0.6 for chance in found["chance"])
    alone = measured(np.full((1, 2, 1, 2), 0.5), np.array([1]), ["fc"], np.array([0, 0]))
    assert alone["pair"] == [None]  # there is no other group
    apart = np.kron(np.eye(2), np.full((2, 2), 0.5))[None, :, None]  # groups that give each other nothing
    found = measured(apart, np.array([1]), ["fc"], np.array([0, 0, 1, 1]))
    assert 1e8 < found["pair"][0] < 1e10
    strangers = measured(apart, np.array([1]), ["fc"], np.array([0, 1, 0, 1]))
    assert 0 < strangers["pair"][0] < 1e-8
    made = [{"label": "x", **one} for one in (found, strangers)]
    assert overall(made)[0]["pair"] == pytest.approx((found["pair"][0] * strangers["pair"][0]) ** 0.5)


def test_the_table_has_means_over_runs() -> None:
    runs = [run(seed=seed) for seed in (0, 10, 20)] + [run("other", 30)]
    lines = overall(runs)
    assert [(line["label"], line["layer"], line["runs"]) for line in lines] == [
        ("pfedla", "conv", 3),
        ("pfedla", "fc", 3),
        ("other", "conv", 1),
        ("other", "fc", 1),
    ]
    index = [one["index"][-1][0] for one in runs[:3]]
    assert lines[0]["index"] == pytest.approx(np.mean(index))
    assert lines[0]["spread"] == pytest.approx(np.std(index, ddof=1))
    rows = [row.strip("| ").split(" | ") for row in groups_table(runs).splitlines()]
    assert {len(row) for row in rows[:-1]} == {10}
    assert rows[3][:4] == ["`pfedla`", "3", "fc", "0.500"]
    assert (rows[3][-3], rows[3][-1]) == ("1.00 ± 0.00", "3")
    assert rows[5][-3] == "1.00"
    above = sum(one["index"][-1][0] > one["chance"][0] for one in runs[:3])
    assert (rows[2][-1], lines[0]["above"]) == (str(above), above)
    assert rows[-1][0] == "even weights"
    other = {**run("third"), "even": {"own": 0.5, "group": 0.25, "rest": 0.25}}
    assert "even weights" not in groups_table([*runs, other])  # which are they?
    assert [float(row[6]) for row in rows[2:-1]] == [pytest.approx(line["pair"], abs=0.051) for line in lines]


def test_the_picture_says_what_the_table_does(tmp_path: Path) -> None:
    runs = [run(), run(seed=3)]
    with rc_context({"svg.fonttype": "none"}):
        draw_groups(tmp_path / "said.svg", runs)
    text = (tmp_path / "said.svg").read_text()
    said = re.findall(r"<text [^>]*>([^<]*)</text>", text)
    lines = overall(runs)
    assert "<image" in text  # how well groups are found, over the rounds
    for (place, line), t in itertools.product(enumerate(lines), (0, 1)):
        assert f"{np.mean([one['index'][t][place] for one in runs]):.2f}".replace("-0.00", "0.00") in said
        assert {line["layer"], f"chance {line['chance']:.2f}", f"{line['pair']:.2f} x"} <= set(said)
    assert {"pfedla", "5", "10", "the client itself", "others of its group", "other groups"} <= set(said)
    assert any("at most chance, which 95 % of guesses" in words for words in said)
    assert any("one of the group / one of another" in words for words in said)


def test_ratios_have_as_many_digits_as_they_deserve() -> None:
    said = {None: "-", 0.997: "1.00", 9.99: "9.99", 9.996: "10", 39.44: "39", 99.6: "100", 154.9: "150", 2852.9: "2900"}
    assert {pair: _ratio(pair) for pair in said} == said


def test_bars_of_the_picture_are_the_shares_of_weight_at_the_end() -> None:
    runs = [run(), run(seed=3)]
    axis = Figure().subplots()
    _draw_shares(axis, runs)
    bars = [bar for bar in axis.patches if isinstance(bar, Rectangle)]
    widths = np.array([bar.get_width() for bar in bars]).reshape(3, 2)
    starts = np.array([bar.get_x() for bar in bars]).reshape(3, 2)
    expected = np.mean([[one["shares"][part][-1] for part in ("own", "group", "rest")] for one in runs], axis=0)
    np.testing.assert_allclose(widths, expected)
    np.testing.assert_allclose(starts, np.cumsum(expected, 0) - expected, atol=1e-12)
    places = [bar.get_y() + bar.get_height() / 2 for bar in bars[:2]]
    named = dict(zip(axis.get_yticks(), (text.get_text() for text in axis.get_yticklabels()), strict=True))
    assert [named[place] for place in places] == ["conv", "fc"]
    assert axis.yaxis_inverted()  # the first layer is on top
    edges = [line.get_xdata()[0] for line in axis.lines]  # type: ignore[index]
    assert edges == pytest.approx([1 / 12, 4 / 12])


def test_cells_of_the_picture_are_what_is_found_above_chance_in_each_round() -> None:
    runs = [run(), run(seed=3)]
    axis = Figure().subplots()
    _draw_index(axis, runs)
    index = np.mean([one["index"] for one in runs], axis=0)  # (rounds, layers)
    chance = np.mean([one["chance"] for one in runs], axis=0)
    shown = np.asarray(axis.images[0].get_array())  # (layers, rounds)
    assert axis.yaxis_inverted()
    for layer, t in itertools.product((0, 1), (0, 1)):
        assert shown[layer, t] == pytest.approx(index[t, layer] if index[t, layer] > chance[layer] else 0)
    assert shown[1, 1] == 1
    assert shown[0].tolist() == [0, 0]
    assert [text.get_text() for text in axis.get_yticklabels()] == [f"chance {value:.2f}" for value in chance]


def test_chance_is_that_of_the_clusters_found_at_the_end() -> None:
    """With another number of groups, clusters of other sizes are found than at first."""
    groups = np.repeat([0, 1, 2, 3], 3)
    early, late = (
        planted(strength, 1, np.repeat(which, 3)) for strength, which in ((9, [0, 0, 0, 1]), (9, [0, 1, 2, 3]))
    )
    found = measured(np.stack([early, late])[:, :, None], np.array([5, 10]), ["fc"], groups)
    assert found["chance"] == [chance_of(spectral_clusters(late, 4), groups)]
    assert found["chance"] != [chance_of(spectral_clusters(early, 4), groups)]


def test_columns_of_the_picture_are_the_shares_of_weight_in_each_round() -> None:
    runs = [run(), run(seed=3)]
    axis = Figure().subplots()
    _draw_course(axis, runs)
    heights = np.array([-bar.get_height() for bar in axis.patches if isinstance(bar, Rectangle)]).reshape(2, 3, 2)
    for layer, (place, part), t in itertools.product((0, 1), enumerate(("own", "group", "rest")), (0, 1)):
        share = np.mean([one["shares"][part][t][layer] for one in runs])
        assert heights[layer, place, t] / heights[layer, :, t].sum() == pytest.approx(share, abs=1e-5)
    assert np.ptp(heights.sum(1)) < 1e-5  # all strips have one height


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw_groups(tmp_path / "one.png", [run()])
    draw_groups(tmp_path / "two.png", [run(), run(seed=3), run("other", strength=0.0)])
    one, two = (imread(tmp_path / f"{name}.png") for name in ("one", "two"))
    assert two.shape[0] > one.shape[0] > 200
    assert two.std() > 0.05
    long = run()
    long["rounds"], long["index"] = list(range(40)), long["index"] * 20
    long["shares"] = {part: values * 20 for part, values in long["shares"].items()}
    draw_groups(tmp_path / "long.png", [long])  # cells without numbers
    assert imread(tmp_path / "long.png").shape == one.shape
