"""A personalized model as a file of its own: safetensors of its state dict, and in the header what rebuilds it.

::

    model = pfedla.load_model("runs/hospitals/models/3.safetensors")
    model(x)

A file names the model it belongs to and never brings code: one of ours is built from its name, any other is given,
`load_model(path, model=make_model)`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import nn

from pfedla.errors import ConfigError, RunError
from pfedla.models import MODELS, make_model, seeded

__all__ = ["Description", "check_file", "describe", "load_model", "save_model"]

KEY, FORMAT = "pfedla", 1


class Description(NamedTuple):
    """What a model file says of its model."""

    client: str  # whose it is
    factory: str | None  # one of `MODELS`, `package.module:factory`, or None if it came from Python
    shape: tuple[int, ...]  # of one input
    outputs: int
    classes: tuple[str, ...]  # the outputs' names; none if targets are no labels
    layers: tuple[str, ...]  # in the model's order
    pixels: bool  # inputs were bytes, scaled to [-1, 1]

    @classmethod
    def of(cls, facts: Mapping[str, Any], client: str, layers: Sequence[str]) -> Description:
        """Describe a client's model by what is known of its run."""
        shape, classes, pixels = facts.get("shape", ()), facts.get("classes", ()), bool(facts.get("pixels"))
        outputs, factory = facts.get("outputs", 0), facts.get("factory")
        return cls(client, factory, tuple(shape), outputs, tuple(classes), tuple(layers), pixels)


def check_file(path: Path) -> None:
    """Refuse a place where a model file cannot be."""
    if not path.parent.is_dir():
        raise RunError(f"cannot write to {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise RunError(f"cannot write to {path}: it is a folder")


def save_model(path: Path, module: nn.Module, description: Description) -> None:
    """Write a module's state dict, with what rebuilds it in the header."""
    state = module.state_dict().items()  # copied, for parameters may be shared
    tensors = {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in state}
    path.write_bytes(save(tensors, {KEY: json.dumps({"format": FORMAT, **description._asdict()})}))


def describe(path: Path | str) -> Description:
    """Read what a model file says of its model."""
    try:
        with safe_open(path, "pt") as file:
            found: Mapping[str, Any] = json.loads((file.metadata() or {})[KEY])
        if found["format"] != FORMAT:
            raise RunError(f"{path} is of another version, {found['format']!r:.20}")
        return Description(
            str(found["client"]),
            None if found["factory"] is None else str(found["factory"]),
            tuple(int(size) for size in found["shape"]),
            int(found["outputs"]),
            tuple(map(str, found["classes"])),
            tuple(map(str, found["layers"])),
            bool(found["pixels"]),
        )
    except KeyError as error:
        raise RunError(f"{path} is no model file that pfedla wrote: its header has no {error}") from None
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise RunError(f"cannot read {path}: {error}") from error


def load_model(path: Path | str, model: Callable[[], nn.Module] | nn.Module | None = None) -> nn.Module:
    """Return the model of a file, in evaluation mode, ready to use.

    `model` is a function that makes such a model, or one to be copied: needed unless it is one of the library's own.
    """
    about = describe(path)
    if model is None and about.factory not in MODELS:
        made = "came from Python" if about.factory is None else f"is made by {about.factory}"
        raise ConfigError(f"the model of {path} {made}: name it, pfedla.load_model(path, model=...)")
    if isinstance(model, nn.Module):
        module = copy.deepcopy(model)
    else:
        module = seeded(model or (lambda: make_model(str(about.factory), about.shape, about.outputs)), 0)
    try:
        module.load_state_dict(load_file(path))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise RunError(f"cannot read {path} into the model: {error}") from error
    return module.eval()
