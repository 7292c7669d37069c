"""What pages say of measurements, outside of the tables that a command prints, is what lies in results/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import Any

import numpy as np
import pytest

from experiments import pages, samples
from pfedla.algorithms import ALGORITHMS
from pfedla.paper.figures import by_chance, falls_with_distance, order_holds, periods, roles_of
from pfedla.paper.grid import METHODS
from pfedla.paper.printed import TABLE1, TABLE2, Place
from pfedla.report.groups import overall

ROOT = Path(__file__).parent.parent
COLUMNS = ("cifar10-non-iid-1", "cifar10-non-iid-2", "fashion-mnist-non-iid-1", "fashion-mnist-non-iid-2")
EARLIER = ("cifar10-non-iid-1", "cifar10-statistics-own", "peers-100", "scale", "step-*")


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "results" / f"{name}.json").read_text())
    return found


def figures(name: str, label: str, key: str, seeds: int) -> list[float]:
    found = {row["seed"]: row[key] for row in rows(name) if row["label"] == label and row["seed"] < seeds}
    return [found[seed] for seed in sorted(found)]


def methods_of(name: str) -> set[str]:
    return {row["label"] for row in rows(name)}


def percent(name: str, label: str, key: str = "accuracy_mean", seeds: int = 99) -> list[float]:
    """Return a figure of a method by seed, in %."""
    return [100 * value for value in figures(name, label, key, seeds)]


def mean(name: str, label: str, key: str = "accuracy_mean", seeds: int = 99) -> float:
    return 100 * fmean(figures(name, label, key, seeds))  # rounded as in tables


def gap(name: str, label: str, against: str, key: str = "accuracy_mean") -> float:
    """Return by how much one method is above another with seed 0."""
    return mean(name, label, key, 1) - mean(name, against, key, 1)


def says(page: str, text: str) -> None:
    shown = re.sub(r"\s+", " ", (ROOT / page).read_text())
    assert text in shown, f"{page} does not say: {text}"


def tables(page: Path) -> list[str]:
    """Return the tables that no command prints."""
    text = re.sub(r"<!-- (?:pfedla|python|table:?) .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
    return re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "others"),
    [
        ("README.md", ["| simulator |", "| | pfedla | Flower |"]),  # of benchmarks; of versions
        ("docs/paper.md", ["| CIFAR-10, 10 clients, 60 rounds,"]),  # see below
        ("docs/algorithms.md", ["| name | paper |", "| method | source |"]),  # of settings
    ],
)
def test_tables_of_measurements_are_printed_by_a_command(page: str, others: list[str]) -> None:
    found = [table for table in tables(ROOT / page) if re.search(r"\d\.\d", table)]
    assert len(found) == len(others)
    for table, start in zip(found, others, strict=True):
        assert table.startswith(start)


def test_the_table_of_running_statistics() -> None:
    (table,) = (table for table in tables(ROOT / "docs" / "paper.md") if "| seed 0 |" in table)
    measured = [
        percent("cifar10-statistics-own", "pfedla,statistics=own"),
        percent("cifar10-non-iid-1", "pfedla"),
        percent("cifar10-statistics-recomputed", "pfedla,hyper_lr=0.001"),
    ]
    shown = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in table.splitlines()[2:]]
    assert shown == [[f"{value:.2f}" for value in (*found, fmean(found))] for found in measured]


def test_what_the_readme_says_of_the_demonstration() -> None:
    above = [a - b for a, b in zip(percent("demo", "pfedla"), percent("demo", "local"), strict=True)]
    says("README.md", f"pFedLA is above Local by {min(above):.2f} to {max(above):.2f} points in each of the five seeds")
    says("README.md", f"by each client it reaches {mean('demo', 'fedavg', 'accuracy_after_training'):.2f}")
    says("README.md", f"lifts FedAvg's one model to {mean('demo', 'fedavg', 'accuracy_class_prior'):.2f}")


def test_what_the_pages_say_of_the_class_prior() -> None:
    says(
        "README.md", "told each client's class frequencies, is above pFedLA's models as they are, and within a point of"
    )
    name, prior = "seeds-cifar10-non-iid-1", "accuracy_class_prior"
    local, fedavg, pfedla = (mean(name, label) for label in ("local", "fedavg", "pfedla"))
    assert fedavg < local < pfedla < mean(name, "fedavg", prior)
    assert abs(mean(name, "fedavg", prior) - mean(name, "pfedla", prior)) < 1


def test_what_the_readme_says_of_pfedla_among_all_methods() -> None:
    name = "seeds-cifar10-non-iid-1"
    means = {label: mean(name, label) for label in methods_of(name)}
    order = sorted(means, key=lambda label: -means[label])
    text = (
        f"of the {len(order)} rows measured in this column, `pfedla` is {order.index('pfedla') + 1}th and `{order[0]}`"
    )
    says("README.md", text + f", FedAvg trained on locally, first ({means[order[0]]:.2f}).")
    lead = [a - b for a, b in zip(percent(name, "pfedla"), percent(name, "local"), strict=True)]
    assert 0 < fmean(lead) < stdev(lead)


def above(name: str, method: str, other: str, key: str = "accuracy_mean") -> str:
    """Return by how much a method is above another or below it, over three seeds."""
    found = [a - b for a, b in zip(*(percent(name, m, key) for m in (method, other)), strict=True)]
    assert len(found) == 3
    return f"{abs(fmean(found)):.1f} ± {stdev(found):.1f}"


def test_what_the_page_says_of_fedamp_beside_fedavg_trained_locally() -> None:
    below = []
    for column in COLUMNS:
        one, other = (
            percent(f"seeds-{column}", "fedamp"),
            percent(f"seeds-{column}", "fedavg", "accuracy_after_training"),
        )
        found = [b - a for a, b in zip(one, other, strict=True)]
        assert fmean(found) > 0
        below.append(f"{fmean(found):.1f} ± {stdev(found):.1f}")
    says("docs/algorithms.md", "below it by {} and {} on CIFAR-10, and by {} and {} on FashionMNIST.".format(*below))


def near(name: str, *, of_the_first: bool = False) -> tuple[str, set[str]]:
    """Return the first, and who is within a standard deviation of it, the larger of two or the first's own."""
    labels = {row["label"] for row in rows(name) if row["seed"] == 2}
    means = {label: mean(name, label) for label in labels}
    spread = {label: stdev(percent(name, label)) for label in labels}
    first = max(means, key=means.__getitem__)
    room = {m: spread[first] if of_the_first else max(spread[first], spread[m]) for m in labels}
    return first, {m for m in means if means[first] - means[m] <= room[m]}


def test_no_method_is_nearer_to_the_first_than_pfedla_x() -> None:
    """On average over the columns; and none is near it in all of them."""
    files = [f"seeds-{column}" for column in COLUMNS]
    nearby = [near(name)[1] for name in files]
    assert not set.intersection(*nearby)
    assert ["pfedla-x" in some for some in nearby] == [True, True, True, False]
    assert not any(near(name)[0] == "pfedla-x" for name in files)
    behind = {
        label: fmean(mean(name, near(name)[0]) - mean(name, label) for name in files)
        for label in set.intersection(*map(methods_of, files))
    }
    first, second = sorted(behind.items(), key=lambda pair: pair[1])[:2]
    assert (first[0], second[0]) == ("pfedla-x", "fedala")
    assert [name for name, some in zip(files, nearby, strict=True) if "fedala" not in some] == [files[1]]
    says("README.md", f"it is {first[1]:.1f} points below the first on average over the four columns, the least")
    says("docs/pfedla-x.md", f"it is {first[1]:.1f} points below the first on average, the least of all methods")
    says("docs/pfedla-x.md", f"(FedALA, the next, is {second[1]:.1f} below)")
    said = []
    for name, best in ((files[2], "local"), (files[3], "pfedhn")):
        ours, theirs = percent(name, "pfedla-x"), percent(name, best)
        apart = [b - a for a, b in zip(ours, theirs, strict=True)]
        assert near(name)[0] == best
        assert fmean(apart) > max(stdev(theirs), stdev(apart))
        said += [fmean(apart), stdev(theirs), stdev(apart), stdev(ours)]
    text = "it is {:.2f} below Local on non-IID_1, with a deviation of {:.2f} of Local's seeds and {:.2f} of the"
    says("docs/pfedla-x.md", text.format(*said))
    text = "and {:.2f} below pFedHN on non-IID_2 ({:.2f} and {:.2f}; its own deviation is {:.2f})"
    says("docs/pfedla-x.md", text.format(*said[4:]))
    for name in files[:2]:
        behind_by = mean(name, near(name)[0]) - mean(name, "pfedla-x")
        assert behind_by < stdev(percent(name, near(name)[0]))


def test_the_page_names_the_commits_of_the_method_table() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "algorithms.md").read_text())
    said = [set(re.findall(r"[0-9a-f]{7}", part)) for part in re.findall(r"are of one commit, (.*?), as \[the", text)]
    found = [
        {row["commit"][:7] for column in COLUMNS if name in column for row in rows(f"seeds-{column}")}
        for name in ("fashion-mnist", "cifar10")
    ]
    assert said == found


def test_the_method_table_has_all_methods_and_seeds() -> None:
    """FedBN has no norms to keep on FashionMNIST."""
    labels = {name for name in ALGORITHMS if not name.endswith("-peers")} - {"clustered"}
    labels |= {"pfedla,hyper_optimizer=sgd,hyper_lr=1.0", "fedrep,body_epochs=5"}
    for column in COLUMNS:
        expected = labels if "cifar" in column else labels - {"fedbn"}
        found = [(row["label"], row["seed"]) for row in rows(f"seeds-{column}")]
        assert sorted(found) == sorted((label, seed) for label in expected for seed in range(3))


def test_what_the_page_says_of_cifar_10_over_three_seeds() -> None:
    page, prior, step = "docs/algorithms.md", "accuracy_class_prior", "pfedla,hyper_optimizer=sgd,hyper_lr=1.0"
    names = [f"seeds-cifar10-non-iid-{split}" for split in (1, 2)]
    told = [mean(name, "fedavg", prior) for name in names]
    says(page, "frequencies, reaches {:.1f} and {:.1f}. Told the same".format(*told))
    complete = [{row["label"] for row in rows(name) if row["seed"] == 2} for name in names]
    for name, labels, most in zip(names, complete, told, strict=True):
        assert all(mean(name, label, prior) < most + 1 for label in labels)

    def both(method: str, other: str) -> tuple[str, ...]:
        return tuple(above(name, method, other) for name in names)

    says(page, "**pFedLA** is {} and {} above Local".format(*both("pfedla", "local")))
    says(page, "it is {} better on non-IID_1 and {} worse on non-IID_2".format(*both(step, "pfedla")))
    says(page, "it is {} and {} below pFedLA.".format(*both("heurpfedla", "pfedla")))
    says(page, "**pFedLA-X** is {} and {} above pFedLA.".format(*both("pfedla-x", "pfedla")))
    says(page, f"it is {above(names[0], 'pfedla-x', 'fedavg-ft')} below FedAvg with fine-tuning, which is first")
    assert 0 < mean(names[1], "ditto") - mean(names[1], "pfedla-x") < 0.05
    half = "fedrep,body_epochs=5"
    assert near(names[0]) == ("fedavg-ft", {"fedavg-ft", "pfedla-x", "fedamp", "ditto", step, "pfedme", half, "fedala"})
    assert near(names[1]) == ("ditto", {"ditto", "pfedla-x", "fedper", "fedavg-ft", half})
    says(
        page,
        "**FedFomo** is {} below Local on non-IID_1 and {} above it on non-IID_2.".format(*both("fedfomo", "local")),
    )
    says(page, "**FedRep** gains {} and {} by half".format(*both(half, "fedrep")))
    says(page, "(μ = 0.01), and FedAvg are {} and {} apart".format(*both("fedprox", "fedavg")))
    says(page, "SCAFFOLD is {} above FedAvg on non-IID_1 and {} below".format(*both("scaffold", "fedavg")))
    says(page, "**APFL** is {} and {} above Local".format(*both("apfl", "local")))
    says(page, "**LG-FedAvg** {} and {}. **Similarity**".format(*both("lg-fedavg", "local")))
    says(
        page, f"level with Local on non-IID_1 and {above(names[1], 'similarity-layer', 'local')} above it on non-IID_2."
    )
    for name, label in ((names[0], "similarity-model"), (names[1], "similarity-model"), (names[0], "similarity-layer")):
        assert abs(mean(name, label) - mean(name, "local")) < 0.1
    for text, label in (
        ("Trained locally, FedAvg's is at {:.1f} on CIFAR-10", "fedavg"),
        ("Trained locally it is at {:.1f} on CIFAR-10, non-IID_1, like FedAvg's", "fedbn"),
    ):
        says(page, text.format(mean(names[0], label, "accuracy_after_training")))
    says(page, "gradients, is {} and {} above Local, and".format(*both("pfedme", "local")))
    says(page, "and {} and {} below pFedLA-X.".format(*both("pfedme", "pfedla-x")))


