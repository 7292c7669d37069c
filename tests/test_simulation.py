from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, Local, PFedLA
from pfedla.config import Run
from pfedla.errors import ConfigError, RunError
from pfedla.fleet import Setting
from pfedla.rounds import evaluate
from pfedla.rundirectory import RunDirectory
from pfedla.simulation import Progress, Result, simulate
from pfedla.training import Samples

FACTS = {"algorithm": "a", "dataset": "d", "clients": 4, "rounds": 6, "seed": 0}

Play = Callable[..., Result]


@pytest.fixture
def play(setting: Callable[..., Setting], data: Callable[..., list[Samples]]) -> Play:
    def run(algorithm: Algorithm[Any], directory: RunDirectory | None = None, watch: Any = None, **run: Any) -> Result:
        made = setting(algorithm)
        settings = Run(**{"rounds": 6, "participants": 3, "eval_every": 2, "workers": 0, **run})
        return simulate(made, data(4), data(4, seed=9), settings, FACTS, directory, watch)

    return run


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("seconds", "samples_per_second")}


def assert_equal(one: Result, other: Result, same: Callable[..., None]) -> None:
    same(one.personalized, other.personalized)
    assert list(map(timeless, one.history)) == list(map(timeless, other.history))
    assert timeless(one.summary) == timeless(other.summary)
    for pair in ((one.inspected, other.inspected), (one.ledger.arrays(), other.ledger.arrays())):
        assert list(pair[0]) == list(pair[1])
        for key, values in pair[0].items():
            assert np.array_equal(values, pair[1][key]), key


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_changes_nothing(
    workers: int, algorithm: Algorithm[Any], play: Play, same: Callable[..., None]
) -> None:
    assert_equal(play(algorithm, rounds=3), play(algorithm, rounds=3, workers=workers), same)


def test_the_seed_decides(play: Play, same: Callable[..., None]) -> None:
    assert_equal(play(PFedLA()), play(PFedLA()), same)
    with pytest.raises(AssertionError):
        assert_equal(play(PFedLA()), play(PFedLA(), seed=1), same)


def stop_at(*rounds: int) -> Callable[[Progress], None]:
    left = list(rounds)

    def watch(progress: Progress) -> None:
        if left and progress.t == left[0]:
            left.pop(0)
            raise KeyboardInterrupt

    return watch


@pytest.mark.parametrize(("stops", "every"), [((3,), 0), ((2, 5), 0), ((5,), 2)])
def test_a_run_interrupted_and_resumed_is_as_if_it_had_never_stopped(
    stops: tuple[int, ...], every: int, algorithm: Algorithm[Any], play: Play, same: Callable[..., None], tmp_path: Path
) -> None:
    whole = RunDirectory.create(tmp_path / "whole", "")
    expected = play(algorithm, whole)
    directory = RunDirectory.create(tmp_path / "parts", "")
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            play(algorithm, directory, stop_at(stop), checkpoint_every=every)
        assert (directory.path / "checkpoint.safetensors").exists()
    assert_equal(play(algorithm, directory), expected, same)
    lines = [[timeless(json.loads(line)) for line in read(path)] for path in (whole.path, directory.path)]
    assert lines[0] == lines[1]


def read(path: Path) -> list[str]:
    return (path / "metrics.jsonl").read_text().splitlines()


def test_a_run_killed_between_checkpoints_goes_on_from_the_last(
    play: Play, same: Callable[..., None], tmp_path: Path
) -> None:
    def killed(progress: Progress) -> None:
        if progress.t == 5:
            raise SystemExit

    expected = play(PFedLA())
    directory = RunDirectory.create(tmp_path / "run", "")
    with pytest.raises(SystemExit):
        play(PFedLA(), directory, killed, checkpoint_every=3)
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "accur')  # the line it was writing
    seen: list[int] = []
    assert_equal(play(PFedLA(), directory, lambda progress: seen.append(progress.t)), expected, same)
    assert seen == [3, 4, 5, 6]


def test_a_run_killed_before_its_first_checkpoint_starts_anew(
    play: Play, same: Callable[..., None], tmp_path: Path
) -> None:
    directory = RunDirectory.create(tmp_path / "run", "")
    (directory.path / "metrics.jsonl").write_text('{"round": 2}\n')
    assert_equal(play(FedAvg(), directory), play(FedAvg()), same)
    assert len(read(directory.path)) == 3


