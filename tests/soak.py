"""Kill runs at random moments and resume them, as long as time allows: `make soak`.

A run is forked off, killed (SIGKILL) after a random time, up to three times, and resumed until it is complete. It must
end as one that was never killed: to the bit, in everything but time. Methods come in rotation, with any number of
workers, in memory and on disk, with a checkpoint after every round, so that many kills fall into writing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pfedla
from pfedla import Experiment, Result, resume, run_experiment
from pfedla.algorithms import ALGORITHMS
from pfedla.config import Tables
from pfedla.record import RunRecord
from tests.world import same_result

KILLS = 3  # of one run at most


def write_data(folder: Path) -> None:
    """Write four clients' images."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for client in range(4):
        x, y = rng.integers(0, 256, (12 + client, 3, 16, 16), dtype=np.uint8), np.arange(12 + client) % 3
        np.savez(folder / f"site-{client}.npz", x=x, y=y)


def settings(folder: Path, method: str, workers: int, storage: str) -> Tables:
    """Return a run that takes about a second."""
    return {
        "algorithm": {"name": method, **({"groups": 2} if method == "clustered" else {})},
        "data": {"folder": str(folder)},
        "training": {"local_epochs": 2, "batch_size": 4},
        "schedule": {"rounds": 6, "participants": 3, "eval_every": 2},
        "machine": {"workers": workers, "storage": storage, "checkpoint_every": 0},
    }


def forked(work: Any) -> int:
    """Do work in a process of its own; return its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def started_or_resumed(tables: Tables, out: Path) -> None:
    """Go on with the run in a folder, from wherever it was killed."""
    record = RunRecord(out)
    if not record.exists:
        run_experiment(Experiment.from_tables(tables), out)
    elif not record.complete:
        resume(out)


def survived(tables: Tables, out: Path, duration: float, draw: random.Random) -> int:
    """Run, kill and resume until the run is complete; return how often it was killed."""
    kills = 0
    while True:
        pid = forked(lambda: started_or_resumed(tables, out))
        if kills < KILLS:
            time.sleep(draw.uniform(0, 1.1 * duration))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            kills += 1
        elif os.waitstatus_to_exitcode(status):
            raise AssertionError(f"the run in {out} could not be resumed")
        if RunRecord(out).complete:
            return kills


def soak(seconds: float, kills: int, seed: int) -> dict[str, int]:
    """Return how many runs were killed how often, all of them with the right result."""
    torch.set_num_threads(1)
    draw, started, done = random.Random(seed), time.monotonic(), {"runs": 0, "kills": 0}
    expected: dict[str, tuple[Result, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_data(data)
        methods = [name for name in ALGORITHMS if name != "fedbn"] + ["fedbn"]
        draw.shuffle(methods)
        for number, method in enumerate(itertools.cycle(methods)):
            if time.monotonic() - started > seconds and done["kills"] >= kills:
                return done
            tables = settings(data, method, draw.choice([0, 1, 2]), draw.choice(["memory", "disk"]))
            if method not in expected:
                begun = time.monotonic()
                result = run_experiment(Experiment.from_tables(settings(data, method, 0, "memory")))
                expected[method] = result, time.monotonic() - begun
            out = Path(folder, f"run-{number}")
            done["kills"] += survived(tables, out, expected[method][1], draw)
            done["runs"] += 1
            same_result(pfedla.load(out), expected[method][0])
            assert not [path.name for path in out.rglob("*") if path.suffix in (".part", ".rows")]
            sys.stderr.write(f"{method}: {done['kills']} kills in {done['runs']} runs, all right\n")
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kills", type=int, default=20, help="at least so many, however long it takes")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    sys.stderr.write(f"seed {arguments.seed}\n")
    sys.stdout.write(json.dumps(soak(arguments.seconds, arguments.kills, arguments.seed)) + "\n")
