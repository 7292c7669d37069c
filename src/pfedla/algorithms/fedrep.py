"""FedRep: a shared body and a head of each client's own, trained in turn.

Collins et al., "Exploiting shared representations for personalized federated learning", ICML 2021.

=============  =========================================================================
phi            φ, the representation: the body that all clients share, `(1, values)`
h_i            client i's head
tau            τ, the epochs in which the head is fitted to the received body
=============  =========================================================================
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pfedla.algorithms.fedper import FedPer
from pfedla.errors import ConfigError
from pfedla.layers import Layers, change, layer_of
from pfedla.settings import Count
from pfedla.training import Task, Training
from pfedla.wire import Payload

__all__ = ["FedRep", "descend"]


def descend(task: Task, start: Layers, layers: Collection[str], epochs: int, part: str) -> Layers:
    """GRD: train some layers; all the others stay, and so do the running statistics they hold."""
    trained = task.fit(start, only=layers, epochs=epochs, part=part)
    return {key: trained[key] if layer_of(key) in layers else rows for key, rows in start.items()}


@dataclass(frozen=True)
class FedRep(FedPer):
    """FedRep: a shared body; each client fits its own head to it, then improves the body.

    A round takes `head_epochs + body_epochs` local epochs. As in the authors' code the body gets 1 and the head the
    rest of `training.local_epochs`, so that no more steps are taken than by other methods; whoever sets
    `head_epochs` chooses another budget. The personalized model is the received body with the head fitted to it:
    `head_epochs` more at each evaluation, of the head alone.
    """

    head_epochs: Count | None = None
    body_epochs: Count = 1

    def check(self, training: Training, n: int) -> None:  # noqa: ARG002
        """Refuse epochs of which none is left for the head."""
        self.tau(training)

    def tau(self, training: Training) -> int:
        """Return τ, the head's epochs: as set, or what the body leaves of the local epochs."""
        left = training.local_epochs - self.body_epochs
        if self.head_epochs is None and left < 1:
            raise ConfigError(
                f"training.local_epochs = {training.local_epochs} leaves none for FedRep's head, since its body "
                f"takes {self.body_epochs}: train for more local epochs, or set algorithm.head_epochs"
            )
        return self.head_epochs or left

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Algorithm 1: h_i by τ epochs on the received φ, then φ_i on that h_i; φ_i goes up."""
        received = got.fill(own)
        tuned = descend(task, received, self.resolved(self.personal), self.tau(task.training), "head")
        body = [name for name in got.names if self.shares(name)]
        trained = descend(task, tuned, body, self.body_epochs, "body")
        return trained, self.send(change(trained, received), examples=task.examples)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:
        """Fit the head to the received body, on training data."""
        return descend(task, got.fill(own), self.resolved(self.personal), self.tau(task.training), "personalize")
