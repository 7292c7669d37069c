"""Whole runs of the loop: the same whoever plays the clients, and as if they had never stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, Local, PFedLA
from pfedla.errors import ConfigError, RunError
from pfedla.ledger import Ledger
from pfedla.record import RunRecord, Snapshot
from pfedla.rounds import Outcome, Progress
from pfedla.wire import Payload
from tests.world import WireFleet, data, fleet_of, outcome_of, same, same_outcome, server_of, setting, timeless

CONTENDERS: dict[str, Callable[..., Any]] = {
    **{f"{workers} workers": partial(fleet_of, workers=workers) for workers in (1, 2, 3)},
    "by wire": WireFleet,
}

slow = partial(pytest.param, marks=pytest.mark.slow)  # each is quick, but there are many: one for each method


@cache
def in_process(algorithm: Algorithm[Any], rounds: int) -> Outcome:
    return outcome_of(algorithm, rounds=rounds)


@pytest.mark.slow
@pytest.mark.parametrize("contender", [slow("1 workers"), "2 workers", slow("3 workers"), "by wire"])
def test_the_number_of_workers_changes_nothing(contender: str, algorithm: Algorithm[Any]) -> None:
    same_outcome(outcome_of(algorithm, rounds=3, fleet=CONTENDERS[contender]), in_process(algorithm, 3))


def test_the_seed_decides() -> None:
    one = outcome_of(PFedLA())
    same_outcome(one, outcome_of(PFedLA()))
    for other in (outcome_of(PFedLA(), seed=1), outcome_of(setting(PFedLA(), seed=4))):
        with pytest.raises(AssertionError):
            same_outcome(one, other)


def stop_at(*rounds: int) -> Callable[[Progress], None]:
    left = list(rounds)

    def watch(progress: Progress) -> None:
        if left and progress.t == left[0]:
            left.pop(0)
            raise KeyboardInterrupt

    return watch


def create(path: Path) -> RunRecord:
    return RunRecord.create(path, "", {})


def lines(record: RunRecord) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (record.path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("stops", "every"), [slow((3,), None), slow((2, 5), None), ((5,), 0)])
def test_a_run_interrupted_and_resumed_is_as_if_it_had_never_stopped(
    stops: tuple[int, ...], every: int | None, algorithm: Algorithm[Any], tmp_path: Path
) -> None:
    record, expected = create(tmp_path / "run"), in_process(algorithm, 6)
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            outcome_of(algorithm, record, stop_at(stop), checkpoint_every=every)
        assert (record.path / "checkpoint.safetensors").exists()
        record.release()
        record = RunRecord.resume(record.path)
    same_outcome(outcome_of(algorithm, record), expected)
    assert list(map(timeless, lines(record))) == list(map(timeless, expected.history))


def test_a_run_killed_between_checkpoints_goes_on_from_the_last(tmp_path: Path) -> None:
    def killed(progress: Progress) -> None:
        if progress.t == 5:
            raise SystemExit

    record = create(tmp_path / "run")
    with pytest.raises(SystemExit):
        outcome_of(PFedLA(), record, killed, checkpoint_every=0)
    with (record.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "accur')  # the line it was writing
    seen: list[int] = []
    same_outcome(outcome_of(PFedLA(), record, lambda progress: seen.append(progress.t)), outcome_of(PFedLA()))
    assert seen == [4, 5, 6]
    assert [line["round"] for line in lines(record)] == [2, 4, 6]


def test_a_run_killed_before_its_first_checkpoint_starts_anew(tmp_path: Path) -> None:
    record = create(tmp_path / "run")
    (record.path / "metrics.jsonl").write_text('{"round": 2}\n')
    same_outcome(outcome_of(FedAvg(), record), outcome_of(FedAvg()))
    assert len(lines(record)) == 3


def test_time_goes_on_where_it_stopped(tmp_path: Path) -> None:
    record = create(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        outcome_of(FedAvg(), record, stop_at(2))
    made = setting(FedAvg())
    saved = record.restore(server_of(made, 4).state, fleet_of(made, data(4)).snapshot())
    assert saved is not None
    record.checkpoint(saved._replace(seconds=1000.0))
    outcome = outcome_of(FedAvg(), record)
    assert [1000 <= line["seconds"] < 1100 for line in outcome.history] == [False, True, True]
    assert 1000 <= outcome.seconds < 1100


def test_the_last_round_is_always_evaluated_and_watchers_see_every_round() -> None:
    seen: list[Progress] = []
    outcome = outcome_of(PFedLA(), watch=seen.append, eval_every=4)
    assert [record["round"] for record in outcome.history] == [4, 6]
    assert [progress.t for progress in seen] == [1, 2, 3, 4, 5, 6]
    assert [p.record["round"] if p.record else None for p in seen] == [None, None, None, 4, 4, 6]
    assert {progress.rounds for progress in seen} == {6}
    assert seen[-1].bytes_down == outcome.ledger.down == outcome.history[-1]["bytes_down"] > seen[0].bytes_down > 0
    assert seen[-1].bytes_up == outcome.ledger.up == outcome.history[-1]["bytes_up"] > seen[0].bytes_up > 0
    assert outcome.diagnostics["round"].tolist() == [4, 6]


@pytest.mark.parametrize(("records", "kept"), [(200, [1, 2, 3, 4, 5, 6]), (3, [2, 4, 6]), (4, [2, 4, 6]), (2, [3, 6])])
def test_weights_over_the_rounds_are_thinned_and_keep_the_last(
    records: int, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = outcome_of(PFedLA(), eval_every=1).diagnostics
    monkeypatch.setattr("pfedla.rounds.RECORDS", records)
    found = outcome_of(PFedLA(), eval_every=1).diagnostics
    assert found["round"].tolist() == kept
    assert found["alpha"].shape == (len(kept), 4, 3, 4)
    np.testing.assert_allclose(found["alpha"].sum(-1), 1, rtol=1e-5)
    assert np.array_equal(found["alpha"], every["alpha"][np.array(kept) - 1])


def test_a_method_without_diagnostics_has_none() -> None:
    assert outcome_of(Local(), rounds=2).diagnostics == {}


def test_too_many_participants_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.participants = 5 must be from 1 to the number of clients, 4"):
        outcome_of(FedAvg(), participants=5)


def test_a_checkpoint_of_another_method_is_refused(tmp_path: Path) -> None:
    record = create(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        outcome_of(FedAvg(), record, stop_at(2))
    with pytest.raises(RunError, match=r"belongs to another configuration|this configuration needs"):
        outcome_of(PFedLA(), record)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_a_checkpoint_that_cannot_be_read_is_named(content: bytes, tmp_path: Path) -> None:
    record = create(tmp_path / "run")
    (record.path / "checkpoint.safetensors").write_bytes(content)
    with pytest.raises(RunError, match=r"cannot read .*checkpoint\.safetensors"):
        outcome_of(FedAvg(), record)


def test_a_checkpoint_comes_back_to_the_bit(tmp_path: Path) -> None:
    strange = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45]])
    state = (strange, {"a.b": torch.arange(6.0).view(2, 3).T, "nothing": torch.zeros(0, 3)})
    clients, ledger = {"rounds": torch.tensor([1, 2])}, Ledger(["a"])
    sent = Payload.of({"a": torch.zeros(2, 3)}, torch.ones(2, 1, dtype=torch.bool), ["a"], more=torch.zeros(2))
    ledger.record(1, [0, 1], sent, [1], sent.rows([1]))
    history, diagnostics = [{"round": 1}], {1: {"alpha": np.eye(2, dtype=np.float32)}}
    record = create(tmp_path / "run")
    record.append(history[0])
    snapshot = Snapshot(3, state, clients, ledger, history, diagnostics, 1.5, {"": torch.arange(5.0).double()}, {}, 2)
    for _ in range(2):  # the second time over the file that the first was read from
        record.checkpoint(snapshot)
        found = record.restore(state, clients)
        assert found is not None
        same((found.state, found.clients), (state, clients))
        assert torch.equal(found.state[0].view(torch.int32), strange.view(torch.int32))
        assert (found.t, found.history, found.seconds, found.refused) == (3, history, 1.5, 2)
        assert found.lengths[""].tolist() == [0, 1, 2, 3, 4]
        assert list(found.diagnostics) == [1]
        assert np.array_equal(found.diagnostics[1]["alpha"], diagnostics[1]["alpha"])
        assert set(found.ledger.arrays()) == set(ledger.arrays())
        for key, values in ledger.arrays().items():
            assert np.array_equal(found.ledger.arrays()[key], values)
        snapshot = found
    names = ["checkpoint-before.safetensors", "checkpoint.safetensors", "config.toml", "metrics.jsonl", "run.json"]
    record.release()
    assert sorted(path.name for path in record.path.iterdir()) == names


# ---- checkpoints that are not what was written


def stopped(path: Path, t: int = 4) -> RunRecord:
    """Return a run that was stopped after round `t`, with a checkpoint of every round."""
    record = create(path)
    with pytest.raises(KeyboardInterrupt):
        outcome_of(PFedLA(), record, stop_at(t), checkpoint_every=0)
    return record


def flip(path: Path, place: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", ["flip early", "flip late", "cut", "empty", "another run", "another format"])
def test_a_damaged_checkpoint_is_left_for_the_one_before_it(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = stopped(tmp_path / "run", 3)
    latest = record.path / "checkpoint.safetensors"
    size, head = latest.stat().st_size, 8 + int.from_bytes(latest.read_bytes()[:8], "little")
    match damage:
        case "flip early":
            flip(latest, head + 5)
        case "flip late":
            flip(latest, size - 1)
        case "cut":
            latest.write_bytes(latest.read_bytes()[: size // 2])
        case "empty":
            latest.write_bytes(b"")
        case "another run":
            latest.write_bytes((stopped(tmp_path / "other").path / "checkpoint.safetensors").read_bytes())
        case _:
            latest.write_bytes(latest.read_bytes().replace(b'\\"format\\": 2', b'\\"format\\": 7'))
    seen: list[int] = []
    same_outcome(outcome_of(PFedLA(), record, lambda progress: seen.append(progress.t)), outcome_of(PFedLA()))
    assert seen == [2, 3, 4, 5, 6]
    assert "The checkpoint before it is used, of round 2" in caplog.text
    assert [line["round"] for line in lines(record)] == [2, 4, 6]


def test_a_damaged_checkpoint_never_takes_the_place_of_a_whole_one(tmp_path: Path) -> None:
    record = stopped(tmp_path / "run", 3)
    (record.path / "checkpoint.safetensors").write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        outcome_of(PFedLA(), record, stop_at(3), checkpoint_every=0)  # writes the next
    (record.path / "checkpoint.safetensors").unlink()
    seen: list[int] = []
    same_outcome(outcome_of(PFedLA(), record, lambda progress: seen.append(progress.t)), outcome_of(PFedLA()))
    assert seen[0] == 2


def test_a_round_is_safe_before_it_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, scored = create(tmp_path / "run"), list[int]()

    def broken(*arguments: Any) -> Any:
        scored.append(arguments[4])
        raise RunError("nobody can be scored")

    with monkeypatch.context() as patch:
        patch.setattr("pfedla.rounds.evaluate", broken)
        with pytest.raises(RunError, match="nobody can be scored"):
            outcome_of(PFedLA(), record, checkpoint_every=0)
    seen: list[int] = []
    same_outcome(outcome_of(PFedLA(), record, lambda progress: seen.append(progress.t)), outcome_of(PFedLA()))
    assert (scored, seen[0]) == ([2], 2)


def test_without_a_whole_checkpoint_a_run_is_not_resumed(tmp_path: Path) -> None:
    record = stopped(tmp_path / "run")
    for name in ("checkpoint.safetensors", "checkpoint-before.safetensors"):
        flip(record.path / name, -1)
    with pytest.raises(RunError, match=r"checkpoint\.safetensors is damaged.*before.* No whole checkpoint is left"):
        outcome_of(PFedLA(), record)


def test_a_kill_between_the_two_renames_loses_one_round(tmp_path: Path) -> None:
    record = stopped(tmp_path / "run", 3)
    (record.path / "checkpoint.safetensors").rename(record.path / "checkpoint.safetensors.part")
    seen: list[int] = []
    same_outcome(outcome_of(PFedLA(), record, lambda progress: seen.append(progress.t)), outcome_of(PFedLA()))
    assert seen[0] == 2


@pytest.mark.parametrize("content", ["", "nonsense\n", '{"round": 2}\n{"round": 99}\n', "\0" * 100])
def test_metrics_are_those_of_the_checkpoint_whatever_became_of_their_file(content: str, tmp_path: Path) -> None:
    record = stopped(tmp_path / "run")
    (record.path / "metrics.jsonl").write_text(content)
    outcome = outcome_of(PFedLA(), record)
    same_outcome(outcome, outcome_of(PFedLA()))
    assert lines(record) == outcome.history


def test_fewer_rounds_than_were_done_are_refused(tmp_path: Path) -> None:
    record = stopped(tmp_path / "run")
    with pytest.raises(RunError, match=r"at round 4 already: schedule\.rounds = 3 cannot be less"):
        outcome_of(PFedLA(), record, rounds=3)


@pytest.mark.parametrize("eval_every", [2, 4])
def test_a_run_made_longer_is_as_one_that_was_long_from_the_start(eval_every: int, tmp_path: Path) -> None:
    record = create(tmp_path / "run")
    outcome_of(PFedLA(), record, rounds=3, eval_every=eval_every, checkpoint_every=100)
    found = outcome_of(PFedLA(), record, rounds=6, eval_every=eval_every)
    same_outcome(found, outcome_of(PFedLA(), rounds=6, eval_every=eval_every))


def test_checkpoints_take_a_fiftieth_of_the_time_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [0.0], list[int]()
    monkeypatch.setattr("pfedla.rounds.time.perf_counter", lambda: now[0])

    def checkpoint(_: RunRecord, snapshot: Snapshot) -> None:
        written.append(snapshot.t)
        now[0] += 0.5

    def round_of_ten_seconds(_: Progress) -> None:
        now[0] += 10

    monkeypatch.setattr(RunRecord, "checkpoint", checkpoint)
    outcome_of(FedAvg(), create(tmp_path / "run"), round_of_ten_seconds, rounds=12, checkpoint_every=15)
    assert written == [2, 5, 8, 11, 12]  # after 20 s, then 25 s apart, which is 50 times half a second; and at the end
