"""Ditto: a personal model beside the federated one, pulled towards it.

Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021.

=============  =========================================================================
theta          w, the shared model, trained by FedAvg as if nothing else happened: `(1, values)`
own            v_k, a client's personal model, which never leaves it
lam            λ, the strength of the pull: 0 is training alone
=============  =========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfedla.algorithms.fedavg import FedAvg
from pfedla.algorithms.fedprox import proximal_gradient
from pfedla.layers import Layers, change
from pfedla.settings import NonNegative
from pfedla.training import Adjust, Task
from pfedla.wire import Payload

__all__ = ["Ditto", "pull"]


def pull(w: Tensor, lam: float) -> Adjust:
    """Add λ (v - w) to the gradient: that of the objective h_k(v; w) = F_k(v) + λ/2 |v - w|²."""

    def towards(v: Tensor, gradient: Tensor) -> None:
        gradient.add_(proximal_gradient(v, w, lam))

    return towards


@dataclass(frozen=True)
class Ditto(FedAvg):
    """Ditto: each client trains a personal model that is pulled towards the federated one, and that one as well.

    A round takes two trainings on the same batches, `training.local_epochs` each: twice the gradients of FedAvg. The
    paper has the clients choose λ on validation data (from 0.1, 1 and 2 where nobody attacks) and takes 1 for those
    who have too little of it: the default here.
    """

    lam: NonNegative = 1.0

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Train the received model and send its change; train the personal one and keep it."""
        received = got.fill(own)
        trained = task.fit(received)
        personal = task.fit(own, adjust=lambda row: pull(task.model.vector(received, row), self.lam))
        return personal, self.send(change(trained, received), examples=task.examples)

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:  # noqa: ARG002
        """Return the personal model."""
        return dict(own)
