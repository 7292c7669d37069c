"""Where do clients differ? What the weights of each layer say about hidden groups of clients, in numbers and a picture.

Of each layer: how much weight goes to the client itself, to the others of its group and to the other groups; and how
well the groups can be read off the weights alone, by spectral clustering, as the adjusted Rand index: 1 for the very
groups, 0 on average for any guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pfedla.randomness import numpy_stream

__all__ = [
    "PARTS",
    "adjusted_rand_index",
    "chance_of",
    "draw_groups",
    "embedded",
    "groups_table",
    "measured",
    "overall",
    "shares",
    "spectral_clusters",
]

RESTARTS = 10  # of k-means
STEPS = 100
ROUNDING = 1e-6  # of eigenvalues from -1 to 1, where weights are in single precision
GUESSES = 1000  # by which chance is told
TINY = 1e-9  # the least share of weight in a ratio
ALL = 0.99  # of its weight: who keeps so much for itself gives others hardly any
CELLS = 12  # of a picture's row that have room for numbers
PARTS = {"own": "the client itself", "group": "others of its group", "rest": "other groups"}
_INK, _FAINT = "#22303c", "#6b7a87"
_COLOURS = {"own": "#0072b2", "group": "#e69f00", "rest": "#bbbbbb"}  # of Okabe and Ito, and grey


def shares(alpha: np.ndarray, groups: np.ndarray) -> dict[str, np.ndarray]:
    """Return how much weight clients give to themselves, to others of their group and to other groups: `(..., L)`.

    `alpha` is `(..., clients, layers, clients)`; the three are means over the clients, and add up to 1.
    """
    same = groups[:, None] == groups[None]
    itself = np.eye(len(groups), dtype=bool)
    masks = {"own": itself, "group": same & ~itself, "rest": ~same}
    return {part: np.einsum("...ilj,ij->...l", alpha, mask) / len(groups) for part, mask in masks.items()}


def adjusted_rand_index(one: np.ndarray, other: np.ndarray) -> float:
    """Return how well two ways to group the same clients agree: 1 if they are the same, 0 on average by chance.

    (Σ_ij C(n_ij, 2) - e) / (mean of Σ_i C(a_i, 2) and Σ_j C(b_j, 2) - e), with e the product of these two sums over
    C(n, 2): Hubert & Arabie, "Comparing partitions", Journal of Classification 2, 1985.
    """
    return float(_indices(one[None], other)[0])


def _indices(many: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the adjusted Rand index of each of many groupings `(m, clients)` of clusters of the same sizes: `(m,)`."""
    one_hot = [(grouping[..., None] == np.arange(grouping.max() + 1)).astype(float) for grouping in (many, other)]
    table = one_hot[0].swapaxes(-1, -2) @ one_hot[1]  # (m, clusters, groups)

    def pairs(counts: np.ndarray) -> np.ndarray:
        found: np.ndarray = (counts * (counts - 1) / 2).sum(-1)
        return found

    both, n = pairs(table).sum(-1), many.shape[-1]
    rows, columns = pairs(table[0].sum(1)), pairs(table[0].sum(0))
    expected, most = rows * columns / max(n * (n - 1) / 2, 1), (rows + columns) / 2
    return np.ones_like(both) if most == expected else (both - expected) / (most - expected)


def spectral_clusters(weights: np.ndarray, k: int, seed: int = 0) -> np.ndarray:
    """Return `k` clusters of clients read off one layer's weights `(clients, clients)`: `(clients,)`.

    Ng, Jordan & Weiss, "On spectral clustering", NeurIPS 2001: k-means on what `embedded` returns.
    """
    return _k_means(embedded(weights, k), k, seed)


def embedded(weights: np.ndarray, k: int) -> np.ndarray:
    """Return clients as points, rows of the `k` leading eigenvectors of D^-1/2 W D^-1/2 scaled to length 1.

    W is what clients think of each other, (P + P')/2, where P are the weights of the others,
    of every client scaled to sum up to 1: what it thinks of itself says nothing about groups. Eigenvectors whose
    eigenvalue is that of one left out are left out, too, for rounding alone would choose among them: even weights show
    one cluster.
    """
    others = weights.astype(np.float64)
    np.fill_diagonal(others, 0)
    total = others.sum(1, keepdims=True)
    even = (1 - np.eye(len(others))) / max(len(others) - 1, 1)
    others = np.where(total > 0, others / np.where(total > 0, total, 1), even)
    affinity = (others + others.T) / 2
    scale = np.sqrt(np.maximum(affinity.sum(1), np.finfo(float).tiny))
    values, vectors = np.linalg.eigh(affinity / scale[:, None] / scale[None])
    told_apart = values[-k:] > (values[-k - 1] + ROUNDING if len(values) > k else -np.inf)
    points = vectors[:, -k:][:, told_apart]
    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), np.finfo(float).tiny)
    return points


