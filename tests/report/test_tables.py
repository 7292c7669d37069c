from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pfedla.errors import ConfigError
from pfedla.report.tables import VALUES, comparison_table, overview, shown


def summary(accuracy: float, down: int, seed: int = 0) -> dict[str, Any]:
    return {
        "dataset": "some-data",
        "clients": 3,
        "rounds": 5,
        "seed": seed,
        "accuracy_mean": accuracy,
        "accuracy_std": 0.1,
        "accuracy_worst": accuracy - 0.1,
        "accuracy_after_training": 0.9,
        "bytes_down": down,
        "bytes_up": 2 * down,
        "seconds": 1.0,
    }


def errors(rmse: float, worst: float, label: str = "", seed: int = 0) -> dict[str, Any]:
    """Make a summary whose headline is the better the smaller it is."""
    figures = {"rmse_mean": rmse, "rmse_std": 0.01, "rmse_worst": worst, "rmse_after_training": rmse}
    kept = {key: value for key, value in summary(0, 10**6, seed).items() if "accuracy" not in key}
    return {**kept, **figures, "label": label, "headline": "rmse", "higher_is_better": False, "percent": False}


def printed(runs: Any) -> list[str]:
    console = Console(width=150, file=io.StringIO())
    console.print(comparison_table(runs))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def row(lines: list[str], method: str) -> list[str]:
    return next(line for line in lines if line.split()[:1] == [method]).split()


def test_the_best_of_each_column_is_marked() -> None:
    lines = printed(
        [("alone", [summary(0.5, 0)]), ("wide", [summary(0.75, 4_000_000)]), ("lean", [summary(0.7, 10**6)])]
    )
    assert row(lines, "alone") == ["alone", "50.00", "10.00", "40.00", "90.00", "0.0", "0.0", "1.0"]
    assert row(lines, "wide") == ["wide", "*75.00", "10.00", "*65.00", "90.00", "4.0", "8.0", "1.0"]
    assert row(lines, "lean")[-3:] == ["*1.0", "*2.0", "1.0"]  # the least traffic of those that talk


def test_seeds_are_averaged_and_their_spread_is_shown() -> None:
    lines = printed([("one", [summary(0.5, 1), summary(0.7, 1, seed=1)])])
    assert row(lines, "one")[1:3] == ["60.00", "14.14"]
    assert any("means over 2 seeds" in line for line in lines)
    assert "*" not in "".join(lines)  # nothing to be best of


def test_comparisons_stand_side_by_side() -> None:
    def of(label: str, *accuracies: float) -> list[dict[str, Any]]:
        return [{**summary(accuracy, 10**6, seed), "label": label} for seed, accuracy in enumerate(accuracies)]

    one = of("alone", 0.5, 0.52) + of("wide", 0.75)
    lines = overview({"one": one, "other": of("wide", 0.6)}).splitlines()
    assert lines[0] == "| method | one | other |"
    assert lines[2] == "| `alone` | 51.00 ± 1.41 | - |"
    assert lines[3] == "| `wide` | 75.00 (1 of 2) | 60.00 |"
    assert overview({"one": one}, ["mb-down"]).splitlines()[3] == "| `wide` | 1.0 (1 of 2) |"


def test_the_best_is_one_that_was_run_with_all_seeds() -> None:
    def of(label: str, **accuracies: float) -> list[dict[str, Any]]:
        return [{**summary(a, 10**6, int(seed[1:])), "label": label} for seed, a in accuracies.items()]

    one = of("most", s0=0.6, s1=0.5) + of("easy", s0=0.9) + of("less", s1=0.52, s0=0.54) + of("other", s2=0.95, s0=0.9)
    marked = [line for line in overview({"one": one}).splitlines() if "**" in line]
    assert marked == []  # nobody has all three
    marked = [line for line in overview({"one": one[:-2]}).splitlines() if "**" in line]
    assert marked == ["| `most` | **55.00 ± 7.07** |"]


def test_differences_are_taken_seed_by_seed() -> None:
    def of(label: str, **accuracies: float) -> list[dict[str, Any]]:
        return [{**summary(a, 10**6, int(seed[1:])), "label": label} for seed, a in accuracies.items()]

    one = of("alone", s0=0.5, s1=0.6, s2=0.4) + of("wide", s1=0.63, s0=0.51) + of("new", s7=0.9)
    lines = overview({"one": one, "other": of("wide", s0=0.6)}, against="alone").splitlines()
    assert lines[0] == "| above `alone` | one | other |"
    assert lines[2:] == ["| `wide` | +2.00 ± 1.41 | - |", "| `new` | - | - |"]
    lines = overview({"one": one}, against="wide").splitlines()
    assert lines[2] == "| `alone` | -2.00 ± 1.41 |"
    with pytest.raises(ConfigError, match=r"unknown method 'alon'.*alone"):
        overview({"one": one}, against="alon")


