from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import Tensor, nn

from pfedla.algorithms import FedAvg, PFedLA
from pfedla.client import Setting
from pfedla.config import Experiment, Machine
from pfedla.errors import ConfigError, RunError
from pfedla.experiment import run_experiment
from pfedla.fleet import Fleet, SimulatedFleet
from pfedla.layers import Layers, LayerSpec
from pfedla.rounds import Schedule, run
from pfedla.training import ClientData, Samples, Task, Training
from pfedla.wire import Payload

ray = pytest.importorskip("ray")

from pfedla.ray import Actors, _Actor, _connect, ray_pool  # noqa: E402
from tests import troubled  # noqa: E402
from tests.troubled import Faulty, Killed  # noqa: E402
from tests.world import fleet_of, same, same_outcome, same_result, uploads  # noqa: E402

CLIENTS, IDS = 5, [0, 1, 2, 3, 4]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Run a local Ray of two CPUs, whose workers are sent the classes of the tests.

    No test here may fork workers: a process with Ray's threads can lock up in its forks.
    """
    for module in (sys.modules[__name__], troubled):
        ray.cloudpickle.register_pickle_by_value(module)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=80 * 2**20,
        )
        signal.signal(signal.SIGTERM, handler)
        yield
        ray.shutdown()


class Careless(nn.Module):
    """A small network with batch norm and dropout, whose first step writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(3 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.drop(self.bn(self.conv(x.mul_(0.5))).relu().flatten(1)))
        return out


@dataclass(frozen=True)
class Telling(FedAvg):
    """A method whose clients tell the process that works for them, and its threads."""

    def enroll(self, theta: Layers) -> Layers:
        return {**theta, "#told": torch.zeros(1, 2)}

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        kept, upload = super().train(own, got, task)
        return {**kept, "#told": torch.tensor([[os.getpid(), torch.get_num_threads()]]).float()}, upload


def setting(algorithm: Any, **training: Any) -> Setting:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        template = Careless()
    spec = LayerSpec.of(template)
    how = Training(**{"local_epochs": 2, "batch_size": 4, "lr": 0.05, **training})
    return Setting(template, spec, algorithm.for_model(spec), how, 3)


def data() -> dict[int, ClientData]:
    """Make clients' data, into which `Careless` must not be able to write."""
    rng = np.random.default_rng(0)

    def some(n: int) -> Samples:
        return Samples(rng.normal(size=(n, 2, 6, 6)).astype(np.float32), rng.integers(0, 3, n))

    return {client: ClientData(some(7 + client), some(4)) for client in IDS}


def here(made: Setting) -> SimulatedFleet:
    """Return a fleet in this process."""
    return fleet_of(made, data())


def on_ray(made: Setting, workers: int | None = None) -> SimulatedFleet:
    """Return a fleet on the cluster."""
    return SimulatedFleet(made, data(), ray_pool(made, data(), workers))


def first(fleet: Fleet, made: Setting, t: int = 1) -> Payload:
    return uploads(fleet, made, IDS, t, CLIENTS)


def test_the_result_is_that_of_one_machine_to_the_bit() -> None:
    outcomes, kept = [], []
    for make in (here, lambda made: on_ray(made, 2)):
        made = setting(PFedLA())
        with closing(make(made)) as fleet:
            outcomes.append(run(made, fleet, CLIENTS, Schedule(seed=1, rounds=3, participants=4, eval_every=2)))
            kept.append(fleet.kept)
    same_outcome(*outcomes)
    same(kept[0], kept[1])
    assert [record["round"] for record in outcomes[0].history] == [2, 3]


def test_a_job_whose_worker_is_killed_is_done_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, killed = setting(FedAvg()), setting(Killed(str(tmp_path / "killed")))
    with closing(on_ray(killed, 1)) as fleet:
        same(first(fleet, killed), first(here(plain), plain))
    assert (tmp_path / "killed").exists()
    (record,) = caplog.records
    assert re.search(r"worked for client .*\b2\b.* in round 1", record.message)
    assert "done again" in record.message


def test_workers_are_one_a_cpu_with_one_thread_and_replaced_if_killed_between_rounds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = setting(Telling())
    processes: set[int] = set()
    pool = ray_pool(made, data())
    with closing(SimulatedFleet(made, data(), pool)) as fleet:
        assert len(pool._workers) == 2
        deadline = time.monotonic() + 60
        while len(processes) < 2:  # the one that starts first may do all the work of the first rounds
            assert time.monotonic() < deadline
            before = first(fleet, made)
            fleet.commit()
            process, threads = fleet.kept.own["#told"].int().unbind(1)
            processes.update(process.tolist())
            assert threads.tolist() == [1] * CLIENTS
        assert os.getpid() not in processes
        for number in processes:
            os.kill(number, signal.SIGKILL)
        after = first(fleet, made)
    same(before, after)
    assert len(caplog.records) == 2


def test_a_job_that_kills_two_workers_ends_the_run_and_names_the_client() -> None:
    made = setting(Killed())
    message = r"a worker died while it worked for client 2 in round 1\. Ray says: .*second one to die over this job"
    with closing(on_ray(made, 1)) as fleet, pytest.raises(RunError, match=message):
        run(made, fleet, CLIENTS, Schedule(rounds=1))