def test_what_the_page_says_of_fashion_mnist_over_three_seeds() -> None:
    page, prior, step = "docs/algorithms.md", "accuracy_class_prior", "pfedla,hyper_optimizer=sgd,hyper_lr=1.0"
    names = {split: f"seeds-fashion-mnist-non-iid-{split}" for split in (1, 2)}
    labels = {split: {row["label"] for row in rows(name)} for split, name in names.items()}
    assert labels[1] == labels[2]

    def apart(split: int, method: str, other: str, key: str = "accuracy_mean") -> str:
        return above(names[split], method, other, key)

    assert near(names[1]) == (
        "local",
        {"apfl", "fedala", "fedfomo", "lg-fedavg", "local", "pfedla-x", "similarity-layer", "similarity-model"},
    )
    assert near(names[2]) == ("pfedhn", {"fedala", "pfedhn"})
    missed = mean(names[2], "pfedhn") - mean(names[2], "pfedla-x") - stdev(percent(names[2], "pfedla-x"))
    says(page, f"and pFedLA-X {missed:.1f} points further below than that")
    assert stdev(percent(names[2], "pfedla-x")) > stdev(percent(names[2], "pfedhn"))
    assert {m for m in labels[2] if mean(names[2], m) < mean(names[2], "local")} == {"fedrep", "per-fedavg"}
    says(page, f"pFedLA is {apart(1, 'pfedla', 'local')} below Local, with the printed step {apart(1, step, 'local')}")
    says(page, f"HeurpFedLA {apart(1, 'heurpfedla', 'local')}.")
    says(page, f"pFedLA is {apart(2, 'pfedla', 'local')} above Local and {apart(2, 'pfedla', 'fedavg')} below FedAvg")
    says(
        page, f"the printed step is {apart(2, step, 'pfedla')} above it, HeurpFedLA {apart(2, 'heurpfedla', 'pfedla')}"
    )
    told = {split: {m: mean(name, m, prior) for m in labels[split]} for split, name in names.items()}
    says(page, f"reaches {told[1]['fedavg']:.1f} and {told[2]['fedavg']:.1f}.")
    says(
        page,
        f"{apart(1, 'fedavg', 'pfedla', prior)} and {apart(2, 'fedavg', 'pfedla', prior)} above pFedLA, told the same",
    )
    assert [{m for m in told[split] if told[split][m] > told[split]["fedavg"] + 1} for split in (1, 2)] == [
        {"scaffold"},
        {"pfedhn"},
    ]
    says(
        page, f"only SCAFFOLD on non-IID_1 ({told[1]['scaffold']:.1f}, a common model above training alone) and pFedHN"
    )
    assert told[1]["scaffold"] > told[1]["local"]
    says(page, f"{apart(1, 'pfedla-x', 'local')} below Local, and {apart(2, 'pfedla-x', 'pfedhn')} below pFedHN")
    says(page, f"is {apart(1, 'pfedme', 'local')} below Local on non-IID_1 and {apart(2, 'pfedme', 'local')} above it")
    for split in (1, 2):
        says(page, f"from {mean(names[split], 'fedrep'):.1f} to {mean(names[split], 'fedrep,body_epochs=5'):.1f}")


def test_what_the_page_says_of_weights_by_group() -> None:
    page = "docs/where-clients-differ.md"
    for shift, label, text in (
        ("labels", "pfedla,", "pFedLA: 1.0, 1.6, 19, 61 and 220 if labels differ"),
        ("inputs", "pfedla,", "and 2.0, 9.7, 49, 3.9 and 2.0 if inputs do"),
        ("labels", "pfedla-x`", "with pFedLA-X 1.0, 1.5, 1900, 28 and 150"),
        ("inputs", "pfedla-x`", "and 1.8, 5.7, 2500, 2.0 and 1.4."),
    ):
        says(page, text)
        table = (ROOT / page).read_text().splitlines()
        found = [line.split("|")[7] for line in table if line.startswith(f"| `where-fashion-mnist-{shift}, {label}")]
        shown = re.search(r"[\d., ]+ and \d+(?:\.\d)?", text)
        assert shown
        for ratio, said in zip(found, re.findall(r"\d+(?:\.\d)?", shown[0]), strict=True):
            assert f"{float(ratio):.{1 if '.' in said else 0}f}" == said


def test_what_the_pages_say_of_local() -> None:
    found = percent("cifar10-non-iid-1", "local")
    says("docs/paper.md", f"{fmean(found):.2f} ± {stdev(found):.2f} over three seeds with 500")
    for column, text in (
        ("fashion-mnist-non-iid-1", "On FashionMNIST, non-IID_1, it is {:.2f} ± {:.2f} over three seeds"),
        ("fashion-mnist-non-iid-2", "non-IID_2 {:.2f} ± {:.2f} (65.60"),
        ("cifar10-non-iid-2", "on CIFAR-10, non-IID_2, {:.2f} ± {:.2f} (39.79"),
    ):
        found = percent(f"seeds-{column}", "local")
        says("docs/paper.md", text.format(fmean(found), stdev(found)))


def test_what_the_pages_say_of_the_hypernetworks_step() -> None:
    names = sorted(path.stem for path in (ROOT / "results").glob("hyper-step-*.json"))
    steps = [
        f"pfedla,hyper_optimizer={step}" for step in ("adam,hyper_lr=0.0003", "adam,hyper_lr=0.001", "sgd,hyper_lr=1.0")
    ]
    small, large, printed = (fmean(mean(name, step) for name in names) for step in steps)
    text = (
        f"best mean, {small - large:.1f} points ahead of Adam with 0.001 and {small - printed:.1f} ahead of the printed"
    )
    says("docs/paper.md", text)
    small, large, printed = (fmean(mean(name, step) for name in names if "emnist" not in name) for step in steps)
    text = f"Adam with 0.001 is {large - small:.1f} ahead of 0.0003, which is {small - printed:.1f} ahead of"
    says("docs/paper.md", text)
    gains = []
    for name in ("emnist-letters-dirichlet", "groups"):
        one, other = (
            percent(f"confirmed-{name}", label) for label in ("pfedla", "pfedla,hyper_optimizer=sgd,hyper_lr=1.0")
        )
        apart = [a - b for a, b in zip(one, other, strict=True)]
        gains.append(f"{fmean(apart):.1f} ± {stdev(apart):.1f}")
    says("docs/paper.md", "The default is {} and {} points above the printed step there".format(*gains))
    gaps = {column: above(f"seeds-{column}", "pfedla", steps[2]) for column in COLUMNS}
    ahead = {column: mean(f"seeds-{column}", "pfedla") > mean(f"seeds-{column}", steps[2]) for column in COLUMNS}
    assert [column for column in COLUMNS if ahead[column]] == ["cifar10-non-iid-2"]
    text = (
        "{} above it on CIFAR-10, non-IID_2, and below it in the other three: by {} on CIFAR-10, non-IID_1, and by {}"
    )
    order = ("cifar10-non-iid-2", "cifar10-non-iid-1", "fashion-mnist-non-iid-1", "fashion-mnist-non-iid-2")
    says("docs/paper.md", (text + " and {} on FashionMNIST").format(*(gaps[column] for column in order)))
    found = [
        percent("step-fashion-mnist-non-iid-2", label)
        for label in (*(f"pfedla,hyper_lr={step}" for step in ("0.001", "0.0003", "0.0001")), "fedavg", "local")
    ]
    text = "There pFedLA is at {} over three seeds, with 0.0003 at {} and with 0.0001 at {}, where FedAvg is at {}"
    says(
        "docs/paper.md",
        (text + " and Local at {}").format(*(f"{fmean(some):.1f} ± {stdev(some):.1f}" for some in found)),
    )
    local = mean("step-fashion-mnist", "local")
    moving = [row["label"] for row in rows("step-fashion-mnist") if row["label"].startswith("pfedla")]
    moving = [label for label in moving if not label.endswith(("=0.005", "=0.1"))]
    costs = [local - mean("step-fashion-mnist", label) for label in moving]
    says("docs/paper.md", f"cost {min(costs):.1f} to {max(costs):.1f} points against Local where α moved")
    later = [above("seeds-fashion-mnist-non-iid-1", "local", label) for label in ("pfedla", steps[2])]
    says("docs/paper.md", "costs [{}, and {} with the printed step]".format(*later))


def test_what_the_pages_say_of_retained_layers() -> None:
    name, labels = "retain-cifar10-non-iid-1", ("heurpfedla", "heurpfedla,retain=2", "heurpfedla,retain=3")
    saved = [100 - 100 * mean(name, label, "bytes_down") / mean(name, "pfedla", "bytes_down") for label in labels]
    lost = [gap(name, "pfedla", label) for label in labels]
    text = "The download shrinks by {:.0f}, {:.0f} and {:.0f} %; accuracy falls by {:.1f}, {:.1f} and {:.1f} points"
    says("docs/paper.md", text.format(*saved, *lost))


def test_what_the_page_says_of_bytes_with_one_layer_retained() -> None:
    means = []
    for step in ("adam,hyper_lr=0.0003", "sgd,hyper_lr=1.0"):
        found = [run for run in rows("paper/cifar10-10-non-iid-1") if run["label"].endswith(f"={step},retain=1")]
        assert len(found) == 3
        means.append(100 * fmean(run["bytes_down"] / run["bytes_up"] for run in found))
    text = f"with k = 1 {means[0]:.0f} % of the bytes still travel down, where it is {means[1]:.0f} % with the printed"
    says("docs/paper.md", text)


def test_what_the_page_says_of_table_3() -> None:
    name, step = "paper/cifar10-10-non-iid-1", "heurpfedla,hyper_optimizer=sgd,hyper_lr=1.0,retain={}"
    labels, printed = [step.format(k) for k in (1, 2, 3)], STEPS["pFedLA"]
    saved = [100 - 100 * mean(name, label, "bytes_down") / mean(name, printed, "bytes_down") for label in labels]
    assert all(max(apart_by_seed(name, label, printed)) < 0 for label in labels)
    lost = [spread(apart_by_seed(name, label, printed)) for label in labels]
    says("docs/paper.md", "The download shrinks by {:.0f}, {:.0f} and {:.0f} % (in the paper".format(*saved))
    says("docs/paper.md", "accuracy falls by {}, {} and {} points (1.4, 1.5".format(*lost))
    kept = [[row for row in rows(name) if row["label"] == label] for label in labels]
    changes = [100 * fmean(run["retained_changes"] for run in some) for some in kept]
    says("docs/paper.md", f"in {min(changes):.0f} to {max(changes):.0f} % of the downloads")
    often = [
        sorted(zip(np.mean([run["retained"] for run in some], 0), some[0]["layers"], strict=True), reverse=True)
        for some in kept
    ]
    assert [[layer for _, layer in some[: k + 1]] for k, some in enumerate(often)] == [
        ["fc1"],
        ["fc1", "fc3"],
        ["fc1", "conv2", "fc3"],
    ]
    said = [100 * share for share, _ in (often[0][0], often[1][1], often[1][2], often[2][1])]
    text = "with k = 1 in {:.0f} % of the downloads), but with k = 2 `fc3` ({:.0f} %) or `{}` ({:.0f} %) beside it, and"
    says("docs/paper.md", text.format(*said[:2], often[1][2][1], said[2]))
    says("docs/paper.md", f"`conv2` everywhere only with k = 3 ({said[3]:.0f} %)")


def test_what_the_pages_say_of_pfedla_x_in_the_papers_columns() -> None:
    leads = []
    for column in (f"{name}-10-non-iid-{split}" for name in ("cifar10", "fashion-mnist") for split in (1, 2)):
        run = rows(f"beyond-{column}")[0]
        assert run["label"] == "pfedla-x"
        others = [row for row in rows(f"paper/{column}") if row["seed"] == 0]
        assert {run["rounds"]} == {row["rounds"] for row in others}
        leads.append(100 * (run["accuracy_mean"] - max(row["accuracy_mean"] for row in others)))
    behind = leads.pop()
    says("docs/paper.md", f"It is {min(leads):.1f} to {max(leads):.1f} points ahead of seed 0 of everything")
    fedavg, pfedla = (100 * cell("fashion-mnist-10-non-iid-2", name)["accuracy_mean"] for name in ("FedAvg", "pFedLA"))
    told = []
    for column in (f"{name}-10-non-iid-{split}" for name in ("cifar10", "fashion-mnist") for split in (1, 2)):
        rivals = [row["accuracy_class_prior"] for row in rows(f"paper/{column}") if row["seed"] == 0]
        told.append(100 * (rows(f"beyond-{column}")[0]["accuracy_class_prior"] - max(rivals)))
    low, high = min(-value for value in told[1:]), max(-value for value in told[1:])
    text = (
        f"it is {told[0]:.1f} ahead in one column, CIFAR-10, non-IID_1, and {low:.1f} to {high:.1f} behind others told"
    )
    says("docs/paper.md", f"Told the class frequencies {text} the same in the other three.")
    text = f"{-behind:.1f} behind FedAvg on FashionMNIST, non-IID_2, where pFedLA is {fedavg - pfedla:.1f} behind"
    says("docs/paper.md", text)
    says("README.md", f"is {-behind:.1f} behind there (one seed)")
    assert max(others, key=lambda row: float(row["accuracy_mean"]))["label"] == "fedavg"
    fedavg = cell("cifar10-10-non-iid-2", "FedAvg")
    falls = [100 * value for value in (at_round(fedavg["curve"], 20), fedavg["accuracy_mean"])]
    says("docs/paper.md", "with this seed and one of the two others, from {:.2f} in round 20 to {:.2f}".format(*falls))
    assert fedavg["losses"][-1] - fedavg["losses"][0] == pytest.approx(1, abs=0.05)
    for split, text in (
        (2, "it falls from {:.2f} in round {} to {:.2f}"),
        (1, "non-IID_1 from {:.2f} in round {} to {:.2f}"),
    ):
        (run,) = rows(f"beyond-cifar10-10-non-iid-{split}")
        best, last = (100 * run[key] for key in ("best_round_accuracy_mean", "accuracy_mean"))
        says("docs/paper.md", text.format(best, run["best_round"], last))
    for name in ("Local", "pFedLA"):
        curve = cell("cifar10-10-non-iid-2", name)["curve"]
        assert abs(at_round(curve, 100) - at_round(curve, 60)) < 0.001


