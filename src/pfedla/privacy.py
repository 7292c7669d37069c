"""Differential privacy at the client: its upload is clipped and noised before anybody else sees it.

A client's change of all the layers that it sends, taken as one vector, is shortened to the length `clip` if it is
longer, and every value gets Gaussian noise of standard deviation `noise x clip`. What else an upload holds is no change
of trained parameters, and none of it leaves the client as it is:

==================  ==================================================================================================
examples            1 for everybody: all clients count the same
running statistics  stay at the client (their change is 0) with methods that find them anew there, as pFedLA does;
                    other methods are refused with models that have some
all else            refused: gains, control variates, shares, steps
==================  ==================================================================================================

The guarantee is that of each client by itself, against whoever sees all messages. Neighbours are two federations in
which one client has whole other data: two changes of length `clip` differ by at most twice that. Every upload of a
client counts; that others may be drawn to take part instead buys nothing, since the server knows who was drawn.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pfedla.errors import ConfigError, RunError
from pfedla.layers import STATS, Layers, kind_of
from pfedla.randomness import stream
from pfedla.settings import NonNegative, Positive, Range, Settings
from pfedla.wire import EXAMPLES, Payload

__all__ = [
    "DELTA",
    "Normal",
    "Privacy",
    "accountant",
    "clipped",
    "epsilon",
    "normal_of",
    "private",
    "statement",
    "system_normal",
]

DELTA = 1e-5
APART = 2  # times clip, at most: how far the uploads of two neighbours lie apart

Normal = Callable[[int], Tensor]  # so many independent values of a standard normal distribution, in 64 bits


@dataclass(frozen=True)
class Privacy(Settings):
    """How far clients' uploads are clipped and noised; not at all by default."""

    section: ClassVar[str] = "privacy"
    clip: Positive | None = None  # the greatest length of a client's change, all layers together; as it is by default
    noise: NonNegative | None = None  # the noise's standard deviation on every value, in units of clip; none by default
    delta: Annotated[float, Range(above=0, below=1)] | None = None  # of the guarantee; 0.00001 by default

    def __post_init__(self) -> None:
        """Refuse noise that bounds nothing."""
        super().__post_init__()
        if self.clip is None and (self.noise is not None or self.delta is not None):
            raise ConfigError("privacy.noise and privacy.delta mean nothing without privacy.clip: set it, too")

    @property
    def deviation(self) -> float:
        """The noise's standard deviation on every value."""
        return (self.noise or 0.0) * (self.clip or 0.0)


def clipped(change: Layers, clip: float) -> Layers:
    """Return a change shortened to the length `clip`, all entries together, in 64 bits: `(1, values)` each."""
    wide = {key: rows.double() for key, rows in change.items()}
    length = torch.stack([rows.norm() for rows in wide.values()]).norm() if wide else torch.zeros(())
    return {key: rows * (clip / length.clamp(min=clip)) for key, rows in wide.items()}


def private(upload: Payload, privacy: Privacy, method: str, normal: Normal) -> Payload:
    """Return one client's upload clipped and noised; refuse one that holds more than changes and examples."""
    if privacy.clip is None:
        return upload
    beside = [name for name in upload.values if name != EXAMPLES]
    beside += [key for key in upload.layers if kind_of(key) not in ("", STATS)]
    if beside:
        raise ConfigError(f"privacy.clip: {method} uploads {', '.join(beside)}, which nothing here clips or noises")
    layers: Layers = {key: torch.zeros_like(rows) for key, rows in upload.layers.items()}  # of statistics, nothing
    change = {key: rows for key, rows in upload.layers.items() if not kind_of(key)}
    for key, rows in clipped(change, privacy.clip).items():
        noise = privacy.deviation * normal(rows.numel()).view(rows.shape) if privacy.deviation else 0.0
        layers[key] = (rows + noise).to(layers[key])
    return upload._replace(layers=layers, values={name: torch.ones_like(x) for name, x in upload.values.items()})


def normal_of(seed: int, t: int, client: int) -> Normal:
    """Return the noise of a simulated client in round `t`: the same in every repetition."""
    generator = stream(seed, "noise", t, client)
    return lambda count: torch.randn(count, generator=generator, dtype=torch.float64)


def system_normal(count: int) -> Tensor:
    """Return noise that nobody can draw again: Box and Muller's, from the operating system's random bytes."""
    pairs = -(-count // 2)
    whole = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64) >> np.uint64(11)  # 53 bits
    u, v = ((whole + np.uint64(1)) / 2.0**53).reshape(2, pairs)  # in (0, 1]
    radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * v
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count])


def accountant() -> Any:
    """Return the library that accounts for epsilon; refuse a run without it before any work."""
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise RunError(f"privacy.noise needs its extra: pip install 'pfedla[privacy]' ({error})") from None


def epsilon(uploads: int, noise: float, delta: float) -> float:
    """Return the ε of a client's `uploads`, at δ: Gaussian mechanisms, composed by Rényi differential privacy."""
    library = accountant()
    found = library.rdp.RdpAccountant()
    found.compose(library.SelfComposedDpEvent(library.GaussianDpEvent(noise / APART), uploads))
    return float(found.get_epsilon(delta))


def statement(summary: Mapping[str, Any]) -> str | None:
    """Say what a run's summary guarantees, and under which assumptions; None if its uploads are as they are."""
    if "uploads_per_client" not in summary:
        return None
    uploads = summary["uploads_per_client"]
    if not uploads:
        return "privacy: no layer leaves a client"
    if summary["epsilon"] is None:
        return "privacy: uploads are clipped and not noised: no guarantee (epsilon is infinite)"
    spent, delta = summary["epsilon"], summary["delta"]
    return (
        f"privacy: epsilon {spent:.4g} at delta {delta:g} for each client's whole data, which may be replaced by any "
        f"other; {uploads} uploads of a client at most, no gain from sampling; reported scores are not covered"
    )
