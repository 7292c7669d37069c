"""Real processes on this machine: a SuperLink and SuperNodes with TLS and registered keys."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from click.testing import CliRunner
from safetensors import safe_open

import pfedla
from pfedla.cli import cli
from pfedla.record import RunRecord
from pfedla.result import Result

pytest.importorskip("flwr")
from pfedla.flower.certificates import write_key
from pfedla.flower.deployment import Deployment
from pfedla.flower.project import NODE_PORT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds its processes in /proc"),
]

SITES = ("north", "east", "south")  # Flower starts a process for each message: seconds of work for each site
PATIENCE = 900.0  # seconds for anything at all
MARK = "PFEDLA_TEST_PROCESSES"
DOCS = Path(__file__).parents[2] / "docs" / "deploy.md"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Machines:
    """The processes of a deployment, given the very commands of its README."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FLWR_")},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
        }
        text = (folder / "README.md").read_text()
        self.blocks = [block.strip() for block in re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)]

    def command(self, *words: str) -> str:
        """Return the block of the README that has these words, the shortest if there are several."""
        found: str = min((block for block in self.blocks if all(word in block for word in words)), key=len)
        return found

    def start(self, command: str, place: str, log: str) -> subprocess.Popen[bytes]:
        """Give a command in one of the deployment's folders."""
        setup = (
            ""
            if "export FLWR_HOME" in command
            else 'export FLWR_HOME="$PWD/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1\n'
        )
        with (self.folder / log).open("ab") as file:
            made = subprocess.Popen(
                ["bash", "-ec", setup + command],
                cwd=self.folder / place,
                env=self.environment | {"PFEDLA_TEST_PLACE": place},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.started.append(made)
        return made

    def give(self, command: str, place: str, log: str) -> None:
        """Give a command that has to succeed, and wait for its end."""
        done = self.start(command, place, log)
        self.until(lambda: done.poll() is not None, f"{command} does not end")
        assert done.returncode == 0, f"{command}: {done.returncode}\n{self.logs()}"

    def until(self, done: Callable[[], object], what: str) -> None:
        """Wait for something; if it does not come, say what, and what all logs have."""
        end = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < end, f"{what}\n{self.logs()}"
            time.sleep(0.2)

    def log(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self, place: str = "") -> list[int]:
        """Return our processes, or those that were started in one place."""
        words = [f"{MARK}={self.mark}".encode(), *([f"PFEDLA_TEST_PLACE={place}".encode()] if place else [])]
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = path.read_bytes().split(b"\0")
            except OSError:  # it has ended, or is somebody else's
                continue
            if all(word in variables for word in words):
                found.append(int(path.parent.name))
        return found

    def running(self, place: str, program: str) -> list[int]:
        """Return the processes of a program in one place."""
        found = []
        for process in self.processes(place):
            with contextlib.suppress(OSError):  # it has ended
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                found += [process] * any(word.endswith(program.encode()) for word in words[:2])
        return found

    def kill(self, place: str = "") -> None:
        """End our processes, at once, until none is left."""
        end = time.monotonic() + 20
        while (left := self.processes(place)) and time.monotonic() < end:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.2)

    def stop(self, place: str, program: str) -> None:
        """Ask a program to end, as Ctrl-C and service managers do, and wait until it has."""
        for process in self.running(place, program):
            os.kill(process, signal.SIGTERM)
        self.until(lambda: not self.running(place, program), f"{program} in {place} does not end")
        self.kill(place)  # its SuperExec, which tries to reach it for some minutes more

    # ---- what the tests do

    def superlink(self, *, gate: bool = True) -> None:
        """Start the SuperLink, and the gate before it."""
        self.listening("flower-superlink", "superlink.log")
        if gate:
            self.listening("deploy gate", "gate.log")

    def listening(self, program: str, log: str) -> None:
        """Start a program of the server, and wait until it listens at its port."""
        (port,) = re.findall(r"--port (\d+)", self.command(program))
        self.start(self.command(program), "server", log)

        def reachable() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", int(port))) == 0

        self.until(reachable, f"{program} does not start")

    def supernode(self, site: str) -> None:
        self.start(self.command("flower-supernode", f'site="{site}"'), f"sites/{site}", f"{site}.log")

    def at(self, t: int) -> bool:
        """Say whether the server has a checkpoint of this round, and so works at the next."""
        path = self.folder / "server" / "run" / "checkpoint.safetensors"
        if not path.exists():
            return False
        with safe_open(path, "pt") as file:
            return int(json.loads(file.metadata()["facts"])["t"]) >= t

    def logs(self) -> str:
        """Return the ends of all logs, for whoever has to find out."""
        return "\n".join(f"== {path.name}\n{self.log(path.name)[-3000:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def deployed(sites: Sequence[str], rounds: int, *options: str) -> Iterator[Machines]:
    """Write a deployment as the command line does, small and impatient; whatever was started is ended."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="pfedla-", dir=memory if os.access(memory, os.W_OK) else None)) / "trial"
    words = ["deploy", "init", str(folder), "--sites", ",".join(sites), "--port", str(free_port()), *options]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    config = folder / "app" / "pfedla.toml"
    tables = tomllib.loads(config.read_text())
    tables["deploy"] |= {"fewest": len(sites), "models": True}  # nobody may be absent from a round
    tables["deploy"] |= {"timeout": 120, "tries": 10}  # a busy machine starts Flower's processes too late
    tables["schedule"] |= {"rounds": rounds, "eval_every": rounds}
    tables["training"] |= {"local_epochs": 1}
    config.write_text(tomli_w.dumps(tables))
    readme = folder / "README.md"
    text = readme.read_text()
    profile = folder / "server" / "flwr" / "config.toml"
    (inner,) = re.findall(r"127\.0\.0\.1:(\d+)", profile.read_text())  # the SuperLink's port behind the gate
    if "--insecure" not in options:
        free = str(free_port())
        profile.write_text(profile.read_text().replace(inner, free))
        text = text.replace(f":{inner}\n", f":{free}\n").replace(f"--port {inner} ", f"--port {free} ")
    for number in range(len(sites)):  # of SuperNodes: another machine each, and here perhaps taken
        text = text.replace(f"--port {NODE_PORT + number} ", f"--port {free_port()} ")
    readme.write_text(text)
    made = Machines(folder)
    try:
        yield made
    finally:
        made.kill()
        left = made.processes()
        for process in made.started:
            process.wait(10)
        shutil.rmtree(folder.parent, ignore_errors=True)
        assert not left


@pytest.fixture
def machines() -> Iterator[Machines]:
    with deployed(SITES, rounds=2) as made:
        yield made


def write_key_of(place: Path) -> None:
    """Make a folder with a key that nobody registered."""
    place.mkdir()
    write_key(place / "key")


def simulated(machines: Machines) -> Result:
    """Run the same in the simulator."""
    deployment = Deployment.load(machines.folder / "app")
    experiment, code, clients = deployment.experiment, deployment.code(), []
    for site in deployment.deploy.sites:
        with contextlib.chdir(machines.folder / "sites" / site):
            clients.append(code.data(site))
    schedule, training = experiment.schedule, experiment.training
    how = {"training": training, "eval_every": schedule.eval_every, "seed": schedule.seed}
    return pfedla.run(experiment.algorithm, code.model, clients, schedule.rounds, workers=0, **how)  # type: ignore[arg-type]


def same_as_simulated(machines: Machines) -> Result:
    """Compare the run on the server with the simulator's, which is returned."""
    expected = simulated(machines)
    model = Deployment.load(machines.folder / "app").code().model
    result = pfedla.load(machines.folder / "server" / "run", model=model)
    for key, rows in expected.personalized.items():
        torch.testing.assert_close(result.personalized[key], rows, rtol=0, atol=1e-6)
    assert result.alpha is not None
    assert expected.alpha is not None
    np.testing.assert_allclose(result.alpha, expected.alpha, rtol=0, atol=1e-6)
    for key, values in expected.ledger.arrays().items():
        assert np.array_equal(result.ledger.arrays()[key], values), key
    return expected


def test_a_trial_without_tls_and_keys_runs_as_its_readme_says() -> None:
    with deployed(("north", "east"), 1, "--insecure") as machines:
        machines.give(machines.command("deploy check"), ".", "check.log")
        machines.superlink(gate=False)
        for site in ("north", "east"):
            machines.supernode(site)
        machines.give(machines.command("flwr run", "../app sites --stream"), "server", "run.log")
        assert RunRecord(machines.folder / "server" / "run").complete, machines.logs()
        same_as_simulated(machines)


def test_real_processes_give_what_the_simulator_gives_through_crashes(machines: Machines) -> None:
    """TLS and registered keys; strangers stay out; the ServerApp, a site and the SuperLink die during rounds."""
    server = machines.folder / "server"
    machines.give(machines.command("deploy check"), ".", "check.log")
    machines.superlink()
    machines.give(machines.command("supernode register"), "server", "register.log")

    # an operator from outside: the gate is for sites
    outside = machines.folder / "sites" / "outside"
    write_key_of(outside)
    inner = tomllib.loads((server / "flwr" / "config.toml").read_text())["superlink"]
    (port,) = re.findall(r"--port (\d+)", machines.command("deploy gate"))
    inner["sites"]["address"] = f"127.0.0.1:{port}"
    (outside / "flwr").mkdir()
    (outside / "flwr" / "config.toml").write_text(tomli_w.dumps({"superlink": inner}))
    for words in ("flwr supernode register key.pub sites --name other", "flwr run ../../app sites"):
        tried = machines.start(words, "sites/outside", "outside.log")
        machines.until(lambda tried=tried: tried.poll() is not None, f"{words} does not end")  # type: ignore[misc]
        assert tried.returncode, machines.log("outside.log")
    assert machines.log("gate.log").count("refused") == 2

    # strangers who call themselves north: one with a key that nobody registered, one without TLS
    stranger, plain = machines.folder / "sites" / "stranger", machines.folder / "sites" / "plain"
    for place in (stranger, plain):
        shutil.copytree(machines.folder / "sites" / "north", place, ignore=shutil.ignore_patterns("key*", "flwr"))
    write_key(stranger / "key")
    command = re.sub(r"--port \d+", f"--port {free_port()}", machines.command("flower-supernode", 'site="north"'))
    bare = command.replace("--root-certificates ca.crt --auth-supernode-private-key key", "--insecure --max-retries 2")
    strangers = {
        "stranger.log": machines.start(command, "sites/stranger", "stranger.log"),
        "plain.log": machines.start(re.sub(r"--port \d+", f"--port {free_port()}", bare), "sites/plain", "plain.log"),
    }

    # a site with another model
    code = (machines.folder / "app" / "site_code.py").read_text()
    other = machines.folder / "sites" / "south" / "mine.py"
    other.write_text(code.replace("64", "32"))
    south = machines.command("flower-supernode", 'site="south"')
    machines.start(south.replace("state=", f'code="{other}" state='), "sites/south", "other.log")
    begin = machines.command("flwr run", "../app sites --stream")
    machines.start(f"{begin} --run-config 'out=\"another\"'", "server", "another.log")
    refusal = "site south has another model than the server: 1 has"
    machines.until(lambda: refusal in machines.log("another.log"), "another model is not refused")
    assert not (server / "another").exists()
    for log, process in strangers.items():
        machines.until(lambda process=process: process.poll() is not None, f"{log}: it was let in")  # type: ignore[misc]
        assert process.returncode, machines.log(log)
    machines.stop("sites/south", "flower-supernode")
    for site in SITES:
        machines.supernode(site)

    # the ServerApp dies in round 1, a site as round 1 is tried again, the SuperLink with all that is its in round 2
    machines.start(begin, "server", "run.log")
    machines.until(lambda: RunRecord(server / "run").exists, "the sites are not found")
    machines.until(lambda: machines.running("sites/east", "flwr-clientapp"), "round 1 does not begin")
    (app,) = machines.running("server", "flwr-serverapp")
    os.kill(app, signal.SIGKILL)
    resume = machines.command("flwr run", "resume=true")
    machines.start(resume, "server", "resume.log")
    machines.until(lambda: machines.log("resume.log").count(" is client ") == len(SITES), "they are not found again")
    machines.until(lambda: machines.running("sites/east", "flwr-clientapp"), "round 1 does not begin again")
    machines.kill("sites/east")
    missed = r"round 1: only \d of 3 sites answered, .*east: "
    machines.until(lambda: re.search(missed, machines.log("resume.log")), "nobody misses east")
    machines.supernode("east")  # Flower lets a node in again once it has missed the old one's heartbeat
    machines.until(lambda: machines.at(1) and machines.running("sites/east", "flwr-clientapp"), "no round 2 at east")
    machines.kill("server")
    assert not RunRecord(server / "run").complete
    machines.superlink()
    machines.give(resume, "server", "resume-again.log")
    assert RunRecord(server / "run").complete, machines.logs()

    expected = same_as_simulated(machines)
    (load,) = re.findall(r"```python\n(.*?)```", (machines.folder / "README.md").read_text(), flags=re.DOTALL)
    assert load.strip() in DOCS.read_text()
    for client, site in enumerate(SITES):
        model = Deployment.load(machines.folder / "app").code().model()
        with contextlib.chdir(machines.folder / "sites" / site):
            exec(load, {"model": model})
        for name, tensor in expected.model(client).state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-6)
