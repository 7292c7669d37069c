"""The figures that the paper prints: Tables 1, 2 and 3.

Ma et al., "Layer-wised model aggregation for personalized federated learning", CVPR 2022. Accuracies are in per cent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["CLIENTS", "DATASETS", "TABLE1", "TABLE2", "TABLE3", "Place", "Printed", "Retained"]

DATASETS = ("EMNIST", "FashionMNIST", "CIFAR10", "CIFAR100")
CLIENTS = (10, 100)


class Printed(NamedTuple):
    """An accuracy and its spread over repeats."""

    mean: float
    std: float


class Place(NamedTuple):
    """Which column of a table."""

    dataset: str
    clients: int


class Retained(NamedTuple):
    """A column of Table 3: k retained layers, and which they must be for the megabytes to come out."""

    k: int
    accuracy: float
    megabytes: float
    layers: tuple[str, ...]


def _table(text: str) -> Mapping[str, Mapping[Place, Printed]]:
    """Read `method: mean±std ...`, one column after the other; "-" where the paper has none."""
    places = [Place(dataset, clients) for dataset in DATASETS for clients in CLIENTS]
    found: dict[str, dict[Place, Printed]] = {}
    for line in text.strip().splitlines():
        method, _, figures = line.strip().partition(": ")
        pairs = zip(places, figures.split(), strict=True)
        found[method] = {place: Printed(*map(float, text.split("±"))) for place, text in pairs if text != "-"}
    return found


TABLE1 = _table("""
    Local: 89.01±0.47 91.25±0.18 85.83±0.17 89.27±0.21 59.44±0.40 64.19±0.19 41.68±0.89 42.53±0.44
    FedAvg: 90.45±0.76 93.71±0.38 91.24±0.98 98.36±0.26 48.57±0.63 58.43±0.29 36.64±0.67 45.19±0.33
    Per-FedAvg: 92.58±0.28 92.38±1.14 93.63±1.83 92.35±1.55 52.54±1.79 59.54±0.39 38.79±1.89 43.72±0.25
    pFedMe: 92.42±0.44 94.36±0.50 90.43±0.86 98.57±0.38 53.73±3.74 65.97±1.61 42.29±3.67 53.60±1.28
    pFedHN: 93.94±0.16 96.64±0.91 94.83±0.33 98.80±0.92 46.98±1.91 63.71±1.26 39.67±0.52 51.36±1.77
    FedBN: - - - - 59.36±0.92 70.88±0.36 45.18±0.42 56.16±0.38
    FedRep: 91.82±0.15 95.23±0.12 93.17±0.26 97.15±0.09 58.01±0.56 71.94±0.22 44.33±0.63 56.47±0.41
    FedFomo: 88.33±0.29 91.36±0.17 86.17±0.34 91.83±0.12 59.37±0.71 66.07±0.24 41.89±0.78 44.28±0.28
    pFedLA: 90.65±0.41 96.34±1.35 94.34±0.29 98.87±0.66 61.43±0.56 73.15±0.83 47.22±0.77 56.62±0.81
    HeurpFedLA: 94.11±0.13 95.04±0.41 95.47±0.47 96.95±0.44 60.02±0.74 73.05±1.02 46.47±0.83 54.43±1.37
""")
TABLE2 = _table("""
    Local: 80.72±0.43 79.09±0.12 65.60±0.59 65.97±0.28 39.79±0.42 45.15±0.29 26.29±0.37 27.87±0.28
    FedAvg: 90.43±0.58 93.91±0.32 89.09±0.57 98.25±0.38 44.89±0.21 54.03±0.37 32.24±0.74 40.89±0.46
    Per-FedAvg: 90.86±0.78 94.09±0.18 90.78±1.12 98.53±0.95 44.48±0.82 54.40±0.44 30.86±1.11 42.56±0.28
    pFedMe: 89.13±0.58 93.87±0.40 85.15±0.94 97.87±0.19 46.97±1.19 58.23±1.07 33.45±0.86 44.35±0.96
    pFedHN: 91.37±0.41 94.48±0.51 93.45±0.11 98.83±0.82 37.49±0.94 49.90±1.66 26.35±0.93 40.27±0.82
    FedBN: - - - - 49.79±0.33 60.62±0.42 34.94±0.50 46.42±0.54
    FedRep: 86.81±0.29 90.32±0.08 79.13±0.56 92.04±0.23 49.16±0.73 60.36±0.57 34.19±0.74 43.51±0.34
    FedFomo: 80.14±0.42 82.61±0.11 64.10±0.38 67.91±0.29 40.62±0.31 47.08±0.49 27.33±0.51 29.63±0.24
    pFedLA: 92.06±0.71 94.83±1.04 93.89±0.91 98.41±0.98 49.93±0.96 61.82±1.89 35.02±0.83 48.79±1.60
    HeurpFedLA: 91.98±0.36 93.31±0.77 92.01±0.74 98.66±0.80 49.06±0.68 60.62±1.73 35.42±0.49 48.72±1.75
""")
TABLE3: Mapping[str, tuple[Retained, ...]] = {
    "EMNIST": (
        Retained(0, 90.65, 491.08, ()),
        Retained(1, 94.11, 488.65, ("fc3",)),
        Retained(2, 93.94, 312.52, ("fc3", "fc1")),
    ),
    "CIFAR10": (
        Retained(0, 61.43, 693.98, ()),
        Retained(1, 60.02, 418.97, ("fc1",)),
        Retained(2, 59.90, 382.25, ("fc1", "conv2")),
        Retained(3, 59.23, 379.82, ("fc1", "conv2", "fc3")),
    ),
}
