from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pfedla.algorithms import FedAvg, PFedLA
from pfedla.client import Job, Setting
from pfedla.errors import ConfigError, RunError
from pfedla.layers import LayerSpec
from pfedla.models import MLP
from pfedla.pool import InProcess, Processes, assign, available_cores, local_pool
from pfedla.rounds import Schedule, run
from pfedla.training import ClientData, Samples, Training
from tests.troubled import Collecting, Faulty, Killed
from tests.world import data, download, fleet_of, same, setting, uploads

IDS = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Killed(), r"a worker died \(signal SIGKILL\) while it worked for client 2 in round 1.*fewer workers.*second"),
        (Faulty(), r"(?s)client 1 failed in round 2:.*ZeroDivisionError: a mistake"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_client_ends_the_run_and_is_named(algorithm: FedAvg, message: str, workers: int) -> None:
    made = setting(algorithm, "mlp")
    with closing(fleet_of(made, data(4), workers)) as fleet, pytest.raises(RunError, match=message):
        run(made, fleet, 4, Schedule(rounds=3))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("layers", [200, 700])
def test_models_of_very_many_layers_do_not_block_the_pipe(layers: int) -> None:
    """What tells of their tensors would fill the pipe from both ends at once."""
    names = [f"a_layer_with_a_name_that_is_very_long_indeed_{i:03d}" * 6 for i in range(layers)]
    module = torch.nn.Sequential()
    for name in names:
        module.add_module(name, torch.nn.Linear(1, 1))
    template = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 1), module, torch.nn.Linear(1, 3))
    made = replace(setting(FedAvg(), "mlp"), template=template, spec=LayerSpec.of(template))
    with closing(fleet_of(made, data(4), 1)) as fleet:
        found = uploads(fleet, made, IDS)
    with closing(fleet_of(made, data(4), 0)) as fleet:
        same(found, uploads(fleet, made, IDS))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_whose_worker_is_killed_is_done_again(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for algorithm in (Killed(once=str(tmp_path / "killed")), FedAvg()):
        made = setting(algorithm, "mlp")
        with closing(fleet_of(made, data(4), workers)) as fleet:
            found.append(uploads(fleet, made, IDS))
    assert (tmp_path / "killed").exists()
    same(found[0], found[1])
    (record,) = caplog.records
    assert "worked for client 2 in round 1" in record.message
    assert "done again" in record.message


ORPHAN = """
import sys
from pfedla import pool
from pfedla.algorithms import FedAvg
from tests.world import data, setting
pool.Runtime.answer = lambda *_: bytes(10**7)  # goes through the pipe, and fills it
if sys.argv[1] == "pipe":
    pool._end_with_parent = lambda: None
made = setting(FedAvg())
workers = pool.Processes(made, data(4), 2)
for worker in workers._workers:
    worker.channel.connection.send("a job")
print(*(worker.process.pid for worker in workers._workers), flush=True)
sys.stdin.read()
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux how processes are")
@pytest.mark.parametrize("by", ["pipe", "signal"])
def test_workers_end_with_a_server_that_is_killed_though_they_wait_to_answer_it(by: str) -> None:
    command = [sys.executable, "-c", ORPHAN, by]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        workers = [int(pid) for pid in server.stdout.readline().split()]
        assert len(workers) == 2
        time.sleep(0.5)  # both stand before a full pipe now
        assert not any(map(gone, workers))
        server.kill()
    deadline = time.monotonic() + 20
    while not all(map(gone, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_shared_memory_messages_go_through_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for free in (1000, 10**9):
        monkeypatch.setattr("pfedla.pool.shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        made = setting(PFedLA())
        with closing(fleet_of(made, data(4), 2)) as fleet:
            found.append(uploads(fleet, made, IDS))
    same(found[0], found[1])


def test_workers_killed_between_rounds_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    made = setting(FedAvg(), "mlp")
    with closing(fleet_of(made, data(4), 2)) as fleet:
        before = uploads(fleet, made, IDS)
        for process in multiprocessing.active_children():
            assert process.pid
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        same(uploads(fleet, made, IDS), before)
    assert len(caplog.records) == 2


def test_work_broken_off_leaves_nothing_behind() -> None:
    made = setting(Faulty(), "mlp")
    with closing(fleet_of(made, data(4), 2)) as fleet:
        before = uploads(fleet, made, IDS)
        with pytest.raises(RunError, match="client 1 failed in round 2"):
            uploads(fleet, made, IDS, t=2)
        same(uploads(fleet, made, IDS), before)


@pytest.mark.parametrize("slot", [0, 4096])
def test_messages_without_room_in_shared_memory_go_through_the_pipe(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.pool.SLOT_BYTES", slot)
    made, found = setting(PFedLA()), []
    for workers in (0, 2):
        with closing(fleet_of(made, data(4), workers)) as fleet:
            found.append(uploads(fleet, made, IDS))
    same(found[0], found[1])


def test_a_worker_and_the_server_never_wait_for_each_other_to_empty_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.pool.SLOT_BYTES", 0)
    model, ids = MLP((64,), 2, hidden=4096), list(range(6))  # a megabyte: more than a pipe holds, both ways
    made = Setting(model, LayerSpec.of(model), FedAvg(), Training(local_epochs=1), seed=0)
    samples = [Samples(torch.randn(8, 64), torch.arange(8) % 2) for _ in ids]
    clients = {client: ClientData(mine, mine) for client, mine in enumerate(samples)}

    def too_long(*_: object) -> None:
        raise AssertionError("they wait for each other")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(30)
    try:
        with closing(fleet_of(made, clients, 1)) as fleet:
            for t in range(1, 4):
                assert list(fleet.train(ids, download(made, ids), t).by_client) == ids
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_workers_can_be_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.pool.START_METHOD", "spawn")
    model = MLP((4,), 2)
    made = Setting(model, LayerSpec.of(model), FedAvg(), Training(local_epochs=1), seed=0)
    samples = [Samples(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(2)]
    clients = {client: ClientData(mine, mine) for client, mine in enumerate(samples)}
    found = []
    for workers in (0, 1):
        with closing(fleet_of(made, clients, workers)) as fleet:
            found.append(uploads(fleet, made, [0, 1]))
    same(found[0], found[1])


def test_workers_leave_garbage_that_came_along_with_the_fork_to_the_server(tmp_path: Path) -> None:
    """A runtime's threads are not forked: who ends it in a worker may wait for them forever."""

    class Owned:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    made = setting(Collecting(), "mlp")
    gc.disable()
    try:
        Owned()
        with closing(fleet_of(made, data(4), 2)) as fleet:
            uploads(fleet, made, IDS)
        assert not list(tmp_path.iterdir())
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_closing_leaves_no_process() -> None:
    made = setting(FedAvg())
    pool = local_pool(made, data(3), workers=5)
    assert len(multiprocessing.active_children()) == 3  # one per client is enough
    pool.close()
    pool.close()
    assert not multiprocessing.active_children()


def test_by_default_there_is_one_worker_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr("pfedla.pool.available_cores", lambda: 2)
    made = setting(FedAvg())
    with closing(local_pool(made, data(3))) as pool:
        assert isinstance(pool, Processes)
        assert len(multiprocessing.active_children()) == 2
    assert isinstance(local_pool(replace(made, device="meta"), {}), InProcess)


def test_a_negative_number_of_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"machine\.workers = -2 must be 0"):
        local_pool(setting(FedAvg()), data(1), workers=-2)


