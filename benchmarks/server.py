"""The server's part of a round: pFedLA's download and update for 10 of N participants, against a limit.

LeNet with batch norm (121,278 parameters) and a model with ResNet-18's layers (11.2 million). Each size runs in three
processes of its own, one after the other; the median run is shown, with the range. The peak is resident memory from
download to update, and `state` what was resident before. Groups of participants, drawn at random, take turns, each
warmed up once. "Eq. 6" and "inner products" are the seconds in the functions `aggregate` and `inner_products` of
`pfedla.algorithms.pfedla`; all other time is the hypernetworks' (and the new rows').

The limit is what the machine could do at best, from two rates measured in the same process, which has one thread as in
a run: F, the flops/s of a dense 2048 x 2048 product, and B, the bytes/s that a large copy reads and writes. With n
participants, P values in a model, L layers, E values in an embedding, H hidden units, and
R = E + EH + H + HH + H + L(HN + N) values in a hypernetwork:

- products of download: max(2nNP / F, 4NP / B). Eq. 6; the bank of models is read once.
- products of update: max(2nNP / F, 4NP / B). The inner products; the bank is read once.
- hypernetworks: max(8n(EH + HH + LHN) / F, 28nR / B). Forward in download; forward and backward in update; the
  participants' rows are read once in download, and in update read and written with both moments of Adam.

- models: 16nP / B. Download writes them; update reads them and the changes and writes the sum.

The sum is the limit. It does not count the gradients' memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.measuring import Row, copy_bandwidth, fresh, matmul_rate, reset_peak, resident
from pfedla import PFedLA
from pfedla.algorithm import Algorithm
from pfedla.algorithms import pfedla as equations
from pfedla.layers import LayerSpec
from pfedla.models import LeNet
from pfedla.pool import keep_freed_memory
from pfedla.randomness import stream
from pfedla.wire import Payload

__all__ = ["Played", "lenet", "measure", "play", "resnet", "state_for"]

RATIO = "ratio to limit"
PARTS = {"aggregate": "Eq. 6", "inner_products": "inner products"}


class Played(NamedTuple):
    """What rounds cost the server: median seconds of each part; resident bytes before, and at most."""

    took: dict[str, float]
    before: int
    peak: int


def measure(quick: bool) -> list[Row]:
    """Return a line for each model and number of clients."""
    if quick:
        return [_over_runs(1, lenet, 20, 1, 256, 2**20)]
    sizes = [(lenet, 10, 30), (lenet, 100, 20), (lenet, 1000, 5), (resnet, 20, 5), (resnet, 100, 4)]
    return [_over_runs(3, model, n, repeats, 2048, 2**29) for model, n, repeats in sizes]


def _over_runs(runs: int, *arguments: Any) -> Row:
    """Measure in several processes, one after the other; return the median run, and the range of its main figures."""
    found = sorted((fresh(_measure, *arguments) for _ in range(runs)), key=lambda row: float(row[RATIO] or 0))
    row = dict(found[len(found) // 2])
    for key in ("both, ms", RATIO):
        values = [float(run[key] or 0) for run in found]
        row[f"{key}, range"] = f"{min(values)} to {max(values)}"
    return row


def lenet() -> nn.Module:
    """Return the paper's model for CIFAR-10."""
    return LeNet((3, 32, 32), 10, batch_norm=True)


