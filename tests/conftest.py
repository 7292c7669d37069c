"""What every test stands on; the tiny world itself is in `tests/world.py`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pfedla import cli, kernels
from pfedla.algorithm import Algorithm
from tests import world


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes minutes of waiting, so that other tests run meanwhile."""
    items.sort(key=lambda item: item.path.name != "test_processes.py")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors are slower on many threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_niceness() -> Iterator[None]:
    """Let Ray's workers run beside other tests: by default they wait for whoever else wants the cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture(autouse=True, scope="session")
def signals_as_usual() -> None:
    """Hear Ctrl-C and the like where the tests run in the background of a shell, which has them ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(params=kernels.available())
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use the loops of each instruction set that there are loops for here."""
    with kernels.switch(request.param):
        yield


QUICK = ("fedavg", "fedper", "fedfomo", "pfedla", "heurpfedla", "pfedla-peers")  # one of each kind


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in world.METHODS])
def algorithm(request: pytest.FixtureRequest) -> Algorithm[Any]:
    """Every method; most of them only where slow tests run, too."""
    return world.METHODS[request.param]()


@pytest.fixture
def pfedla(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Call the command line; return exit code, standard output and standard error."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pfedla", *words])
        monkeypatch.setattr(sys, "path", [*sys.path])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert "\x1b" not in out + err  # no colour where it is piped
        return code, out, err

    return call
