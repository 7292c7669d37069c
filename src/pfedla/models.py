"""The paper's convolutional networks, and a small perceptron.

Table 3 of the paper fixes the network by its megabytes: conv 5x5 (16) - pool - conv 5x5 (32) - pool - 120 - 84 -
classes, with a batch norm after each convolution for CIFAR and none for EMNIST and FashionMNIST.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from pfedla.blocks import Conv2d, ConvPoolReLU, NormPoolReLU
from pfedla.chain import Chain, Chained
from pfedla.errors import ConfigError, ModelError, known_name, told
from pfedla.objective import Objective
from pfedla.randomness import seed_of
from pfedla.settings import Settings
from pfedla.training import ClientData

__all__ = [
    "MLP",
    "MODELS",
    "PYTHON",
    "LeNet",
    "Model",
    "check_model",
    "import_object",
    "make_model",
    "model_name",
    "needs_nothing",
    "seeded",
]

PYTHON = "python"  # the model of a run whose model and data came from Python


@dataclass(frozen=True)
class Model(Settings):
    """The network, and which of its modules form one layer."""

    section: ClassVar[str] = "model"
    name: str = "auto"
    layers: dict[str, str] = field(default_factory=dict)  # layer name -> pattern of module names

    def __post_init__(self) -> None:
        """Spell a built-in model's name as we do."""
        super().__post_init__()
        spelled = {name.casefold(): name for name in ("auto", *MODELS)}
        object.__setattr__(self, "name", spelled.get(self.name.casefold(), self.name))


class LeNet(nn.Module, Chained):
    """The paper's CNN: 121,278 parameters for CIFAR-10 (with batch norm), 85,822 for ten classes of 28x28."""

    def __init__(self, shape: tuple[int, ...], classes: int, batch_norm: bool) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 16:
            raise ModelError(f"LeNet takes images (channels, height, width) of at least 16x16, not {tuple(shape)}")
        channels, height, width = shape
        convolution = Conv2d if batch_norm else ConvPoolReLU  # either way, pooling and ReLU come after all else
        self.conv1 = convolution(channels, 16, 5)
        self.bn1 = NormPoolReLU(16) if batch_norm else nn.Identity()
        self.conv2 = convolution(16, 32, 5)
        self.bn2 = NormPoolReLU(32) if batch_norm else nn.Identity()
        self.fc1 = nn.Linear(32 * _pooled(height) * _pooled(width), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.bn1(self.conv1(x))
        x = self.bn2(self.conv2(x))
        x = self.fc1(x.flatten(1)).relu()
        out: Tensor = self.fc3(self.fc2(x).relu())
        return out

    @torch.jit.unused
    def chain(self) -> Chain | None:
        """Return its modules in order; None for a subclass that computes something else with them."""
        if type(self).forward is not LeNet.forward:
            return None
        return Chain([(self.conv1, self.bn1), (self.conv2, self.bn2)], [self.fc1, self.fc2, self.fc3])


class MLP(nn.Module):
    """A perceptron with one hidden layer of 64, for quick trials and data that are not images."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.fc1 = nn.Linear(int(torch.Size(shape).numel()), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        out: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return out


def _pooled(size: int) -> int:
    """Return the side of a feature map after two rounds of 5x5 convolution and 2x2 pooling."""
    return ((size - 4) // 2 - 4) // 2


Factory = Callable[[tuple[int, ...], int], nn.Module]  # (input shape, classes) -> module

MODELS: dict[str, Factory] = {
    "lenet": lambda shape, classes: LeNet(shape, classes, batch_norm=False),
    "lenet-bn": lambda shape, classes: LeNet(shape, classes, batch_norm=True),
    "mlp": MLP,
}


def make_model(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a model by name.

    `name` is one of `MODELS`; `"auto"`, the paper's choice (batch norm for colour images); or
    `"package.module:factory"`, a callable that takes the input shape and the number of classes (or other outputs).
    """
    name = model_name(name, shape)
    if ":" in name:
        try:
            module = import_object(name, "model.name")(shape, classes)
        except Exception as error:  # it is the user's own code
            why = f"cannot be called with {shape} and {classes}: {told(error)}"
            raise ConfigError(f"model.name = {name!r} {why}") from error
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model.name = {name!r} returned {type(module).__name__}, not a torch.nn.Module")
        return module
    return MODELS[name](shape, classes)


def model_name(name: str, shape: tuple[int, ...]) -> str:
    """Return which model a name stands for, with inputs of this shape: one of `MODELS`, or `package.module:factory`."""
    if ":" in name:
        return name
    known = known_name("model", name, [*MODELS, "auto", "package.module:factory"])
    if known == "auto":
        return ("lenet-bn" if shape[0] == 3 else "lenet") if len(shape) == 3 else "mlp"
    return known


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the common first model from a seed, without touching the caller's random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "model"))
        module = make()
    if not isinstance(module, nn.Module):
        raise ModelError(f"the model factory returned {type(module).__name__}, not a torch.nn.Module")
    return module


def needs_nothing(function: Callable[..., object]) -> bool:
    """Say whether a function can be called without arguments, as far as its signature tells."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # it has none
        pass
    return True


def check_model(
    template: nn.Module, objective: Objective, data: Mapping[int, ClientData], names: Sequence[str] = ()
) -> None:
    """Try the model on the first samples of the first client, and its outputs against everybody's targets."""
    like = next(p for p in template.parameters() if p.requires_grad)
    x, _ = data[0].train.take(slice(0, 2), like)
    template.eval()
    try:
        with torch.inference_mode():
            out = template(x)
    except Exception as error:  # the model may be the user's own code
        raise ModelError(
            f"the model does not take the data: a batch of shape {tuple(x.shape)} ({x.dtype}) gave: {told(error)}"
        ) from error
    if not isinstance(out, Tensor):
        raise ModelError(f"the model must return a tensor, not {type(out).__name__}")
    if out.dim() < 1 or len(out) != len(x):
        raise ModelError(f"the model must return a row for each sample: {len(x)} gave a tensor of {tuple(out.shape)}")
    for client, samples in data.items():
        for part in samples:
            try:
                objective.check(out[: len(part)], part.targets)
            except ModelError as error:
                who = names[client] if names else f"client {client}"
                raise ModelError(f"{who}: {error}") from error


def import_object(path: str, setting: str) -> Callable[..., object]:
    """Return what `"package.module:name"` names."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(f"{setting} = {path!r}: cannot import {module_name!r} ({error})") from error
    except Exception as error:  # it is the user's own code
        raise ConfigError(f"{setting} = {path!r}: {module_name!r} ends in {told(error)}") from error
    try:
        found = getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{setting} = {path!r}: module {module_name!r} has no {attribute!r}") from None
    if not callable(found):
        raise ConfigError(f"{setting} = {path!r} cannot be called")
    return found  # type: ignore[no-any-return]