def test_the_mean_over_comparisons_is_of_methods_that_are_in_all() -> None:
    def runs(label: str, *accuracies: float) -> list[dict[str, Any]]:
        return [{**summary(value, 10**6, seed), "label": label} for seed, value in enumerate(accuracies)]

    found = {"easy": runs("a", 0.8, 0.9) + runs("b", 0.7, 0.7), "hard": runs("a", 0.2, 0.5)}
    lines = overview(found, average=True).splitlines()
    assert lines[0] == "| method | easy | hard | mean |"
    assert lines[2] == "| `a` | **85.00 ± 7.07** | 35.00 ± 21.21 | 60.00 ± 14.14 |"
    assert lines[3].endswith("| - | - |")
    lines = overview(found, ("headline", "mb-up"), average=True).splitlines()
    assert lines[0] == (
        "| method | easy, accuracy % | easy, mb-up | hard, accuracy % | hard, mb-up | mean, headline | mean, mb-up |"
    )
    assert lines[2].endswith("| 60.00 ± 14.14 | 2.0 ± 0.0 |")
    assert overview(found, ("headline", "headline"), average=True) == overview(found, average=True)


def test_the_headline_says_what_is_best() -> None:
    lines = printed([("near", [errors(0.25, 1.5)]), ("far", [errors(0.5, 1.25)]), ("middle", [errors(0.375, 2)])])
    assert row(lines, "near") == ["near", "*0.25", "0.01", "1.5", "*0.25", "1.0", "2.0", "1.0"]
    assert row(lines, "far") == ["far", "0.5", "0.01", "*1.25", "0.5", "1.0", "2.0", "1.0"]
    assert any(line.split()[:2] == ["method", "rmse"] for line in lines)
    assert "Rmse on the clients' test samples" in " ".join(" ".join(lines).split())
    assert "%" not in "".join(lines)


def test_comparisons_side_by_side_mark_the_smallest_error_and_the_largest_accuracy() -> None:
    wide = [{**summary(accuracy, 1), "label": label} for label, accuracy in (("alone", 0.5), ("wide", 0.75))]
    both = {"classes": wide, "numbers": [errors(0.5, 1, "alone"), errors(0.75, 1, "wide")]}
    assert overview(both).splitlines()[2:] == ["| `alone` | 50.00 | **0.5** |", "| `wide` | **75.00** | 0.75 |"]
    seeds = [*both["numbers"], errors(0.25, 1, "alone", 1), errors(0.625, 1, "wide", 1), errors(1, 1, "worse")]
    seeds.append(errors(0.875, 1, "worse", 1))
    lines = overview({"numbers": seeds}, against="alone").splitlines()
    assert lines[2:] == ["| `wide` | **+0.3125 ± 0.08839** |", "| `worse` | +0.5625 ± 0.08839 |"]


def test_runs_with_different_headlines_cannot_be_compared() -> None:
    mixed = [summary(0.5, 1), errors(0.5, 1)]
    with pytest.raises(ConfigError, match="runs with different headlines cannot be compared: accuracy, rmse"):
        comparison_table([("one", mixed[:1]), ("other", mixed[1:])])
    with pytest.raises(ConfigError, match="runs with different headlines"):
        overview({"both": [{**one, "label": "x"} for one in mixed]})


def test_what_has_no_value_is_a_dash_and_never_the_best() -> None:
    nobody = {**errors(0.5, 1), "rmse_mean": None, "rmse_std": None, "rmse_worst": None, "rmse_after_training": None}
    lines = printed([("near", [errors(0.25, 1.5)]), ("far", [errors(0.5, 2)]), ("nobody", [nobody])])
    assert row(lines, "nobody") == ["nobody", "-", "-", "-", "-", "1.0", "2.0", "1.0"]
    assert row(lines, "near")[1:4] == ["*0.25", "0.01", "*1.5"]


def test_every_value_can_be_shown() -> None:
    found = [overview({"one": [errors(0.5, 0.75, "x")]}, [value]).splitlines()[2] for value in VALUES]
    expected = ("0.5", "-", "-", "-", "0.01", "0.75", "0.5", "-", "1.0", "2.0", "1.0")
    assert found == [f"| `x` | {text} |" for text in expected]
    all_at_once = overview({"one": [errors(0.5, 0.75, "x")]}, VALUES).splitlines()
    assert all_at_once[0] == f"| method | rmse | {' | '.join(VALUES[1:])} |"
    assert all_at_once[2] == f"| `x` | {' | '.join(expected)} |"
    both = {name: [{**summary(0.5, 1), "label": "x"}] for name in ("one", "other")}
    heading = "| method | one, accuracy % | one, worst | other, accuracy % | other, worst |"
    assert overview(both, ["headline", "worst"]).splitlines()[0] == heading


