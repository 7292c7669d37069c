"""From starting Python to the end of the first round, in new processes.

The first round is that of `training` with one local epoch: 10 clients x 420 images, LeNet with batch norm. `import
torch` is what anyone pays; `import pfedla` is what comes on top. The modules' files are in the system's cache.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise

from benchmarks.measuring import Row

__all__ = ["measure"]

STAGES = ("start of Python", "import torch", "import pfedla", "data, server and workers", "first round", "second round")

PROGRAM = """
import time; stamps = [time.time()]
import torch; stamps.append(time.time())
import pfedla; stamps.append(time.time())
from benchmarks.federation import Federation
from benchmarks.work import Work
federation = Federation(Work(epochs=1{smaller}), pfedla.PFedLA()); stamps.append(time.time())
federation.round(); stamps.append(time.time())
federation.round(); stamps.append(time.time())
federation.close()
import json; print(json.dumps(stamps))
"""


def measure(quick: bool) -> list[Row]:
    """Return a line for each stage, the median of a few processes."""
    program = PROGRAM.format(smaller=", clients=2, images=40" if quick else "")
    runs = [_stamps(program) for _ in range(1 if quick else 4)]
    spans = [[after - before for before, after in pairwise(run)] for run in runs[not quick :]]
    medians = [statistics.median(span) for span in zip(*spans, strict=True)]
    rows: list[Row] = [{"stage": stage, "seconds": round(span, 3)} for stage, span in zip(STAGES, medians, strict=True)]
    return [*rows, {"stage": "all, to the end of the first round", "seconds": round(sum(medians[:-1]), 3)}]


def _stamps(program: str) -> list[float]:
    start = time.time()
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)  # noqa: S603
    return [start, *json.loads(done.stdout)]
