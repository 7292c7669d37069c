"""How runs of pFedLA-X go over their rounds: accuracy, loss, how much is served of the own, and how many others count.

Runs are named by their folders, and collected; those of the same label and seed are replaced.

    python -m experiments.over_rounds --json results/x-rounds-cifar10-10-non-iid-2.json runs/x-rounds/*-seed0
    python -m experiments.over_rounds --json results/x-rounds-cifar10-10-non-iid-2.json    # the table
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.paper.runs import own_weights
from pfedla.record import LAYERS, ROUND, RunRecord

SHOWN = ("conv2", "fc1")  # of the layers, in the table: those with nine tenths of the parameters
BY_LAYER = {  # "start" is of an earlier version, in which where training starts was learned
    "start": "starts from its own",
    "served": "serves of its own",
    "others": "others in effect",
}


def course(folder: Path) -> dict[str, Any]:
    """Return what a run recorded at its evaluations: means over clients; shares by layer."""
    record = RunRecord(folder)
    history, found, summary = record.history(), record.diagnostics(), record.summary()
    at = [found[ROUND].tolist().index(line["round"]) for line in history]
    served = own_weights(found["alpha"]).mean(-1)
    others = effective(found["alpha"]).mean(1)
    return {
        "label": folder.name.rpartition("-seed")[0],
        **{key: summary[key] for key in ("seed", "commit", "compiled_loop")},
        "layers": [str(layer) for layer in found[LAYERS]],
        "rounds": [line["round"] for line in history],
        "accuracy": [line["accuracy_mean"] for line in history],
        "after_training": [line["accuracy_after_training"] for line in history],
        "loss": [line["loss_mean"] for line in history],
        "served": np.round(served[at], 5).tolist(),
        "others": np.round(others[at], 4).tolist(),
    }


def effective(alpha: np.ndarray) -> np.ndarray:
    """Return how many others count in effect, 1 / Σ q² of the weights among them: `(rounds, clients, layers)`."""
    rest = alpha * (1 - np.eye(alpha.shape[1]))[:, None, :]
    q = rest / np.maximum(rest.sum(-1, keepdims=True), 1e-30)
    found: np.ndarray = 1 / np.maximum((q * q).sum(-1), 1e-30)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return the runs as a Markdown table, a row for every second evaluation up to the last."""
    known = [key for key in BY_LAYER if any(key in run for run in found)]
    shares = [f"{BY_LAYER[key]}, {layer}" for key in known for layer in SHOWN]
    lines = [f"| method | round | accuracy % | after training | loss | {' | '.join(shares)} |"]
    lines.append("| --- " * (5 + len(shares)) + "|")
    for run in found:
        places = [run["layers"].index(layer) for layer in SHOWN]
        for row in range((len(run["rounds"]) - 1) % 2, len(run["rounds"]), 2):
            cells = [f"`{run['label']}`", str(run["rounds"][row])]
            cells += [f"{100 * run[key][row]:.2f}" for key in ("accuracy", "after_training")]
            cells += [f"{run['loss'][row]:.2f}"]
            cells += [f"{run[key][row][place]:.2f}" if key in run else "-" for key in known for place in places]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Collect the runs that are named, and print the table of all that are collected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    found: list[dict[str, Any]] = json.loads(options.json.read_text()) if options.json.exists() else []
    for run in map(course, options.runs):
        found = [one for one in found if (one["label"], one["seed"]) != (run["label"], run["seed"])] + [run]
    if options.runs:
        lines = ",\n".join(map(json.dumps, found))
        options.json.write_text(f"[\n{lines}\n]\n")
    sys.stdout.write(table(found))


if __name__ == "__main__":
    main()
