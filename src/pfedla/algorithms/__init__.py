"""The methods, by the names that configuration files and the command line use."""

from __future__ import annotations

import inspect
from typing import Any

from pfedla.algorithm import Algorithm
from pfedla.algorithms.fedavg import FedAvg, Local
from pfedla.algorithms.pfedla import HeurPFedLA, PFedLA

__all__ = ["ALGORITHMS", "FedAvg", "HeurPFedLA", "Local", "PFedLA", "describe"]

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "local": Local,
    "fedavg": FedAvg,
    "pfedla": PFedLA,
    "heurpfedla": HeurPFedLA,
}


def describe(algorithm: type[Algorithm[Any]]) -> str:
    """Return a method's one-line description."""
    return (inspect.getdoc(algorithm) or "").partition("\n")[0]