def test_an_answer_that_is_lost_with_its_worker_does_not_hide_whose_job_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take, lost = _Actor.take, list[int]()

    def losing(actor: _Actor) -> Any:
        if not lost and len(actor.jobs) == 2 and actor.jobs[1][1].client == 2:
            lost.append(actor.jobs[0][1].client)
            ray.get(actor.jobs[1][0])  # raises: it dies over its second job, before the first one's answer came
        return take(actor)

    monkeypatch.setattr(_Actor, "take", losing)
    made = setting(Killed())
    with (
        closing(on_ray(made, 1)) as fleet,
        pytest.raises(RunError, match=r"worked for client 2 in round 1\..*second one to die over this job"),
    ):
        first(fleet, made)
    assert f"worked for client {lost[0]} or 2 in round 1" in caplog.records[0].message


def test_a_clients_mistake_reads_as_with_workers_on_this_machine() -> None:
    made = setting(Faulty())
    texts = []
    for make in (here, lambda made: on_ray(made, 1)):
        with closing(make(made)) as fleet:
            before = first(fleet, made)
            with pytest.raises(RunError) as caught:
                first(fleet, made, t=2)
            same(first(fleet, made), before)  # nothing is left behind
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert texts[0].startswith("client 1 failed in round 2:")


@dataclass(frozen=True)
class Homesick(FedAvg):
    """A method that cannot leave the process it was made in."""

    home: int = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.home != os.getpid():
            raise ModuleNotFoundError("No module named 'home'")


def test_a_method_that_a_node_does_not_know_is_reported() -> None:
    made = setting(Homesick(home=os.getpid()))
    with (
        closing(on_ray(made, 1)) as fleet,
        pytest.raises(RunError, match=r"No module named 'home'.*Every node needs"),
    ):
        first(fleet, made)


def test_closing_ends_the_actors_and_leaves_the_cluster_to_whom_it_belongs() -> None:
    pool = ray_pool(setting(FedAvg()), data(), 1)
    assert isinstance(pool, Actors)
    (worker,) = pool._workers
    pool.close()
    pool.close()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(worker._actor.here.remote())
    assert ray.is_initialized()


@pytest.mark.parametrize("workers", [0, 3])
def test_a_number_of_workers_that_the_cluster_has_not_is_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match=rf"machine\.workers = {workers}: each takes one of the Ray cluster's 2 CPUs"):
        ray_pool(setting(FedAvg()), data(), workers)


def test_another_cluster_than_the_one_connected_to_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"machine\.ray_address = 'far:6379': this process is connected to the cluster at .*:\d+"
    ):
        ray_pool(setting(FedAvg()), data(), address="far:6379")


@pytest.mark.parametrize("variable", [False, True])
def test_a_cluster_that_does_not_answer_is_refused_at_once(variable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        if variable:
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=rf"machine\.ray_address = '{address}': .*refused"):
            ray_pool(setting(FedAvg()), data(), address=None if variable else address)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"machine\.device = 'meta': .* on CPUs"):
        ray_pool(replace(setting(FedAvg()), device="meta"), data())


TINY: dict[str, dict[str, Any]] = {
    "data": {"clients": 3, "samples_per_client": 12},
    "split": {"name": "iid"},
    "model": {"name": "mlp"},
    "training": {"local_epochs": 1},
    "schedule": {"rounds": 2, "eval_every": 1},
}


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pfedla.ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    experiment = replace(Experiment.from_tables(TINY), machine=Machine(fleet="ray"))
    with pytest.raises(ConfigError, match=r"machine\.fleet = 'ray': .*pip install 'pfedla\[ray\]'"):
        run_experiment(experiment)


def test_a_configuration_chooses_the_cluster() -> None:
    results = []
    for fleet, workers in (("local", 0), ("ray", 1)):
        results.append(
            run_experiment(Experiment.from_tables({**TINY, "machine": {"fleet": fleet, "workers": workers}}))
        )
    same_result(*results)


DYING = """
import os
from dataclasses import dataclass
from pathlib import Path
from pfedla import FedAvg

@dataclass(frozen=True)
class Dying(FedAvg):
    def train(self, own, got, task):
        print("a line that nobody asked for")
        if task.ids[0] == 1 and not Path(__file__).with_name("dead").exists():
            Path(__file__).with_name("dead").touch()
            os._exit(3)
        return super().train(own, got, task)
"""


def test_standard_output_holds_json_alone_even_if_a_worker_dies(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps({**TINY, "algorithm": {"name": "dying:Dying"}}))
    command = [sys.executable, "-c", "from pfedla.cli import main; main()", "run", "tiny.toml", "--json"]
    done = subprocess.run(
        [*command, "--set", "machine.fleet=ray", "--set", "machine.ray_address=local"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 2
    assert "The work is done again by a new worker" in done.stderr


def test_ray_does_not_take_sigterm_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object, **__: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # as Ray does

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    assert _connect(None)
    assert signal.getsignal(signal.SIGTERM) is before
