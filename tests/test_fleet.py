from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from pfedla.algorithms import FedAvg, PFedLA
from pfedla.config import Run
from pfedla.errors import ConfigError, RunError
from pfedla.fleet import Setting, SimulatedFleet, available_workers
from pfedla.layers import Layers, LayerSpec
from pfedla.models import MLP
from pfedla.simulation import simulate
from pfedla.training import Samples, Task, Training
from pfedla.wire import Payload
from tests.troubled import Faulty, Killed

Make = Callable[..., Setting]
Data = Callable[..., list[Samples]]


@dataclass(frozen=True)
class Keeping(FedAvg):
    """A method whose clients keep something of their own, and read it in the next round."""

    forget: bool = False

    def enroll(self, theta: Layers) -> Layers:
        return {**theta, "fc2#times": torch.full((1, 1), 5.0)}

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        kept, upload = super().train(own, got, task)
        return kept if self.forget else {**kept, "fc2#times": own["fc2#times"] + 1}, upload


def download(setting: Setting, ids: list[int]) -> Payload:
    state = setting.algorithm.init(setting.spec.read(setting.template), 4, torch.Generator())
    return setting.algorithm.download(state, torch.tensor(ids))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Killed(), r"a worker died \(signal SIGKILL\) while it worked for client 2 in round 1.*fewer workers.*second"),
        (Faulty(), r"(?s)client 1 failed in round 2:.*ZeroDivisionError: a mistake"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_client_ends_the_run_and_is_named(
    algorithm: FedAvg, message: str, workers: int, setting: Make, data: Data
) -> None:
    with pytest.raises(RunError, match=message):
        simulate(setting(algorithm, "mlp"), data(4), data(4), Run(rounds=3, workers=workers), {})
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_whose_worker_is_killed_is_done_again(
    workers: int,
    setting: Make,
    data: Data,
    tmp_path: Path,
    same: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    uploads = []
    for algorithm in (Killed(once=str(tmp_path / "killed")), FedAvg()):
        made, samples, ids = setting(algorithm, "mlp"), data(4), [0, 1, 2, 3]
        with SimulatedFleet(made, samples, samples, workers) as fleet:
            uploads.append(fleet.train(ids, download(made, ids), 1)[1].layers)
    assert (tmp_path / "killed").exists()
    same(uploads[0], uploads[1])
    (record,) = caplog.records
    assert "worked for client 2 in round 1" in record.message
    assert "done again" in record.message


def test_workers_killed_between_rounds_are_replaced(
    setting: Make, data: Data, same: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    made, samples, ids = setting(FedAvg(), "mlp"), data(4), [0, 1, 2, 3]
    with SimulatedFleet(made, samples, samples, workers=2) as fleet:
        before = fleet.train(ids, download(made, ids), 1)[1].layers
        for process in multiprocessing.active_children():
            assert process.pid
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        after = fleet.train(ids, download(made, ids), 1)[1].layers
    same(before, after)
    assert len(caplog.records) == 2


def test_work_broken_off_leaves_nothing_behind(setting: Make, data: Data, same: Callable[..., None]) -> None:
    made, samples, ids = setting(Faulty(), "mlp"), data(4), [0, 1, 2, 3]
    with SimulatedFleet(made, samples, samples, workers=2) as fleet:
        before = fleet.train(ids, download(made, ids), 1)[1].layers
        with pytest.raises(RunError, match="client 1 failed in round 2"):
            fleet.train(ids, download(made, ids), 2)
        same(fleet.train(ids, download(made, ids), 1)[1].layers, before)


@pytest.mark.parametrize("slot", [0, 4096])
def test_messages_without_room_in_shared_memory_go_through_the_pipe(
    slot: int, setting: Make, data: Data, same: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, samples, ids = setting(PFedLA()), data(4), [0, 1, 2, 3]
    uploads = []
    for workers in (0, 2):
        monkeypatch.setattr("pfedla.workers.SLOT_BYTES", slot)
        with SimulatedFleet(made, samples, samples, workers) as fleet:
            uploads.append(fleet.train(ids, download(made, ids), 1)[1].layers)
    same(uploads[0], uploads[1])


def test_a_worker_and_the_server_never_wait_for_each_other_to_empty_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.workers.SLOT_BYTES", 0)
    model, ids = MLP((64,), 2, hidden=4096), list(range(6))  # a megabyte: more than a pipe holds, both ways
    made = Setting(model, LayerSpec.of(model), FedAvg(), Training(local_epochs=1), seed=0)
    samples = [Samples(torch.randn(8, 64), torch.arange(8) % 2) for _ in ids]

    def too_long(*_: object) -> None:
        raise AssertionError("they wait for each other")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(30)
    try:
        with SimulatedFleet(made, samples, samples, workers=1) as fleet:
            for t in range(1, 4):
                assert fleet.train(ids, download(made, ids), t)[0] == ids
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_clients_divergence_is_reported_without_a_traceback(setting: Make, data: Data) -> None:
    with pytest.raises(RunError, match=r"^training diverged at client \d in round 1"):
        simulate(setting(FedAvg(), "mlp", lr=1e30), data(2), data(2), Run(rounds=1, workers=1), {})


def test_what_clients_trained_is_theirs_after_commit_only(setting: Make, data: Data, same: Callable[..., None]) -> None:
    made, samples, ids = setting(FedAvg()), data(4), [1, 3]
    with SimulatedFleet(made, samples, samples, workers=0) as fleet:
        before = copy.deepcopy(fleet.own)
        answered, upload = fleet.train(ids, download(made, ids), 1)
        same(fleet.own, before)
        assert not fleet.trained.any()
        fleet.train(ids, download(made, ids), 1)  # again, as after Ctrl-C: the same
        fleet.commit()
        assert answered == ids
        assert fleet.trained.tolist() == [False, True, False, True]
        for key, rows in upload.layers.items():
            torch.testing.assert_close(fleet.own[key][ids], before[key][ids] + rows)
        after = copy.deepcopy(fleet.own)
        fleet.commit()
        same(fleet.own, after)


def test_answers_come_sorted_whatever_the_order_asked(setting: Make, data: Data, same: Callable[..., None]) -> None:
    made, samples = setting(FedAvg(), "mlp"), data(4)
    with SimulatedFleet(made, samples, samples, workers=0) as fleet:
        one = fleet.train([3, 0, 2], download(made, [3, 0, 2]), 1)
        other = fleet.train([0, 2, 3], download(made, [0, 2, 3]), 1)
    assert one[0] == other[0] == [0, 2, 3]
    same(one[1], other[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_clients_keep_what_their_method_adds(workers: int, setting: Make, data: Data) -> None:
    made, samples = setting(Keeping(), "mlp"), data(4)
    with SimulatedFleet(made, samples, samples, workers) as fleet:
        for t, ids in enumerate(([0, 1], [1, 3]), 1):
            fleet.train(ids, download(made, ids), t)
            fleet.commit()
        assert fleet.own["fc2#times"].flatten().tolist() == [6, 7, 5, 6]


def test_a_method_that_forgets_what_its_clients_keep_is_refused(setting: Make, data: Data) -> None:
    made, samples = setting(Keeping(forget=True), "mlp"), data(4)
    with (
        SimulatedFleet(made, samples, samples, workers=0) as fleet,
        pytest.raises(RunError, match=r"client 2 must keep .* differs: fc2#times"),
    ):
        fleet.train([2], download(made, [2]), 1)


def test_workers_can_be_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MLP((4,), 2)
    spec = LayerSpec.of(model)
    made = Setting(model, spec, FedAvg(), Training(local_epochs=1), seed=0)
    samples = [Samples(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(2)]
    got = FedAvg().download(FedAvg().init(spec.read(model), 2, torch.Generator()), torch.tensor([0, 1]))
    uploads = []
    for workers in (0, 1):
        monkeypatch.setattr("pfedla.workers.START_METHOD", "spawn")
        with SimulatedFleet(made, samples, samples, workers) as fleet:
            uploads.append(fleet.train([0, 1], got, 1)[1].layers)
    assert all(torch.equal(uploads[0][key], uploads[1][key]) for key in spec.names)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_scores_are_in_the_order_asked(workers: int, setting: Make, data: Data) -> None:
    made, samples = setting(PFedLA()), data(4)
    with SimulatedFleet(made, samples, samples, workers) as fleet:
        forward = fleet.evaluate([0, 1, 2, 3], download(made, [0, 1, 2, 3]), 1)
        backward = fleet.evaluate([3, 2, 1, 0], download(made, [3, 2, 1, 0]), 1)
    assert np.allclose(forward.personalized.loss, backward.personalized.loss[::-1])
    assert len(set(forward.personalized.loss)) == 4
    assert np.isnan(forward.after_training.accuracy).all()


def test_closing_leaves_no_process(setting: Make, data: Data) -> None:
    fleet = SimulatedFleet(setting(FedAvg()), data(3), data(3), workers=5)
    assert fleet.workers == 3
    assert len(multiprocessing.active_children()) == 3
    fleet.close()
    fleet.close()
    assert not multiprocessing.active_children()


def test_workers_are_counted() -> None:
    assert 1 <= available_workers() <= (os.cpu_count() or 1)


def test_a_negative_number_of_workers_is_refused(setting: Make, data: Data) -> None:
    with pytest.raises(ConfigError, match="workers = -2 must be 0"):
        SimulatedFleet(setting(FedAvg()), data(1), data(1), workers=-2)
