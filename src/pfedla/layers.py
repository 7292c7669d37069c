"""Layers: what is mixed, sent and counted.

A *layer* is one module of the network with the parameters it owns directly: a convolution's weight and
bias together, a batch norm of its own. Users may group modules into larger layers by name patterns.

`Layers` maps an entry to a tensor with a leading client axis, `(clients, values)`:

- `"conv1"`: the trained parameters of layer `conv1`, flattened;
- `"bn1#stats"`: floating-point running statistics. They travel with their layer, and are never trained;
- `"bn1#counters"`: integer counters. They stay with the client;
- `"conv1#control"`: whatever else an algorithm keeps or sends for that layer, under a kind of its own;
- `"#alpha"`: a value that a client keeps for no layer (in a `Payload` these have a place of their own).

`LayerSpec` says which tensors of a module form which entry, and in which order. Four-dimensional parameters
are stored channels-last, the order in which convolutions run fastest; nothing outside this file has to know.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pfedla.errors import ModelError, nearest
from pfedla.storage import repeat

__all__ = [
    "COUNTERS",
    "INSTANCE_NORMS",
    "NORMS",
    "STATS",
    "LayerSpec",
    "Layers",
    "Slot",
    "bank",
    "change",
    "entry",
    "kind_of",
    "layer_of",
    "match_layers",
    "tensors_of",
]

Layers = dict[str, Tensor]
Groups = Mapping[str, str | Sequence[str]] | Sequence[str]

STATS = "stats"
COUNTERS = "counters"
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *INSTANCE_NORMS)
ROOT = "(root)"  # the layer of parameters that the outermost module owns itself


def entry(layer: str, kind: str = "") -> str:
    """Return the key of a layer's entry of this kind; no kind means its trained parameters, no layer a value."""
    return f"{layer}#{kind}" if kind else layer


def layer_of(key: str) -> str:
    """Return the layer an entry belongs to, `""` for a value."""
    return key.partition("#")[0]


def kind_of(key: str) -> str:
    """Return an entry's kind, `""` for trained parameters."""
    return key.partition("#")[2]


def change(trained: Layers, received: Layers) -> Layers:
    """Return Δθ = trained - received, of everything that travels: the one place that fixes this sign."""
    return {key: trained[key] - received[key] for key in received if kind_of(key) in ("", STATS)}


def bank(theta: Layers, n: int) -> Layers:
    """Return what a server keeps of a common model `theta` for `n` clients: `n` rows of all that travels, copied."""
    return {key: repeat(row, n) for key, row in theta.items() if kind_of(key) != COUNTERS}


