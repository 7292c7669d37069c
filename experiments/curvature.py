"""Why Per-FedAvg's models are useless before their step: the curvature of the loss at them, round after round.

First-order MAML moves w by ∇f(w - α ∇f(w)). Near a minimum, along a direction of curvature h, that multiplies the
distance from it by 1 - β h (1 - α h): above h = 1/α it grows. The exact gradient has (1 - α h)² there, and does not.

    python -m experiments.curvature experiments/methods-fashion-mnist-non-iid-1.toml per-fedavg,alpha=0.01

Prints, every few rounds, means over clients: the largest curvature of the client's training loss at its w_i (power
iteration), and the accuracy (%) of w_i on test data before and after the step of α that it was trained for.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from pfedla.algorithms import PerFedAvg
from pfedla.comparison import parse_variant
from pfedla.config import Experiment, merge, read_tables
from pfedla.engine import FlatModel
from pfedla.experiment import federation_of, prepare
from pfedla.fleet import SimulatedFleet
from pfedla.inspection import Inspector
from pfedla.ledger import Ledger
from pfedla.pool import local_pool
from pfedla.randomness import stream
from pfedla.rounds import Server, run_round
from pfedla.training import ClientData, Samples, score

__all__ = ["largest_curvature", "main"]

STEPS, EPSILON = 30, 1e-3


def largest_curvature(model: FlatModel, samples: Samples) -> float:
    """Return the largest eigenvalue, in size, of the Hessian of the loss on all samples, at the model's weights."""
    x, y = samples.take(torch.arange(len(samples)), model.weights)
    w = model.weights.clone()

    def gradient(weights: Tensor) -> Tensor:
        model.weights.copy_(weights)
        return model.backward(x, y).clone()

    direction = torch.randn(w.shape, generator=stream(0, "direction")).to(w)
    value = 0.0
    for _ in range(STEPS):
        direction /= direction.norm()
        step = EPSILON * direction
        product = (gradient(w + step) - gradient(w - step)) / (2 * EPSILON)
        value, direction = float(direction @ product), product
    model.weights.copy_(w)
    return value


def main(arguments: list[str] | None = None) -> None:
    """Run the method and print a line every few rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("method", help="such as per-fedavg,variant=hf,alpha=0.001")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--data-dir")
    given = parser.parse_args(arguments)
    machine = {"machine": {"data_dir": given.data_dir, "workers": 0}} if given.data_dir else {}
    tables = merge(merge(read_tables(given.config), parse_variant(given.method).changes), machine)
    experiment = Experiment.from_tables(tables)
    federation = federation_of(experiment)
    setting = prepare(experiment, federation)
    n, method = len(federation.data), setting.algorithm
    if not isinstance(method, PerFedAvg):
        raise SystemExit("the method must be per-fedavg, with settings of its own if you like")
    model = FlatModel(setting.template, setting.spec, setting.objective)
    first = setting.spec.read(setting.template)
    state = method.init(first, n, stream(setting.seed, "init"))
    server = Server(state, Ledger(setting.spec.names), inspector=Inspector(setting.spec))
    fleet = SimulatedFleet(setting, federation.data, local_pool(setting, federation.data, 0))
    sys.stdout.write(
        "| round | curvature, mean | largest | accuracy before the step | after it |\n|---|---|---|---|---|\n"
    )
    for t in range(1, given.rounds + 1):
        run_round(method, server, fleet, range(n))
        if t % given.every == 0:
            found = [_at_client(model, federation.data[i], fleet, i, method.alpha) for i in range(n)]
            means, most = torch.tensor(found).mean(0).tolist(), max(curvature for curvature, _, _ in found)
            sys.stdout.write(f"| {t} | {means[0]:.0f} | {most:.0f} | {100 * means[1]:.1f} | {100 * means[2]:.1f} |\n")
            sys.stdout.flush()


def _at_client(model: FlatModel, data: ClientData, fleet: SimulatedFleet, client: int, alpha: float) -> list[float]:
    """Return the curvature at a client's model, and its accuracy before and after a step on all training samples."""
    train, test = data
    own = {key: rows[[client]] for key, rows in fleet.kept.own.items()}
    before = float(score(model, own, [test])["accuracy"][0])
    model.load(own)
    model.module.train()
    curvature = largest_curvature(model, train)
    model.load(own)
    x, y = train.take(torch.arange(len(train)), model.weights)
    model.weights.add_(model.backward(x, y), alpha=-alpha)
    after = float(score(model, model.read(), [test])["accuracy"][0])
    return [curvature, before, after]


if __name__ == "__main__":
    main()
