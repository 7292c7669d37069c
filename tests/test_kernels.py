"""The compiled loops: whether they are there, how they are chosen, and the hypernetworks' against torch."""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pfedla import kernels
from pfedla.algorithms import HeurPFedLA, PFedLA
from pfedla.algorithms.pfedla import Clients
from pfedla.errors import ConfigError
from pfedla.layers import Layers
from pfedla.wire import Payload

NAMES, SIZES = ("a", "b", "c"), (30, 1000, 7)

levels = pytest.mark.parametrize("level", kernels.available())


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def draw(rows: int, seed: int) -> Layers:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, size, generator=generator) for name, size in zip(NAMES, SIZES, strict=True)}


def trained(algorithm: PFedLA, n: int, level: str) -> tuple[list[Payload], Clients]:
    """Return what three rounds with different participants send, and the state after them."""
    state = algorithm.init(draw(1, 0), n, torch.Generator().manual_seed(1))._replace(theta=draw(n, 2))
    sent = []
    with kernels.switch(level):
        for t in range(3):
            ids = torch.randperm(n, generator=torch.Generator().manual_seed(t))[: n // 2].sort().values
            got = algorithm.download(state, ids)
            ones = torch.ones(len(ids), len(NAMES), dtype=torch.bool)
            upload = Payload.of(draw(len(ids), 3 + t), ones, NAMES, torch.ones(len(ids), dtype=torch.int64))
            state = algorithm.update(state, ids, got, upload)
            sent.append(got)
    return sent, state


@levels
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("n", [4, 33, 120])
@pytest.mark.parametrize(
    "algorithm",
    [PFedLA(), PFedLA(embedding=3, hidden=7), HeurPFedLA(hidden=21), PFedLA(peers=3), PFedLA(hyper_optimizer="sgd")],
    ids=["usual", "small", "retained", "peers", "sgd"],
)
def test_rounds_of_pfedla_are_those_of_torch(algorithm: PFedLA, n: int, level: str, same: Callable[..., None]) -> None:
    """Over three rounds: later ones start from moments and step counts of earlier ones."""
    ours, theirs = trained(algorithm, n, level), trained(algorithm, n, kernels.OFF)
    for mine, other in zip(ours[0], theirs[0], strict=True):
        same(mine, other, atol=1e-4)
    assert torch.equal(ours[1].heads.steps, theirs[1].heads.steps)
    assert torch.equal(ours[1].body.steps, theirs[1].body.steps)
    for found, wanted in ((ours[1].body, theirs[1].body), (ours[1].heads, theirs[1].heads)):
        for part in range(3):
            same(found[part], wanted[part], atol=1e-4)


@levels
def test_how_many_threads_work_changes_nothing(level: str, same: Callable[..., None]) -> None:
    states = []
    for count in (1, 2, 5, 1):
        torch.set_num_threads(count)
        states.append(trained(PFedLA(), 60, level)[1])
    same(states[0], states[1])
    same(states[0], states[2])


WEIGHTS, BANK = torch.ones(2, 100), torch.ones(100, 20_000)  # enough for several threads


def _product(level: str) -> float:
    """Multiply with three threads; torch's own must not run in a forked process whose parent had some."""
    kernels.choose(level)
    torch.set_num_threads(3)
    (found,) = kernels.product([WEIGHTS], [BANK])
    torch.set_num_threads(1)
    return float(found.sum())


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@levels
def test_a_forked_process_has_threads_of_its_own(level: str) -> None:
    with kernels.switch(level):
        assert _product(level) == 4e6
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map_async(_product, [level] * 4).get(timeout=60) == [4e6] * 4


@levels
def test_what_does_not_fit_is_refused(level: str) -> None:
    bank, row, both = torch.zeros(5, 8), [torch.ones(1, 8)] * 2, [torch.ones(2, 8)]
    with kernels.switch(level):
        for call in (
            lambda: kernels.product([torch.ones(2, 4)], [bank]),
            lambda: kernels.product([torch.ones(2, 5), torch.ones(3, 5)], [bank, bank]),
            lambda: kernels.inner([torch.ones(2, 7)], [bank]),
            lambda: kernels.inner([torch.ones(kernels.FEW + 1, 8)], [bank]),
            lambda: kernels.write_sum([bank], torch.tensor([0]), both, both),
            lambda: kernels.write_sum(
                [bank, bank[:3]], torch.tensor([4]), [torch.ones(1, 8)] * 2, [torch.ones(1, 8)] * 2
            ),
        ):
            with pytest.raises(ValueError, match="do not belong together"):
                call()
        for odd in (-1, 5):
            with pytest.raises(IndexError, match="of 5"):
                kernels.write_sum([bank], torch.tensor([odd]), row[:1], row[:1])
    assert not bank.any()


@levels
def test_row_numbers_may_have_gaps_and_any_integer_type(level: str) -> None:
    with kernels.switch(level):
        for ids in (torch.tensor([3, 9, 1, 9])[::2], torch.tensor([3, 1], dtype=torch.int32)):
            bank = torch.zeros(5, 8)
            kernels.write_sum([bank], ids, [torch.ones(2, 8)], [torch.ones(2, 8)])
            assert bank.sum(1).tolist() == [0, 16, 0, 16, 0]


def test_there_are_loops_where_a_compiler_and_a_processor_were_found() -> None:
    """An installation that failed to build them silently would only be slow."""
    cpu = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpu.exists() or "avx2" not in cpu.read_text() or not shutil.which("g++"):
        pytest.skip("no processor or no compiler for them")
    assert kernels.available()[-1] == "avx2"
    assert os.environ.get("PFEDLA_KERNELS", "auto") != "auto" or kernels.level() == kernels.available()[0]


def _level_of(value: str) -> str:
    code = "from pfedla import kernels; print(kernels.level())"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PFEDLA_KERNELS": value}, capture_output=True, text=True
    )
    return run.stdout.strip() or run.stderr.strip().splitlines()[-1]


def test_the_environment_chooses_them() -> None:
    assert _level_of("off") == "off"
    assert _level_of("auto") == (*kernels.available(), "off")[0]
    assert "PFEDLA_KERNELS = 'mmx': here it may be auto" in _level_of("mmx")


def test_they_are_switched_for_a_while() -> None:
    before = kernels.level()
    with pytest.raises(ConfigError, match="it may be"), kernels.switch("mmx"):
        pass
    with kernels.switch(kernels.OFF):
        assert kernels.level() == "off"
        assert not kernels.usable(torch.ones(2))
    assert kernels.level() == before
    assert kernels.usable(torch.ones(2)) is bool(kernels.available())
    assert not kernels.usable(torch.ones(2), torch.ones(2).double())
    assert not kernels.usable(torch.ones(3, 2).T)
