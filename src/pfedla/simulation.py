"""Run a whole federation on this machine: rounds, scores, history, checkpoints, and the result."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pfedla.algorithm import Algorithm
from pfedla.algorithms.peers import one_square
from pfedla.config import Run
from pfedla.errors import ConfigError, ModelError
from pfedla.fleet import Evaluation, Setting, SimulatedFleet
from pfedla.layers import Layers, LayerSpec
from pfedla.ledger import Ledger
from pfedla.randomness import seed_of, stream
from pfedla.rounds import Server, chunks, evaluate, participants, run_round, uninterrupted
from pfedla.rundirectory import Moment, RunDirectory
from pfedla.storage import let_go, mapped, zeros
from pfedla.training import Samples

__all__ = ["Progress", "Result", "check_model", "fleet_of", "seeded", "simulate"]

ALPHA_RECORDS, ALPHA_BYTES = 200, 64 * 2**20  # what is watched over the rounds is thinned to this


class Progress(NamedTuple):
    """What a watcher is told after every round."""

    t: int
    rounds: int
    record: dict[str, Any] | None  # the latest evaluation, as in metrics.jsonl
    bytes_down: int
    bytes_up: int
    seconds: float


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Result:
    """What a run measured, and the personalized models."""

    summary: dict[str, Any]
    history: list[dict[str, Any]]  # one record for each evaluated round
    inspected: dict[str, np.ndarray]  # what the method lets be watched, over the rounds of `inspected["round"]`
    ledger: Ledger
    spec: LayerSpec
    template: nn.Module
    personalized: Layers  # {entry: (clients, numbers)}; empty if models are not kept

    @cached_property
    def alpha(self) -> np.ndarray | None:
        """The aggregation weights, `(rounds, clients, layers, clients)`; None for methods without."""
        if "candidates" in self.inspected:
            return one_square(self.inspected["alpha"], self.inspected["candidates"])
        return self.inspected.get("alpha")

    def model(self, client: int) -> nn.Module:
        """Return a client's personalized model, a torch module in evaluation mode, ready to use."""
        n = self.summary["clients"]
        if not 0 <= client < n:
            raise ConfigError(f"there is no client {client}: clients are numbered from 0 to {n - 1}")
        if not self.personalized:
            raise ConfigError("the models were not kept: set run.keep_models to true")
        return self.spec.build(self.template, self.personalized, client)


def simulate(
    setting: Setting,
    train: Sequence[Samples],
    test: Sequence[Samples],
    run: Run,
    facts: dict[str, Any],
    directory: RunDirectory | None = None,
    watch: Watch | None = None,
) -> Result:
    """Run a federation to its end, from a directory's checkpoint if there is one.

    On Ctrl-C the directory gets a checkpoint of the last complete round before `KeyboardInterrupt` goes on.
    """
    n, spec, algorithm = len(train), setting.spec, setting.algorithm
    count = run.participants or n
    examples = np.array([len(samples) for samples in train])
    evaluated = _every(run.rounds, run.eval_every)
    workers = None if run.workers < 0 else run.workers
    participants(run.seed, 0, n, count)  # refuses a bad count before any work
    place = None if run.storage == "memory" else directory.path if directory else Path(tempfile.gettempdir())
    with mapped(place):
        made = fleet_of(run)(setting, train, test, workers)
    with made as fleet:
        with mapped(place):
            server = Server(algorithm.init(spec.read(setting.template), n, stream(run.seed, "init")))
        ledger, history, watched = Ledger(spec.names), list[dict[str, Any]](), _Watched(evaluated)
        before = 0.0
        if directory and (saved := directory.restore(server.state, fleet.state())):
            server.state, server.t = saved.state, saved.t
            fleet.own, fleet.trained = saved.clients
            ledger, history, before = saved.ledger, saved.history, saved.seconds
            watched.records = saved.inspected
        started = time.perf_counter()

        def seconds() -> float:
            return before + time.perf_counter() - started

        def moment() -> Moment:
            return Moment(server.t, server.state, fleet.state(), ledger, history, watched.records, seconds())

        try:
            while True:
                if server.t in evaluated and (not history or history[-1]["round"] < server.t):
                    scores = evaluate(algorithm, server.state, fleet, n, server.t)
                    history.append(_record(server.t, scores, ledger, seconds()))
                    watched.look(server.t, algorithm.inspect(server.state))
                    if directory:
                        directory.append(history[-1])
                if watch and server.t:
                    latest = history[-1] if history else None
                    watch(Progress(server.t, run.rounds, latest, ledger.down, ledger.up, seconds()))
                if server.t == run.rounds:
                    break
                if directory and run.checkpoint_every and server.t and server.t % run.checkpoint_every == 0:
                    directory.checkpoint(moment())
                ids = participants(run.seed, server.t + 1, n, count)
                run_round(algorithm, server, fleet, ledger, ids)
            elapsed = seconds()
            with mapped(place):
                personalized = _personalized(algorithm, server, fleet, n) if run.keep_models else {}
        except KeyboardInterrupt:
            if directory:
                with uninterrupted():
                    directory.checkpoint(moment())
            raise
    passes = int(examples[ledger.arrays()["client"]].sum()) * setting.training.local_epochs
    summary = {**facts, **_summary(history, ledger, elapsed, passes)}
    return Result(summary, history, watched.arrays(), ledger, spec, setting.template, personalized)


