from __future__ import annotations

import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pfedla
from pfedla.algorithms import FedAvg, FedPer, PFedLA, PFedLAX
from pfedla.cli import cli
from pfedla.errors import ConfigError, RunError
from pfedla.record import RunRecord
from pfedla.rounds import Schedule
from pfedla.tree import flatten
from tests import world

pytest.importorskip("flwr")
from click.testing import CliRunner

from pfedla.flower.app import serve
from pfedla.flower.deployment import Deployment
from pfedla.flower.growth import add_site
from pfedla.flower.project import init
from tests.flower.sites import FakeGrid, deployment

SHORT = Schedule(seed=3, rounds=2, eval_every=1)


def stopped(tmp_path: Path, algorithm: Any) -> Path:
    """Run a deployment of three sites, of whose code a fourth has data, to its end; return its folder."""
    app = deployment(tmp_path / "app", algorithm, 3, schedule=SHORT)
    code = (app / "site_code.py").read_text()
    (app / "site_code.py").write_text(code.replace("samples(3", "samples(4"))
    serve(Deployment.load(app), FakeGrid(app, tmp_path / "state", 3), tmp_path / "run")
    longer(app, 4)
    return tmp_path


def longer(app: Path, rounds: int) -> None:
    path = app / "pfedla.toml"
    path.write_text(path.read_text().replace("rounds = 2", f"rounds = {rounds}"))


def state_of(run: Path, algorithm: Any, n: int) -> dict[str, torch.Tensor]:
    """Read the server's state from a run's checkpoint."""
    setting = world.setting(algorithm)
    state = setting.algorithm.init(setting.spec.read(setting.template), n, torch.Generator())
    clients = {name: torch.zeros(n, dtype=torch.int64) for name in ("versions", "nodes")}
    saved = RunRecord(run).latest(state, clients)
    assert saved is not None
    return flatten(saved.state)


@pytest.mark.parametrize("algorithm", [PFedLA(retain=1), PFedLAX(), FedAvg(), FedPer()])
def test_a_site_that_is_added_takes_part_and_the_others_rows_are_as_they_were(algorithm: Any, tmp_path: Path) -> None:
    folder = stopped(tmp_path, algorithm)
    assert add_site(folder, "site-3", tmp_path / "run", tmp_path / "wider") == 3
    before, after = state_of(tmp_path / "run", algorithm, 3), state_of(tmp_path / "wider", algorithm, 4)
    for key, rows in before.items():
        if key.startswith(("theta/", "members/theta/", "body/value")):
            assert torch.equal(after[key][: len(rows)], rows), key
    assert RunRecord(tmp_path / "wider").facts()["id"] == RunRecord(tmp_path / "run").facts()["id"]
    with pytest.raises(RunError, match="went on in"):
        add_site(folder, "site-4", tmp_path / "run", tmp_path / "other")
    made = Deployment.load(folder / "app")
    assert made.deploy.sites == ("site-0", "site-1", "site-2", "site-3")
    grid = FakeGrid(folder / "app", tmp_path / "state", 4)
    result = serve(made, grid, tmp_path / "wider", resume=True)
    assert [line["round"] for line in result.history] == [1, 2, 3, 4]
    assert [len(line["clients"]["accuracy"]) for line in result.history] == [4] * 4
    assert result.history[1]["clients"]["accuracy"][3] is None
    assert result.history[3]["clients"]["accuracy"][3] is not None
    assert pfedla.load(tmp_path / "run", model=made.code().model).names == ("site-0", "site-1", "site-2")
    if isinstance(algorithm, PFedLA | PFedLAX):
        alpha = result.alpha
        assert alpha is not None
        assert alpha.shape[1:] == (4, alpha.shape[2], 4)
        assert not alpha[1, 3].any()
        assert alpha[3, 3].any()


def test_what_cannot_be_added_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = stopped(tmp_path, PFedLA())
    text = (folder / "app" / "pfedla.toml").read_text()
    with pytest.raises(ConfigError, match="names a site twice"):
        add_site(folder, "site-1", tmp_path / "run", tmp_path / "wider")
    with pytest.raises(ConfigError, match="must be at most 60 letters and digits"):
        add_site(folder, "../site", tmp_path / "run", tmp_path / "wider")
    with pytest.raises(RunError, match="already holds a complete run"):
        add_site(folder, "site-3", tmp_path / "run", tmp_path / "run")
    (folder / "app" / "pfedla.toml").write_text(text.replace("rounds = 4", "rounds = 2"))
    with pytest.raises(RunError, match=r"has had its 2 rounds: raise schedule\.rounds"):
        add_site(folder, "site-3", tmp_path / "run", tmp_path / "wider")
    (folder / "app" / "pfedla.toml").write_text(text.replace("lr = 0.05", "lr = 0.5"))
    with pytest.raises(RunError, match=r"training\.lr is 0\.5 and was 0\.05"):
        add_site(folder, "site-3", tmp_path / "run", tmp_path / "wider")
    assert not (tmp_path / "wider").exists()
    (folder / "app" / "pfedla.toml").write_text(text)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunError):
        add_site(folder, "site-3", tmp_path / "run", tmp_path / "wider")


def test_a_site_that_is_added_gets_a_key_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    init(folder, ["north", "east"], "server.example.org", 8000)
    config = folder / "app" / "pfedla.toml"
    config.write_text(
        config.read_text().replace("rounds = 10", "rounds = 1").replace("local_epochs = 5", "local_epochs = 1")
    )
    grid = FakeGrid(folder / "app", tmp_path / "state", 0)
    for node, site in enumerate(("north", "east"), 1):
        grid.add(node, folder / "app", tmp_path / "state", site, site)
    data = str(folder / "sites" / "north" / "data.npz")
    code = folder / "app" / "site_code.py"
    code.write_text(code.read_text().replace('"data.npz"', repr(data)))
    made = Deployment.load(folder / "app")
    serve(replace(made, deploy=replace(made.deploy, patience=0.0)), grid, folder / "server" / "run")
    config.write_text(config.read_text().replace("rounds = 1\n", "rounds = 2\n"))
    words = ["--run", str(folder / "server" / "run"), "--out", str(folder / "server" / "run-3")]
    found = CliRunner().invoke(cli, ["deploy", "add-site", str(folder), "south", *words], catch_exceptions=False)
    assert "flwr supernode register ../sites/south/key.pub sites --name south\n" in found.output
    assert "flwr run ../app sites --stream --run-config 'out=\"run-3\" resume=true'\n" in found.output
    place = folder / "sites" / "south"
    assert {path.name for path in place.iterdir()} == {"key", "key.pub", "ca.crt"}
    assert stat.S_IMODE((place / "key").stat().st_mode) == 0o600
    assert (place / "key.pub").read_bytes() != (folder / "sites" / "north" / "key.pub").read_bytes()
    made = Deployment.load(folder / "app")
    assert made.deploy.sites == ("north", "east", "south")
    grid.add(3, folder / "app", tmp_path / "state", "south", "south")
    assert serve(made, grid, folder / "server" / "run-3", resume=True).names == made.deploy.sites


def test_the_command(tmp_path: Path) -> None:
    folder = stopped(tmp_path, PFedLA())
    words = ["deploy", "add-site", str(folder), "site-3", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "w")]
    found = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    assert "goes on with site-3 from round 3" in found.output
    assert "flwr run ../app sites --stream --run-config 'out=\"../w\" resume=true'" in found.output
    assert Deployment.load(folder / "app").deploy.sites[-1] == "site-3"
