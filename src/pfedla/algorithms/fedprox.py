"""FedProx: federated averaging that keeps clients near the shared model while they train.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020.

=============  =========================================================================
w              a client's parameters while it trains
w_t            w^t, the shared model it received
mu             μ, how strongly it is pulled back
=============  =========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfedla.algorithms.fedavg import FedAvg
from pfedla.layers import Layers, change
from pfedla.settings import NonNegative
from pfedla.training import Adjust, Task
from pfedla.wire import Payload

__all__ = ["FedProx", "proximal_gradient"]


def proximal_gradient(w: Tensor, w_t: Tensor, mu: float) -> Tensor:
    """Eq. 2: the gradient of μ/2 ||w - w^t||², which is added to that of the client's loss."""
    return mu * (w - w_t)


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedProx: FedAvg whose local training is pulled back to the received model.

    The notes to the authors' code say that no mu works for all settings and suggest to tune it among 0.001, 0.01,
    0.1, 0.5 and 1; the default is our choice among these. `mu=0` is FedAvg.
    """

    mu: NonNegative = 0.01

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Algorithm 2: local SGD on h(w; w^t), the loss with the proximal term."""
        received = got.fill(own)

        def adjust(row: int) -> Adjust:
            w_t = task.model.vector(received, row)

            def pull(w: Tensor, gradient: Tensor) -> None:
                gradient += proximal_gradient(w, w_t, self.mu)

            return pull

        trained = task.fit(received, adjust=adjust)
        return trained, self.send(change(trained, received), examples=task.examples)
