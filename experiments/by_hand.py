"""A run set up to be played round by round, so that a script can look at what lies at the clients in between."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from pfedla.client import Setting
from pfedla.comparison import parse_variant
from pfedla.config import Experiment, merge, read_tables
from pfedla.data.federation import Federation
from pfedla.engine import FlatModel
from pfedla.experiment import federation_of, prepare
from pfedla.fleet import SimulatedFleet
from pfedla.inspection import Inspector
from pfedla.ledger import Ledger
from pfedla.pool import local_pool
from pfedla.randomness import stream
from pfedla.rounds import Server

__all__ = ["Started", "arguments_of", "started"]


class Started(NamedTuple):
    """Everything that rounds are played with, and a model to look at the clients' parameters with."""

    setting: Setting
    federation: Federation
    server: Server
    fleet: SimulatedFleet
    model: FlatModel


def arguments_of(description: str | None) -> argparse.ArgumentParser:
    """Return what such scripts are told: a configuration, how many rounds, and how often to look."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--data-dir")
    return parser


def started(config: Path, method: str, data_dir: str | None) -> Started:
    """Set up a run of a method, such as `per-fedavg,alpha=0.01`, in this process."""
    machine = {"machine": {"data_dir": data_dir, "workers": 0}} if data_dir else {}
    tables = merge(merge(read_tables(config), parse_variant(method).changes), machine)
    experiment = Experiment.from_tables(tables)
    federation = federation_of(experiment)
    setting = prepare(experiment, federation)
    first = setting.spec.read(setting.template)
    state = setting.algorithm.init(first, len(federation.data), stream(setting.seed, "init"))
    server = Server(state, Ledger(setting.spec.names), inspector=Inspector(setting.spec))
    fleet = SimulatedFleet(setting, federation.data, local_pool(setting, federation.data, 0))
    return Started(setting, federation, server, fleet, FlatModel(setting.template, setting.spec, setting.objective))
