"""Runs that are killed at random moments end as if they had not been: a short form of `make soak`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked off")
def test_runs_that_are_killed_at_random_moments_are_resumed_to_the_bit() -> None:
    command = [sys.executable, "-m", "tests.soak", "--seconds", "0", "--kills", "20", "--seed", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] >= 20
