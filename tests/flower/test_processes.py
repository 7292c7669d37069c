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
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file

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
    pytest.mark.skipif(
        not os.environ.get("PFEDLA_FLOWER_PROCESSES"),
        reason="takes a quarter of an hour and has not passed yet: set PFEDLA_FLOWER_PROCESSES=1 to try",
    ),
]

SITES = ("north", "east")
PATIENCE = 900.0  # seconds for anything at all
MARK = "PFEDLA_TEST_PROCESSES"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(done: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.2)


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
        """Return the one block of the README that has these words."""
        found: str
        (found,) = (block for block in self.blocks if all(word in block for word in words))
        return found

    def start(self, command: str, place: str, log: str) -> subprocess.Popen[bytes]:
        """Give a command in one of the deployment's folders."""
        setup = "" if "export FLWR_HOME" in command else 'export FLWR_HOME="$PWD/flwr" FLWR_TELEMETRY_ENABLED=0\n'
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

    def give(self, command: str, place: str, log: str) -> int:
        """Give a command and wait for its end."""
        return self.start(command, place, log).wait(PATIENCE)

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

    def kill(self, place: str = "") -> None:
        """End our processes, at once, until none is left."""
        end = time.monotonic() + 20
        while (left := self.processes(place)) and time.monotonic() < end:
            for process in left:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.2)

    # ---- what the tests do

    def superlink(self) -> None:
        self.start(self.command("flower-superlink"), "server", "superlink.log")
        until(self.reachable, f"the SuperLink does not start:\n{self.log('superlink.log')}")

    def reachable(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def port(self) -> int:
        (found,) = re.findall(r"--port (\d+)", self.command("flower-superlink"))
        return int(found)

    def supernode(self, site: str) -> None:
        self.start(self.command("flower-supernode", f'site="{site}"'), f"sites/{site}", f"{site}.log")

    def at(self, t: int) -> bool:
        """Say whether the server has a checkpoint of this round, and so works at the next."""
        path = self.folder / "server" / "run" / "checkpoint.safetensors"
        if not path.exists():
            return False
        with safe_open(path, "pt") as file:
            return int(json.loads(file.metadata()["facts"])["t"]) >= t

    def busy(self, place: str) -> bool:
        """Say whether a site is at work for the server."""
        commands = [Path(f"/proc/{process}/cmdline") for process in self.processes(place)]
        return any(b"flwr-clientapp" in path.read_bytes() for path in commands if path.exists())

    def logs(self) -> str:
        """Return the ends of all logs, for whoever has to find out."""
        return "\n".join(f"== {path.name}\n{self.log(path.name)[-3000:]}" for path in sorted(self.folder.glob("*.log")))


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Write a deployment as the command line does, small and impatient; whatever was started is ended."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="pfedla-", dir=memory if os.access(memory, os.W_OK) else None)) / "trial"
    done = CliRunner().invoke(
        cli, ["deploy", "init", str(folder), "--sites", ",".join(SITES), "--port", str(free_port())]
    )
    assert done.exit_code == 0, done.output
    config = folder / "app" / "pfedla.toml"
    tables = tomllib.loads(config.read_text())
    tables["deploy"] |= {"fewest": 2, "timeout": 120, "tries": 3, "models": True}
    tables["schedule"] |= {"rounds": 3, "eval_every": 3}
    tables["training"] |= {"local_epochs": 1}
    config.write_text(tomli_w.dumps(tables))
    readme = folder / "README.md"
    text = readme.read_text()
    for number in range(len(SITES)):  # of SuperNodes: another machine each, and here perhaps taken
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


def simulated(machines: Machines) -> Result:
    """Run the same in the simulator."""
    deployment = Deployment.load(machines.folder / "app")
    experiment, code, clients = deployment.experiment, deployment.code(), []
    for site in SITES:
        with contextlib.chdir(machines.folder / "sites" / site):
            clients.append(code.data(site))
    schedule, training = experiment.schedule, experiment.training
    how = {"training": training, "eval_every": schedule.eval_every, "seed": schedule.seed}
    return pfedla.run(experiment.algorithm, code.model, clients, schedule.rounds, workers=0, **how)  # type: ignore[arg-type]


def test_real_processes_give_what_the_simulator_gives_through_crashes(machines: Machines) -> None:
    """TLS and registered keys; strangers stay out; a site, then the server, die in the middle of a round."""
    assert machines.give(machines.command("deploy check"), ".", "check.log") == 0, machines.log("check.log")
    machines.superlink()
    assert machines.give(machines.command("supernode register"), "server", "register.log") == 0, machines.logs()
    for site in SITES:
        machines.supernode(site)

    begin = "flwr run ../app sites --stream"
    assert begin in machines.blocks
    run = machines.start(begin, "server", "run.log")
    until(lambda: machines.at(1) and machines.busy("sites/east"), f"no round is played:\n{machines.logs()}")
    machines.kill("sites/east")
    until(lambda: "round 2: only 1 of 2 sites answered" in machines.log("run.log"), machines.logs())
    machines.supernode("east")  # Flower lets a node in again once it has missed the old one's heartbeat
    until(lambda: machines.at(2), f"round 2 is not repeated:\n{machines.logs()}")
    machines.kill("server")
    run.wait(PATIENCE)
    assert not RunRecord(machines.folder / "server" / "run").complete
    machines.superlink()
    command = machines.command("flwr run", "resume=true")
    assert machines.give(command, "server", "resume.log") == 0, machines.logs()
    until(lambda: RunRecord(machines.folder / "server" / "run").complete, f"it is not resumed:\n{machines.logs()}", 5)

    expected = simulated(machines)
    result = pfedla.load(
        machines.folder / "server" / "run", model=Deployment.load(machines.folder / "app").code().model
    )
    for key, rows in expected.personalized.items():
        torch.testing.assert_close(result.personalized[key], rows, rtol=0, atol=1e-6)
    assert result.alpha is not None
    assert expected.alpha is not None
    np.testing.assert_allclose(result.alpha, expected.alpha, rtol=0, atol=1e-6)
    for key, values in expected.ledger.arrays().items():
        assert np.array_equal(result.ledger.arrays()[key], values), key
    for client, site in enumerate(SITES):
        held = load_file(machines.folder / "sites" / site / "state" / "model.safetensors")
        for name, tensor in expected.model(client).state_dict().items():
            torch.testing.assert_close(held[name], tensor, rtol=0, atol=1e-6)

    # strangers: one with a key that nobody registered, one without TLS
    stranger, plain = machines.folder / "sites" / "stranger", machines.folder / "sites" / "plain"
    for place in (stranger, plain):
        shutil.copytree(machines.folder / "sites" / "north", place, ignore=shutil.ignore_patterns("key*", "flwr"))
    write_key(stranger / "key")
    own = machines.command("flower-supernode", 'site="north"')
    command = re.sub(r"--port \d+", f"--port {free_port()}", own)
    turned_away = machines.start(command, "sites/stranger", "stranger.log")
    command = re.sub(r"--root-certificates ca.crt --auth-supernode-private-key key", "--insecure", command)
    plaintext = machines.start(command.replace("--insecure", "--insecure --max-retries 2"), "sites/plain", "plain.log")
    for process, log in ((turned_away, "stranger.log"), (plaintext, "plain.log")):
        until(lambda process=process: process.poll() is not None, f"it was let in:\n{machines.logs()}")  # type: ignore[misc]
        assert process.returncode, machines.log(log)

    # a site with another model
    machines.kill("sites/east")
    time.sleep(65)  # two heartbeats
    code = (machines.folder / "app" / "site_code.py").read_text()
    (machines.folder / "sites" / "east" / "mine.py").write_text(code.replace("64", "32"))
    other = str(machines.folder / "sites" / "east" / "mine.py")
    command = machines.command("flower-supernode", 'site="east"').replace("state=", f'code="{other}" state=')
    machines.start(command, "sites/east", "east.log")
    assert machines.give("flwr run ../app sites --stream --run-config 'out=\"another\"'", "server", "another.log") == 0
    assert "site east has another model than the server" in machines.log("another.log"), machines.logs()
    assert not (machines.folder / "server" / "another").exists()