def test_the_mean_weighted_by_samples_is_shown_where_it_differs() -> None:
    alike, unlike = summary(0.5, 1) | {"accuracy_weighted": 0.500001}, summary(0.5, 1) | {"accuracy_weighted": 0.75}
    assert "by" not in printed([("one", [alike])])[1].split()
    lines = printed([("one", [alike]), ("two", [unlike])])
    assert row(lines, "two")[1:3] == ["50.00", "*75.00"]
    assert "mean weighted by samples" in " ".join(" ".join(lines).split())


def test_small_numbers_are_written_as_people_would() -> None:
    few = summary(0.5, 1234) | {"clients": 1, "rounds": 1, "few_test_samples": 1}
    text = " ".join(" ".join(printed([("one", [few]), ("other", [summary(0.4, 5000)])])).split())
    assert "some-data, 1 client, 1 round, seed 0" in text
    assert "1 client with fewer than 10 such samples" in text
    assert "*0.0012" in text
    assert "*0.0 " not in text


def test_refused_uploads_are_told() -> None:
    runs = [("calm", [summary(0.5, 1)] * 2), ("wild", [summary(0.6, 1) | {"refused_uploads": 3}] * 2)]
    caption = str(comparison_table(runs).caption)
    assert "Refused uploads: 6 of wild; many mean that training diverged" in caption
    assert "Refused" not in str(comparison_table(runs[:1]).caption)


def test_what_the_class_prior_explains_stands_beside_the_headline() -> None:
    controls = {"accuracy_class_prior": 0.625, "accuracy_known_classes": 0.5625}
    runs = [("shared", [summary(0.5, 1) | controls]), ("own", [summary(0.75, 1)])]
    lines = printed(runs)
    assert row(lines, "shared")[1:4] == ["50.00", "62.50", "10.00"]
    assert row(lines, "own")[1:4] == ["*75.00", "-", "10.00"]
    assert "the same with the client's class frequencies" in " ".join(" ".join(lines).split())
    assert "frequencies" not in "".join(printed(runs[1:]))
    found = {"one": [{**run, "label": label} for label, (run,) in runs]}
    assert overview(found, ["class-prior"]).splitlines()[2:] == ["| `shared` | 62.50 |", "| `own` | - |"]
    assert overview(found, ["known-classes"]).splitlines()[2] == "| `shared` | 56.25 |"


def test_of_losses_the_smaller_one_is_the_better() -> None:
    runs = [("one", summary(0.5, 1) | {"loss_mean": 1.25}), ("other", summary(0.5, 1) | {"loss_mean": 0.75})]
    found = {"some": [{**run, "label": label} for label, run in runs]}
    assert overview(found, ["loss"]).splitlines()[2:] == ["| `one` | 1.250 |", "| `other` | **0.750** |"]
    assert "+0.5" in overview(found, ["loss"], against="other")
    assert "loss" not in "".join(printed([(label, [run]) for label, run in runs]))


def test_a_table_says_what_models_were_scored_on() -> None:
    for scored_on in ("test", "validation"):
        lines = printed([("one", [summary(0.5, 1) | {"scored_on": scored_on}])])
        assert f"on the clients' {scored_on} samples" in " ".join(" ".join(lines).split())


def test_metrics_are_shown_as_fractions_or_percentages() -> None:
    assert [shown(0.12345, percent=True), shown(0.12345, percent=False)] == ["12.35", "0.1235"]
    assert [shown(123456.0, percent=False), shown(float("nan"), percent=True)] == ["1.235e+05", "-"]


def test_a_headline_without_a_value_in_some_seed_is_a_dash() -> None:
    runs = [{**summary(0.5, 1, seed), "accuracy_mean": None if seed else 0.5, "label": "a"} for seed in (0, 1)]
    assert overview({"one": runs}).splitlines()[2] == "| `a` | - |"
    assert row(printed([("a", runs), ("b", runs)]), "a")[1:3] == ["-", "-"]


def test_differences_of_megabytes_are_written_as_people_would() -> None:
    runs = [summary(0.5, size) | {"label": label} for label, size in (("fedavg", 412_900_000), ("local", 0))]
    assert "-412.9" in overview({"a": runs}, ["mb-down"], against="fedavg")


def test_there_is_no_mean_of_figures_of_different_kinds() -> None:
    one, other = [summary(0.9, 1) | {"label": "a"}], [errors(3.0, 4.0, "a")]
    with pytest.raises(ConfigError, match="no mean over comparisons with different headlines or units: accuracy, rmse"):
        overview({"x": one, "y": other}, average=True)
