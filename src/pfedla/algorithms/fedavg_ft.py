"""FedAvg-FT: federated averaging, fine-tuned by each client before use.

Wang et al., "Federated evaluation of on-device personalization", arXiv:1910.10252, 2019.

=============  =========================================================================
theta          the shared model of FedAvg, `(1, values)`
theta_i        client i's personalized model: theta after some epochs on its training data
=============  =========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from pfedla.algorithms.fedavg import FedAvg
from pfedla.layers import Layers
from pfedla.settings import Count
from pfedla.training import Task
from pfedla.wire import Payload

__all__ = ["FedAvgFT"]


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg-FT: FedAvg whose model each client fine-tunes on its training data before use.

    Rounds are FedAvg's to the bit. Each evaluation costs every client `finetune_epochs` of local training on top
    (as much as one more round if it is not set: `training.local_epochs`), and no communication. The paper tunes
    the number of epochs and the learning rate; ours are those of local training.
    """

    finetune_epochs: Count | None = None

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:
        """Return theta_i: the received model, fine-tuned; the client's own is left as it is."""
        return task.fit(got.fill(own), epochs=self.finetune_epochs, part="finetune")
