"""What is trained for: losses and metrics on numbers that can be checked by hand, and whole runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

import pfedla
from pfedla import Binary, Classification, Custom, FedAvg, Local, MultiLabel, PerPosition, PFedLA, Regression, Training
from pfedla.algorithm import Algorithm
from pfedla.engine import FlatModel
from pfedla.errors import ConfigError, ModelError
from pfedla.layers import LayerSpec
from pfedla.objective import OBJECTIVES, Objective
from pfedla.report.tables import comparison_table, overview
from pfedla.training import Samples, score
from tests.world import same_result

LOG2, LOG3 = math.log(2), math.log(3)


class Echo(nn.Module):
    """Returns its inputs times 1, so that outputs can be written down as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one


def scored(objective: Objective, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Score outputs as those of a client's model, in batches of 2, of 3 and in one: all must give the same."""
    model = Echo()
    spec = LayerSpec.of(model)
    flat, found = FlatModel(model, spec, objective), []
    for size in (2, 3, 250):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pfedla.training.EVALUATION_BATCH", size)
            scores = score(flat, spec.read(model), [Samples(outputs, targets)])
        found.append({metric: float(values[0]) for metric, values in scores.items()})
    assert found[0] == pytest.approx(found[2], nan_ok=True)
    assert found[1] == pytest.approx(found[2], nan_ok=True)
    return found[0]


def logits(classes: list[int], count: int = 3) -> Tensor:
    """Return logits whose likeliest class has odds of 2 to 1: its share is 1/2 of three classes, the others' 1/4."""
    return functional.one_hot(torch.tensor(classes), count) * LOG2


# ---- every objective by hand


def test_classification_by_hand() -> None:
    outputs, targets = logits([0, 0, 1, 2, 0]), torch.tensor([0, 2, 0, 2, 1])
    outputs[1] = 0  # all alike: the first is taken
    expected = {"accuracy": 2 / 5, "loss": (LOG2 + LOG3 + 2 * LOG2 + LOG2 + 2 * LOG2) / 5}
    assert scored(Classification(), outputs, targets) == pytest.approx(expected)


def test_what_a_clients_classes_and_their_frequencies_tell() -> None:
    """Three classes, of which the client trains on 0 (thrice) and 2 (once): 1 is out, and 0 is favoured by log 3."""
    cases = [  # logits, label, and who is right: plain, known classes, class prior
        ([0.0, 9.0, 1.0], 0, (0, 0, 1)),
        ([0.0, 9.0, 2.0], 2, (0, 1, 1)),
        ([1.0, 0.0, 0.0], 0, (1, 1, 1)),
        ([0.0, 5.0, 0.0], 1, (1, 0, 0)),
        ([0.0, 0.0, 1.05], 2, (1, 1, 0)),
    ]
    model, train = Echo(), [Samples(torch.zeros(4, 3), torch.tensor([0, 2, 0, 0]))]
    spec = LayerSpec.of(model)
    flat, theta = FlatModel(model, spec, Classification()), spec.read(model)
    for some in (*([case] for case in cases), cases):
        outputs, targets, right = zip(*some, strict=True)
        test = [Samples(torch.tensor(outputs), torch.tensor(targets))]
        found = score(flat, theta, test, train)
        assert list(found) == ["accuracy", "loss", "accuracy_known_classes", "accuracy_class_prior"]
        shares = [float(values[0]) for metric, values in found.items() if metric != "loss"]
        assert shares == pytest.approx(np.mean(right, axis=0).tolist())
        assert list(score(flat, theta, test)) == ["accuracy", "loss"]


def test_other_objectives_have_no_controls() -> None:
    for objective in (Regression(), Binary(), MultiLabel(), PerPosition(), Custom(functional.mse_loss)):
        assert objective.prior(torch.zeros(3)) is None
        assert not objective.control_names


def test_a_shared_model_becomes_personal_by_the_class_prior_alone(tmp_path: Path) -> None:
    """All clients share one rule from inputs to classes and differ in their classes: FedAvg lacks only the prior."""
    rng = np.random.default_rng(0)
    clients = []
    for first in range(4):
        y = (first + rng.integers(0, 2, 200)) % 4
        x = np.eye(4)[y] + 0.9 * rng.normal(size=(200, 4))
        clients.append((x.astype(np.float32), y))
    result = pfedla.run(FedAvg(), lambda: nn.Linear(4, 4), clients, 15, eval_every=5, workers=0, out=tmp_path / "run")
    figures = result.summary
    assert figures["accuracy_class_prior"] > figures["accuracy_mean"] + 0.1
    assert figures["accuracy_known_classes"] > figures["accuracy_mean"] + 0.1
    record = pfedla.load(tmp_path / "run", nn.Linear(4, 4)).history[-1]
    for control in ("accuracy_known_classes", "accuracy_class_prior"):
        assert record[control] == figures[control] == pytest.approx(np.mean(record["clients"][control]))
        assert len(record["clients"][f"{control}_after_training"]) == 4


ERRORS = torch.tensor([0.0, 1.0, -2.0, 0.0, 3.0])
VALUES = torch.tensor([1.0, 1.0, 5.0, 4.0, 2.0])
BY_HAND = {"rmse": math.sqrt(14 / 5), "mae": 6 / 5, "loss": 14 / 5}


def test_regression_by_hand() -> None:
    assert scored(Regression(), VALUES + ERRORS, VALUES) == pytest.approx(BY_HAND)
    roots = [math.sqrt(1 / 2), math.sqrt(4 / 2), 3.0]  # of batches of 2, 2 and 1: their mean is another number
    assert BY_HAND["rmse"] != pytest.approx(sum(roots) / 3)


def test_values_in_a_row_go_with_values_in_a_column_and_are_never_spread() -> None:
    outputs, targets = VALUES + ERRORS, VALUES
    for a in (outputs, outputs[:, None]):
        for b in (targets, targets[:, None]):
            assert scored(Regression(), a, b) == pytest.approx(BY_HAND)
            assert float(Regression().loss(a, b)) == pytest.approx(14 / 5)
    yes, half = (targets > 1).float(), scored(Binary(), outputs, (targets > 1).float())
    for a in (outputs, outputs[:, None]):
        for b in (yes, yes[:, None], yes.long(), yes[:, None].long()):
            assert scored(Binary(), a, b) == pytest.approx(half)


def test_regression_of_several_values_counts_each() -> None:
    outputs = torch.stack([VALUES + ERRORS, VALUES], dim=1)
    expected = {"rmse": math.sqrt(14 / 10), "mae": 6 / 10, "loss": 14 / 10}
    assert scored(Regression(), outputs, torch.stack([VALUES, VALUES], dim=1)) == pytest.approx(expected)


def test_binary_by_hand() -> None:
    outputs = torch.tensor([LOG3, -LOG3, 0.0, LOG3, -LOG3])  # odds of 3 to 1, for or against; even odds are a no
    targets = torch.tensor([1, 0, 1, 0, 1])
    expected = {"accuracy": 2 / 5, "loss": (2 * math.log(4 / 3) + LOG2 + 2 * math.log(4)) / 5}
    assert scored(Binary(), outputs, targets) == pytest.approx(expected)


def test_multi_label_by_hand() -> None:
    said = torch.tensor([[1, 0], [1, 1], [0, 0], [1, 0], [0, 1]])
    true = torch.tensor([[1, 1], [0, 1], [0, 0], [1, 0], [1, 0]])
    right, found, missed, wrong = 6, 3, 2, 2  # of ten labels; of those that are there; and those that are not
    expected = {
        "f1": 2 * found / (2 * found + wrong + missed),
        "accuracy": right / 10,
        "loss": (right * math.log(4 / 3) + (10 - right) * math.log(4)) / 10,
    }
    assert expected["f1"] == 0.6
    assert scored(MultiLabel(), (2 * said - 1) * LOG3, true) == pytest.approx(expected)
    nothing = scored(MultiLabel(), -torch.ones(5, 2), torch.zeros(5, 2))
    assert math.isnan(nothing["f1"])
    assert nothing["accuracy"] == 1


def test_per_position_by_hand() -> None:
    said = [[0, 1], [2, 2], [1, 0], [0, 0], [2, 1]]
    outputs = torch.stack([logits(row).T for row in said])  # (5, classes, positions)
    targets = torch.tensor([[0, -100], [2, 1], [-100, -100], [1, 0], [2, 1]])
    expected = {"accuracy": 5 / 7, "loss": (5 * LOG2 + 2 * 2 * LOG2) / 7}
    assert scored(PerPosition(), outputs, targets) == pytest.approx(expected)
    assert scored(PerPosition(ignore=7), outputs, targets.where(targets >= 0, 7)) == pytest.approx(expected)
    padded = torch.tensor([[0, 1], [2, 1], [0, 0], [1, 0], [2, 1]])  # a class may be what is ignored
    expected_of_padded = {"accuracy": 4 / 6, "loss": (4 * LOG2 + 2 * 2 * LOG2) / 6}
    assert scored(PerPosition(ignore=0), outputs, padded) == pytest.approx(expected_of_padded)
    square = scored(PerPosition(), outputs.unsqueeze(2), targets.unsqueeze(1))  # (5, classes, height, width)
    assert square == pytest.approx(expected)
    nothing = scored(PerPosition(), outputs, torch.full((5, 2), -100))
    assert math.isnan(nothing["accuracy"])
    assert math.isnan(nothing["loss"])


def near(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets).abs() < 1.5).float().mean()