def resnet() -> nn.Module:
    """Return the layers of a ResNet-18 for ten classes of small images; the server never calls it."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64)]
    before = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            layers += [nn.Conv2d(before, width, 3, bias=False), nn.BatchNorm2d(width)]
            layers += [nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width)]
            if width != before:
                layers += [nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)]
            before = width
    return nn.Sequential(*layers, nn.Linear(512, 10))


def state_for(method: Algorithm[Any], model: nn.Module, n: int) -> tuple[Algorithm[Any], Any]:
    """Return a method for a model, and its state before the first round of `n` clients."""
    spec = LayerSpec.of(model)
    algorithm = method.for_model(spec)
    return algorithm, algorithm.init(spec.read(model), n, stream(0, "init"))


@contextmanager
def timed(module: Any, names: dict[str, str]) -> Iterator[dict[str, float]]:
    """Add up the seconds spent in functions of a module."""
    spent = dict.fromkeys(names.values(), 0.0)

    def clocked(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[part] += time.perf_counter() - start

        return call

    with ExitStack() as stack:
        for name, part in names.items():
            stack.enter_context(patch.object(module, name, clocked(getattr(module, name), part)))
        yield spent


def play(method: Algorithm[Any], model: nn.Module, n: int, repeats: int) -> Played:
    """Run the server's part of rounds of 10 of `n` clients, after one that is not counted for each group of them."""
    algorithm, state = state_for(method, model, n)
    groups = [ids.sort().values for ids in torch.randperm(n, generator=stream(0, "groups")).split(min(10, n))[:5]]
    upload = _upload(algorithm.download(state, groups[0]), algorithm.uploads_beside)
    for ids in groups:
        state = algorithm.update(state, ids, algorithm.download(state, ids), upload)
    before = resident() - sum(rows.nbytes for rows in upload.layers.values())
    reset_peak()
    rounds = []
    for turn in range(repeats):
        ids = groups[turn % len(groups)]
        with timed(equations, PARTS) as spent:
            start = time.perf_counter()
            got = algorithm.download(state, ids)
            downloaded = time.perf_counter()
            state = algorithm.update(state, ids, got, upload)
            end = time.perf_counter()
        del got  # a round holds on to it until the update is done
        rounds.append({"download": downloaded - start, "update": end - downloaded, "both": end - start, **spent})
    took = {part: statistics.median(turn[part] for turn in rounds) for part in rounds[0]}
    return Played(took, before, resident("VmHWM"))


def _measure(make: Callable[[], nn.Module], n: int, repeats: int, square: int, copied: int) -> Row:
    keep_freed_memory()  # as in a run
    torch.set_num_threads(1)
    rates = [(matmul_rate(square), copy_bandwidth(copied))]
    algorithm, model = PFedLA(), make()
    took, before, peak = play(algorithm, model, n, repeats)
    rates.append((matmul_rate(square), copy_bandwidth(copied)))
    flops, bandwidth = (max(kind) for kind in zip(*rates, strict=True))
    limit = limits(algorithm, LayerSpec.of(model), n, min(10, n), flops, bandwidth)
    return {
        "model": "LeNet+BN" if make is lenet else "ResNet-18's layers",
        "clients": n,
        "download, ms": _ms(took["download"]),
        "update, ms": _ms(took["update"]),
        "both, ms": _ms(took["both"]),
        "Eq. 6, ms": _ms(took["Eq. 6"]),
        "inner products, ms": _ms(took["inner products"]),
        "hypernetworks, ms": _ms(took["both"] - took["Eq. 6"] - took["inner products"]),
        "limit, ms": _ms(sum(limit.values())),
        **{f"limit of {part}, ms": _ms(value) for part, value in limit.items()},
        RATIO: round(took["both"] / sum(limit.values()), 2),
        "state, MB": round(before / 1e6),
        "peak, MB": round(peak / 1e6),
        "matmul, Gflop/s": round(flops / 1e9, 1),
        "copy, GB/s": round(bandwidth / 1e9, 1),
    }


def limits(algorithm: PFedLA, spec: LayerSpec, n: int, count: int, flops: float, bandwidth: float) -> dict[str, float]:
    """Return the seconds that download and update of `count` of `n` clients take at best, as the module says."""
    values = sum(slots[-1].stop for key, slots in spec.slots.items() if not key.endswith("#counters"))
    layers, embedding, hidden = len(spec.names), algorithm.embedding, algorithm.hidden
    product, bank = 2 * count * n * values / flops, 4 * n * values / bandwidth
    forward = 2 * count * (embedding * hidden + hidden**2 + layers * hidden * n) / flops
    row = embedding + embedding * hidden + hidden + hidden**2 + hidden + layers * (hidden * n + n)
    return {
        "download": max(product, bank),
        "update": max(product, bank),
        "hypernetworks": max(4 * forward, 7 * 4 * count * row / bandwidth),
        "models": 4 * 4 * count * values / bandwidth,
    }


def _upload(got: Payload, beside: Sequence[str]) -> Payload:
    """Return a small change of everything, as clients would send it, with a method's own values beside it."""
    layers = {key: torch.randn(rows.shape, generator=stream(0, key)) * 1e-3 for key, rows in got.layers.items()}
    n, count = got.sent.shape
    values = {"path": torch.ones(n), "start": torch.full((n,), 0.1), "serve": torch.full((n, count), 0.1)}
    more = {name: values[name] for name in beside}
    return Payload.of(layers, torch.ones_like(got.sent), got.names, examples=torch.full((n,), 420), **more)


def _ms(value: float) -> float:
    return float(f"{value * 1e3:.3g}")
