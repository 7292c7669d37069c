"""The training engine: a module whose parameters are one vector."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from pfedla.chain import Chain, Chained, called_by_others
from pfedla.layers import Layers, LayerSpec, entry, kind_of, tensors_of
from pfedla.objective import Classification, Objective

__all__ = ["FlatModel"]


class FlatModel:
    """A module whose trained parameters live in one vector, so that a step on all of them is one operation.

    `weights` and `gradient` are `(parameters,)`; the module's parameters and their `.grad` are views of them,
    layer after layer. The module handed in is taken over: give a copy if you need it otherwise.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: LayerSpec,
        objective: Objective | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = spec
        self.objective = objective or Classification()
        self.module = module.to(device)
        self.loss = torch.tensor(torch.nan)  # of the latest batch
        self.weights = torch.empty(spec.parameters, dtype=spec.dtype, device=device)
        self.gradient = torch.zeros_like(self.weights)
        self._range: dict[str, slice] = {}
        parameters = dict(module.named_parameters())
        start = 0
        for layer in spec.names:
            where = self._range[layer] = slice(start, start + spec.size(layer))
            start = where.stop
            for slot in spec.slots[layer]:
                view = slot.view(self.weights[where])
                view.copy_(parameters[slot.name].detach())
                parameters[slot.name].data = view
                parameters[slot.name].grad = slot.view(self.gradient[where])
        self._buffers = {key: slots for key, slots in spec.slots.items() if kind_of(key)}
        self._tensors = tensors_of(module)
        chain = module.chain() if isinstance(module, Chained) else None
        trained = {values for values in parameters.values() if values.requires_grad}
        self._chain = chain if chain and set(chain.parameters) == trained and chain.regular else None

    def vector(self, layers: Layers, row: int = 0, kind: str = "") -> Tensor:
        """Return one row of the entries of a kind, in the order of `weights`: `(parameters,)`."""
        return torch.cat([layers[entry(layer, kind)][row] for layer in self.spec.names]).to(self.weights)

    def layers(self, vector: Tensor, kind: str = "") -> Layers:
        """Return a vector in the order of `weights` as one row of entries of a kind, copied: `vector` undone."""
        return {entry(layer, kind): vector[where].to("cpu", copy=True)[None] for layer, where in self._range.items()}

    def mask(self, layers: Collection[str]) -> Tensor:
        """Return which values of `weights` belong to these layers: `(parameters,)` bool."""
        mask = torch.zeros_like(self.weights, dtype=torch.bool)
        for layer in layers:
            mask[self._range[layer]] = True
        return mask

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `gradient`, filled with that of the objective on a batch, whose loss is then in `loss`."""
        chain = self._chain if self._chain and self._as_a_chain(self._chain, x) else None
        if chain:
            made = chain.forward(x).requires_grad_()
            outputs = made.clone()  # on which a loss may work in place
        else:
            self.gradient.zero_()
            outputs = self.module(x)
        loss = self.objective.loss(outputs, y)
        loss.backward()
        if chain:
            chain.backward(x, torch.zeros_like(made) if made.grad is None else made.grad)
        self.loss = loss.detach()
        return self.gradient

    def _as_a_chain(self, chain: Chain, x: Tensor) -> bool:
        """Say whether the module's parts, one after the other, do with a batch what the module would."""
        return self.module.training and not called_by_others(self.module) and chain.fits(x)

    def load(self, layers: Layers, row: int = 0) -> None:
        """Copy one row of `layers` into the module."""
        for layer, where in self._range.items():
            self.weights[where].copy_(layers[layer][row])
        for key, slots in self._buffers.items():
            for slot in slots:
                self._tensors[slot.name].copy_(slot.view(layers[key][row]))

    def read(self) -> Layers:
        """Return the module's layers, copied, as one row on the CPU: `{entry: (1, values)}`."""
        trained = self.layers(self.weights)
        return {
            key: trained[key] if key in trained else self.spec.gather(key, self._tensors) for key in self.spec.slots
        }
