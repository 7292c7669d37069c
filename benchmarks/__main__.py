"""Run benchmarks, print a table each, and write what they measured to one JSON file."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    checkpoint,
    cluster,
    evaluation,
    kernels,
    memory,
    peers,
    server,
    startup,
    tables,
    training,
    tricks,
    variants,
)
from benchmarks.measuring import Bystanders, Row
from pfedla.pool import available_cores

BENCHMARKS: dict[str, Callable[[bool], list[Row]]] = {
    "training": training.measure,
    "tricks": tricks.measure,
    "kernels": kernels.measure,
    "server": server.measure,
    "variants": variants.measure,
    "evaluation": evaluation.measure,
    "startup": startup.measure,
    "memory": memory.measure,
    "checkpoint": checkpoint.measure,
    "cluster": cluster.measure,
    "peers": peers.measure,
}
USUAL = [name for name in BENCHMARKS if name not in ("cluster", "peers")]  # these need more to be installed


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--json", type=Path, help="update this file: benchmarks that do not run now keep their figures")
    parser.add_argument("--page", type=Path, help="fill this page's tables")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: checks that it works, measures nothing")
    options = parser.parse_args(arguments)
    results = tables.load(options.json) if options.json else {}
    for name in options.names or USUAL:
        start, bystanders = time.perf_counter(), Bystanders()
        rows = BENCHMARKS[name](options.quick)
        took = {"seconds": round(time.perf_counter() - start), "busy with other work": round(bystanders.share(), 3)}
        results[name] = {**machine(), **took, "rows": rows}
        tables.show(name, rows)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.page:
        tables.write_into(options.page, results)


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "commit": commit(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
    }


def commit() -> str:
    """Return the checked-out commit, with a `+` if the code was changed since."""
    try:
        changed = _git("status", "--porcelain", "--", "src", "benchmarks")
        return _git("rev-parse", "--short=8", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    root = Path(__file__).parent.parent
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603


if __name__ == "__main__":
    main()
