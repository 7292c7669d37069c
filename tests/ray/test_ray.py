from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import Tensor, nn

from pfedla.algorithms import FedAvg, PFedLA
from pfedla.config import Experiment, Run
from pfedla.errors import ConfigError, RunError
from pfedla.experiment import run_experiment
from pfedla.fleet import Setting, SimulatedFleet
from pfedla.layers import Layers, LayerSpec
from pfedla.ledger import Ledger
from pfedla.rounds import Server, evaluate, run_round
from pfedla.simulation import simulate
from pfedla.training import Samples, Task, Training
from pfedla.wire import Payload

ray = pytest.importorskip("ray")

from pfedla.ray import RayFleet, _Hand  # noqa: E402
from tests import troubled  # noqa: E402
from tests.troubled import Faulty, Killed  # noqa: E402

CLIENTS, IDS = 5, [0, 1, 2, 3, 4]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Run a local Ray of two CPUs, whose workers are sent the classes of the tests.

    No test here may fork workers: a process with Ray's threads can lock up in its forks.
    """
    for module in (sys.modules[__name__], troubled):
        ray.cloudpickle.register_pickle_by_value(module)
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
        return {**theta, "fc#told": torch.zeros(1, 2)}

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        kept, upload = super().train(own, got, task)
        return {**kept, "fc#told": torch.tensor([[os.getpid(), torch.get_num_threads()]]).float()}, upload


def world(algorithm: Any, make: Callable[[], nn.Module] = Careless, **training: Any) -> tuple[Setting, list[Samples]]:
    """Return a setting and clients' samples."""
    rng = np.random.default_rng(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        template = make()
    spec = LayerSpec.of(template)
    how = Training(**{"local_epochs": 2, "batch_size": 4, "lr": 0.05, **training})
    made = Setting(template, spec, algorithm.for_model(spec), how, 3)
    counts = [7 + client for client in range(CLIENTS)]
    return made, [Samples(rng.normal(size=(n, 2, 6, 6)).astype(np.float32), rng.integers(0, 3, n)) for n in counts]


def download(setting: Setting) -> Payload:
    state = setting.algorithm.init(setting.spec.read(setting.template), CLIENTS, torch.Generator())
    return setting.algorithm.download(state, torch.tensor(IDS))


def test_the_result_is_that_of_one_machine_to_the_bit(same: Callable[..., None]) -> None:
    outcomes = []
    for kind, workers in ((SimulatedFleet, 0), (RayFleet, 2)):
        made, samples = world(PFedLA())
        algorithm = made.algorithm
        server = Server(algorithm.init(made.spec.read(made.template), CLIENTS, torch.Generator().manual_seed(1)))
        with kind(made, samples, samples, workers) as fleet:
            for ids in (IDS, [1, 3], IDS):
                run_round(algorithm, server, fleet, Ledger(made.spec.names), ids)
            scores = evaluate(algorithm, server.state, fleet, CLIENTS, server.t)
            personalized = fleet.personalize(IDS, algorithm.download(server.state, torch.tensor(IDS)), server.t)
            outcomes.append((tuple(server.state), fleet.state(), personalized, np.stack([*map(np.stack, scores)])))
    same(outcomes[0][:3], outcomes[1][:3])
    assert np.array_equal(outcomes[0][3], outcomes[1][3])


def test_a_job_whose_worker_is_killed_is_done_again(
    tmp_path: Path, same: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    uploads = []
    for algorithm, kind, workers in ((FedAvg(), SimulatedFleet, 0), (Killed(str(tmp_path / "killed")), RayFleet, 1)):
        made, samples = world(algorithm)
        with kind(made, samples, samples, workers) as fleet:
            uploads.append(fleet.train(IDS, download(made), 1)[1].layers)
    assert (tmp_path / "killed").exists()
    same(uploads[0], uploads[1])
    (record,) = caplog.records
    assert re.search(r"worked for client .*\b2\b.* in round 1", record.message)
    assert "done again" in record.message


def test_workers_are_one_a_cpu_with_one_thread_and_replaced_if_killed_between_rounds(
    same: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    made, samples = world(Telling())
    processes: set[int] = set()
    with RayFleet(made, samples, samples) as fleet:
        assert fleet.workers == 2
        deadline = time.monotonic() + 60
        while len(processes) < 2:  # the one that starts first may do all the work of the first rounds
            assert time.monotonic() < deadline
            before = fleet.train(IDS, download(made), 1)[1].layers
            fleet.commit()
            process, threads = fleet.own["fc#told"].int().unbind(1)
            processes.update(process.tolist())
            assert threads.tolist() == [1] * CLIENTS
        assert os.getpid() not in processes
        for number in processes:
            os.kill(number, signal.SIGKILL)
        after = fleet.train(IDS, download(made), 1)[1].layers
    same(before, after)
    assert len(caplog.records) == 2


def test_a_job_that_kills_two_workers_ends_the_run_and_names_the_client() -> None:
    made, samples = world(Killed())
    message = r"a worker died while it worked for client 2 in round 1\. Ray says: .*second one to die over this job"
    with pytest.raises(RunError, match=message):
        simulate(made, samples, samples, Run(rounds=1, workers=1, fleet="ray"), {})


def test_an_answer_that_is_lost_with_its_worker_does_not_hide_whose_job_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take, lost = _Hand.take, list[int]()

    def losing(hand: _Hand) -> Any:
        if not lost and len(hand.jobs) == 2 and hand.jobs[1][1].client == 2:
            lost.append(hand.jobs[0][1].client)
            ray.get(hand.jobs[1][0])  # raises: the worker dies over its second job, before the first one's answer came
        return take(hand)

    monkeypatch.setattr(_Hand, "take", losing)
    made, samples = world(Killed())
    with (
        RayFleet(made, samples, samples, workers=1) as fleet,
        pytest.raises(RunError, match=r"worked for client 2 in round 1\..*second one to die over this job"),
    ):
        fleet.train(IDS, download(made), 1)
    assert f"worked for client {lost[0]} or 2 in round 1" in caplog.records[0].message


def test_a_clients_mistake_reads_as_with_workers_on_this_machine(same: Callable[..., None]) -> None:
    made, samples = world(Faulty())
    texts = []
    for kind, workers in ((SimulatedFleet, 0), (RayFleet, 1)):
        with kind(made, samples, samples, workers) as fleet:
            before = fleet.train(IDS, download(made), 1)[1].layers
            with pytest.raises(RunError) as caught:
                fleet.train(IDS, download(made), 2)
            same(fleet.train(IDS, download(made), 1)[1].layers, before)  # nothing is left behind
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
    made, samples = world(Homesick(home=os.getpid()))
    with (
        RayFleet(made, samples, samples, workers=1) as fleet,
        pytest.raises(RunError, match=r"No module named 'home'.*Every node needs"),
    ):
        fleet.train(IDS, download(made), 1)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_number_of_workers_that_the_cluster_has_not_is_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match=rf"run.workers = {workers}: each takes one of the Ray cluster's 2 CPUs"):
        RayFleet(*world(FedAvg()), [], workers)


def test_another_cluster_than_the_one_connected_to_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ray_address = 'far:6379': this process is connected to .*:\d+"):
        RayFleet(*world(FedAvg()), [], address="far:6379")


@pytest.mark.parametrize("variable", [False, True])
def test_a_cluster_that_does_not_answer_is_refused_at_once(variable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        if variable:
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=rf"run.ray_address = '{address}': .*refused"):
            RayFleet(*world(FedAvg()), [], address="" if variable else address)


def test_other_devices_are_refused() -> None:
    made, samples = world(FedAvg())
    elsewhere = Setting(made.template, made.spec, made.algorithm, made.training, made.seed, device="meta")
    with pytest.raises(ConfigError, match=r"run.device = 'meta': .* on CPUs"):
        RayFleet(elsewhere, samples, samples)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pfedla.ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"run.fleet = 'ray': .*pip install 'pfedla\[ray\]'"):
        simulate(*world(FedAvg()), [], Run(fleet="ray"), {})


TINY: dict[str, dict[str, Any]] = {
    "data": {"clients": 3, "samples_per_client": 12},
    "split": {"name": "iid"},
    "model": {"name": "mlp"},
    "training": {"local_epochs": 1},
    "run": {"rounds": 2, "eval_every": 1},
}


def test_a_configuration_chooses_the_cluster(same: Callable[..., None]) -> None:
    results = []
    for fleet, workers in (("local", 0), ("ray", 1)):
        tables = {**TINY, "run": {**TINY["run"], "fleet": fleet, "workers": workers}}
        results.append(run_experiment(Experiment.from_tables(tables)))
    same(results[0].personalized, results[1].personalized)
    for one, other in zip(results[0].history, results[1].history, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


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
        [*command, "--set", "run.fleet=ray", "--set", "run.ray_address=local"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 2
    assert "The work is done again by a new worker" in done.stderr
