"""FedFomo: each client weighs some other clients' models by what they do on its own held-out data.

Zhang et al., "Personalized federated learning with first order model optimization", ICLR 2021.

=============  =================================================================================================
theta          θ_j, every client's latest model: `{layer: (N, values)}`
affinity       P, how much each client would have gained or lost from each other, summed up: `(N, N)`, 0 at first
candidates     M - 1 models sent to a client; the first travels as the layer, the others as `"layer#candidates"`
previous       θ_i^(t-1), the model client i last trained from; it keeps it as `"layer#previous"`
gains          what the own model and the candidates gain by distance, signed, their sizes adding up to 1: `(n, M)`;
               those of the candidates go up as a value
w              w_j, the weights of the own model and the candidates, in proportion to what is gained: `(n, M)`
=============  =================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.layers import STATS, Layers, bank, kind_of
from pfedla.randomness import stream
from pfedla.settings import NonNegative, Range, Share
from pfedla.training import Task, score
from pfedla.wire import Payload

__all__ = ["HELD_OUT", "Affinities", "FedFomo", "choose", "first_order_gains", "weights_of"]

HELD_OUT = ("held out",)  # where the random split of a client's training data is drawn: the same in every round


class Affinities(NamedTuple):
    """The server's state; `t` rounds were completed, `seed` decides which candidates are explored."""

    theta: Layers
    affinity: Tensor
    t: Tensor  # ()
    seed: Tensor  # ()


def choose(affinity: Tensor, count: int, epsilon: float, rng: torch.Generator) -> list[int]:
    """Return `count` candidates, by affinity `(N,)` or, with probability ε each, at random; equals in random order."""
    shuffled = torch.randperm(len(affinity), generator=rng)
    ranked = shuffled[affinity[shuffled].argsort(descending=True, stable=True)].tolist()
    explore = torch.rand(count, generator=rng) < epsilon
    return [ranked.pop(int(torch.randint(len(ranked), (), generator=rng)) if yes else 0) for yes in explore]


def first_order_gains(loss: Tensor, theta: Tensor) -> Tensor:
    """(L(θ_i^(t-1)) - L(θ_j)) / |θ_j - θ_i^(t-1)|, scaled to sum up to 1 in size: `(M,)`; row 0 is the previous."""
    distance = (theta[1:] - theta[0]).norm(dim=1).double()  # (M,)
    gains: Tensor = ((loss[0] - loss[1:]) / distance).nan_to_num(0.0, posinf=0.0, neginf=0.0)  # itself: 0
    return gains / gains.abs().sum() if gains.any() else gains


def weights_of(gains: Tensor) -> Tensor:
    """w_j ∝ max(gain_j, 0): `(M,)`; all 0 where nothing is gained."""
    w = gains.clamp(min=0)
    return w / w.sum() if w.any() else w


@dataclass(frozen=True)
class FedFomo(Algorithm[Affinities]):
    """FedFomo: each client mixes the models that do better on data it holds out.

    Defaults of the authors' commands: 5 models, the own one included, ε = 0.3 lowered by 0.05 per round, a fifth of the
    training data held out. A client whose candidates all do worse keeps its own model. Affinities take losses as well
    as gains, as in the authors' code, so that a candidate that does worse is asked for less often.
    """

    uploads_changes: ClassVar[bool] = False
    models: Annotated[int, Range(least=2)] = 5
    epsilon: Share = 0.3
    epsilon_decay: NonNegative = 0.05
    held_out: Annotated[float, Range(above=0, below=1)] = 0.2

    @property
    def uploads_beside(self) -> tuple[str, ...]:
        """What the candidates gain."""
        return ("gains",)

    @property
    def tells_steps(self) -> bool:
        """Gains are differences of losses, whatever the number of steps."""
        return False

    def init(self, theta: Layers, n: int, rng: torch.Generator) -> Affinities:
        """Start everybody from the common model."""
        return Affinities(bank(theta, n), torch.zeros(n, n), torch.tensor(0), torch.randint(2**31, (), generator=rng))

    def candidates(self, state: Affinities, ids: Tensor) -> Tensor:
        """Return whose models these clients get in the next round, never their own: `(n, M - 1)`."""
        t, n = int(state.t), len(state.affinity)
        epsilon, chosen = max(self.epsilon - self.epsilon_decay * t, 0.0), []
        for i in ids.tolist():
            others = torch.tensor([j for j in range(n) if j != i or n == 1])
            rng = stream(int(state.seed), "candidates", t, i)
            chosen.append(others[choose(state.affinity[i, others], min(self.models - 1, len(others)), epsilon, rng)])
        return torch.stack(chosen)

    def download(self, state: Affinities, ids: Tensor) -> Payload:
        """Send M - 1 models to each client."""
        chosen = self.candidates(state, ids)
        first = {key: rows[chosen[:, 0]] for key, rows in state.theta.items()}
        return self.send(first | {f"{k}#candidates": x[chosen[:, 1:]].flatten(1) for k, x in state.theta.items()})

    def update(self, state: Affinities, ids: Tensor, got: Payload, upload: Payload) -> Affinities:  # noqa: ARG002
        """Keep the clients' models, and add their gains and losses to their affinities."""
        chosen = self.candidates(state, ids)
        state.affinity[ids] = state.affinity[ids].scatter_add(1, chosen, upload.values["gains"])
        for key, rows in state.theta.items():
            rows[ids] = upload.layers[key]
        return state._replace(t=state.t + 1)

    def enroll(self, theta: Layers) -> Layers:
        """Keep the model last trained from beside the own one."""
        return theta | {f"{key}#previous": row for key, row in theta.items() if kind_of(key) in ("", STATS)}

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        """Mix, then train on what is not held out; send the model itself and what the candidates gain."""
        mixture, gains = self.mix(own, got, task)
        trained = task.split(self.held_out, *HELD_OUT)[1].fit(mixture)
        sent = {key: rows for key, rows in trained.items() if kind_of(key) in ("", STATS)}
        kept = trained | {f"{key}#previous": mixture[key] for key in sent}
        return kept, self.send(sent, examples=task.examples, gains=gains[:, 1:].float())

    def personalize(self, own: Layers, got: Payload, task: Task) -> Layers:
        """Return the client's mixture."""
        return self.mix(own, got, task)[0]

    def mix(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Tensor]:
        """Return Σ_j w_j θ_j, statistics too, and the gains `(n, M)`; where there is none, the own model."""
        mixture, found = {key: rows.clone() for key, rows in own.items() if not key.endswith("#previous")}, []
        for row, held_out in enumerate(task.split(self.held_out, *HELD_OUT)[0].samples):
            options = {}  # the previous model, the own one and the candidates: (1 + M, values)
            for key in (key for key in mixture if kind_of(key) in ("", STATS)):
                parts = own[f"{key}#previous"], own[key], got.layers[key], got.layers[f"{key}#candidates"]
                options[key] = torch.cat([part[row] for part in parts]).view(-1, own[key].shape[1])
            count = len(options[got.names[0]])
            whole = {key: options.get(key, rows[[row]].expand(count, -1)) for key, rows in mixture.items()}
            loss = torch.from_numpy(score(task.model, whole, [held_out] * count)["loss"])
            gains = first_order_gains(loss, torch.cat([options[name] for name in got.names], 1))
            w = weights_of(gains)
            for key, models in options.items():
                mixture[key][row] = w.to(models) @ models[1:] if w.any() else own[key][row]
            found.append(gains)
        return mixture, torch.stack(found)
