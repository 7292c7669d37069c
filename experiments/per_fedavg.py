r"""Per-FedAvg in the federation of its authors' experiments (Fallah et al., NeurIPS 2020, Section 5).

50 users: half of them hold `a` images of each of the first five classes, the others a/2 of one of these and 2a of one
of the other five, with a = 196 on MNIST and 68 on CIFAR-10; test images are divided alike. A perceptron with hidden
layers of 80 and 60 (ELU); 1,000 rounds in which 10 users take τ steps with β = 0.001 on batches of 40; everybody is
scored after one step of α. Unlike theirs, our means over users are weighted by their images. The first command writes
the users' data, the second runs the methods:

    python -m experiments.per_fedavg cifar10 runs/users-cifar10
    pfedla compare experiments/per-fedavg.toml --folder runs/users-cifar10 \
        -a experiments.per_fedavg:Steps,tau=10,alpha=0.01 -a experiments.per_fedavg:Steps,tau=10,alpha=0.01,variant=hf \
        -a experiments.per_fedavg:FedAvgUpdate,tau=10,alpha=0.01
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from torch import nn

from pfedla import Payload
from pfedla.algorithms import PerFedAvg
from pfedla.algorithms.perfedavg import Batch
from pfedla.data.datasets import Dataset, load_dataset
from pfedla.engine import FlatModel
from pfedla.layers import Layers, change
from pfedla.settings import Count
from pfedla.training import Batches, Task

USERS = 50
SIZES = {
    "mnist": (196, 1 / 6),
    "cifar10": (68, 1 / 5),
}  # a, and test images for each training image, as in the official sets


def perceptron(shape: Sequence[int], classes: int) -> nn.Module:
    """Return the authors' model."""
    layers = [
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(int(np.prod(shape)), 80)),
        ("elu1", nn.ELU()),
        ("fc2", nn.Linear(80, 60)),
        ("elu2", nn.ELU()),
        ("fc3", nn.Linear(60, classes)),
    ]
    return nn.Sequential(OrderedDict(layers))


@dataclass(frozen=True)
class Steps(PerFedAvg):
    """Steps: Per-FedAvg with as many steps for every client; `training.local_epochs` must have the batches for them."""

    tau: Count = 10

    def groups(self, batches: Batches) -> Iterator[list[Batch]]:
        """Yield the batches of the first τ steps."""
        return islice(super().groups(batches), self.tau)


@dataclass(frozen=True)
class FedAvgUpdate(Steps):
    """FedAvgUpdate: FedAvg with as many steps for every client, scored after one step of α."""

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Take τ plain steps."""

        def descend(_: int, model: FlatModel, batches: Batches) -> None:
            for batch in islice(batches, self.tau):
                model.weights.add_(model.backward(*batch), alpha=-(self.beta or task.training.lr))

        trained = task.each(received := got.fill(own), descend)
        return trained, self.send(change(trained, received), examples=task.examples)


def holdings(user: int, a: int) -> dict[int, int]:
    """Return how many training images of which class a user holds."""
    if user < USERS // 2:
        return dict.fromkeys(range(5), a)
    return {user % 5: a // 2, 5 + user // 5 % 5: 2 * a}


def divide(dataset: Dataset, a: int, ratio: float, folder: Path) -> None:
    """Write a file for each user: nobody holds what another holds."""
    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(0).permutation(len(dataset.y))
    left = {label: iter(order[dataset.y[order] == label].tolist()) for label in range(10)}
    for user in range(USERS):
        held = holdings(user, a)
        train = [index for label, count in held.items() for index in islice(left[label], count)]
        test = [index for label, count in held.items() for index in islice(left[label], round(ratio * count))]
        if len(train) < sum(held.values()) or len(test) < sum(round(ratio * count) for count in held.values()):
            raise SystemExit(f"{dataset.name} has too few images here for {USERS} users")
        np.savez(
            folder / f"user-{user:02d}.npz",
            x=dataset.x[train],
            y=dataset.y[train],
            x_test=dataset.x[test],
            y_test=dataset.y[test],
        )


def main(arguments: list[str] | None = None) -> None:
    """Write the users' data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir")
    given = parser.parse_args(arguments)
    divide(load_dataset(given.dataset, given.data_dir), *SIZES[given.dataset], given.folder)


if __name__ == "__main__":
    main()