def test_workers_on_another_device_are_refused() -> None:
    elsewhere = replace(setting(FedAvg()), device="meta")
    with pytest.raises(ConfigError, match=r"machine\.workers = 2: on meta all clients share this process; use 0"):
        local_pool(elsewhere, data(1), workers=2)


@dataclass
class Desk:
    """A worker that only collects its jobs."""

    jobs: list[Job] = field(default_factory=list)

    def give(self, job: Job) -> None:
        self.jobs.append(job)


@pytest.mark.parametrize(
    ("count", "given"),
    [
        (1, [[0], []]),
        (2, [[0], [1]]),
        (4, [[0], [1]]),
        (5, [[0, 2], [1]]),
        (6, [[0, 2], [1, 3]]),
        (9, [[0, 2], [1, 3]]),
    ],
)
def test_a_second_job_is_given_only_while_there_are_enough_for_all(count: int, given: list[list[int]]) -> None:
    made, desks = setting(FedAvg()), [Desk(), Desk()]
    kept, sent = made.enroll(), download(made, [0])
    waiting = deque(Job("train", client, 1, kept, sent) for client in range(count))
    assign(waiting, desks, lambda desk, job: True)
    assert [[job.client for job in desk.jobs] for desk in desks] == given
    assert [job.client for job in waiting] == list(range(sum(map(len, given)), count))


def test_a_job_waits_for_a_worker_that_accepts_it() -> None:
    made, desks = setting(FedAvg()), [Desk(), Desk()]
    waiting = deque(Job("train", client, 1, made.enroll(), download(made, [0])) for client in range(4))
    assign(waiting, desks, lambda desk, job: desk is desks[1])
    assert [[job.client for job in desk.jobs] for desk in desks] == [[], [0, 1]]
    assign(waiting, desks, lambda desk, job: False)
    assert [job.client for job in waiting] == [2, 3]


def test_without_memory_to_share_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(RunError, match=r"no memory to share with workers .*: machine\.workers = 0 needs none"):
        fleet_of(setting(FedAvg()), data(2), workers=1)