def _k_means(points: np.ndarray, k: int, seed: int) -> np.ndarray:
    """Return the best of several k-means, each begun with points far from one another (k-means++)."""
    best, found = np.inf, np.zeros(len(points), np.int64)
    for restart in range(RESTARTS):
        rng = numpy_stream(seed, "k-means", restart)
        centres = points[[rng.integers(len(points))]]
        while len(centres) < k:
            far = ((points[:, None] - centres[None]) ** 2).sum(-1).min(1)
            chance = far / far.sum() if far.sum() > 0 else None
            centres = np.vstack([centres, points[rng.choice(len(points), p=chance)]])
        for _ in range(STEPS):
            distance = ((points[:, None] - centres[None]) ** 2).sum(-1)  # (clients, k)
            label = distance.argmin(1)
            moved = np.stack([points[label == c].mean(0) if (label == c).any() else centres[c] for c in range(k)])
            if np.array_equal(moved, centres):
                break
            centres = moved
        if (cost := float(distance.min(1).sum())) < best:
            best, found = cost, label
    return found


def chance_of(found: np.ndarray, groups: np.ndarray, seed: int = 0) -> float:
    """Return the adjusted Rand index that 95 % of guesses do not exceed: clusters of these sizes, dealt at random."""
    guesses = numpy_stream(seed, "guesses").permuted(np.tile(found, (GUESSES, 1)), axis=1)
    return float(np.quantile(_indices(guesses, groups), 0.95))


def measured(alpha: np.ndarray, rounds: np.ndarray, layers: Sequence[str], groups: np.ndarray) -> dict[str, Any]:
    """Return all that is measured of a run, as JSON holds it; `alpha` is `(rounds, clients, layers, clients)`.

    `pair` is the weight of one other client of the same group over that of one of another group, None if there is none.
    """
    k, n = len(np.unique(groups)), len(groups)
    parts = shares(alpha, groups)  # (rounds, L)
    clusters = [[spectral_clusters(now[:, place], k) for place in range(len(layers))] for now in alpha]
    index = np.array([[adjusted_rand_index(found, groups) for found in now] for now in clusters])  # (rounds, L)
    same = (groups[:, None] == groups[None]).sum(1) - 1.0
    near, far = same.mean(), (n - 1 - same).mean()
    final = {part: values[-1] for part, values in parts.items()}
    pair = [None] * len(layers)
    if near and far:
        within, across = (np.maximum(final[part], TINY) / others for part, others in (("group", near), ("rest", far)))
        pair = (within / across).tolist()
    return {
        "groups": groups.tolist(),
        "layers": list(layers),
        "even": {"own": 1 / n, "group": near / n, "rest": far / n},
        "rounds": rounds.tolist(),
        "shares": {part: _plain(values) for part, values in parts.items()},
        "index": _plain(index),
        "pair": pair,
        "chance": [chance_of(found, groups) for found in clusters[-1]],
    }


def _plain(values: np.ndarray) -> list[list[float]]:
    return [[round(float(value), 6) for value in row] for row in values]