def test_the_summary_is_the_final_rounds_even_if_an_earlier_was_better(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worse_by_the_round(*arguments: Any) -> Any:
        scores = evaluate(*arguments)
        t = arguments[-1]
        return scores._replace(personalized=scores.personalized._replace(accuracy=np.array([9, 8, 8, 7.0]) / 10 / t))

    monkeypatch.setattr("pfedla.simulation.evaluate", worse_by_the_round)
    result = play(FedAvg())
    assert [record["round"] for record in result.history] == [2, 4, 6]
    assert result.summary["accuracy_mean"] == pytest.approx(0.8 / 6)
    assert result.summary["accuracy_worst"] == pytest.approx(0.7 / 6)
    assert result.summary["accuracy_std"] == pytest.approx(np.std([0.9, 0.8, 0.8, 0.7]) / 6)
    assert (result.summary["best_round"], result.summary["best_round_accuracy_mean"]) == (2, pytest.approx(0.4))


def test_the_summary_names_what_was_run_and_measured(play: Play) -> None:
    result = play(Local())
    assert {*FACTS, "accuracy_mean", "accuracy_std", "accuracy_worst", "accuracy_after_training"} <= set(result.summary)
    assert {"bytes_down", "bytes_up", "seconds", "samples_per_second"} <= set(result.summary)
    assert result.summary["bytes_down"] == result.summary["bytes_up"] == 0
    assert result.alpha is None
    assert json.loads(json.dumps(result.summary)) == result.summary


def test_the_last_round_is_always_evaluated_and_watchers_see_every_round(play: Play) -> None:
    seen: list[Progress] = []
    result = play(PFedLA(), watch=seen.append, eval_every=4)
    assert [record["round"] for record in result.history] == [4, 6]
    assert [progress.t for progress in seen] == [1, 2, 3, 4, 5, 6]
    assert [p.record["round"] if p.record else None for p in seen] == [None, None, None, 4, 4, 6]
    assert seen[-1].bytes_down == result.summary["bytes_down"] > 0
    assert result.inspected["round"].tolist() == [4, 6]


@pytest.mark.parametrize(("records", "kept"), [(200, [1, 2, 3, 4, 5, 6]), (3, [2, 4, 6]), (4, [2, 4, 6]), (2, [3, 6])])
def test_weights_over_the_rounds_are_thinned_and_keep_the_last(
    records: int, kept: list[int], play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pfedla.simulation.ALPHA_RECORDS", records)
    result = play(PFedLA(), eval_every=1)
    assert result.inspected["round"].tolist() == kept
    assert result.alpha is not None
    assert result.alpha.shape == (len(kept), 4, 3, 4)
    np.testing.assert_allclose(result.alpha.sum(-1), 1, rtol=1e-5)


def test_a_clients_model_is_its_personalized_one(play: Play, data: Callable[..., list[Samples]]) -> None:
    result = play(PFedLA())
    test = data(4, seed=9)
    for client, accuracy in enumerate(result.history[-1]["clients"]["accuracy"]):
        model = result.model(client)
        x, y = test[client].take(slice(0, len(test[client])), like=torch.empty(0))
        assert float((model(x).argmax(1) == y).double().mean()) == pytest.approx(accuracy, abs=1e-6)
        state = copy.deepcopy(result.template)
        result.spec.write(state, result.personalized, client)
        assert torch.equal(state.eval()(x), model(x))
    for client in (-1, 4):
        with pytest.raises(ConfigError, match="clients are numbered from 0 to 3"):
            result.model(client)


def test_too_many_participants_are_refused(play: Play) -> None:
    with pytest.raises(ConfigError, match="participants = 5 must be from 1 to the number of clients, 4"):
        play(FedAvg(), participants=5)


def test_a_checkpoint_of_another_method_is_refused(play: Play, tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "")
    with pytest.raises(KeyboardInterrupt):
        play(FedAvg(), directory, stop_at(2))
    with pytest.raises(RunError, match=r"belongs to another configuration|this configuration needs"):
        play(PFedLA(), directory)
