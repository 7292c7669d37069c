"""The compiled loops: whether they are there, and how they are chosen; `test_blocks.py` compares them with torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pfedla import kernels
from pfedla.errors import ConfigError


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


@pytest.mark.slow
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
    assert kernels.level() == before
