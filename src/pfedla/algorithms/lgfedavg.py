"""LG-FedAvg: a representation of each client's own under a shared head.

Liang et al., "Think locally, act globally: Federated learning with local and global representations",
arXiv:2001.01523, 2020.

=============  =========================================================================
l_i            ℓ_i, client i's representation: all layers before the head
g              the head that all clients share, `(1, values)`
=============  =========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from pfedla.algorithms.fedavg import PersonalLayers
from pfedla.algorithms.fedper import head_of
from pfedla.layers import LayerSpec

__all__ = ["LGFedAvg"]


@dataclass(frozen=True)
class LGFedAvg(PersonalLayers):
    """LG-FedAvg: FedAvg of the head alone; the layers before it stay at the client.

    The head is the last layer, as by default in the authors' code (`num_layers_keep=1`), unless `head` names
    layers by patterns. Representations are learned from the labels alone, and from the common first model; the
    authors' code starts from one that FedAvg has trained.
    """

    head: tuple[str, ...] = ()

    def stays(self, spec: LayerSpec) -> tuple[str, ...]:
        """Algorithm 1: ℓ_i stays, g is averaged."""
        head = head_of(spec, self.head)
        return tuple(name for name in spec.names if name not in head)
