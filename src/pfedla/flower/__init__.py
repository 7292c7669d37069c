"""Clients at sites of their own, over Flower: the same rounds as in the simulator, on data that never leaves.

This is the only place that imports flwr, and nothing imports this place unless a deployment is asked for.
"""

from __future__ import annotations

import importlib as _importlib
import warnings as _warnings

try:
    with _warnings.catch_warnings():
        _warnings.simplefilter("ignore", DeprecationWarning)  # what its parts say of each other
        for _name in ("flwr.app", "flwr.clientapp", "flwr.serverapp"):
            _importlib.import_module(_name)
except ImportError as error:
    raise ImportError("a deployment needs Flower: pip install 'pfedla[flower]'") from error
from pfedla.flower.app import client_app, server_app
from pfedla.flower.fleet import FlowerFleet
from pfedla.flower.roster import Roster

__all__ = ["FlowerFleet", "Roster", "client_app", "server_app"]