def test_what_the_page_says_of_pfedla_x_over_the_rounds() -> None:
    page = "docs/pfedla-x.md"
    default, learned = rows("x-rounds-cifar10-10-non-iid-2")
    assert [run["label"] for run in (default, learned)] == ["pfedla-x", LEARNED]

    def at(run: dict[str, Any], key: str, t: int) -> Any:
        return run[key][run["rounds"].index(t)]

    def best(run: dict[str, Any]) -> str:
        most = max(run["accuracy"])
        return f"from {100 * most:.2f} in round {run['rounds'][run['accuracy'].index(most)]}"

    says(page, f"{best(default)} to {100 * default['accuracy'][-1]:.2f}, learned {best(learned)} to")
    says(page, f"to {100 * learned['accuracy'][-1]:.2f}. FedAvg and FedRep with")
    falls = []
    for label, t in (("fedavg", 20), ("fedrep,body_epochs=5", 40)):
        runs = [run["curve"] for run in rows("paper/cifar10-10-non-iid-2") if run["label"] == label]
        falls.append([100 * (at_round(curve, t) - at_round(curve, 100)) for curve in runs])
    text = f"by {falls[0][0]:.1f} points after round 20 and by {falls[1][0]:.1f} after round 40 with this seed"
    says(page, f"{text} (over three seeds by {fmean(falls[0]):.1f} and {fmean(falls[1]):.1f});")
    assert default["rounds"][int(np.argmax(default["accuracy"]))] == 20
    places = [default["layers"].index(layer) for layer in ("conv2", "fc1")]
    assert {f"{at(learned, 'start', t)[place]:.2f}" for t in (40, 60, 80, 100) for place in places} == {"0.01"}
    few, more = (at(default, "others", 100)[place] for place in reversed(places))
    says(page, f"After 100 rounds {few:.1f} of the 9 others count in `fc1`, and {more:.1f} in `conv2`")
    says(page, f"the client's own there, {at(default, 'served', 100)[places[1]]:.2f} in `fc1`")
    moved = np.array(at(default, "served", 100)) - np.array(at(default, "served", 60))
    early, late = (at(default, "served", t)[places[1]] for t in (20, 60))
    says(page, f"(`fc1` from {early:.2f} to {late:.2f}; after that no layer's by more than {np.abs(moved).max():.2f})")
    fall = [default["accuracy"][default["rounds"].index(t)] for t in (20, 60, 100)]
    assert (fall[0] - fall[1]) / (fall[0] - fall[2]) == pytest.approx(0.5, abs=0.05)
    says(page, f"from {at(default, 'loss', 10):.2f} in round 10 to {at(default, 'loss', 100):.2f}")
    assert default["loss"] == sorted(default["loss"])
    other = rows("beyond-cifar10-10-non-iid-2")[0]
    assert default["accuracy"][-1] == other["accuracy_mean"]
    half = cell("cifar10-10-non-iid-2", "fedrep,body_epochs=5")["curve"]
    assert at_round(half, 100) < at_round(half, 40) - 0.02


def test_the_runs_of_a_method_are_of_one_commit_and_one_setting_of_the_compiled_loop() -> None:
    """Files of earlier versions lack one or both: results/README.md says which commit added them."""
    earlier = {path for pattern in EARLIER for path in (ROOT / "results").glob(f"{pattern}.json")}
    listed = (ROOT / "results" / "README.md").read_text().splitlines()
    for path in earlier:
        (line,) = (line for line in listed if f"`{path.name}`" in line.partition(" | ")[0])
        assert re.search(r"added by commit [0-9a-f]{7}\b", line), path.name
    files = set((ROOT / "results").rglob("*.json")) - earlier - {ROOT / "results" / "benchmarks.json"}
    assert len(files) > 40
    for path in files:
        found = json.loads(path.read_text())
        runs = found if isinstance(found, list) else [row for one in found.values() for row in one["rows"]]
        by_method: dict[str, set[tuple[str, str]]] = {}
        for row in runs:
            if "why_not" not in row:
                makers = by_method.setdefault(row.get("label") or row.get("method", ""), set())
                makers.add((row["commit"], row["compiled_loop"]))
        for label, makers in by_method.items():
            assert len(makers) == 1, (path.name, label, makers)
            assert all(None not in one and "dirty" not in one[0] for one in makers), (path.name, label, makers)


def test_what_the_page_says_of_what_a_fold_knows() -> None:
    found = dict[str, list[str]]()
    for part in (ROOT / "results" / "left-out.md").read_text().split("methods-")[1:]:
        (last,) = (line for line in part.splitlines() if line.startswith("| 60 |"))
        found[part.partition(".toml")[0]] = [cell.partition(" /")[0] for cell in last.split(" | ")[1:]]
    for name, column in (
        ("CIFAR-10, non-IID_1", "cifar10-non-iid-1"),
        ("FashionMNIST, non-IID_2", "fashion-mnist-non-iid-2"),
    ):
        says("docs/pfedla-x.md", f"| {name} | {' | '.join(found[column])} |")


def test_what_the_page_says_of_200_rounds() -> None:
    page, (one, two) = "docs/pfedla-x.md", ("cifar10-non-iid-2", "fashion-mnist-non-iid-2")
    methods = ("pfedla-x", "fedavg-ft", "pfedla")

    def later(column: str, method: str) -> list[float]:
        pairs = zip(percent(f"x-200-{column}", method), percent(f"seeds-{column}", method), strict=True)
        return [after - before for after, before in pairs]

    assert all(row["commit"].startswith("a3a1f08") for column in (one, two) for row in rows(f"x-200-{column}"))
    falls = [later(one, method) for method in methods]
    assert max(map(fmean, falls)) < 0
    text = "it falls by {} points from round 60 to round 200, `fedavg-ft` by {} and pFedLA by {}."
    says(page, text.format(*map(spread, falls)))
    behind = [apart_by_seed(f"x-200-{one}", "pfedla-x", other) for other in methods[1:]]
    assert max(map(fmean, behind)) < 0
    says(page, "last of the three, {} and {} points below them".format(*map(spread, behind)))
    best = {row["best_round"] for row in rows(f"x-200-{one}") if row["label"] == "pfedla-x"}
    assert best == {20, 40}
    rises = [later(two, method) for method in methods[:2]]
    near_to = apart_by_seed(f"x-200-{two}", "pfedla-x", "fedavg-ft")
    assert min(map(fmean, rises)) > 0
    text = "by {} and {} points, to within {} points of each other".format(*map(spread, rises), spread(near_to))
    says(page, text)
    fall, ahead = later(two, "pfedla"), apart_by_seed(f"x-200-{two}", "pfedla-x", "pfedla")
    assert fmean(fall) < 0 < fmean(ahead)
    says(page, f"falls by {spread(fall)}, and is {spread(ahead)} below pFedLA-X in the end")


def test_what_the_page_says_of_drop_outs() -> None:
    page, columns = "docs/pfedla-x.md", ("cifar10-non-iid-1", "fashion-mnist-non-iid-2")
    files = [f"drop-outs-{column}" for column in columns]
    tuned = [spread(apart_by_seed(name, "pfedla-x", "fedavg-ft")) for name in files]
    assert all(fmean(apart_by_seed(name, "pfedla-x", "fedavg-ft")) > 0 for name in files)
    says(page, "level with `fedavg-ft`**, {} and {} points above it".format(*tuned))
    now, before = (
        {(method, c): f"{mean(f'{kind}-{c}', method):.1f}" for method in ("pfedla", "pfedla-x") for c in columns}
        for kind in ("drop-outs", "seeds")
    )
    one, two = columns
    says(page, f"with everybody's {before['pfedla-x', one]} ({now['pfedla-x', one]}).")
    says(page, f"falls from {before['pfedla', one]} to {now['pfedla', one]} there")
    says(page, f"it stays ({now['pfedla', two]} of {before['pfedla', two]})")
    says(page, f"pFedLA-X falls from {before['pfedla-x', two]} to {now['pfedla-x', two]}.")


def test_what_the_page_says_of_100_clients_of_pfedla_x() -> None:
    page, files = "docs/pfedla-x.md", ("hundred-fashion-mnist-non-iid-2", "hundred-cifar10-non-iid-1")
    assert [sorted({row["seed"] for row in rows(name)}) for name in files] == [[0, 1, 2], [0, 1, 2]]
    below, above_it = ([apart_by_seed(name, "pfedla-x", other) for name in files] for other in ("fedavg-ft", "pfedla"))
    assert max(map(fmean, below)) < 0 < min(map(fmean, above_it))
    text = f"by {spread(below[0])} points on FashionMNIST and by {spread(below[1])} on CIFAR-10"
    says(page, f"{text}, though {spread(above_it[0])} and {spread(above_it[1])} above pFedLA with its default.")


def test_what_the_guide_says_of_newcomers() -> None:
    page, found = "docs/guide.md", json.loads((ROOT / "results" / "newcomers.json").read_text())
    columns = ("methods-cifar10-non-iid-1", "methods-fashion-mnist-non-iid-1")

    def at(method: str, rounds: int) -> list[float]:
        """Return the means of the columns, in %."""
        each = [[row for key in found if key.startswith(f"{c},") for row in found[key]["rows"]] for c in columns]
        return [100 * fmean(row[str(rounds)] for row in some if row["method"] == method) for some in each]

    more = [a - b for a, b in zip(at("pfedla", 0), at("fedavg", 0), strict=True)]
    says(page, f"is worth {more[0]:.0f} to {more[1]:.0f} points over FedAvg's one model with pFedLA")
    plain = at("pfedla, no gradients", 0)
    assert all(a < b for a, b in zip(plain, at("fedavg", 0), strict=True))
    later = zip(at("fedavg", 5), at("pfedla", 5), strict=True)
    says(page, "(after five rounds {:.1f} against {:.1f}, and {:.1f} against {:.1f})".format(*sum(later, ())))
    tuned = at("fedavg-ft", 0)
    says(page, "is ahead of all others from the start, {:.1f} and {:.1f}".format(*tuned))
    others = [at(row["method"], 0) for row in found[f"{columns[0]}, seed 0"]["rows"] if row["method"] != "fedavg-ft"]
    assert all(tuned[k] > max(some[k] for some in others) for k in (0, 1))
    says(page, "so it is at {:.1f} and {:.1f} after one round".format(*at("pfedla-x", 1)))
    assert all(a < b for a, b in zip(at("pfedla-x", 5), at("pfedla", 5), strict=True))


ONE_WEIGHT = "experiments.one_weight.OneWeight"


def ordered(name: str) -> list[str]:
    """Return the methods of a comparison, the best first, without what was run to take pFedLA-X apart."""
    found = {label for label in methods_of(name) if not label.startswith((ONE_WEIGHT, "pfedla-x,"))}
    return sorted(found, key=lambda label: (-round(mean(name, label), 6), label))


def test_what_the_page_says_of_accuracy_by_group() -> None:
    page, printed, told = "docs/where-clients-differ.md", "pfedla,hyper_optimizer=sgd,hyper_lr=1", "clustered,groups=3"
    labels, inputs = files = [f"where-methods-fashion-mnist-{shift}" for shift in ("labels", "inputs")]
    for file, best in ((labels, "fedper"), (inputs, "lg-fedavg")):
        order = ordered(file)
        assert order[:3] == [told, "pfedla-x", "pfedla"]
        assert [label for label in order if "pfedla" not in label][1] == best
        assert {len(percent(file, label)) for label in order} == {3}
        not_run = {"fedfomo", "similarity-model", "apfl", "pfedhn", "pfedme", "scaffold", "fedprox", "per-fedavg"}
        assert not not_run & {label.partition(",")[0] for label in order}
    assert mean(labels, "fedper") > mean(labels, "fedavg-ft") > mean(labels, "lg-fedavg") > mean(labels, printed)
    assert mean(inputs, "fedper") < mean(inputs, "lg-fedavg")
    says(page, f"by {above(labels, 'pfedla', 'fedper')} points over FedPer")
    says(page, f"by {above(inputs, 'pfedla', 'lg-fedavg')} over LG-FedAvg")
    baselines = above(labels, "pfedla-x", "fedper"), above(inputs, "pfedla-x", "lg-fedavg")
    says(page, "pFedLA-X is {} and {} above these.".format(*baselines))
    oracle = [above(file, told, "pfedla-x") for file in files]
    says(page, "{} points below FedAvg within the true groups with labels that differ, {} with inputs".format(*oracle))
    over = [above(file, "pfedla-x", other) for other in ("pfedla", printed) for file in files]
    says(page, "It is {} and {} above pFedLA, and {} and {} above pFedLA with the printed step".format(*over))
    one, another, alone = mean(labels, "fedavg"), mean(inputs, "fedavg"), mean(inputs, "local")
    says(page, f"({one:.1f} %)")
    says(page, f"({another:.1f}, as Local's {alone:.1f})")


