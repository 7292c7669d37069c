"""Rounds of pFedLA with 100 to 30,000 clients on one machine: seconds, memory, and accuracy.

`python -m benchmarks.scale --data-dir DIR` runs `experiments/crowd.toml` with these numbers of clients, 100 of them in
each round, each number in a process of its own: with 20 candidates per client and the rows on disk, and, up to 1,000
clients, with everybody as candidate and the rows in memory. The rows of 30,000 clients take 32 GB. It writes
`results/scale.json` as it goes (what is there is kept) and draws `docs/images/scale.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

from benchmarks.measuring import fresh
from pfedla.config import Experiment, Tables
from pfedla.experiment import federation_of, prepare
from pfedla.fleet import SimulatedFleet
from pfedla.ledger import Ledger
from pfedla.pool import local_pool
from pfedla.randomness import stream
from pfedla.rounds import Server, evaluate, participants, run_round
from pfedla.storage import mapped
from pfedla.tree import flatten

ROOT = Path(__file__).parent.parent
FOUND, FIGURE = ROOT / "results" / "scale.json", ROOT / "docs" / "images" / "scale.png"
EXACT, FEW = "everybody is a candidate, rows in memory", "20 candidates, rows on disk"
ROUNDS = {(10_000, FEW): 120, (100, FEW): 20, (1000, FEW): 20, (100, EXACT): 20, (1000, EXACT): 20, (30_000, FEW): 20}
EVALUATIONS = {30_000: 1}  # after the one before the first round; elsewhere 5


def main() -> None:
    """Measure what is missing, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data-dir", default="", help="where FashionMNIST lies; $PFEDLA_DATA by default")
    parser.add_argument("--rounds", type=int, help="fewer rounds, for a trial")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = json.loads(FOUND.read_text()) if FOUND.exists() else []
    for (n, how), rounds in ROUNDS.items():
        if any((row["clients"], row["how"]) == (n, how) for row in found):
            continue
        found.append(fresh(measure, n, how, arguments.rounds or rounds, arguments.data_dir))
        print(json.dumps({key: value for key, value in found[-1].items() if key != "rounds_s"}))
        FOUND.write_text(json.dumps(found, indent=1) + "\n")
    draw(found)


