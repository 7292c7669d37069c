from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from pfedla.algorithm import Algorithm
from pfedla.client import Kept, Setting
from pfedla.flower import FlowerFleet, Roster
from pfedla.flower.vault import Vault
from pfedla.training import ClientData
from tests import world
from tests.flower.sites import FakeGrid, deployment, names

RUN = "0" * 32
ROUNDS = ([0, 1, 2], [1, 2], [0, 2], [0, 1, 2])


def fleet_of(tmp_path: Path, algorithm: Algorithm[Any], n: int, **settings: Any) -> Any:
    """Return what makes a fleet of sites for `world.play`."""
    app = deployment(tmp_path / "app", algorithm, n)
    grid = FakeGrid(app, tmp_path / "state", n)

    def made(setting: Setting, _: dict[int, ClientData]) -> FlowerFleet:
        roster = Roster(grid, names(n), setting.spec, setting.template, registered=False)
        roster.gather(n, 0)
        return FlowerFleet(roster, setting.spec, RUN, timeout=1, **settings)

    return grid, made


def kept(tmp_path: Path, played: world.Played, fleet: FlowerFleet, grid: FakeGrid) -> Kept:
    """Return what all sites have on their disks, as the server counts."""
    rows = []
    for client, version in enumerate(fleet.versions.tolist()):
        found = played.setting.enroll()
        if version:
            read = Vault(tmp_path / "state" / str(grid.node_of(client)), RUN).read(version, found)
            assert read is not None
            found = read
        rows.append(found)
    own = {key: torch.cat([row.own[key] for row in rows]) for key in rows[0].own}
    return rows[0]._replace(own=own, rounds=torch.cat([row.rounds for row in rows]))


def test_every_method_gives_the_same_over_flower_as_in_the_simulator(tmp_path: Path, algorithm: Algorithm[Any]) -> None:
    grid, make = fleet_of(tmp_path, algorithm, 3)
    simulated = world.play(algorithm, ROUNDS, 3)
    deployed = world.play(algorithm, ROUNDS, 3, fleet=make)
    world.same(simulated.state, deployed.state)
    assert isinstance(deployed.fleet, FlowerFleet)
    world.same(simulated.own, kept(tmp_path, deployed, deployed.fleet, grid).own)
    world.same(simulated.personalized(), deployed.personalized())