def test_custom_by_hand() -> None:
    objective = Custom(functional.l1_loss, near, "near", higher_is_better=True, percent=True)
    assert (objective.headline, objective.higher_is_better, objective.percent) == ("near", True, True)
    assert scored(objective, VALUES + ERRORS, VALUES) == pytest.approx({"near": 3 / 5, "loss": 6 / 5})
    assert scored(Custom(functional.l1_loss), VALUES + ERRORS, VALUES) == pytest.approx({"loss": 6 / 5})


def test_a_metric_needs_a_name_and_a_name_a_metric() -> None:
    with pytest.raises(ConfigError, match="a metric needs a name other than 'loss', and a name a metric: 'loss'"):
        Custom(functional.l1_loss, near)
    with pytest.raises(ConfigError, match=r"a metric needs a name .* 'near'"):
        Custom(functional.l1_loss, headline="near")
    with pytest.raises(ConfigError, match="a metric needs a name"):
        Custom(functional.l1_loss, functional.mse_loss, "")


EVERY: dict[str, tuple[Objective, Tensor, Tensor]] = {
    "classification": (Classification(), logits([0, 0, 1, 2, 0]), torch.tensor([0, 2, 0, 2, 1])),
    "regression": (Regression(), VALUES + ERRORS, VALUES),
    "binary": (Binary(), ERRORS, (VALUES > 1).float()),
    "multi-label": (MultiLabel(), torch.stack([ERRORS, -ERRORS], 1), torch.stack([VALUES > 1, VALUES > 4], 1).long()),
    "per-position": (
        PerPosition(),
        torch.stack([logits([0, 1]).T] * 5),
        torch.tensor([[0, 0], [1, -100]] * 2 + [[2, 1]]),
    ),
    "custom": (Custom(functional.l1_loss, near, "near"), VALUES + ERRORS, VALUES),
}


