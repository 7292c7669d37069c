"""A method that sends a value each way: FedProx whose pull follows the clients' losses.

A client sends its latest loss beside its update; the server sends each client the strength of its pull beside the
model, stronger where the loss has grown. One line names a value where it is sent, one line reads it on the other side,
and the ledger counts its bytes under its name.

Run it from a shell, beside the others:  pfedla compare -a fedprox -a examples.my_values:AdaptiveProx
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

import pfedla
from pfedla.algorithms.fedavg import weighted_mean
from pfedla.layers import bank
from pfedla.settings import NonNegative


class State(NamedTuple):
    """What the server keeps."""

    theta: pfedla.Layers  # {layer: (1, values)}
    mu: torch.Tensor  # (clients,): the strength of each client's pull
    loss: torch.Tensor  # (clients,): its latest loss


@dataclass(frozen=True)
class AdaptiveProx(pfedla.Algorithm[State]):
    """AdaptiveProx: FedProx with a pull for each client, stronger after its loss grew and weaker after it fell."""

    mu: NonNegative = 0.1
    step: NonNegative = 0.1

    def init(self, theta: pfedla.Layers, n: int, rng: torch.Generator) -> State:  # noqa: ARG002
        """Start from the common model and one pull for everybody."""
        return State(bank(theta, 1), torch.full((n,), self.mu), torch.full((n,), torch.inf))

    def download(self, state: State, ids: torch.Tensor) -> pfedla.Payload:
        """Send the model, and each client's pull beside it."""
        rows = {key: row.expand(len(ids), -1) for key, row in state.theta.items()}
        return self.send(rows, mu=state.mu[ids])

    def train(self, own: pfedla.Layers, got: pfedla.Payload, task: pfedla.Task) -> tuple[pfedla.Layers, pfedla.Payload]:
        """Train with the pull that was received; send the loss of the last batch beside the change."""
        kept, upload = pfedla.FedProx(mu=float(got.values["mu"])).train(own, got, task)
        return kept, self.send(upload.layers, examples=upload.examples, loss=task.model.loss.reshape(1))

    def update(self, state: State, ids: torch.Tensor, got: pfedla.Payload, upload: pfedla.Payload) -> State:
        """Average the changes as FedAvg does, and move the pulls."""
        for key, row in state.theta.items():
            row += weighted_mean(upload.layers[key], upload.examples)
        grown = upload.values["loss"] > state.loss[ids]
        state.mu[ids] = (got.values["mu"] + torch.where(grown, self.step, -self.step)).clamp(min=0)
        state.loss[ids] = upload.values["loss"]
        return state


if __name__ == "__main__":
    experiment = pfedla.Experiment.from_tables(
        {
            "data": {"clients": 6, "samples_per_client": 600},
            "split": {"name": "iid"},
            "model": {"name": "mlp"},
            "training": {"local_epochs": 2, "lr": 0.1},
            "schedule": {"rounds": 15},
        }
    )
    result = pfedla.run_experiment(replace(experiment, algorithm=AdaptiveProx()))
    sent = result.ledger.arrays()
    print(f"accuracy {result.summary['accuracy_mean']:.3f}")
    print(f"bytes of values: {sent['down:#mu'].sum()} down, {sent['up:#loss'].sum()} up")