def overall(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each method and layer, with means over its runs: all that the table shows."""
    lines: list[dict[str, Any]] = []
    for label in dict.fromkeys(run["label"] for run in runs):
        mine = [run for run in runs if run["label"] == label]
        for place, layer in enumerate(mine[0]["layers"]):
            last = {part: [run["shares"][part][-1][place] for run in mine] for part in PARTS}
            index = [run["index"][-1][place] for run in mine]
            chance = [run["chance"][place] for run in mine]
            pairs = [run["pair"][place] for run in mine]
            lines.append(
                {
                    "label": label,
                    "runs": len(mine),
                    "layer": layer,
                    **{part: float(np.mean(values)) for part, values in last.items()},
                    "pair": None if None in pairs else float(np.exp(np.mean(np.log(pairs)))),
                    "index": float(np.mean(index)),
                    "spread": float(np.std(index, ddof=1)) if len(index) > 1 else None,
                    "chance": float(np.mean(chance)),
                    "above": sum(found > most for found, most in zip(index, chance, strict=True)),
                }
            )
    return lines


def groups_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the measures at the end of the runs as a Markdown table: a row per method and layer."""
    even = runs[0]["even"]
    heads = ["weights of", "runs", "layer", *(f"on {words}" for words in PARTS.values())]
    heads += [
        "one of the group / one of another",
        "groups found (ARI)",
        "chance (95th percentile)",
        "runs above chance",
    ]
    rows = [heads, ["---"] * len(heads)]
    for line in overall(runs):
        index = f"{line['index']:.2f}" + (f" ± {line['spread']:.2f}" if line["spread"] is not None else "")
        cells = [f"`{line['label']}`", str(line["runs"]), line["layer"], *(f"{line[part]:.3f}" for part in PARTS)]
        rows.append([*cells, _ratio(line["pair"]), index, f"{line['chance']:.2f}", str(line["above"])])
    if all(run["even"] == even for run in runs):
        rows.append(["even weights", "", "", *(f"{even[part]:.3f}" for part in PARTS), "1.00", "", "", ""])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _ratio(pair: float | None) -> str:
    """Return a ratio as text: to the hundredth where it may be close to 1, large ones to two digits."""
    if pair is None:
        return "-"
    return f"{pair:.2f}" if pair < 9.995 else f"{pair:.0f}" if pair < 99.5 else f"{float(f'{pair:.2g}'):.0f}"


def draw_groups(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw for each method and layer shares of weight, at the end and over rounds, and how well groups are found."""
    labels = list(dict.fromkeys(run["label"] for run in runs))
    tall = max(1.7, 0.24 * max(len(run["layers"]) for run in runs) + 0.8)
    figure = Figure(figsize=(10.0, tall * len(labels) + 0.7), dpi=160, layout="constrained")
    title = "Where clients differ: weights by hidden group, layer by layer"
    figure.suptitle(title, color=_INK, fontsize=11, weight="bold", x=0.01, ha="left")
    axes = figure.subplots(len(labels), 3, squeeze=False, width_ratios=(1.0, 0.8, 1.1))
    for (left, middle, right), label in zip(axes, labels, strict=True):
        mine = [run for run in runs if run["label"] == label]
        left.set_title(label, fontsize=9, color=_INK, loc="left").set_in_layout(False)  # it may reach over the next
        _draw_shares(left, mine)
        _draw_course(middle, mine)
        _draw_index(right, mine)
        for axis in (left, middle, right):
            axis.tick_params(length=0, labelsize=8, colors=_FAINT)
        left.tick_params(axis="y", colors=_INK, labelsize=8.5)
    for axis in axes[:-1].flat:
        axis.set_xlabel("")  # said below the last
    handles, words = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, words, fontsize=8, ncols=3, frameon=False, loc="outside upper right")
    figure.savefig(path)


def _draw_shares(axis: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw a bar for each layer, and where it would be divided if all weights were even."""
    layers, even = runs[0]["layers"], runs[0]["even"]
    places, start = np.arange(len(layers)), np.zeros(len(layers))
    for part, words in PARTS.items():
        width = np.mean([run["shares"][part][-1] for run in runs], axis=0)
        axis.barh(places, width, left=start, color=_COLOURS[part], height=0.72, label=words)
        start += width
    for edge in (even["own"], even["own"] + even["group"]):
        axis.axvline(edge, color=_INK, linewidth=0.9, linestyle=":")
    for place, line in enumerate(overall(runs)):
        shade = _INK if line["own"] < ALL else _FAINT  # a ratio of what is hardly given
        axis.text(1.01, place, f"{_ratio(line['pair'])} x", va="center", fontsize=8, color=shade)
    axis.set_yticks(places, layers)
    axis.set_ylim(len(layers) - 0.5, -0.5)
    axis.set_xlim(0, 1)
    words = "share of weight at the end (dotted: even)\nx: one of the group / one of another\n"
    words += f"(pale: own weight of {ALL:g} and more)"
    axis.set_xlabel(words, fontsize=8, color=_FAINT)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_course(axis: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw a strip for each layer, beside its bar, and in it a column for each round: the shares of weight then."""
    layers, rounds, height = runs[0]["layers"], runs[0]["rounds"], 0.84
    parts = {part: np.mean([run["shares"][part] for run in runs], axis=0) for part in PARTS}  # (rounds, L)
    for place in range(len(layers)):
        foot = np.full(len(rounds), place + height / 2)  # up is down: rows are counted from above
        for part in PARTS:
            tall = -height * parts[part][:, place]
            axis.bar(np.arange(len(rounds)), tall, bottom=foot, color=_COLOURS[part], width=0.9)
            foot += tall
    _mark_rounds(axis, rounds)
    axis.set_yticks([])
    axis.set_ylim(len(layers) - 0.5, -0.5)
    axis.set_xlabel("round: shares of weight\nfrom below in the same order", fontsize=8, color=_FAINT)
    axis.spines[:].set_visible(False)


def _mark_rounds(axis: Axes, rounds: Sequence[int]) -> None:
    every = -(-len(rounds) // CELLS)
    axis.set_xticks(np.arange(len(rounds))[::every], [str(t) for t in rounds[::every]])


def _draw_index(axis: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw a row for each layer, beside its bar, and a cell for each round: the darker, the better groups are found.

    What is not above chance is white.
    """
    rounds = runs[0]["rounds"]
    index = np.mean([run["index"] for run in runs], axis=0).T  # (L, rounds)
    chance = np.mean([run["chance"] for run in runs], axis=0)  # (L,)
    axis.imshow(np.where(index > chance[:, None], index, 0), cmap="Blues", vmin=0, vmax=1.25, aspect="auto")
    for (layer, place), value in np.ndenumerate(index) if len(rounds) <= CELLS else ():
        shade = "white" if value > 0.75 else _INK
        text = f"{value:.2f}".replace("-0.00", "0.00")
        axis.text(place, layer, text, ha="center", va="center", fontsize=7.5, color=shade)
    _mark_rounds(axis, rounds)
    axis.yaxis.tick_right()
    axis.set_yticks(np.arange(len(chance)), [f"chance {value:.2f}" for value in chance])
    words = "round: groups found (ARI)\nwhite: at most chance, which 95 % of guesses\nat the end do not exceed"
    axis.set_xlabel(words, fontsize=8, color=_FAINT)
    axis.spines[:].set_visible(False)
