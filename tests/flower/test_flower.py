from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors

import pfedla
from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedPer, PFedLA
from pfedla.client import Kept, Setting
from pfedla.errors import RunError
from pfedla.record import RunRecord
from pfedla.result import Result
from pfedla.rounds import Schedule
from pfedla.training import ClientData
from pfedla.wire import decode
from tests import world

pytest.importorskip("flwr")
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.common.serde import message_to_proto  # noqa: E402

from pfedla.flower import FlowerFleet, Roster  # noqa: E402
from pfedla.flower.app import serve  # noqa: E402
from pfedla.flower.deployment import Deployment  # noqa: E402
from pfedla.flower.messages import CALL, field, order, packed, payload  # noqa: E402
from pfedla.flower.messages import answer as said  # noqa: E402
from pfedla.flower.vault import Vault  # noqa: E402
from tests.flower.sites import FakeGrid, deployment, names  # noqa: E402

RUN = "0" * 32
ROUNDS = ([0, 1, 2], [1, 2], [0, 2])
METRICS = ("accuracy", "balanced_accuracy", "loss")


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


def deployed(tmp_path: Path, algorithm: Algorithm[Any], n: int = 3, **settings: Any) -> tuple[Deployment, FakeGrid]:
    """Write a deployment and connect its sites."""
    app = deployment(tmp_path / "app", algorithm, n, **settings)
    return Deployment.load(app), FakeGrid(app, tmp_path / "state", n)


def simulated(deployment: Deployment) -> Result:
    """Run what a deployment does in the simulator."""
    code, experiment = deployment.code(), deployment.experiment
    schedule = experiment.schedule
    return pfedla.run(
        experiment.algorithm,
        code.model,
        [code.data(site) for site in deployment.deploy.sites],
        schedule.rounds,
        training=experiment.training,
        eval_every=schedule.eval_every,
        seed=schedule.seed,
        workers=0,
    )


SHORT = Schedule(seed=3, rounds=3, eval_every=2)


def same_run(one: Result, other: Result) -> None:
    """Compare two runs in all but time, and what only a simulator knows."""
    world.same_outcome(one, other)
    beside = ("seconds", "samples_per_second", "dataset")
    for key in one.summary.keys() - beside:
        assert one.summary[key] == other.summary[key], key


def test_a_deployed_run_leaves_what_a_simulated_one_leaves(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=SHORT, test_seed=9)
    result, expected = serve(made, grid, tmp_path / "run"), simulated(made)
    same_run(result, expected)
    loaded = pfedla.load(tmp_path / "run", model=made.code().model)
    assert loaded.names == ("site-0", "site-1", "site-2")
    same_run(loaded, expected)
    for client in range(3):  # and every site has its own model
        held = load_file(tmp_path / "state" / str(grid.node_of(client)) / "model.safetensors")
        world.same(held, dict(expected.model(client).state_dict()))


def test_the_ledger_counts_what_flower_carries(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=SHORT)
    ledger = serve(made, grid, tmp_path / "run").ledger
    asked = [(question, answer) for question, answer in grid.messages if question.metadata.message_type == "train"]
    down = sum(len(payload(question.content)) for question, _ in asked)
    up = sum(len(payload(answer.content)) for _, answer in asked if answer)
    assert (down, up) == (ledger.down + ledger.overhead_down, ledger.up + ledger.overhead_up)
    sizes = [message_to_proto(message).ByteSize() for pair in asked for message in pair if message]
    assert 0 < sum(sizes) - (down + up) < 600 * len(sizes)  # who, when, which version: a few words more


def test_only_arrays_and_scalars_cross_the_wire_and_nothing_of_the_data(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, examples=False, models=False)
    result = serve(made, grid, tmp_path / "run")
    assert not result.with_models
    words = set()
    for pair in grid.messages:
        for message in (message for message in pair if message):
            for name, record in message.content.items():
                assert isinstance(record, ArrayRecord | ConfigRecord | MetricRecord)
                words |= {f"{name}.{key}" for key in record}
    assert words == {
        *("job.run", "job.client", "job.t", "job.version", "payload.payload"),
        *("answer.fault", "answer.site", "answer.outline", "answer.first", "answer.examples"),
        *(f"{when}.{what}" for when in ("personalized", "after_training") for what in METRICS),
    }
    told = {field(answer.content, "examples", int) for asked, answer in grid.messages if asked.metadata.message_type == CALL and answer}
    assert told == {0}
    uploads = [decode(payload(answer.content), result.spec.names) for asked, answer in grid.messages if asked.metadata.message_type == "train" and answer and result.spec]
    assert {int(upload.examples) for upload in uploads} == {1}
    assert "site-0" in (tmp_path / "run" / "run.json").read_text()


def change_upload(fault: str) -> Any:
    """Return what spoils site-1's upload in round 2."""

    def change(question: Message, answer: Message) -> Message | None:
        if question.metadata.message_type != "train" or order(question.content)[1:3] != (1, 2):
            return answer
        upload = from_safetensors(payload(answer.content))
        if fault == "late":
            return None
        if fault == "error":
            return Message(Error(2, "it broke"), reply_to=question)
        if fault == "nan":
            upload["fc"][0] = torch.nan
        if fault == "shape":
            upload["fc"] = upload["fc"][:-1]
        if fault == "missing":
            del upload["fc"]
        if fault == "absurd":
            upload["fc"] *= 1e9
        records: dict[str, Any] = packed(b"garbage" if fault == "garbage" else to_safetensors(upload))
        if fault == "empty":
            return Message(RecordDict(), reply_to=question)
        return Message(said(records), reply_to=question)

    return change


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("late", "no answer within 0.1 seconds"),
        ("error", "it broke"),
        ("nan", "not finite"),
        ("shape", "fc has the shape"),
        ("missing", "it lacks fc"),
        ("absurd", "times the usual upload"),
        ("garbage", "cannot be read"),
        ("empty", "cannot be read"),
    ],
)
def test_a_bad_answer_is_left_out_and_its_site_comes_back(
    tmp_path: Path, fault: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=SHORT, timeout=0.1)
    grid.change = change_upload(fault)
    ledger = serve(made, grid, tmp_path / "run").ledger.arrays()
    assert any("client 1 is absent from round 2" in text and reason in text for text in caplog.messages)
    up = {(t, client): sizes.sum() for t, client, sizes in zip(ledger["round"], ledger["client"], ledger["up"], strict=True)}
    assert not up[2, 1]
    assert all(size for place, size in up.items() if place != (2, 1))
    versions = Vault(tmp_path / "state" / str(grid.node_of(1)), pfedla_id(tmp_path / "run")).versions()
    assert versions == [1, 3]  # round 2 was never taken


def pfedla_id(run: Path) -> str:
    found: str = RunRecord(run).facts()["id"]
    return found
