r"""pFedLA with the lines of Algorithm 1 in the order in which they are printed: θ first (7), then v and ψ (8).

Eqs. 10-11 then take the inner products of Δθ with the models *after* the round. By the chain rule it must be those
before it, which θ̄ was mixed from; that is what `pfedla` does. From the repository's root, with the printed step:

    pfedla compare experiments/methods-cifar10-non-iid-1.toml --results results/updated-first-cifar10-non-iid-1.json \
        -a pfedla,hyper_optimizer=sgd,hyper_lr=1.0 \
        -a experiments.updated_first:UpdatedFirst,hyper_optimizer=sgd,hyper_lr=1.0
"""

from dataclasses import dataclass

from torch import Tensor

from pfedla import Payload, PFedLA
from pfedla.algorithms.pfedla import Clients


@dataclass(frozen=True)
class UpdatedFirst(PFedLA):
    """UpdatedFirst: pFedLA whose hypernetworks step by the models after the round."""

    def update(self, state: Clients, ids: Tensor, got: Payload, upload: Payload) -> Clients:
        """Take the clients' changes before the step as well as after it, which changes them no more."""
        if self.retain:
            raise NotImplementedError("retained layers are not sent: this variant is for pFedLA alone")
        for key, rows in state.theta.items():
            rows[ids] = got.layers[key] + upload.layers[key]
        return super().update(state, ids, got, upload)
