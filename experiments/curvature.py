"""Why Per-FedAvg's models are useless before their step: the curvature of the loss at them, round after round.

First-order MAML moves w by ∇f(w - α ∇f(w)). Near a minimum, along a direction of curvature h, that multiplies the
distance from it by 1 - β h (1 - α h): above h = 1/α it grows. The exact gradient has (1 - α h)² there, and does not.

    python -m experiments.curvature experiments/methods-fashion-mnist-non-iid-1.toml per-fedavg,alpha=0.01

Prints, every few rounds, means over clients: the largest curvature of the client's training loss at its w_i (power
iteration), and the accuracy (%) of w_i on test data before and after the step of α that it was trained for.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from experiments.by_hand import arguments_of, started
from pfedla.algorithms import PerFedAvg
from pfedla.engine import FlatModel
from pfedla.fleet import SimulatedFleet
from pfedla.randomness import stream
from pfedla.rounds import run_round
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
    parser = arguments_of(__doc__)
    parser.add_argument("method", help="such as per-fedavg,variant=hf,alpha=0.001")
    given = parser.parse_args(arguments)
    setting, federation, server, fleet, model = started(given.config, given.method, given.data_dir)
    n, method = len(federation.data), setting.algorithm
    if not isinstance(method, PerFedAvg):
        raise SystemExit("the method must be per-fedavg, with settings of its own if you like")
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