@pytest.mark.parametrize("name", EVERY)
def test_the_loss_that_is_measured_is_the_loss_that_is_trained(name: str) -> None:
    objective, outputs, targets = EVERY[name]
    assert scored(objective, outputs, targets)["loss"] == pytest.approx(float(objective.loss(outputs, targets)))
    objective.check(outputs[:2], targets)
    assert next(iter(scored(objective, outputs, targets))) == objective.headline


@pytest.mark.parametrize("name", EVERY)
def test_without_samples_there_are_no_values(name: str) -> None:
    objective, outputs, targets = EVERY[name]
    found = scored(objective, outputs[:0], targets[:0])
    assert found.keys() == {objective.headline, "loss"}
    assert all(map(math.isnan, found.values()))


def test_every_ready_objective_has_its_name() -> None:
    for name, kind in OBJECTIVES.items():
        assert kind().name == name
        assert type(EVERY[name][0]) is kind
    assert Custom(functional.l1_loss).name == "pfedla.objective:Custom"


# ---- what does not fit


class Forgetful(Regression):
    """Forgets to measure its headline."""

    headline = "r2"


@pytest.mark.parametrize(
    ("objective", "outputs", "targets", "message"),
    [
        (
            Classification(),
            torch.zeros(2, 3, 1),
            torch.tensor([0, 1]),
            r"logits of shape \(batch, classes\), not .*3, 1",
        ),
        (Classification(), torch.zeros(2), torch.tensor([0, 1]), r"not a tensor of shape \(2,\)"),
        (
            Classification(),
            torch.zeros(2, 3),
            torch.zeros(2),
            "labels must be whole numbers in one dimension, not torch.f",
        ),
        (Classification(), torch.zeros(2, 3), torch.zeros(2, 1).long(), "in one dimension, not torch.int64 2-d"),
        (
            Classification(),
            torch.zeros(2, 3),
            torch.tensor([0, 1, 0, 3]),
            "labels go from 0 to 3, but .* has 3 outputs",
        ),
        (Classification(), torch.zeros(2, 3), torch.tensor([-1, 1]), "labels go from -1 to 1"),
        (Regression(), torch.zeros(2, 2), torch.zeros(9), r"outputs of shape \(2, 2\) and targets of shape \(9,\)"),
        (Regression(), torch.zeros(2, 2, 3), torch.zeros(9, 3, 2), "they must be of one shape"),
        (Regression(), torch.zeros(2, 6), torch.zeros(9, 2, 3), "they must be of one shape"),
        (Regression(), torch.zeros(1, 2), torch.zeros(2), "regression cannot compare"),
        (Binary(), torch.zeros(2, 2), torch.zeros(9), "binary cannot compare"),
        (Binary(), torch.zeros(2), torch.tensor([0, 1, 1, 2]), "targets must be 0 or 1, not from 0 to 2"),
        (Binary(), torch.zeros(2), torch.tensor([0, 0.5]), "targets must be 0 or 1, not from 0 to 0.5"),
        (MultiLabel(), torch.zeros(2, 3), torch.zeros(9, 2), "multi-label cannot compare"),
        (MultiLabel(), torch.zeros(2, 2), torch.full((9, 2), -1), "targets must be 0 or 1, not from -1 to -1"),
        (
            PerPosition(),
            torch.zeros(2, 3),
            torch.zeros(9).long(),
            r"\(batch, classes, positions\.\.\.\): outputs .*2, 3",
        ),
        (PerPosition(), torch.zeros(2, 3, 4), torch.zeros(9, 5).long(), r"and targets of shape \(9, 5\)"),
        (PerPosition(), torch.zeros(2, 3, 4), torch.zeros(9, 4), "labels must be whole numbers, not torch.float32"),
        (
            PerPosition(),
            torch.zeros(2, 3, 4),
            torch.full((9, 4), 3),
            "labels go from 3 to 3, but the model has 3 classes",
        ),
        (PerPosition(ignore=9), torch.zeros(2, 3, 4), torch.full((9, 4), -100), "labels go from -100 to -100"),
        (Custom(lambda o, t: (o - t).square()), torch.zeros(2, 1), torch.zeros(9, 1), r"of one value, not .*\(2, 1\)"),
        (Custom(lambda o, t: 1.0), torch.zeros(2), torch.zeros(9), "a tensor of one value, not float"),  # type: ignore[arg-type, return-value]
        (Custom(functional.l1_loss, lambda o, t: o - t, "e"), torch.zeros(2), torch.zeros(9), "Custom cannot compare"),
        (Custom(functional.cross_entropy), torch.zeros(2, 3), torch.tensor([0, 7]), "Custom cannot compare"),
        (Forgetful(), torch.zeros(2), torch.zeros(9), "must measure r2, not only rmse, mae, loss"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_training(
    objective: Objective, outputs: Tensor, targets: Tensor, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        objective.check(outputs, targets)


def test_what_is_ignored_may_be_any_number() -> None:
    PerPosition(ignore=99).check(torch.zeros(2, 3, 2), torch.tensor([[0, 99], [99, 2]]))
    PerPosition().check(torch.zeros(2, 3, 2), torch.full((2, 2), -100))


# ---- whole runs

WEIGHTS = np.array([1.0, -2.0, 0.5], dtype=np.float32)


def linear_problem(clients: int = 4, count: int = 60) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Make clients of one linear problem, each with more noise than the one before, and a bias of 3 for all."""
    rng, made = np.random.default_rng(0), list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]()
    for client in range(clients):
        x = rng.normal(size=(count, 3)).astype(np.float32)
        y = (x @ WEIGHTS + 3 + 0.02 * (1 + client) * rng.normal(size=count)).astype(np.float32)
        made.append((x[:40], y[:40], x[40:], y[40:]))
    return made


def run(
    objective: Objective, clients: Any, model: Callable[[], nn.Module], algorithm: Any = None, **settings: Any
) -> pfedla.Result:
    how = {"rounds": 2, "eval_every": 1, "workers": 0, "training": Training(local_epochs=2, batch_size=8, lr=0.05)}
    return pfedla.run(algorithm or PFedLA(), model, clients, objective=objective, **{**how, **settings})


FAST = Training(local_epochs=5, batch_size=8, lr=0.5)


def outputs_of(result: pfedla.Result, client: int, x: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = result.model(client)(torch.from_numpy(x)).double().numpy()
    return found


def line() -> nn.Module:
    return nn.Linear(3, 1)


def test_a_linear_problem_is_learned_and_summed_up() -> None:
    clients = linear_problem()
    result = run(Regression(), clients, line, FedAvg(), rounds=10)
    errors = [(outputs_of(result, i, x)[:, 0] - y) for i, (_, _, x, y) in enumerate(clients)]
    rmse = [float(np.sqrt(np.mean(error**2))) for error in errors]
    noise = [float(np.sqrt(np.mean((x @ WEIGHTS + 3 - y) ** 2))) for _, _, x, y in clients]
    zero = [float(np.sqrt(np.mean(y**2))) for *_, y in clients]  # of a model that says 0
    summary = result.summary
    assert summary["rmse_mean"] < 1.1 * np.mean(noise) < 0.05 * np.mean(zero)
    assert result.history[0]["rmse_mean"] > 3 * summary["rmse_mean"]  # it took more than a round
    expected = {
        "rmse_mean": np.mean(rmse),
        "rmse_std": np.std(rmse),
        "rmse_worst": max(rmse),
        "rmse_p90": np.percentile(rmse, 90),
        "mae_mean": np.mean([np.abs(error).mean() for error in errors]),
        "loss_mean": np.mean(np.square(rmse)),
    }
    assert {key: summary[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert summary["rmse_worst"] > summary["rmse_p90"] > summary["rmse_mean"]
    assert (summary["headline"], summary["higher_is_better"], summary["percent"]) == ("rmse", False, False)
    assert {"rmse_after_training", "mae_after_training", "loss_after_training"} <= summary.keys()
    assert not any("accuracy" in key or key.endswith("p10") for key in summary)
    means = {record["round"]: record["rmse_mean"] for record in result.history}
    assert summary["best_round_rmse_mean"] == means[summary["best_round"]] == min(means.values())
    assert result.history[-1]["clients"]["rmse"] == pytest.approx(rmse, abs=1e-5)


def test_every_method_trains_for_numbers(algorithm: Algorithm[Any]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    clients = linear_problem(3, 48)
    result = run(Regression(), clients, make, algorithm, training=Training(local_epochs=2, batch_size=40))
    for client, (_, _, x, y) in enumerate(clients):
        by_hand = float(np.sqrt(np.mean((outputs_of(result, client, x)[:, 0] - y) ** 2)))
        assert result.history[-1]["clients"]["rmse"][client] == pytest.approx(by_hand, abs=1e-5)


def test_the_smallest_error_is_the_best_of_a_comparison() -> None:
    clients = linear_problem()
    runs = {kind.__name__: run(Regression(), clients, line, kind(), rounds=1) for kind in (Local, FedAvg)}
    means = {name: result.summary["rmse_mean"] for name, result in runs.items()}
    best = min(means, key=lambda name: float(means[name]))
    console = Console(width=150, color_system=None)
    with console.capture() as capture:
        console.print(comparison_table([(name, [result.summary]) for name, result in runs.items()]))
    rows = dict(re.findall(r"^ *(Local|FedAvg) +(\S+)", capture.get(), re.MULTILINE))
    assert rows == {name: ("*" if name == best else "") + f"{mean:.4g}" for name, mean in means.items()}
    listed = [{**result.summary, "label": name} for name, result in runs.items()]
    assert f"| `{best}` | **{means[best]:.4g}** |" in overview({"one": listed})


def test_runs_with_different_headlines_cannot_be_compared() -> None:
    clients = linear_problem(2)
    one = run(Regression(), clients, line).summary
    other = run(Custom(functional.l1_loss), [(x, y[:, None]) for x, y, *_ in clients], line).summary
    assert other["headline"] == "loss"
    with pytest.raises(ConfigError, match="runs with different headlines cannot be compared: loss, rmse"):
        comparison_table([("one", [one]), ("other", [other])])


def test_a_loss_and_a_metric_of_ones_own(tmp_path: Path) -> None:
    clients = [tuple(part[:, None] if part.ndim == 1 else part for part in own) for own in linear_problem()]
    objective = Custom(lambda o, t: functional.huber_loss(o, t), near, "near", higher_is_better=True, percent=True)
    result = run(objective, clients, line, FedAvg(), out=tmp_path / "run")
    shares = [
        float(np.mean(np.abs(outputs_of(result, client, x) - y) < 1.5)) for client, (_, _, x, y) in enumerate(clients)
    ]
    summary = result.summary
    assert summary["near_mean"] == pytest.approx(np.mean(shares))
    assert summary["near_worst"] == pytest.approx(min(shares))
    assert summary["near_p10"] == pytest.approx(np.percentile(shares, 10))
    assert (summary["headline"], summary["higher_is_better"], summary["percent"]) == ("near", True, True)
    assert result.history[1]["loss_mean"] < result.history[0]["loss_mean"]
    same_result(pfedla.load(tmp_path / "run", model=line), result)
    same_result(run(objective, clients, line, FedAvg(), workers=2), result)


def test_binary_runs() -> None:
    clients = [(x, (y > 3).astype(np.int64)) for x, y, *_ in linear_problem()]
    result = run(Binary(), [(*own, *own) for own in clients], line, FedAvg(), training=FAST)
    shares = [float(np.mean((outputs_of(result, i, x)[:, 0] > 0) == y)) for i, (x, y) in enumerate(clients)]
    assert result.summary["accuracy_mean"] == pytest.approx(np.mean(shares))
    assert result.summary["accuracy_mean"] > 0.9  # half of the answers are no
    assert result.summary["accuracy_worst"] == pytest.approx(min(shares))


def test_multi_label_runs() -> None:
    clients = [(x, np.stack([y > 3, x[:, 0] > 0], axis=1).astype(np.float32)) for x, y, *_ in linear_problem()]
    result = run(MultiLabel(), [(*own, *own) for own in clients], lambda: nn.Linear(3, 2), training=FAST)
    scores = []
    for client, (x, y) in enumerate(clients):
        said = outputs_of(result, client, x) > 0
        found = int((said & (y > 0)).sum())
        wrong, missed = int((said & (y == 0)).sum()), int((~said & (y > 0)).sum())
        scores.append(2 * found / (2 * found + wrong + missed))
    assert result.summary["f1_mean"] == pytest.approx(np.mean(scores))
    assert result.summary["f1_mean"] > 0.9
    assert {"accuracy_mean", "loss_mean", "f1_p10", "f1_worst"} <= result.summary.keys()


class Tagger(nn.Module):
    """Two classes at each of three positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x.unsqueeze(1))
        return out


def test_per_position_runs() -> None:
    clients = []
    for x, *_ in linear_problem():
        y = (x > 0).astype(np.int64)
        y[::2, 1] = -100  # padding, say
        clients.append((x, y))
    result = run(PerPosition(), [(*own, *own) for own in clients], Tagger, FedAvg(), training=FAST)
    shares = []
    for client, (x, y) in enumerate(clients):
        said = outputs_of(result, client, x).argmax(1)
        shares.append(float((said == y)[y != -100].mean()))
    assert result.summary["accuracy_mean"] == pytest.approx(np.mean(shares))
    assert result.summary["accuracy_mean"] > 0.9
    assert result.summary["dataset"] == "own data"


def test_a_client_whose_positions_are_all_ignored_is_left_out_of_the_mean() -> None:
    x = linear_problem(1)[0][0]
    y = (x > 0).astype(np.int64)
    nothing = np.full_like(y, -100)
    result = run(PerPosition(), [(x, y, x, y), (x, y, x, nothing)], Tagger, FedAvg())
    first, second = result.history[-1]["clients"]["accuracy"]
    assert second is None
    assert result.summary["accuracy_mean"] == result.summary["accuracy_worst"] == pytest.approx(first, abs=1e-6)


def test_a_model_is_told_the_number_of_classes_or_of_values() -> None:
    labels = np.array([[0, 1, -100], [2, 0, 1]])
    assert PerPosition().outputs([labels, labels * 0]) == 3
    assert PerPosition(ignore=2).outputs([labels.clip(0)]) == 2
    assert Classification().outputs([np.array([0, 4]), np.array([1])]) == 5
    assert Regression().outputs([np.zeros((7, 2, 3))]) == 6
    assert Regression().outputs([np.zeros(7)]) == 1