def measure(n: int, how: str, rounds: int, data_dir: str, dataset: str = "fashion-mnist") -> dict[str, Any]:
    """Return what `n` clients take."""
    changes: Tables = {
        "data": {"clients": n, "dataset": dataset},
        "algorithm": {"name": "pfedla-peers" if how == FEW else "pfedla"},
        "schedule": {"participants": min(n, 100)},
        "machine": {"data_dir": data_dir} if data_dir else {},
    }
    experiment = Experiment.load(ROOT / "experiments" / "crowd.toml", changes)
    started = time.perf_counter()
    federation = federation_of(experiment)
    setting = prepare(experiment, federation)
    algorithm, schedule, count = setting.algorithm, experiment.schedule, min(n, 100)
    with watched() as peak, tempfile.TemporaryDirectory() as directory:
        with mapped(Path(directory) if how == FEW else None):
            fleet = SimulatedFleet(setting, federation.data, local_pool(setting, federation.data))
            state = algorithm.init(setting.spec.read(setting.template), n, stream(schedule.seed, "init"))
        ready = time.perf_counter() - started
        server = Server(state, Ledger(setting.spec.names))
        took, training, accuracy, evaluations = list[float](), list[float](), dict[int, float](), list[float]()
        clients_train = fleet.train

        def train(*arguments: Any) -> Any:
            start = time.perf_counter()
            answer = clients_train(*arguments)
            training.append(time.perf_counter() - start)
            return answer

        fleet.train = train  # type: ignore[method-assign,assignment]
        with closing(fleet):
            for t in range(rounds + 1):
                if t % (rounds // EVALUATIONS.get(n, 5) or 1) == 0:
                    start = time.perf_counter()
                    scores = evaluate(algorithm, server.state, fleet, n, t)
                    evaluations.append(time.perf_counter() - start)
                    accuracy[t] = round(float(scores.personalized["accuracy"].mean()), 4)
                if t < rounds:
                    start = time.perf_counter()
                    run_round(algorithm, server, fleet, participants(schedule, t + 1, n))
                    took.append(time.perf_counter() - start)
    passes = (
        statistics.mean(len(samples.train) for samples in federation.data.values())
        * count
        * experiment.training.local_epochs
    )
    return {
        "clients": n,
        "how": how,
        "participants": count,
        "passes_a_round": round(passes),
        "set_up_s": round(ready, 1),
        "round_s": round(statistics.median(took), 3),
        "of_it_training_s": round(statistics.median(training), 3),
        "of_it_server_s": round(statistics.median(a - b for a, b in zip(took, training, strict=True)), 3),
        "evaluation_of_everybody_s": round(statistics.median(evaluations), 1),
        "peak_memory_gb": round(peak["Pss"] / 1e9, 2),
        "peak_memory_without_files_gb": round(peak["Pss_Anon"] / 1e9, 2),
        "state_gb": round(sum(x.nbytes for x in flatten(server.state).values()) / 1e9, 2),
        "own_gb": round(sum(x.nbytes for x in fleet.kept.own.values()) / 1e9, 2),
        "accuracy": accuracy,
        "rounds_s": [round(seconds, 3) for seconds in took],
    }


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Yield the most memory that this process and its workers took, looked at every two seconds. Linux only.

    Shared pages count once. "Pss" has the pages of mapped files, which the system takes back when it needs them;
    "Pss_Anon" has not.
    """
    peak, done = {"Pss": 0, "Pss_Anon": 0}, threading.Event()

    def look() -> None:
        ended = False
        while not ended:
            ended = done.wait(2.0)  # a last look at the end
            texts = []
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            for process in ["self", *children]:
                try:
                    texts.append(Path(f"/proc/{process}/smaps_rollup").read_text())
                except OSError:  # it has ended
                    continue
            for what in peak:
                now = sum(int(kb) * 1024 for text in texts for kb in re.findall(rf"^{what}:\s+(\d+)", text, re.M))
                peak[what] = max(peak[what], now)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def draw(found: list[dict[str, Any]]) -> None:
    """Draw time, memory and accuracy."""
    figure, (seconds, memory, accuracy) = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    for how, colour in ((EXACT, "tab:orange"), (FEW, "tab:blue")):
        rows = sorted((row for row in found if row["how"] == how), key=lambda row: row["clients"])
        n = [row["clients"] for row in rows]
        for axis, key, style in (
            (seconds, "round_s", "o-"),
            (seconds, "of_it_server_s", "s--"),
            (memory, "peak_memory_gb", "o-"),
            (memory, "peak_memory_without_files_gb", "s--"),
        ):
            label = how if key == "round_s" else None
            axis.plot(
                n, [row[key] for row in rows], style, color=colour, label=label, alpha=1 if style == "o-" else 0.6
            )
    for axis, what, title, dashed in (
        (seconds, "seconds", "A round with 100 participants", "dashed: the server's part"),
        (memory, "GB", "Peak memory, all processes", "dashed: without pages of mapped files"),
    ):
        axis.set(xscale="log", yscale="log", xlabel="clients", ylabel=what, title=title)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_yticks([tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10) if tick < 2 * axis.get_ylim()[1]])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.minorticks_off()
        axis.set_xticks(sorted({row["clients"] for row in found}))
        axis.text(0.98, 0.03, dashed, transform=axis.transAxes, ha="right", fontsize=9, color="0.3")
    longest = max(found, key=lambda row: len(row["rounds_s"]))
    curve = {int(t): 100 * value for t, value in longest["accuracy"].items()}
    accuracy.plot(list(curve), list(curve.values()), "o-", color="tab:blue")
    accuracy.set(
        xlabel="round", ylabel="%", title=f"Mean accuracy of all {longest['clients']:,} clients", ylim=(0, None)
    )
    for axis in (seconds, memory, accuracy):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(FIGURE, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