def match_layers(patterns: Iterable[str], names: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the layers whose names match any pattern, in model order; a pattern without a match is an error."""
    patterns = tuple(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(f"{what} {pattern!r} matches no layer: {nearest(pattern, names)}")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


class Slot(NamedTuple):
    """Where one tensor of the module lies in its entry's vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def view(self, vector: Tensor) -> Tensor:
        """Return this tensor as a view of the entry's vector `(values,)`."""
        flat = vector[self.start : self.stop]
        if len(self.shape) == 4:
            out, into, height, width = self.shape
            return flat.view(out, height, width, into).permute(0, 3, 1, 2)
        return flat.view(self.shape)


@dataclass(frozen=True)
class LayerSpec:
    """Which tensors of a module form which layer."""

    slots: dict[str, tuple[Slot, ...]]
    names: tuple[str, ...]
    dtype: torch.dtype
    norms: frozenset[str]  # the layers that consist of batch or instance norms alone

    @classmethod
    def of(cls, module: nn.Module, groups: Groups | None = None) -> LayerSpec:
        """Read the layers off a module.

        Parameters
        ----------
        module
            Any module. Frozen parameters (`requires_grad=False`) are part of no layer: they stay as built.
            A parameter shared by two modules belongs to the layer of the first.
        groups
            Modules to join into one layer: `{"encoder": "encoder.*"}`, or `["encoder.*"]` where the pattern
            is also the layer's name. Patterns match module names as in a shell. The rest stay one layer each.
        """
        dtype = _check_parameters(module)
        if strange := [name for name, _ in module.named_modules() if "#" in name]:
            raise ModelError(f"module {strange[0]!r} cannot name a layer: rename it, without '#'")
        layer_by_module = _group([name for name, _ in module.named_modules()], groups)
        persistent = module.state_dict().keys()
        found: dict[str, list[tuple[str, Tensor]]] = {}
        others: set[str] = set()  # layers with a module that is no norm
        seen: set[int] = set()
        waiting: list[tuple[str, Tensor]] = []  # statistics met before the first trained layer
        latest = ""
        for path, owner in module.named_modules():
            layer = layer_by_module[path]
            trained = [
                (_join(path, name), parameter)
                for name, parameter in owner.named_parameters(recurse=False)
                if parameter.requires_grad and id(parameter) not in seen
            ]
            buffers = [
                (_join(path, name), buffer)
                for name, buffer in owner.named_buffers(recurse=False)
                if _join(path, name) in persistent and id(buffer) not in seen
            ]
            seen.update(id(tensor) for _, tensor in trained + buffers)
            if trained:
                found.setdefault(layer, []).extend(trained)
                latest = layer
                if not isinstance(owner, NORMS):
                    others.add(layer)
            home = layer if layer in found else latest  # statistics of an untrained module ride with the one before
            if not home:
                waiting += buffers
                continue
            for name, buffer in waiting + buffers:
                kind = STATS if buffer.is_floating_point() else COUNTERS
                found.setdefault(entry(home, kind), []).append((name, buffer))
            waiting = []
        slots = {key: _slots(tensors) for key, tensors in found.items()}
        names = tuple(key for key in slots if not kind_of(key))
        return cls(slots, names, dtype, frozenset(names) - others)

    def size(self, layer: str) -> int:
        """Return how many parameters of a layer are trained."""
        return self.slots[layer][-1].stop

    @property
    def parameters(self) -> int:
        """How many parameters are trained, in all layers together."""
        return sum(self.size(layer) for layer in self.names)

    def read(self, module: nn.Module) -> Layers:
        """Return a module's layers, copied, as one row: `{entry: (1, values)}`."""
        tensors = tensors_of(module)
        return {key: self.gather(key, tensors) for key in self.slots}

    def gather(self, key: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return an entry's row, `(1, values)` on the CPU, copied from a module's tensors by name."""
        slots = self.slots[key]
        row = torch.empty(1, slots[-1].stop, dtype=torch.int64 if kind_of(key) == COUNTERS else self.dtype)
        for slot in slots:
            slot.view(row[0]).copy_(tensors[slot.name].detach())
        return row

    def write(self, module: nn.Module, layers: Layers, row: int = 0) -> None:
        """Copy one row of `layers` into a module; every entry of the model must be there."""
        tensors = tensors_of(module)
        with torch.no_grad():
            for key, slots in self.slots.items():
                for slot in slots:
                    tensors[slot.name].copy_(slot.view(layers[key][row]))

    def build(self, template: nn.Module, layers: Layers, row: int = 0) -> nn.Module:
        """Return a copy of `template` that holds one row of `layers`, ready to use."""
        module = copy.deepcopy(template)
        self.write(module, layers, row)
        return module.eval()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _slots(tensors: list[tuple[str, Tensor]]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for name, tensor in tensors:
        start = slots[-1].stop if slots else 0
        slots.append(Slot(name, tuple(tensor.shape), start, start + tensor.numel()))
    return tuple(slots)


def _check_parameters(module: nn.Module) -> torch.dtype:
    """Return the one floating-point type of the trained parameters; refuse what cannot be federated."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ModelError(f"{type(module).__name__} has no trainable parameter: there is nothing to federate")
    owners: dict[int, str] = {}
    for name, parameter in trained.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter {name!r} has no shape yet: run the lazy module on one batch first")
        if parameter.dtype not in (torch.float32, torch.float64):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ModelError(
                f"parameter {name!r} is {kind}, but only float32 and float64 are trained (plain SGD loses its small "
                "steps in half precision): use model.float(), or freeze the parameter (requires_grad=False)"
            )
        if parameter.numel() == 0:
            raise ModelError(f"parameter {name!r} is empty")
        other = owners.setdefault(parameter.untyped_storage().data_ptr(), name)
        if other != name:
            raise ModelError(
                f"parameters {other!r} and {name!r} share memory but are two objects: "
                "tie them by assigning the same nn.Parameter to both"
            )
    dtypes = {parameter.dtype for parameter in trained.values()}
    if len(dtypes) > 1:
        names = {str(p.dtype).removeprefix("torch."): name for name, p in trained.items()}
        found = " and ".join(f"{kind} ({name})" for kind, name in sorted(names.items()))
        raise ModelError(f"the trained parameters mix {found}: build the model in one type")
    return dtypes.pop()


def _group(paths: list[str], groups: Groups | None) -> dict[str, str]:
    """Return the layer of each module: its group if a pattern matches, else its own name."""
    layer_by_module = {path: path or ROOT for path in paths}
    named = groups.items() if isinstance(groups, Mapping) else ((p, p) for p in groups or ())
    taken: dict[str, str] = {}
    for layer, patterns in named:
        if "#" in layer or not layer:
            raise ModelError(f"{layer!r} cannot name a layer: it is empty or contains '#'")
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            matched = [path for path in paths if path and fnmatchcase(path, pattern)]
            if not matched:
                hint = nearest(pattern, [path for path in paths if path])
                raise ModelError(f"layer pattern {pattern!r} matches no module: {hint}")
            for path in matched:
                if taken.setdefault(path, layer) != layer:
                    raise ModelError(f"module {path!r} is matched by two layers: {taken[path]!r} and {layer!r}")
                layer_by_module[path] = layer
        if layer in paths and taken.get(layer) != layer:
            raise ModelError(f"{layer!r} cannot name a layer of other modules: a module has that name")
    return layer_by_module
