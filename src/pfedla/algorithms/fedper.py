"""FedPer: a shared body and a head of each client's own, trained together.

Arivazhagan et al., "Federated learning with personalization layers", arXiv:1912.00818, 2019.

=============  =========================================================================
W_B            the base layers: shared, `(1, values)`
W_P            the personalization layers: one set for each client, the head
=============  =========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from pfedla.algorithms.fedavg import PersonalLayers
from pfedla.errors import ModelError
from pfedla.layers import LayerSpec, match_layers

__all__ = ["FedPer", "head_of"]


def head_of(spec: LayerSpec, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the layers of the head: those that match a pattern, or the last one; some layer must be left."""
    head = match_layers(patterns or spec.names[-1:], spec.names, "algorithm.head")
    if len(head) == len(spec.names):
        raise ModelError(
            f"the head takes all layers of this model ({', '.join(head)}), but head and body are treated differently: "
            "name fewer layers in algorithm.head, or use local or fedavg"
        )
    return head


@dataclass(frozen=True)
class FedPer(PersonalLayers):
    """FedPer: FedAvg whose head stays at the client.

    The paper varies how many of the last layers are personal. Ours is the last one, the classifier, unless
    `head` names layers by patterns, `("fc*",)`.
    """

    head: tuple[str, ...] = ()

    def stays(self, spec: LayerSpec) -> tuple[str, ...]:
        """Algorithms 1-2: W_P stays, W_B is averaged."""
        return head_of(spec, self.head)
