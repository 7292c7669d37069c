"""FedBN: federated averaging with local batch normalization.

Li et al., "FedBN: Federated learning on non-IID features via local batch normalization", ICLR 2021.

=============  =========================================================================
w_BN           the norm layers, γ and β and the running mean and variance: one for each client
w              all other layers: shared, `(1, values)`
=============  =========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from pfedla.algorithms.fedavg import PersonalLayers
from pfedla.errors import ModelError
from pfedla.layers import LayerSpec

__all__ = ["FedBN"]


@dataclass(frozen=True)
class FedBN(PersonalLayers):
    """FedBN: FedAvg whose norm layers, parameters and running statistics, stay at the client.

    There is nothing to set. A norm that is part of a larger layer, or has no trained parameters, is no layer of
    its own and is shared with the layer it belongs to.
    """

    def stays(self, spec: LayerSpec) -> tuple[str, ...]:
        """Algorithm 1: the BN layers are excluded from averaging; a model must have some."""
        if not spec.norms:
            raise ModelError(
                "FedBN keeps norm layers local, but this model has no batch or instance norm that is a layer of its "
                f"own (its layers: {', '.join(spec.names)}): add one, take it out of its group, or use fedavg"
            )
        return tuple(name for name in spec.names if name in spec.norms)