def test_what_the_page_says_of_weights_by_layer() -> None:
    page, told = "docs/where-clients-differ.md", "clustered,groups=3"
    cifar, fashion = (
        [f"where-methods-{name}-{shift}" for shift in ("labels", "inputs")] for name in ("cifar10", "fashion-mnist")
    )

    def apart(files: list[str], one: str, other: str, sign: int) -> list[str]:
        found = [apart_by_seed(file, one, other) for file in files]
        assert all(sign * fmean(values) > 0 for values in found)
        return [spread(values) for values in found]

    says(page, "accuracy is {} and {} points higher on FashionMNIST".format(*apart(fashion, ONE_WEIGHT, "pfedla-x", 1)))
    says(page, "that differ, and {} and {} on CIFAR-10.".format(*apart(cifar, ONE_WEIGHT, "pfedla-x", 1)))
    says(page, "There it is {} and {} points above the oracle".format(*apart(cifar, ONE_WEIGHT, told, 1)))
    slow, fast = f"{ONE_WEIGHT},eta=0.43", "pfedla-x,eta=21"
    says(page, "it is {} and {} below pFedLA-X on CIFAR-10;".format(*apart(cifar, slow, "pfedla-x", -1)))
    says(page, "is {} and {} above,".format(*apart(cifar, fast, "pfedla-x", 1)))
    says(page, "above, {} and {} below the sum.".format(*apart(cifar, fast, ONE_WEIGHT, -1)))
    files = columns_of_arms("validation", "where", "perceptron")
    each = {file: apart_by_seed(file, ONE_WEIGHT, "pfedla-x") for file in files}
    means, losses = (over_columns(files, ONE_WEIGHT, "pfedla-x", key) for key in ("accuracy_mean", "loss_mean"))
    assert (len(files), fmean(means) < 0 < fmean(losses)) == (11, True)
    text = f"one weight is {spread(means, 2)} points below pFedLA-X on average, and its loss"
    says(page, f"{text} {spread(losses, 3)} higher.")
    low, high = (pick(each, key=lambda file: fmean(each[file])) for pick in (min, max))
    assert (low, high) == ("x-where-cifar10-inputs", "x-where-cifar10-labels")
    says(page, f"between {spread(each[low])} points below and {spread(each[high])} above, both where groups differ")
    half = "fedrep,body_epochs=5"
    (ahead,) = apart(cifar[:1], half, "pfedla-x", 1)
    says(page, f"above FedRep with one epoch, {ahead} below it with half,")
    says("README.md", f"FedRep with half of its epochs for the body is, by {ahead} points.")
    says("docs/pfedla-x.md", f"{ahead} points below FedRep with half of its epochs")
    says(
        "README.md",
        "A variant of it that weighs the others' whole models in place of their layers has the best mean in",
    )
    for file in (*fashion, *cifar):
        known = methods_of(file) - {told}
        assert max(known, key=lambda label: mean(file, label)) == ONE_WEIGHT
    says(page, f"it is level with the oracle ({mean(cifar[0], half):.1f} and {mean(cifar[0], told):.1f})")
    says(page, f"FedRep with half for its body at {mean(cifar[1], half):.1f};")
    first = [next(label for label in ordered(file) if label != told) for file in (*fashion, *cifar)]
    assert first == ["pfedla-x", "pfedla-x", half, "pfedla-x"]


def test_what_the_page_says_of_groups_on_cifar_10() -> None:
    page, printed = "docs/where-clients-differ.md", "pfedla,hyper_optimizer=sgd,hyper_lr=1"
    shifts = ("labels", "inputs")
    lines = {
        (shift, line["label"], line["layer"]): line
        for shift in shifts
        for line in overall(rows(f"where-cifar10-{shift}"))
    }
    assert {line["runs"] for line in lines.values()} == {3}

    def ratio(shift: str, label: str, layer: str) -> str:
        found: float = lines[shift, label, layer]["pair"]
        return f"{found:.1f}" if found >= 10 else f"{found:.2f}"

    def found(shift: str, label: str, layer: str) -> str:
        return f"{lines[shift, label, layer]['index']:.2f}"

    ends = [ratio(shift, printed, layer) for shift in shifts for layer in ("fc2", "fc3")]
    says(page, "has {} and {} times the weight of one of another with labels that differ, {} and {} with".format(*ends))
    ends = [found(shift, printed, layer) for shift in shifts for layer in ("fc2", "fc3")]
    says(page, "with labels ({} and {}) and not with inputs ({} and {}, no more than by chance)".format(*ends))
    for layer in ("fc2", "fc3"):
        assert lines["inputs", printed, layer]["index"] < lines["inputs", printed, layer]["chance"]
        assert lines["labels", printed, layer]["index"] > 2 * lines["labels", printed, layer]["chance"]
    says(page, "parts with both, {} and {}.".format(*(ratio(shift, printed, "conv1") for shift in shifts)))
    by_seed: dict[tuple[str, str], list[float]] = {}
    for shift in shifts:
        for run in rows(f"where-cifar10-{shift}"):
            if run["label"] == printed:
                later = np.array(run["shares"]["own"])[1:]
                assert later[:, [run["layers"].index(layer) for layer in ("conv2", "fc1")]].min() > 0.94
            else:
                for layer in ("conv1", "fc3"):
                    by_seed.setdefault((shift, layer), []).append(run["pair"][run["layers"].index(layer)])
        assert all(abs(lines[shift, "pfedla-x", f"bn{n}"]["pair"] - 1) < 0.01 for n in (1, 2))
        pairs = {layer: line["pair"] for (s, label, layer), line in lines.items() if (s, label) == (shift, "pfedla-x")}
        assert set(sorted(pairs, key=lambda layer, pairs=pairs: -pairs[layer])[:2]) == {"conv2", "fc1"}  # type: ignore[misc]
    text = "{} times the weight of one of another in `conv1` if inputs differ and {} if labels do ({:.2f} to {:.2f} and"
    text += " {:.2f} to {:.2f} by seed); at the output, {} in `fc3` if inputs differ and {} if labels do ({:.2f} to"
    text += " {:.2f} and {:.2f} to {:.2f})."
    both_ends: list[Any] = []
    for layer in ("conv1", "fc3"):
        both_ends += [ratio(shift, "pfedla-x", layer) for shift in ("inputs", "labels")]
        for shift in ("inputs", "labels"):
            both_ends += [min(by_seed[shift, layer]), max(by_seed[shift, layer])]
    says(page, text.format(*both_ends))
    assert lines["labels", "pfedla-x", "fc3"]["index"] == 1
    by_inputs = [run["index"][-1][-1] for run in rows("where-cifar10-inputs") if run["label"] == "pfedla-x"]
    text = "with inputs in none: in two of the seeds the index is {:.2f} and {:.2f}, in the third {:.2f}."
    says(page, text.format(*sorted(by_inputs)))
    assert lines["inputs", "pfedla-x", "conv1"]["index"] == 1
    says(page, f"and nearly so with labels ({found('labels', 'pfedla-x', 'conv1')})")
    owns = [
        np.mean([run["shares"]["own"][-1][0] for run in rows(f"where-cifar10-{s}") if run["label"] == "pfedla-x"])
        for s in shifts
    ]
    says(page, f"mostly the client's own ({owns[0]:.2f}), as it is with inputs")
    assert owns[1] == pytest.approx(owns[0], abs=0.015)
    assert (
        sum(one > other for one, other in zip(by_seed["labels", "conv1"], by_seed["labels", "fc3"], strict=True)) == 1
    )

    def reached(shift: str, label: str) -> str:
        return f"{mean(f'where-methods-cifar10-{shift}', label):.1f}"

    told = "clustered,groups=3"
    for text, cells in (
        ("points above Local ({} and {}).", [("labels", "fedrep"), ("labels", "local")]),
        ("pFedLA with the printed step ({}) and FedPer,", [("labels", printed)]),
        ("which keeps the last layer at the client, too ({})", [("labels", "fedper")]),
        ("with its default step is below it ({}). pFedLA-X ({})", [("labels", "pfedla"), ("labels", "pfedla-x")]),
        ("learned weights are first, pFedLA-X ({}),", [("inputs", "pfedla-x")]),
        ("above pFedLA with the printed step ({})", [("inputs", printed)]),
        ("trained on locally ({}), pFedLA with its default ({})", [("inputs", "fedavg-ft"), ("inputs", "pfedla")]),
        ("Local is at {}, FedRep", [("inputs", "local")]),
        ("last are FedRep ({}), FedPer ({}), which keeps the wrong end, too, FedAvg ({}) and FedALA",
         [("inputs", name) for name in ("fedrep", "fedper", "fedavg")]),
    ):  # fmt: skip
        says(page, text.format(*(reached(*one) for one in cells)))
    gains = [above("where-methods-cifar10-labels", label, "local") for label in (printed, "fedper")]
    says(page, "are {} and {} above it, pFedLA with its default".format(*gains))
    says(page, f"by its authors, {above('where-methods-cifar10-labels', 'fedrep', 'local')} points above Local")
    gains = [
        above("where-methods-cifar10-labels", *two)
        for two in (("pfedla-x", "fedrep"), ("pfedla-x", printed), (told, "pfedla-x"))
    ]
    text = "is {} above FedRep with one epoch, 2.9 ± 0.6 below it with half, {} above the printed step and {} below the"
    says(page, text.format(*gains))
    gains = [above("where-methods-cifar10-inputs", *two) for two in (("pfedla-x", printed), (told, "pfedla-x"))]
    says(page, "(38.3), {} above pFedLA with the printed step (35.9) and {} below the oracle".format(*gains))
    for shift, first in (
        ("labels", [told, "fedrep,body_epochs=5", "pfedla-x", "fedrep", printed, "fedper"]),  # the first two are level
        ("inputs", [told, "pfedla-x", printed]),
    ):
        name = f"where-methods-cifar10-{shift}"
        order = ordered(name)
        assert order[: len(first)] == first
        assert shift == "labels" or order[-4:] == ["fedrep", "fedper", "fedavg", "fedala"]
        assert {len(percent(name, label)) for label in order} == {3}


