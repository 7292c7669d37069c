"""A method of your own in one file: each client meets the average of all models halfway.

Run it from a shell, beside the others:  pfedla compare -a fedavg -a examples.my_algorithm:Halfway
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

import pfedla
from pfedla.layers import bank


class State(NamedTuple):
    """What the server keeps: tensors, in NamedTuples and dictionaries."""

    theta: pfedla.Layers  # {layer: (clients, values)}


@dataclass(frozen=True)
class Halfway(pfedla.Algorithm[State]):
    """Halfway: a client's model is mixed with the average of all."""

    share: float = 0.5  # of the average; 0 is Local

    def init(self, theta: pfedla.Layers, n: int, rng: torch.Generator) -> State:  # noqa: ARG002
        """Give every client the common model."""
        return State(bank(theta, n))

    def download(self, state: State, ids: torch.Tensor) -> pfedla.Payload:
        """Mix each client's latest model with the average."""
        return self.send({key: rows[ids].lerp(rows.mean(0), self.share) for key, rows in state.theta.items()})

    def update(self, state: State, ids: torch.Tensor, got: pfedla.Payload, upload: pfedla.Payload) -> State:
        """Take the clients' new models: what they got, and how they changed it."""
        for key, rows in state.theta.items():
            rows[ids] = got.layers[key] + upload.layers[key]
        return state


if __name__ == "__main__":
    experiment = pfedla.Experiment.from_tables(
        {"data": {"clients": 6, "samples_per_client": 100}, "model": {"name": "mlp"}, "schedule": {"rounds": 30}}
    )
    for algorithm in (Halfway(), pfedla.FedAvg(), pfedla.Local()):
        result = pfedla.run_experiment(replace(experiment, algorithm=algorithm))
        print(f"{type(algorithm).__name__}: accuracy {result.summary['accuracy_mean']:.3f}")