def _personalized(algorithm: Algorithm[Any], server: Server, fleet: SimulatedFleet, n: int) -> Layers:
    """Return every client's personalized model: `{entry: (clients, numbers)}`."""
    personalized: Layers = {}
    for ids in chunks(n):
        rows = fleet.personalize(ids, algorithm.download(server.state, torch.tensor(ids)), server.t)
        for key, some in rows.items():
            if key not in personalized:
                personalized[key] = zeros((n, some.shape[1]), some.dtype)
            personalized[key][ids.start : ids.stop] = some
        let_go()
    return personalized


def fleet_of(run: Run) -> Callable[..., SimulatedFleet]:
    """Return what makes the fleet that a run asks for; refuse one whose extra is not installed."""
    if run.fleet == "local":
        return SimulatedFleet
    try:
        from pfedla.ray import RayFleet
    except ImportError as error:
        raise ConfigError(f"run.fleet = {run.fleet!r}: {error}") from None
    return partial(RayFleet, address=run.ray_address)


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the common first model from a seed, without touching the caller's random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "model"))
        module = make()
    if not isinstance(module, nn.Module):
        raise ModelError(f"the model factory returned {type(module).__name__}, not a torch.nn.Module")
    return module


def check_model(template: nn.Module, samples: Sequence[Samples]) -> None:
    """Try the model on the first samples of the first client, and its outputs against everybody's labels."""
    x, _ = samples[0].take(slice(0, 2), like=next(p for p in template.parameters() if p.requires_grad))
    template.eval()
    try:
        with torch.inference_mode():
            out = template(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ModelError(
            f"the model does not take the data: a batch of shape {tuple(x.shape)} ({x.dtype}) gave: {error}"
        ) from error
    if not isinstance(out, torch.Tensor) or out.dim() != 2:
        found = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise ModelError(f"the model must return logits of shape (batch, classes), not {found}")
    for client, part in enumerate(samples):
        low, high = part.labels
        if low < 0 or high >= out.shape[1]:
            raise ModelError(
                f"client {client} has labels from {low} to {high}, but the model has {out.shape[1]} outputs: "
                "labels must be numbered from 0"
            )


class _Watched:
    """What a method lets be watched, kept for some rounds."""

    def __init__(self, evaluated: Sequence[int]) -> None:
        self.evaluated = list(evaluated)
        self.records: dict[int, dict[str, np.ndarray]] = {}

    def look(self, t: int, values: dict[str, torch.Tensor]) -> None:
        """Keep this round's values unless they are thinned out."""
        size = sum(value.numel() * value.element_size() for value in values.values())
        if not size:
            return
        keep = max(2, min(ALPHA_RECORDS, ALPHA_BYTES // size))
        every = -(-len(self.evaluated) // keep)  # rounded up
        place = self.evaluated.index(t)
        if (len(self.evaluated) - 1 - place) % every == 0:  # counted from the end: the last is always kept
            self.records[t] = {name: value.numpy() for name, value in values.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the values over the rounds that were kept."""
        if not self.records:
            return {}
        names = sorted(next(iter(self.records.values())))
        stacked = {name: np.stack([record[name] for record in self.records.values()]) for name in names}
        return {"round": np.array(list(self.records)), **stacked}


def _every(rounds: int, every: int) -> list[int]:
    """Return the rounds to evaluate: each `every`-th, and the last."""
    return sorted({*range(every, rounds + 1, every), rounds})


def _record(t: int, scores: Evaluation, ledger: Ledger, seconds: float) -> dict[str, Any]:
    """Return one line of metrics.jsonl."""
    accuracy, loss = scores.personalized
    after, after_loss = scores.after_training
    trained = ~np.isnan(after)
    return {
        "round": t,
        "accuracy_mean": float(accuracy.mean()),
        "accuracy_std": float(accuracy.std()),
        "accuracy_worst": float(accuracy.min()),
        "accuracy_p10": float(np.percentile(accuracy, 10)),
        "loss_mean": float(loss.mean()),
        "accuracy_after_training": float(after[trained].mean()) if trained.any() else None,
        "loss_after_training": float(after_loss[trained].mean()) if trained.any() else None,
        "bytes_down": ledger.down,
        "bytes_up": ledger.up,
        "seconds": round(seconds, 3),
        "clients": {
            "accuracy": accuracy.round(6).tolist(),
            "loss": loss.round(6).tolist(),
            "accuracy_after_training": [None if np.isnan(a) else round(float(a), 6) for a in after],
            "loss_after_training": [None if np.isnan(a) else round(float(a), 6) for a in after_loss],
        },
    }


def _summary(history: list[dict[str, Any]], ledger: Ledger, seconds: float, passes: int) -> dict[str, Any]:
    """Return the final figures. The headline is the last round; the best round stands beside it as what it is."""
    final, best = history[-1], max(history, key=lambda record: record["accuracy_mean"])
    keys = ["mean", "std", "worst", "p10", "after_training"]
    return {
        **{f"accuracy_{key}": final[f"accuracy_{key}"] for key in keys},
        "loss_mean": final["loss_mean"],
        "best_round": best["round"],
        "best_round_accuracy_mean": best["accuracy_mean"],
        "bytes_down": ledger.down,
        "bytes_up": ledger.up,
        "seconds": round(seconds, 3),
        "samples_per_second": round(passes / seconds, 1),
    }