def controls(label: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return what a method's weights say where both or nothing differ, by data set, shift and layer."""
    return {
        (name, shift, line["layer"]): line
        for name in ("fashion-mnist", "cifar10")
        for shift in ("both", "none")
        for line in overall(rows(f"where-{name}-{shift}"))
        if line["label"] == label
    }


def test_what_the_page_says_of_the_controls() -> None:
    page = "docs/where-clients-differ.md"
    lines = controls("pfedla-x")
    assert {line["runs"] for line in lines.values()} == {3}
    none = {key: line for key, line in lines.items() if key[1] == "none"}
    first = none.pop(("cifar10", "none", "conv1"))
    assert first["above"] == 2
    text = (
        f"above chance in two of three seeds ({first['index']:.2f} on average), in the eleven other layers in one of 33"
    )
    says(page, text)
    assert (len(none), sum(line["above"] for line in none.values())) == (11, 1)
    none["cifar10", "none", "conv1"] = first
    pairs = [line["pair"] for line in none.values()]
    says(page, f"one of the own block weighs {min(pairs):.2f} to {max(pairs):.2f} times as much as one of another")
    own = {key: line["own"] for key, line in none.items()}
    says(page, f"a client keeps at most {max(own[key] for key in own if key[0] == 'fashion-mnist'):.2f} for itself")
    convolutions = [own["cifar10", "none", layer] for layer in ("conv1", "conv2")]
    says(page, "even where nothing differs ({:.2f} and {:.2f})".format(*convolutions))
    for name in ("fashion-mnist", "cifar10"):
        for layer in ("conv1", "fc3"):
            assert lines[name, "both", layer]["pair"] > 1.4
            assert lines[name, "both", layer]["index"] > 4 * lines[name, "both", layer]["chance"]
    theirs = controls("pfedla,hyper_optimizer=sgd,hyper_lr=1")
    none = {key: line for key, line in theirs.items() if key[1] == "none"}
    assert (len(none), {line["above"] for line in none.values()}) == (12, {0})
    assert {line["runs"] for line in theirs.values()} == {3}
    low, high = (pick(line["pair"] for line in none.values()) for pick in (min, max))
    says(page, f"one of the own block weighs {low:.2f} to {high:.2f} times as much as one of another. **With both")
    ends = [theirs[name, "both", layer] for name in ("fashion-mnist", "cifar10") for layer in ("conv1", "fc3")]
    assert [line["above"] for line in ends] == [3, 3, 2, 2]
    text = "by {:.2f} in `conv1` and {:.0f} in `fc3` on FashionMNIST, where the groups are found in all seeds, and by "
    says(page, (text + "{:.2f} and {:.2f} on CIFAR-10").format(*(line["pair"] for line in ends)))
    alone = {
        shift: next(
            line
            for line in overall(rows(f"where-cifar10-{shift}"))
            if (line["label"], line["layer"]) == ("pfedla-x", "conv1")
        )
        for shift in ("labels", "inputs")
    }
    pairs = [lines["cifar10", "both", "conv1"]["pair"], *(alone[shift]["pair"] for shift in ("labels", "inputs"))]
    text = "of one of another in `conv1`, as with labels alone ({:.2f}) and not as with inputs ({:.2f})"
    says(page, f"{pairs[0]:.2f} times the weight " + text.format(*pairs[1:]))


def test_what_the_page_says_of_less_training() -> None:
    for shift, layer, text in (
        ("labels", "fc1", "best in `fc1` if labels differ ({:.2f})"),
        ("inputs", "conv2", "in `conv2` if inputs do ({:.2f})"),
    ):
        lines = {line["layer"]: line for line in overall(rows(f"where-small-{shift}"))}
        assert max(lines, key=lambda name: lines[name]["index"]) == layer
        says("docs/where-clients-differ.md", text.format(lines[layer]["index"]))
        assert max(line["pair"] for line in lines.values()) < 1.25


def test_what_the_page_says_of_weights_over_the_rounds() -> None:
    page, found = "docs/where-clients-differ.md", rows("where-fashion-mnist-labels")

    def course(algorithm: str, part: str) -> list[str]:
        """Return what the last layer gives to others of the group or to the client itself, evaluation by evaluation."""
        runs = [run for run in found if run["algorithm"] == algorithm]
        assert (len(runs), runs[0]["rounds"], runs[0]["layers"][-1]) == (3, [10, 20, 30, 40, 50, 60], "fc3")
        return [f"{share:.2f}" for share in np.mean([run["shares"][part] for run in runs], axis=0)[:, -1]]

    group, own = course("pfedla", "group"), course("pfedla", "own")
    says(page, "others of the group {}, {}, {} and {} of its weight in rounds 10 to 40".format(*group))
    says(page, "(own weight {}, {}, {} and {})".format(*own))
    group, own = course("pfedla-x", "group"), course("pfedla-x", "own")
    assert own[1:] == sorted(own[1:], reverse=True)
    says(
        page,
        f"({own[0]} in round 10, {own[1]} in round 20), then gives weight back round by round ({own[-1]} in round 60)",
    )
    says(page, f"to its group ({group[1]}, then {group[-1]})")


def test_what_the_page_says_of_what_pfedla_x_keeps() -> None:
    """In `fc1` about half of the weight lies on the others of the group, elsewhere at most a third on the client."""
    for shift in ("labels", "inputs"):
        last = {
            part: np.mean(
                [r["shares"][part][-1] for r in rows(f"where-fashion-mnist-{shift}") if r["label"] == "pfedla-x"], 0
            )
            for part in ("own", "group", "rest")
        }
        place = 2  # fc1
        assert last["group"][place] == pytest.approx(0.5, abs=0.04)
        assert f"{100 * last['rest'][place]:.1f}" == "0.1"
        assert max(np.delete(last["own"], place)) < 1 / 3


def test_what_the_pages_say_of_codecs() -> None:
    page, files = "docs/paper.md", ("codecs-cifar10", "codecs-fashion-mnist")
    small = "codec.up=int4,codec.down=int8"

    def lost(label: str) -> list[str]:
        return [above(file, "pfedla", label) for file in files]

    def share(label: str) -> float:
        """Return the traffic on both data sets, as a share of pFedLA's."""
        sides = ("bytes_down", "bytes_up", "overhead_down", "overhead_up")
        one, other = (
            sum(fmean(figures(file, name, side, 3)) for file in files for side in sides) for name in (label, "pfedla")
        )
        return one / other

    first = [mean(file, "pfedla", seeds=1) for file in files]
    says(page, "of seed 0 alone, with which pFedLA without a codec is at {:.2f} and {:.2f}".format(*first))
    assert all(mean(file, "pfedla,codec=int8") > mean(file, "pfedla") - 0.06 for file in files)
    assert round(share("pfedla,codec=int8"), 2) == 0.25
    says(page, "costs {} points on CIFAR-10 and {} on FashionMNIST, for".format(*lost(f"pfedla,{small}")))
    says(page, f"for {share(f'pfedla,{small}'):.0%}".replace("%", " %"))
    says(page, "`int4` both ways costs {} and {}".format(*lost("pfedla,codec=int4")))
    assert round(share(f"heurpfedla,retain=3,{small}"), 2) == 0.10
    says(page, "{} below pFedLA on CIFAR-10, {} above it on FashionMNIST".format(*lost(f"heurpfedla,retain=3,{small}")))
    says(page, "retained layers alone are {} below and {} above".format(*lost("heurpfedla,retain=3")))
    top, random = (f"codec.up={name},codec.keep=0.1,codec.down=int8" for name in ("top-k", "random-k"))
    for sparse, text in ((top, "costs {:.1f} and {:.1f} points"), (random, "`random-k` costs {:.1f} and {:.1f}")):
        says(page, text.format(*(gap(file, "pfedla", f"pfedla,{sparse}") for file in files)))
    kept = [mean(files[0], f"heurpfedla,retain=3{codec}", seeds=1) for codec in (f",{top}", f",{random}", "")]
    says(page, "{:.2f} and {:.2f} on CIFAR-10, beside {:.2f} without".format(*kept))
    assert 1 < share(f"pfedla,{top}") / share(f"pfedla,{small}") < 1.05
    says(
        "docs/guide.md", "a fifth of the traffic for {:.3} to {:.3} points of accuracy".format(*lost(f"pfedla,{small}"))
    )


def test_what_the_page_says_of_both_ends_with_differing_inputs() -> None:
    found: dict[str, list[list[float]]] = {}
    for run in rows("where-fashion-mnist-inputs"):
        found.setdefault(run["algorithm"], []).append(run["pair"])
    ends = {name: [geometric_mean(pair[place] for pair in pairs) for place in (0, -1)] for name, pairs in found.items()}
    assert {f"{end:.1f}" for end in ends["pfedla"]} == {"2.0"}
    assert [sum(pair[-1] > pair[0] for pair in found[name]) for name in ("pfedla", "pfedla-x")] == [1, 1]
    (turned,) = (pair for pair in found["pfedla-x"] if pair[-1] > pair[0])
    shown = (*ends["pfedla-x"], turned[0], turned[-1])
    text = "with pFedLA-X it is {:.2f} and {:.2f}, and in one seed {:.2f} and {:.2f}"
    says("docs/where-clients-differ.md", text.format(*shown))
    says("docs/where-clients-differ.md", "in one seed of three larger in `fc3` than in `conv1`")


LEARNED = "pfedla-x,eta_start=3"  # pFedLA-X with a learned start, which its parts were measured with


def columns_of_arms(*kinds: str) -> list[str]:
    """Return the files with what was held against each other on validation samples, of some kinds of federations."""
    found = sorted(path.stem for path in (ROOT / "results").glob("x-*.json"))
    return [name for name in found if name.startswith(tuple(f"x-{kind}-" for kind in kinds))]


def apart_by_seed(name: str, label: str, against: str = LEARNED, key: str = "accuracy_mean") -> list[float]:
    """Return by how much a row is above another, seed by seed: in points of accuracy, or in loss."""
    pairs = zip(*(figures(name, one, key, 3) for one in (label, against)), strict=True)
    return [(100 if "accuracy" in key else 1) * (a - b) for a, b in pairs]


def over_columns(names: list[str], label: str, against: str = LEARNED, key: str = "accuracy_mean") -> list[float]:
    """Return the same over several columns: their mean, seed by seed."""
    return [fmean(seeds) for seeds in zip(*(apart_by_seed(n, label, against, key) for n in names), strict=True)]


def spread(values: list[float], digits: int = 1) -> str:
    assert len(values) == 3
    return f"{abs(fmean(values)):.{digits}f} ± {stdev(values):.{digits}f}"


def test_what_the_page_says_of_the_step_of_the_others_weights() -> None:
    page, files = "docs/pfedla-x.md", columns_of_arms("validation", "where", "perceptron")
    assert len(files) == 11
    steps = {step: f"{LEARNED},eta={step}" for step in (1, 10)}
    slow = {file: apart_by_seed(file, LEARNED, steps[1]) for file in files}
    says(page, f"3 is {spread(slow.pop('x-where-cifar10-labels'))} points above 1 with labels that differ and")
    says(page, f"and {spread(slow.pop('x-where-cifar10-inputs'))} with inputs")
    says(page, f"It costs {spread(slow.pop('x-perceptron-letters'))} on the letters; in the other eight columns")
    says(page, f"the two are at most {max(abs(fmean(one)) for one in slow.values()):.1f} points apart")
    quick = over_columns(files, LEARNED, steps[10])
    assert -stdev(quick) < fmean(quick) < 0
    says(page, f"3 is {spread(quick)} below 10 on average")
    says(page, f"{spread(over_columns(files, steps[10], key='loss_mean'), 3)} higher with 10")
    says(page, f"10 is {spread(apart_by_seed('x-where-cifar10-labels', steps[10]))} points above 3")
    name = "x-validation-cifar10-non-iid-1"
    loss = spread(apart_by_seed(name, steps[10], key="loss_mean"), 3)
    says(page, f"{spread(apart_by_seed(name, steps[10]))} below it, with a loss that is {loss} higher")


def test_what_the_page_says_of_the_fixed_start() -> None:
    page, files = "docs/pfedla-x.md", columns_of_arms("validation", "where", "perceptron")
    found = over_columns(files, "pfedla-x")
    assert 0 < fmean(found) < stdev(found)
    says(page, f"Fixed, it is {spread(found)} points above learned with 3 on average over the eleven columns")
    says(page, f"with a loss that is {spread(over_columns(files, 'pfedla-x', key='loss_mean'), 3)} higher")
    largest = max(abs(fmean(apart_by_seed(file, "pfedla-x"))) for file in files)
    assert 0.8 < largest < 0.9
    says(page, "no column is more than 0.9 points apart")
    seven = columns_of_arms("validation", "perceptron")
    assert [file for file in files if "pfedla-x,eta_start=5" in methods_of(file)] == sorted(seven)
    quick = over_columns(seven, "pfedla-x,eta_start=5")
    assert abs(fmean(quick)) < 0.1 < stdev(quick)


def test_what_the_page_says_of_the_parts_of_pfedla_x() -> None:
    page, lenet = "docs/pfedla-x.md", columns_of_arms("validation")
    inputs, labels, letters = (f"x-perceptron-{name}" for name in ("inputs", "labels", "letters"))
    seven = [*lenet, inputs, labels, letters]
    first = {name: f"x-validation-{name}-non-iid-1" for name in ("cifar10", "fashion-mnist")}
    adam = "pfedla.algorithms.pfedla_x_hyper.PFedLAXHyper,eta_start=3"
    even, one, early, late = (f"{LEARNED},{what}" for what in ("eta=0", "logits=one", "hold=1", "hold=3"))

    def mean_apart(label: str, names: list[str]) -> list[float]:
        return [fmean(apart_by_seed(name, label)) for name in names]

    lost = [spread(apart_by_seed(name, even)) for name in (inputs, labels)]
    assert max(mean_apart(even, [inputs, labels])) < 0
    says(page, "the perceptron's federations with groups lose {} and {} points".format(*lost))
    assert 0.3 < max(map(abs, mean_apart(even, lenet))) < 0.4
    assert fmean(apart_by_seed(letters, even)) > 0 > fmean(apart_by_seed(letters, even, key="loss_mean"))
    loss = spread(apart_by_seed(letters, even, key="loss_mean"), 3)
    says(
        page,
        f"within 0.4 points, and the letters gain {spread(apart_by_seed(letters, even))}, with a loss that is {loss}",
    )
    assert 1.1 < max(map(abs, mean_apart(adam, lenet))) < 1.2
    below = [spread(apart_by_seed(name, adam)) for name in (inputs, labels)]
    says(page, "about as well as even weights, {} and {} below free logits".format(*below))
    ahead = [spread(apart_by_seed(name, adam)) for name in (letters, "x-validation-cifar10-non-iid-2")]
    says(page, "ahead of them on the letters, by {}, and on CIFAR-10, non-IID_2, by {};".format(*ahead))
    assert min(mean_apart(adam, [letters, "x-validation-cifar10-non-iid-2"])) > 0
    assert max(mean_apart(f"{adam},hyper_optimizer=sgd,hyper_lr=3", seven)) < 0
    lower = sorted(-value for value in mean_apart(early, seven))
    assert lower[0] < 0
    says(page, f"accuracy is {lower[1]:.1f} to {lower[-1]:.1f} points lower in six of seven columns")
    says(page, f"Three rounds are no better ({spread(over_columns(seven, late))} on average)")
    assert max(mean_apart(one, seven)) < 0
    two = [spread(apart_by_seed(name, one)) for name in (labels, letters)]
    says(page, "in all seven columns, by {} and {} on the perceptron's labels and letters".format(*two))
    losing = (first["cifar10"], letters, first["fashion-mnist"], "x-validation-cifar10-non-iid-2")
    without = [spread(apart_by_seed(name, "pfedla-x,eta_serve=0")) for name in losing]
    text = (
        "CIFAR-10, non-IID_1, loses {} points, the letters {}, FashionMNIST, non-IID_1, {} and CIFAR-10, non-IID_2, {};"
    )
    says(page, text.format(*without) + " FashionMNIST, non-IID_2, loses nothing.")
    assert max(mean_apart("pfedla-x,eta_serve=0", list(losing))) < -1
    assert mean_apart("pfedla-x,eta_serve=0", ["x-validation-fashion-mnist-non-iid-2"])[0] > 0
    more = [spread(apart_by_seed(name, "pfedla-x,eta_serve=0")) for name in (inputs, labels)]
    says(page, "all samples in training are worth more: {} and {} above".format(*more))
    assert min(mean_apart("pfedla-x,eta_serve=0", [inputs, labels])) > 0
    few, many = (f"{LEARNED},folds={n}" for n in (3, 10))
    both = [over_columns(seven, label) for label in (few, many)]
    assert max(map(fmean, both)) < 0 < min(fmean(over_columns(seven, label, key="loss_mean")) for label in (few, many))
    says(page, "{} and {} below five on average, with a higher loss".format(*map(spread, both)))
    ten = [spread(apart_by_seed(name, many)) for name in first.values()]
    says(page, "Ten lose {} and {} on non-IID_1".format(*ten))
    assert max(mean_apart(many, list(first.values()))) < 0


def test_what_the_page_says_of_folded_batch_norms() -> None:
    step = STEPS["pFedLA"]
    folded, apart = (mean(f"{name}-cifar10-non-iid-1", step, seeds=1) for name in ("folded", "seeds"))
    says("docs/paper.md", f"{folded:.2f} against {apart:.2f} on CIFAR-10, non-IID_1, 60 rounds, the printed step")


def test_what_the_page_says_of_per_fedavg_in_its_authors_federation() -> None:
    name, steps = "per-fedavg-authors-cifar10", "experiments.per_fedavg.{},tau=10,alpha=0.01"
    plain = steps.format("FedAvgUpdate")
    first, free = (gap(name, steps.format("Steps") + variant, plain) for variant in ("", ",variant=hf"))
    text = f"the first-order variant is {first:.1f} points and the Hessian-free one {free:.1f} above `FedAvgUpdate`"
    says("docs/algorithms.md", text)
    few = [100 * row["accuracy_mean"] for row in rows(name) if "alpha=0.001" in row["label"]]
    assert [f"{value:.0f}" for value in few] == ["34", "34"]
    told = [100 * row["accuracy_class_prior"] for row in rows(name)]
    assert len(told) == 5
    assert max(told) - min(told) < 1


def test_what_the_page_says_of_curvature() -> None:
    """Of Per-FedAvg, α = 0.01 first, then 0.001: {round: largest curvature, accuracy before the step, after it}."""
    tables = (ROOT / "results" / "curvature.md").read_text().split("| round |")[1:]
    first, second = (
        {int(row[1]): (row[3].strip(), row[4].strip(), row[5].strip()) for row in (line.split("|") for line in some)}
        for some in ([line for line in table.splitlines() if re.match(r"\| \d", line)] for table in tables)
    )
    largest = [first[t][0] for t in (12, 16, 20)]
    page = "docs/algorithms.md"
    says(page, "clients is {} after 12 rounds, {} after 16 and {} after 20".format(*largest))
    scores = [score for t in (12, 16, 20, 40) for score in first[t][1:]]
    text = "is {} and {} after 12 rounds, {} and {} after 16, {} and {} after 20, {} and {} after 40."
    says(page, text.format(*scores))
    most, before, after = second[20]
    says(page, f"after 20 rounds {before} and {after}, with a largest curvature of {most}.")


def test_what_the_pages_say_of_other_versions() -> None:
    step = "pfedla,hyper_optimizer=sgd,hyper_lr=1.0"
    changed = "experiments.updated_first.UpdatedFirst,hyper_optimizer=sgd,hyper_lr=1.0"
    other, one = (mean(f"{name}-cifar10-non-iid-1", step, seeds=1) for name in ("anew", "updated-first"))
    says("docs/paper.md", f"moved the first of them ({other:.2f} with another version")
    assert (
        0
        < one - other
        < one - mean("updated-first-cifar10-non-iid-1", changed)
        < stdev(percent("seeds-cifar10-non-iid-1", step))
    )


def test_what_the_page_says_of_figure_1() -> None:
    runs = {row["label"]: row for row in json.loads((ROOT / "results" / "paper" / "fig1.json").read_text())}
    own = {
        label: {
            layer: [run["alpha"][client][place][client] for client in range(6)]
            for place, layer in enumerate(run["layers"])
        }
        for label, run in runs.items()
    }
    assert all(weight > 0.99 for layer in own["similarity-model"].values() for weight in layer)
    by_layer = own["similarity-layer"]
    assert all(abs(weight - 1 / 6) < 0.001 for weight in by_layer.pop("bn2"))
    assert [round(weight, 1) for weight in by_layer.pop("fc3")] == [1, 0.5, 0.5, 1, 1, 1]
    assert all(weight > 0.99 for layer in by_layer.values() for weight in layer)
    says(
        "docs/reproduction.md",
        "except `bn2`, which all six clients share evenly, and `fc3` of two of them, which is pooled",
    )
    first = [100 * runs[f"similarity-{part}"]["curve"][2][-1] for part in ("layer", "model")]
    assert first[0] == first[1]
    says("docs/reproduction.md", f"client 0 is then at {first[0]:.2f} layer-wise and model-wise")
    second = [100 * runs[f"similarity-{part},temperature=0.1"]["curve"][2][-1] for part in ("layer", "model")]
    says("docs/reproduction.md", "batch norms with everybody: {:.2f} against {:.2f} for whole models".format(*second))
    one, other = (mean("fig1-temperature", f"similarity-{part},temperature=0.1") for part in ("layer", "model"))
    says("docs/reproduction.md", f"layer-wise is {one - other:.1f} points above model-wise for the mean client")
    warm = {row["label"]: row for row in rows("fig1-temperature")}
    layers, models = (warm[f"similarity-{part},temperature=0.1"] for part in ("layer", "model"))
    says("docs/reproduction.md", f"and {100 * (layers['curve'][2][-1] - models['curve'][2][-1]):.1f} for client 0.")
    says(
        "docs/reproduction.md",
        f"Client 0 gains, {second[0]:.2f} against {100 * warm['local']['curve'][2][-1]:.2f} alone",
    )
    first_client = {layer: layers["alpha"][0][place] for place, layer in enumerate(layers["layers"])}
    assert first_client["fc1"][:2] == pytest.approx([0.5, 0.5], abs=0.01)
    assert all(weight == pytest.approx(1 / 6, abs=0.005) for name in ("bn1", "bn2") for weight in first_client[name])
    threes = ((0, 1, 2), (3, 4, 5))
    for run, pooled in ((layers, ("fc2", "fc3")), (models, models["layers"])):
        alpha = np.asarray(run["alpha"])  # (clients, layers, clients)
        for place, layer in enumerate(run["layers"]):
            own = alpha[np.arange(6), place, np.arange(6)]
            if layer in pooled:
                assert all(alpha[np.ix_(some, [place], some)].sum(-1).min() > 0.95 for some in threes)
                assert own.max() < 0.4
            elif layer.startswith("conv"):
                assert own.min() > 0.99
    averaged = [row["alpha"] for label, row in warm.items() if label.endswith(("=0.2", "=1"))]
    assert np.allclose(averaged, 1 / 6, atol=0.01)
    assert len(averaged) == 4


STEPS = {
    "pFedLA": "pfedla,hyper_optimizer=sgd,hyper_lr=1.0",
    "HeurpFedLA": "heurpfedla,hyper_optimizer=sgd,hyper_lr=1.0,retain=1",
    "Adam": "pfedla,hyper_optimizer=adam,hyper_lr=0.0003",
}


def cell(column: str, method: str) -> dict[str, Any]:
    """Return what `pfedla paper` measured of a method with seed 0."""
    label = STEPS.get(method, method.lower())
    (found,) = (row for row in rows(f"paper/{column}") if row["label"] == label and row["seed"] == 0)
    return found


def accuracy(column: str, method: str) -> str:
    return f"{100 * cell(column, method)['accuracy_mean']:.2f}"


def by_seed(column: str, method: str, key: str = "accuracy_mean") -> list[float]:
    """Return what `pfedla paper` measured of a method, in %, seed by seed."""
    return percent(f"paper/{column}", STEPS.get(method, method.lower()), key)


def over_seeds(column: str, method: str, key: str = "accuracy_mean") -> str:
    values = by_seed(column, method, key)
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def chance_of(table: int, dataset: str, methods: int, clients: int = 10) -> str:
    """Return the p of a rank correlation."""
    shown = (ROOT / "docs" / "reproduction.md").read_text().partition("### Table 2")[0 if table == 1 else 2]
    (p,) = re.findall(rf"order, {dataset}, {clients} clients: \S+ \(p = (\S+)\) over {methods} methods", shown)
    return str(p)


def rank_correlation(table: int, dataset: str, methods: int, clients: int = 10) -> str:
    """Return what stands below Table 1 or 2 of the methods' order and the paper's."""
    shown = (ROOT / "docs" / "reproduction.md").read_text().partition("### Table 2")[0 if table == 1 else 2]
    (rho,) = re.findall(rf"order, {dataset}, {clients} clients: ([+-][\d.]+) \(p = \S+\) over {methods} methods", shown)
    return str(rho)


def at_round(curve: list[list[Any]], t: int) -> Any:
    return curve[1][curve[0].index(t)]


def own_weights(found: dict[str, Any]) -> dict[str, float]:
    """Return the clients' mean weights for themselves, by layer."""
    alpha, clients = found["alpha"], range(len(found["alpha"]))
    return {layer: fmean(alpha[i][place][i] for i in clients) for place, layer in enumerate(found["layers"])}


def test_what_the_page_says_agrees_with_the_paper_and_does_not() -> None:
    page, half, after = "docs/paper.md", "fedrep,body_epochs=5", "accuracy_after_training"
    cifar1, cifar2, fashion1, fashion2 = columns = [
        f"{name}-10-non-iid-{split}" for name in ("cifar10", "fashion-mnist") for split in (1, 2)
    ]
    for column, methods, text in (
        (cifar1, ("pFedLA", "pFedMe"), "five times the gradients of all others: {} (61.43) and {} (53.73)."),
        (cifar1, ("HeurpFedLA", "Local"), "HeurpFedLA is at {} (60.02), Local at {} (59.44) and Per-FedAvg at"),
        (cifar1, ("Per-FedAvg",), "and Per-FedAvg at {} (52.54)"),
        (cifar1, ("fedrep,body_epochs=1", half), "FedRep is at {} and, with half of the epochs for the body, at {} ("),
        (cifar1, ("FedAvg", "FedBN"), "lower than in the paper: FedAvg, {} (48.57), and FedBN, {} (59.36)."),
        (cifar1, ("FedFomo", "pFedHN"), "below Local, {} (59.37), and pFedHN, {} (46.98)"),
        (cifar2, ("pFedLA", "Local"), "It is at {} (49.93): above Local, {} (39.79), but level with FedAvg"),
        (cifar2, ("FedAvg",), "but level with FedAvg, {} (44.89)"),
        (cifar2, ("HeurpFedLA",), "HeurpFedLA is at {} (49.06). First are FedRep"),
        (cifar2, (half, "pFedMe", "FedBN"), "for its body, {}, and pFedMe, {} (46.97); FedBN is at {} (49.79)"),
        (fashion2, ("FedAvg",), "and FedAvg, after 200 rounds, is at {} on non-IID_2."),
        (fashion1, ("Local", half, "FedFomo"), "body and FedFomo are level ({}, {} and {})"),
        (fashion1, ("HeurpFedLA", "pFedLA", "pFedHN", "pFedMe"),
         "then come HeurpFedLA, {}, and pFedLA, {}, within a deviation of the first, pFedHN, {}, and pFedMe, {};"),
        (fashion2, ("pFedHN", "FedAvg", "Per-FedAvg", "pFedMe", "pFedLA", "FedFomo", "Local"),
         "FedAvg are level at the top ({} and {}; Per-FedAvg {}; pFedMe {}; pFedLA {}; FedFomo {}; Local {})"),
    ):  # fmt: skip
        says(page, text.format(*(over_seeds(column, method) for method in methods)))
    trained = [over_seeds(cifar1, method, after) for method in ("FedAvg", "FedBN", "pFedLA")]
    says(page, "After it FedAvg is at {} and FedBN at {}, level with pFedLA ({}).".format(*trained))
    both_ways = over_seeds(fashion1, "FedAvg"), over_seeds(fashion1, "FedAvg", after)
    says(page, "FedAvg is at {} and, after local training, at {}.".format(*both_ways))
    firsts = (cifar1, "pFedMe"), (cifar2, half), (fashion1, "Local"), (fashion2, "pFedHN")
    assert {STEPS["pFedLA"], STEPS["HeurpFedLA"]} <= near(f"paper/{fashion1}")[1]
    level = [b - a for a, b in zip(by_seed(cifar1, "pFedLA"), by_seed(cifar1, "pFedMe"), strict=True)]
    assert 0 < fmean(level) < 0.1 < stdev(level)
    for column, first in firsts:
        measured = methods_of(f"paper/{column}")
        rivals = {m.spec.format(half=5) for m in METHODS if "adam" not in m.spec}
        means = {label: mean(f"paper/{column}", label) for label in measured & rivals}
        assert max(means, key=means.__getitem__) == STEPS.get(first, first.lower())
        known = {label.partition(",")[0] for label in measured}
        assert known == {m.algorithm for m in METHODS} - ({"fedbn"} if "fashion" in column else set())
    seeds = {
        column: {
            method: len(by_seed(column, method)) for method in ("Local", "FedAvg", "pFedLA", "HeurpFedLA", "pFedMe")
        }
        for column in columns
    }
    assert [set(seeds[column].values()) for column in (cifar1, cifar2)] == [{3}, {3}]
    assert seeds[fashion1] == seeds[fashion2]
    fewer = seeds[fashion1].pop("pFedMe")
    ((number, said),) = {(count, {1: "one", 2: "two", 3: "three"}[count]) for count in seeds[fashion1].values()}
    but = "" if fewer == number else f" (pFedMe {({1: 'one', 2: 'two'})[fewer]})"
    says(page, f"three seeds on CIFAR-10, {said} on FashionMNIST{but} and one on the others")
    says(page, f"at {over_seeds(fashion1, 'Local')} and {over_seeds(fashion2, 'Local')}:")
    after_60 = {m: at_round(cell(fashion2, m)["curve"], 60) for m in ("pFedLA", "Adam", "FedAvg")}
    says(page, f"level with FedAvg ({100 * after_60['pFedLA']:.2f} and {100 * after_60['FedAvg']:.2f})")
    for column, text in (
        (cifar1, "HeurpFedLA leaves `fc1` at the clients in {:.0f} % of the downloads; Table 3's"),
        (cifar2, "HeurpFedLA leaves `fc1` at the clients in {:.0f} % of the downloads. With Adam"),
    ):
        shares = [
            dict(zip(run["layers"], run["retained"], strict=True))["fc1"]
            for run in rows(f"paper/{column}")
            if run["label"] == STEPS["HeurpFedLA"]
        ]
        says(page, text.format(100 * fmean(shares)))

    def own(method: str, layer: str) -> float:
        runs = [run for run in rows(f"paper/{cifar2}") if run["label"] == STEPS[method]]
        return fmean(dict(zip(run["layers"], run["own"][1][-1], strict=True))[layer] for run in runs)

    says(page, f"(weights of {own('pFedLA', 'conv2'):.2f} and {own('pFedLA', 'fc1'):.2f} for themselves")
    adam = over_seeds(cifar2, "Adam")
    says(
        page,
        f"are on the way there ({own('Adam', 'conv2'):.2f} and {own('Adam', 'fc1'):.2f}), pFedLA is at {adam}, the",
    )
    labels = methods_of(f"paper/{cifar2}")
    assert max(labels, key=lambda label: mean(f"paper/{cifar2}", label)) == STEPS["Adam"]
    literal, adam_too = (
        [b - a for a, b in zip(by_seed(fashion2, method), by_seed(fashion2, "FedAvg"), strict=True)]
        for method in ("pFedLA", "Adam")
    )
    text = f"(over three seeds {spread(literal)} points apart, and with Adam {spread(adam_too)})"
    says(page, f"while FedAvg goes on to {accuracy(fashion2, 'FedAvg')} {text}.")
    text = f"it falls behind FedAvg by {spread(literal)} points after 200 rounds with the printed step, and by"
    says("README.md", f"{text} {spread(adam_too)} with the default. Our own `pfedla-x`")
    curves = [run["curve"] for run in rows(f"paper/{fashion2}") if run["label"] == STEPS["Adam"]]
    assert len(curves) == 3
    assert all(at_round(curve, 60) > at_round(curve, 200) for curve in curves)
    says(page, f"pFedLA stops at {accuracy(fashion2, 'pFedLA')} while")
    says(page, f"after 200, with {accuracy(fashion2, 'Adam')} (")
    early, then, soon, late = (
        dict(zip(cell(fashion2, "pFedLA")["layers"], at_round(cell(fashion2, "pFedLA")["own"], t), strict=True))
        for t in (60, 100, 120, 200)
    )
    says(page, f"({early['fc1']:.2f} for itself in `fc1`, even would be 0.10), and after 100, too")
    text = f"each client's own: {then['fc1']:.2f}, {soon['fc1']:.2f} in round 120 and {late['fc1']:.2f} after 200"
    says(page, f"{text}, `fc2` {late['fc2']:.2f}")
    level = [at_round(cell(fashion2, method)["curve"], 100) for method in ("pFedLA", "FedAvg")]
    level += [
        fmean(at_round(run["curve"], 100) for run in rows(f"paper/{fashion2}") if run["label"] == label)
        for label in (STEPS["pFedLA"], "fedavg")
    ]
    text = "and after 100, too ({:.2f} and {:.2f}; over three seeds {:.2f} and {:.2f})"
    says(page, text.format(*(100 * value for value in level)))
    adams = cell(fashion2, "Adam")
    says(page, f"{at_round(adams['own'], 60)[2]:.2f} in `fc1` after 60 rounds with {100 * after_60['Adam']:.2f}")
    assert adams["layers"][2] == "fc1"
    assert all(weight > 0.99 for layer, weight in own_weights(adams).items() if layer != "conv1")
    for table in (1, 2):
        text = "Rank correlation with the paper's order: {} over ten methods, p = {}."
        says(page, text.format(rank_correlation(table, "CIFAR10", 10), chance_of(table, "CIFAR10", 10)))
    central = percent("central-cifar10", "local")
    ahead = 100 * at_round(cell(cifar2, "FedAvg")["curve"], 20)
    assert min(central) < ahead < max(central) + 0.1
    says(page, f"seed 0 of FedAvg was at {ahead:.2f} in round 20, at the level of the central seeds")
    gains = [paper - mean("central-fashion-mnist", "local") for paper in (89.09, 91.24)]
    says(page, f"gain {gains[0]:.0f} to {gains[1]:.0f} points to reach the paper's")
    says("README.md", f"the step as printed reaches {over_seeds(cifar1, 'pFedLA')} after 100 rounds")


def lowest(run: dict[str, Any]) -> int:
    """Return the round in which the test loss was lowest."""
    t: int = run["curve"][0][run["losses"].index(min(run["losses"]))]
    return t


def test_what_the_page_says_in_short_of_the_papers_columns() -> None:
    ours, papers = dict[tuple[int, str], bool](), dict[tuple[int, str], bool]()
    datasets = {"emnist": "EMNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}
    for table, printed in ((1, TABLE1), (2, TABLE2)):
        for path in (ROOT / "results/paper").glob(f"*-non-iid-{table}.json"):
            labels = {m.spec.format(half=5) for m in METHODS if "adam" not in m.spec} & methods_of(f"paper/{path.stem}")
            if STEPS["HeurpFedLA"] not in labels:
                continue  # what is measured of it is not what it takes to tell who is first
            slug, clients = re.fullmatch(r"(.+)-(\d+)-non-iid-\d", path.stem).groups()  # type: ignore[union-attr]
            first = max(labels, key=lambda label, name=path.stem: mean(f"paper/{name}", label))  # type: ignore[misc]
            ours[table, path.stem] = first in (STEPS["pFedLA"], STEPS["HeurpFedLA"])
            place = Place(datasets[slug], int(clients))
            best = max((m for m in printed if place in printed[m]), key=lambda m, at=place: printed[m][at].mean)  # type: ignore[misc]
            papers[table, path.stem] = best in ("pFedLA", "HeurpFedLA")
    assert [sum(key[0] == table for key in ours) for table in (1, 2)] == [5, 5]
    assert [sum(found for key, found in ours.items() if key[0] == table) for table in (1, 2)] == [2, 0]
    assert sum(papers.values()) == 9
    text = "first in two of the five columns of Table 1 that are measured (EMNIST and CIFAR-100, one seed each)"
    says(
        "docs/paper.md",
        f"{text}, within a deviation of the first in two more, and first in none of the five of Table 2",
    )
    says("docs/paper.md", "in the paper one of the two is first in nine of these ten")


def test_what_the_page_says_of_the_class_prior_in_the_papers_columns() -> None:
    page, keys = "docs/paper.md", ("accuracy_mean", "accuracy_after_training", "accuracy_class_prior")
    wanted = {STEPS.get(method, method.lower()) for method in ("FedAvg", "pFedLA", "HeurpFedLA", "Local")}
    files = sorted(path.stem for path in (ROOT / "results/paper").glob("*-non-iid-*.json"))
    files = [name for name in files if wanted <= methods_of(f"paper/{name}")]
    gaps = dict[str, list[float]]()
    for name in files:
        methods = {method: STEPS.get(method, method.lower()) for method in ("FedAvg", "pFedLA", "HeurpFedLA")}
        found = {
            method: {row["seed"]: row for row in rows(f"paper/{name}") if row["label"] == label}
            for method, label in methods.items()
        }
        seeds = set.intersection(*map(set, found.values()))
        means = {
            method: {key: 100 * fmean(runs[seed][key] for seed in seeds) for key in keys}
            for method, runs in found.items()
        }
        ours = [means[method] for method in ("pFedLA", "HeurpFedLA")]
        gaps[name] = [means["FedAvg"][key] - max(some[key] for some in ours) for key in keys]
        best = max(some[key] for some in ours for key in (keys[0], keys[2]))
        assert (best > means["FedAvg"][keys[2]]) == (gaps[name][2] < 0)  # told or not, whichever is better
    words = {3: "three", 7: "seven", 8: "eight", 9: "nine"}
    plain, trained, told = (words[sum(gap[place] > 0 for gap in gaps.values())] for place in (0, 1, 2))
    above, below = (sorted(abs(gap[2]) for gap in gaps.values() if (gap[2] > 0) == way) for way in (True, False))
    assert len(files) == 10
    adams = [STEPS["Adam"], STEPS["HeurpFedLA"].replace("sgd,hyper_lr=1.0", "adam,hyper_lr=0.0003")]
    counts = []
    for key in keys[1:]:
        ahead = 0
        for name in files:
            every = [*wanted - {"local", "fedavg"}, *adams, "fedavg"]
            by_label = {m: {r["seed"]: r[key] for r in rows(f"paper/{name}") if r["label"] == m} for m in every}
            by_label = {label: runs for label, runs in by_label.items() if runs}
            seeds = set.intersection(*map(set, by_label.values()))
            over = {label: fmean(runs[seed] for seed in seeds) for label, runs in by_label.items()}
            ahead += over.pop("fedavg") > max(over.values())
        counts.append(ahead)
    assert counts == [6, 6]
    says(page, "With the rows with Adam included both are six.")
    assert gaps["cifar10-10-non-iid-1"][2] == above[0]
    text = f"in {told} of the ten columns measured: level on CIFAR-10, non-IID_1 ({above[0]:.1f} above), and"
    says(page, f"{text} {above[1]:.1f} to {above[-1]:.1f} points above elsewhere. Before, it is in {plain}.")
    says(page, f"it is not below the better of them, likewise trained on, in {trained}.")
    assert all(("cifar100" in name) == (gap[2] < 0) for name, gap in gaps.items())
    says(page, f"told the class frequencies, by {below[0]:.1f} and {below[1]:.1f} points")
    local = [
        100 * (cell(name, "Local")[keys[2]] - cell(name, "FedAvg")[keys[2]]) for name in files if "cifar100" in name
    ]
    says(page, "does so, too, by {:.1f} and {:.1f}.".format(*local))
    run = cell("fashion-mnist-10-non-iid-2", "fedrep,body_epochs=1")
    says(
        page,
        f"FedRep's lose {100 * (run[keys[0]] - run[keys[2]]):.1f} points by it on FashionMNIST, non-IID_2 (seed 0)",
    )


def test_what_the_page_says_of_numbers_of_samples() -> None:
    printed = {column.name: paper for column, paper in samples.columns().items()}
    own = {column.name: samples.own_dominance(column) for column in samples.columns()}
    found = {samples.point_of(row): 100 * row["accuracy_mean"] for row in rows("samples") if "accuracy_mean" in row}
    above = {
        size: {p.column: found[p] - printed[p.column] for p in found if p[1:] == (size, own[p.column])}
        for size in samples.SIZES
    }
    assert (len(above[60]), len(above[200]), len(above[400])) == (7, 8, 8)
    short = [-more for more in above[60].values()]
    says("docs/paper.md", f"that can have them, by {min(short):.0f} to {max(short):.0f} points")
    assert [column for column, more in above[100].items() if more > -0.2] == [
        "emnist-10-non-iid-1",
        "fashion-mnist-10-non-iid-2",
    ]
    close = samples.Point("fashion-mnist-10-non-iid-2", 100, own["fashion-mnist-10-non-iid-2"])
    says("docs/paper.md", f"non-IID_2 ({found[close]:.2f} and {printed[close.column]:.2f})")
    assert samples.ROUNDS == {"EMNIST": 60, "FashionMNIST": 60, "CIFAR10": 20, "CIFAR100": 20}
    later = {c: 100 * cell(c, "Local")["accuracy_mean"] for c in above[200] if c.startswith("cifar")}
    text = "to {:.2f} and {:.2f} on CIFAR-10 and to {:.2f} and {:.2f} on CIFAR-100"
    of_two = [f"{name}-10-non-iid-{k}" for name in ("cifar10", "cifar100") for k in (1, 2)]
    says("docs/paper.md", text.format(*(later[c] for c in of_two)))
    text = "(after 100 rounds by {:.1f}, {:.1f}, {:.1f} and {:.1f})"
    says("docs/paper.md", text.format(*(printed[c] - later[c] for c in of_two)))
    cifar, grey = ({c: more for c, more in above[200].items() if c.startswith("cifar") == of} for of in (True, False))
    below, over = [-more for more in cifar.values()], list(grey.values())
    says(
        "docs/paper.md",
        f"four columns of CIFAR, by {min(below):.0f} to {max(below):.0f} points (after 100",
    )
    says(
        "docs/paper.md",
        f"and above it in the four of 28x28 images, by {min(over):.0f} to {max(over):.0f}. CIFAR-100, non-IID_1,",
    )
    assert (len(below), len(over)) == (4, 4)
    assert (
        abs(above[400]["cifar100-10-non-iid-1"]) < 1 < min(-above[n]["cifar100-10-non-iid-1"] for n in (60, 100, 200))
    )
    three = {c: found[samples.Point(c, 200, 3.0)] - printed[c] for c in own if own[c]}
    assert sorted(three, key=three.__getitem__)[1:] == [
        f"{d}-10-non-iid-2" for d in ("cifar10", "emnist", "fashion-mnist")
    ]
    more = found[samples.Point("cifar10-10-non-iid-2", 200, 6.0)] - printed["cifar10-10-non-iid-2"]
    assert (round(three["cifar10-10-non-iid-2"]), round(three["fashion-mnist-10-non-iid-2"]), round(more)) == (-3, 5, 7)
    low, high = (found[samples.Point("cifar100-10-non-iid-2", 200, times)] for times in (3.0, 15.0))
    says(
        "docs/paper.md",
        f"Local is at {low:.2f} where the paper has {printed['cifar100-10-non-iid-2']:.2f}",
    )
    says("docs/paper.md", f"is at {high:.2f}; beyond 17 times")
    assert [round(6 * times / (6 * times + 94), 2) for times in (3, 15)] == [0.16, 0.49]
    assert (200 - 94) // 6 == 17


def test_what_the_page_says_of_600_rounds() -> None:
    late = rows("paper/paper/fashion-mnist-10-non-iid-2")
    then = {row["label"]: {t: 100 * at_round(row["curve"], t) for t in (60, 200, 600)} for row in late}
    one, other = STEPS["pFedLA"], "fedavg"
    says("docs/paper.md", f"nothing has changed: {then[one][600]:.2f} and {then[other][600]:.2f}. Of five methods that")
    orders = {t: sorted(then, key=lambda label: -then[label][t]) for t in (60, 200, 600)}
    assert (len(late), orders[200]) == (5, orders[600])
    assert 0.7 < max(abs(curve[600] - curve[200]) for curve in then.values()) < 0.8
    rep, heur = (
        [100 * value for row in late if row["label"] == label for value in row["curve"][1]]
        for label in ("fedrep,body_epochs=1", STEPS["HeurpFedLA"])
    )
    apart = [a - b for t, a, b in zip(late[0]["curve"][0], rep, heur, strict=True) if t >= 200]
    assert apart[0] < 0 < max(apart) < 1
    assert apart[-1] < 0
    assert (orders[60][:2], orders[200][:2]) == ([one, other], [other, one])
    assert (orders[60][-1], orders[200][-1]) == ("fedrep,body_epochs=1", "local")


def test_what_the_page_says_of_cifar_100() -> None:
    page, (one, two) = "docs/paper.md", (f"cifar100-10-non-iid-{split}" for split in (1, 2))
    half = "fedrep,body_epochs=5"
    for column, methods, text in (
        (one, ("HeurpFedLA", "pFedLA"), "methods that were run, as in the paper, at {} (46.47) and {} (47.22), but"),
        (one, (half, "Local"), "half of the epochs for its body at {} and Local at {} (41.68) beside them"),
        (two, ("FedFomo", "fedrep,body_epochs=1"), "FedFomo, {} (27.33), and FedRep, {} (34.19), are ahead"),
        (two, ("pFedLA", "HeurpFedLA"), "of pFedLA, {} (35.02), and HeurpFedLA, {} (35.42)"),
        (two, ("Local", "Adam"), "Local is at {} (26.29), and pFedLA with Adam first of all, {} (rank"),
    ):
        says(page, text.format(*(accuracy(column, method) for method in methods)))
    for method, text in (
        ("FedAvg", "FedAvg is at {} (36.64) and {} (32.24)"),
        ("FedBN", "FedBN at {} (45.18) and {} (34.94)"),
    ):
        says(page, text.format(*(accuracy(column, method) for column in (one, two))))
    said = (rank_correlation(1, "CIFAR100", 9), chance_of(1, "CIFAR100", 9))
    says(page, "(rank correlation {} over nine methods, p = {})".format(*said))
    trained = [100 * cell(column, m)["accuracy_after_training"] for m in ("FedAvg", "FedBN") for column in (one, two)]
    says(page, "Then FedAvg is at {:.2f} and {:.2f} here, and FedBN at {:.2f} and {:.2f}:".format(*trained))
    says(page, f"(rank correlation {rank_correlation(2, 'CIFAR100', 9)})")
    for column, first in ((one, STEPS["HeurpFedLA"]), (two, STEPS["Adam"])):
        best = {row["label"]: row["accuracy_mean"] for row in rows(f"paper/{column}")}
        best = {label: best[label] for label in best if column == two or "adam" not in label}
        assert max(best, key=best.__getitem__) == first
        assert len(best) == (10 if column == one else 12)
    central = percent("central-cifar100", "local")
    says(page, f"reaches {fmean(central):.1f} ± {stdev(central):.1f} ([results/central-cifar100.json]")


def test_what_the_page_says_of_100_clients() -> None:
    page, columns = "docs/paper.md", [f"fashion-mnist-100-non-iid-{split}" for split in (1, 2)]
    tiny = "pfedla,hyper_optimizer=sgd,hyper_lr=1e-6"
    for method, text in (
        ("pFedLA", "pFedLA is at {} (98.87) on non-IID_1 and at {} (98.41) on non-IID_2"),
        ("FedAvg", "FedAvg is at {} (98.36) and {} (98.25)"),
        ("Local", "Local at {} (89.27) and {} (65.97)"),
        ("HeurpFedLA", "HeurpFedLA is at {} (96.95) and {} (98.66)"),
        ("fedrep,body_epochs=1", "is at {} (97.15; on non-IID_2 {}, 92.04)"),
    ):
        says(page, text.format(*(accuracy(column, method) for column in columns)))
    for column in columns:
        for method in ("pFedLA", "Adam"):
            assert all(0.009 < weight < 0.012 for weight in cell(column, method)["own"][1][-1])
    even = [mean(f"even-{column}", tiny) for column in columns]
    says(page, "pFedLA is at {:.2f} and {:.2f}. So what it sends".format(*even))
    assert all(
        abs(mean(f"paper/{column}", STEPS["pFedLA"]) - one) < 0.7 for column, one in zip(columns, even, strict=True)
    )
    rho = [rank_correlation(n, "FashionMNIST", 5, 100) for n in (1, 2)]
    says(page, "Rank correlation with the paper's order: {} and {} over five methods".format(*rho))


def test_what_the_page_says_of_saturation() -> None:
    page, splits = "docs/paper.md", (1, 2)
    cifar = [row for split in splits for row in rows(f"paper/cifar10-10-non-iid-{split}")]
    assert sum(lowest(row) == 20 for row in cifar) > len(cifar) / 2
    said = []
    for run in (cell("cifar10-10-non-iid-2", method) for method in ("Local", "FedAvg", "pFedLA")):
        assert lowest(run) == 20
        said.append(f"{min(run['losses']):.2f} to {run['losses'][-1]:.2f}")
    says(page, "on non-IID_2 Local's from {}, FedAvg's from {}, pFedLA's from {}.".format(*said))
    curves = {name: cell("cifar10-10-non-iid-2", name)["curve"] for name in ("FedAvg", "pFedLA", "Local")}
    said = [f"{100 * at_round(curves['FedAvg'], t):.2f}" for t in (20, 100)]
    runs = [run["curve"] for run in rows("paper/cifar10-10-non-iid-2") if run["label"] == "fedavg"]
    over = [100 * fmean(at_round(curve, t) for curve in runs) for t in (20, 100)]
    up = 100 * max(at_round(curve, 100) - at_round(curve, 20) for curve in runs)
    assert [at_round(curve, 100) > at_round(curve, 20) for curve in runs] == [False, True, False]
    text = f"(over three seeds from {over[0]:.2f} to {over[1]:.2f}: in one of them it rises by {up:.1f})"
    says(page, f"accuracy falls there from {said[0]} to {said[1]} {text}, while Local's and pFedLA's hardly move")
    assert all(max(curves[name][1]) - min(curves[name][1]) < 0.005 for name in ("Local", "pFedLA"))
    lowest_and_best = (100 * pick(curves["pFedLA"][1]) for pick in (min, max))
    says(page, "has been between {:.2f} and {:.2f} since round 20".format(*lowest_and_best))
    for method in ("FedRep", "FedBN", "FedFomo"):
        curve = cell("cifar10-10-non-iid-2", {"FedRep": "fedrep,body_epochs=1"}.get(method, method))["curve"]
        assert at_round(curve, 100) > at_round(curve, 80) > at_round(curve, 60)
    for method, rounds in {"FedAvg": [140, 160], "pFedLA": [80, 100], "Local": [20, 40]}.items():
        found = [cell(f"fashion-mnist-10-non-iid-{split}", method) for split in splits]
        assert sorted(map(lowest, found)) == rounds
    says(
        page,
        "FedAvg's loss is lowest in rounds 140 to 160, that of pFedLA in rounds 80 to 100, and Local's in rounds 20",
    )


def test_what_the_page_says_of_emnist() -> None:
    page, column = "docs/paper.md", "emnist-10-non-iid-1"
    found = [accuracy(column, method) for method in ("pFedLA", "HeurpFedLA")]
    says(page, "It is at {} (90.65), FedRep".format(*found))
    says(page, "HeurpFedLA, the paper's first, at {1} (94.11)".format(*found))
    for method, text in (
        ("fedrep,body_epochs=5", "half of the epochs for its body at {}"),
        ("pFedHN", "pFedHN at {} (93.94)"),
        ("FedAvg", "FedAvg at {} (90.45)"),
        ("Local", "Local at {} (89.01)"),
    ):
        says(page, text.format(accuracy(column, method)))
    theirs = {method: figures[Place("EMNIST", 10)].mean for method, figures in TABLE1.items() if method != "FedBN"}
    order = sorted(theirs, key=lambda method: -theirs[method])
    assert (order[0], order.index("pFedLA") + 1, len(order)) == ("HeurpFedLA", 6, 9)
    ours = [row["accuracy_mean"] for row in rows(f"paper/{column}") if ",hyper_optimizer=adam" not in row["label"]]
    assert max(ours) == cell(column, "pFedLA")["accuracy_mean"]
    says(page, f"lie within {100 * (max(ours) - min(ours)):.1f} points")
    says(page, f"FedAvg is at {100 * cell(column, 'FedAvg')['accuracy_class_prior']:.2f}.")
    says(page, f"(rank correlation with the paper's: {rank_correlation(1, 'EMNIST', 8)})")
    kept = {row["label"][-1]: row for row in rows(f"paper/{column}") if ",hyper_optimizer=sgd" in row["label"]}
    lost = [100 * (kept["0"]["accuracy_mean"] - kept[k]["accuracy_mean"]) for k in "123"]
    says(page, "Here it costs {:.1f}, two layers cost {:.1f} and three {:.1f}.".format(*lost))
    share = dict(zip(kept["1"]["layers"], kept["1"]["retained"], strict=True))
    says(page, f"it is `fc1` in {100 * share['fc1']:.0f} % of the downloads, and `fc3` in {100 * share['fc3']:.0f} %")


def test_what_the_page_says_of_emnist_with_dominant_classes() -> None:
    page, column = "docs/paper.md", "emnist-10-non-iid-2"
    said = {name: accuracy(column, name) for name in ("FedAvg", "pFedHN", "pFedLA", "HeurpFedLA", "Local", "FedFomo")}
    says(page, "at {FedAvg} (90.43), {pFedHN} (91.37) and {pFedLA} (92.06, the paper's first)".format(**said))
    own = own_weights(cell(column, "pFedLA"))
    most = max(weight for layer, weight in own.items() if layer != "fc1")
    says(page, f"(own weights of {own['fc1']:.2f} in `fc1` and at most {most:.2f} elsewhere after 200 rounds)")
    says(page, f"does, {said['HeurpFedLA']} (91.98), and")
    lost = 100 * (cell(column, "pFedLA")["accuracy_mean"] - cell(column, "Adam")["accuracy_mean"])
    least = min(weight for layer, weight in own_weights(cell(column, "Adam")).items() if layer != "conv1")
    says(page, f"own weights of {least:.2f} and more in all layers but the first, is {lost:.1f} points lower.")
    says(page, f"Local is at {said['Local']} (80.72)")
    gain = 100 * (cell(column, "FedFomo")["accuracy_mean"] - cell(column, "Local")["accuracy_mean"])
    says(page, f"is {gain:.1f} points above it, {said['FedFomo']} (80.14)")
    says(page, f"Rank correlation with the paper's order: {rank_correlation(2, 'EMNIST', 8)} over eight methods")


FOUR = ("cifar10", "cifar100", "emnist", "fashion-mnist")
FULL = {"fc1", "fc2", "fc3"}


def figure(number: int, dataset: str, step: str) -> dict[str, Any]:
    (found,) = (row for row in rows(f"paper/fig{number}-{dataset}") if row["label"] == STEPS[step])
    return found


def test_what_the_page_says_of_figure_5() -> None:
    page = "docs/reproduction.md"
    holds: dict[str, dict[str, set[str]]] = {"pFedLA": {}, "Adam": {}}
    for step, by_dataset in holds.items():
        for dataset in FOUR:
            run = figure(5, dataset, step)
            rounds, weights = roles_of(run)
            late = weights[periods(rounds)[2]].mean(0)
            by_dataset[dataset] = {
                layer for layer, some in zip(run["layers"], late, strict=True) if order_holds(some.tolist())
            }
            if step == "pFedLA":
                early = weights[periods(rounds)[0]].mean(0)
                assert sum(early[:, -1] <= late[:, -1]) == 1  # of the others
                twin = dict(zip(run["layers"], late[:, 1], strict=True))["fc3"]
                assert (f"{twin:.2f}" == "0.99") == dataset.startswith("cifar")
    says(
        page,
        "holds in `fc1` on all four data sets, in `fc2` on all but EMNIST, and in `fc3` on EMNIST and FashionMNIST",
    )
    assert holds["pFedLA"] == {
        "cifar10": {"fc1", "fc2"},
        "cifar100": {"fc1", "fc2"},
        "emnist": {"fc1", "fc3"},
        "fashion-mnist": FULL,
    }
    says(page, "With Adam the order holds in `fc1` everywhere, in `fc2` and `fc3` on EMNIST and FashionMNIST")
    says(page, "on CIFAR in `bn2`, on CIFAR-100 in `bn1` and `conv2`, too")
    assert holds["Adam"] == {
        "cifar10": {"bn2", "fc1"},
        "cifar100": {"bn1", "conv2", "bn2", "fc1"},
        "emnist": FULL,
        "fashion-mnist": FULL,
    }


def test_what_the_page_says_of_figure_6() -> None:
    beyond, others = dict[str, set[str]](), 0
    for step in ("pFedLA", "Adam"):
        for dataset in FOUR:
            run = figure(6, dataset, step)
            weights = np.asarray(run["alpha"])  # (clients, layers, clients)
            falls = {
                layer
                for place, layer in enumerate(run["layers"])
                if (falls_with_distance(weights[:, place]) or 0) < by_chance([weights[:, place]])
            }
            assert falls >= FULL
            beyond[f"{dataset}, {step}"] = falls - FULL
            others += len(run["layers"]) - len(FULL)
    assert {name: layers for name, layers in beyond.items() if layers} == {
        "fashion-mnist, pFedLA": {"conv2"},
        "cifar100, pFedLA": {"conv2"},
        "fashion-mnist, Adam": {"conv2"},
        "cifar10, Adam": {"bn1"},
    }
    says(
        "docs/reproduction.md",
        "in `fc1`, `fc2` and `fc3` on all four data sets, with the printed step and with Adam, each time more than for",
    )
    says(
        "docs/reproduction.md", "in `conv2` on FashionMNIST, with the printed step on CIFAR-100, too, and with Adam in"
    )
    says("docs/reproduction.md", f"`bn1` on CIFAR-10: 4 of {others}, where chance would give about one.")
    assert 0.5 < 0.05 * others < 1.5


def test_pictures_of_the_papers_figures_have_names_that_are_drawn() -> None:
    drawn = {"fig1", "fig6", "fig6-adam", "fig7", "fig7-adam"}
    drawn |= {f"fig5-{dataset}{step}" for dataset in FOUR for step in ("", "-adam")}
    assert set(pages.pictures()) <= drawn
    for name in pages.pictures():
        says("docs/reproduction.md", f"(images/paper-{name}.png)")


def test_what_the_page_says_of_figure_7() -> None:
    found = [run for run in rows("paper/cifar10-10-non-iid-1") if run["label"] == STEPS["pFedLA"]]
    largest = [
        max((run["alpha"][client][place][client], layer) for place, layer in enumerate(run["layers"]))[1]
        for run in found
        for client in range(10)
    ]
    text = f"as in the paper, and so it is for {largest.count('fc1')} of {len(largest)} clients over three seeds"
    says("docs/reproduction.md", f"own weight is in `fc1` on CIFAR-10, {text}")
    assert set(largest) == {"fc1", "conv2", "fc3"}
    target = [
        cell(column, method) for column, method in (("cifar10-10-non-iid-1", "Adam"), ("emnist-10-non-iid-1", "pFedLA"))
    ]
    ordered = [sorted(zip([row[0] for row in run["alpha"][0]], run["layers"], strict=True)) for run in target]
    assert ordered[0][-1][1] == "conv2"
    assert [layer for _, layer in ordered[1][-2:]] == ["fc3", "fc1"]
