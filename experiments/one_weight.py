r"""pFedLA-X in which another client has one weight for its whole model: what weights by layer add to weights by client.

<Δ_i^l, θ_j^l> is summed over the layers before the logits climb, so they are the same in all of them. How much of its
own a client serves is judged layer by layer as before. From the repository's root:

    pfedla compare experiments/where-cifar10-labels.toml -a pfedla-x -a experiments.one_weight:OneWeight --seeds 3
"""

from dataclasses import dataclass

from torch import Tensor

from pfedla import Payload
from pfedla.algorithms import PFedLAX
from pfedla.algorithms.pfedla import bounds, inner_products
from pfedla.algorithms.pfedla_x import Others, all_teachers, climbed, risen


@dataclass(frozen=True)
class OneWeight(PFedLAX):
    """OneWeight: pFedLA-X that weighs the others' whole models."""

    def update(self, state: Others, ids: Tensor, got: Payload, upload: Payload) -> Others:
        """Climb z by the sum over the layers; then take what the clients trained."""
        g = inner_products(upload.layers, state.members.theta, got.names).to(state.z)  # (n, L, N)
        own, among = state.members.models(ids), all_teachers(state.members, ids)
        m = got.fill(own)
        rise = risen(g, bounds(upload.layers, m, got.names), upload.values["path"], among)
        together = rise.sum(1, keepdim=True).expand_as(rise)
        state.z[ids] = climbed(state.z[ids], together, among, self.eta)
        self.take(state.members, ids, own, m, upload)
        return state
