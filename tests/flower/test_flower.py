from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load as from_safetensors
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors

import pfedla
from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedFomo, FedPer, PFedLA, PFedLAPeers
from pfedla.client import Kept, Setting, threads
from pfedla.codec import Codec
from pfedla.errors import ConfigError, RunError, plain
from pfedla.layers import LayerSpec
from pfedla.record import RunRecord
from pfedla.result import Result
from pfedla.rounds import Schedule
from pfedla.training import ClientData, Training
from pfedla.wire import decode
from tests import world

pytest.importorskip("flwr")
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import message_to_proto

from pfedla.flower import FlowerFleet, Roster
from pfedla.flower.app import serve
from pfedla.flower.deployment import Deployment
from pfedla.flower.messages import CALL, exchange, field, order, packed, payload
from pfedla.flower.messages import answer as said
from pfedla.flower.roster import outline
from pfedla.flower.site import fault
from pfedla.flower.vault import Vault
from tests.flower.sites import FakeGrid, deployment, names

RUN = "0" * 32
ROUNDS = ([0, 1, 2], [1, 2], [0, 2])
METRICS = ("accuracy", "accuracy_class_prior", "accuracy_known_classes", "loss")


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
            read = Vault(tmp_path / "state" / str(grid.node_of(client)), RUN, f"site-{client}").read(version, found)
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
        participants=schedule.participants,
        eval_every=schedule.eval_every,
        seed=schedule.seed,
        codec=experiment.codec,
        workers=0,
    )


SHORT = Schedule(seed=3, rounds=3, eval_every=2)


def same_run(one: Result, other: Result) -> None:
    """Compare two runs in all but time, and what only a simulator knows."""
    world.same_outcome(one, other)
    beside = ("seconds", "samples_per_second", "dataset", "accuracy_weighted", "few_test_samples")
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


CODECS = [
    *(Codec(up=name) for name in ("float16", "bfloat16", "int8", "int4", "top-k", "random-k")),
    *(Codec(down=name) for name in ("float16", "bfloat16", "int8", "int4")),
    Codec("int8", "int4"),
]


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.up}-{codec.down}")
def test_codecs_give_the_same_over_flower_as_in_the_simulator(tmp_path: Path, codec: Codec) -> None:
    schedule = Schedule(seed=3, rounds=4, eval_every=2, participants=2)
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=schedule, test_seed=9, codec=codec)
    grid.change = lambda question, answer: None if at(question, 3) else answer
    made = replace(made, deploy=replace(made.deploy, timeout=0.1, tries=1))
    with pytest.raises(RunError, match="round 3"):  # so that sites go on with what they owe from their disks
        serve(made, grid, tmp_path / "run")
    grid.change = lambda _, answer: answer
    same_run(serve(made, grid, tmp_path / "run", resume=True), simulated(made))


WIDE = """
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Note(nn.Module):
    def forward(self, x):
        Path(__file__).with_name("threads").write_text(str(torch.get_num_threads()))
        return x


def model():  # large enough for torch to share its sums among threads
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 28 * 28, 3)]
    return nn.Sequential(Note(), *layers)


def data(site):
    rng = np.random.default_rng(int(site.removeprefix("site-")))
    return rng.normal(size=(40, 1, 28, 28)).astype(np.float32), rng.integers(0, 3, 40)
"""


def test_a_sites_cores_do_not_change_its_result(tmp_path: Path) -> None:
    training = Training(local_epochs=1, batch_size=14, lr=0.05)
    schedule, codec = Schedule(seed=3, rounds=1), Codec(up="int8")
    made, grid = deployed(tmp_path, PFedLA(), 2, schedule=schedule, training=training, codec=codec)
    (tmp_path / "app" / "site_code.py").write_text(WIDE)
    used = tmp_path / "app" / "threads"
    with threads(2):
        expected = simulated(made)
        same_run(serve(made, grid, tmp_path / "run"), expected)
        assert used.read_text() == "1"
        for config in grid.nodes.values():
            config["threads"] = 2  # their owners' choice
        serve(made, grid, tmp_path / "faster")
    assert used.read_text() == "2"
    grid.nodes[grid.node_of(0)]["threads"] = 0
    with pytest.raises(RunError, match=r"a node cannot take part: --node-config: threads = 0 must be a whole number"):
        serve(made, grid, tmp_path / "none")


def test_the_ledger_counts_what_flower_carries(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=SHORT)
    ledger = serve(made, grid, tmp_path / "run").ledger
    asked = [(question, answer) for question, answer in grid.messages if question.metadata.message_type == "train"]
    down = sum(len(payload(question.content)) for question, _ in asked)
    up = sum(len(payload(answer.content)) for _, answer in asked if answer)
    assert (down, up) == (ledger.down + ledger.overhead_down, ledger.up + ledger.overhead_up)
    for message in (message for pair in asked for message in pair if message):
        more = message_to_proto(message).ByteSize() - len(payload(message.content))
        assert 0 < more < 600  # who, when, which version: a few words


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
        *("job.run", "job.client", "job.t", "job.version", "job.site", "job.software", "job.model", "payload.payload"),
        *("answer.fault", "answer.site", "answer.outline", "answer.first", "answer.examples", "answer.version"),
        *(f"{when}.{what}" for when in ("personalized", "after_training") for what in METRICS),
    }
    told = {
        field(answer.content, "examples", int)
        for asked, answer in grid.messages
        if asked.metadata.message_type == CALL and answer
    }
    assert told == {0}
    uploads = [
        decode(payload(answer.content), result.spec.names)
        for asked, answer in grid.messages
        if asked.metadata.message_type == "train" and answer and result.spec
    ]
    assert {int(upload.examples) for upload in uploads} == {1}
    assert "site-0" in (tmp_path / "run" / "run.json").read_text()


def test_uploads_are_clipped_and_noised_at_the_sites(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    seen: list[dict[int, torch.Tensor]] = []
    for noise in ("", "noise = 2.0", "noise = 2.0"):
        here = tmp_path / str(len(seen))
        app = deployment(here / "app", PFedLA(), 3, schedule=SHORT, models=False)
        with (app / "pfedla.toml").open("a") as file:
            file.write(f"\n[privacy]\nclip = 0.01\n{noise}\n")
        grid = FakeGrid(app, here / "state", 3)
        result = serve(Deployment.load(app), grid, here / "run")
        told = [answer for asked, answer in grid.messages if asked.metadata.message_type == CALL and answer]
        assert {field(answer.content, "examples", int) for answer in told} == {0}
        assert result.summary["uploads_per_client"] == SHORT.rounds
        assert (result.summary["epsilon"] is not None) == bool(noise)
        seen.append({})
        for asked, answer in grid.messages:
            if asked.metadata.message_type == "train" and answer and result.spec and order(asked.content).t == 1:
                upload = decode(payload(answer.content), result.spec.names)
                assert upload.examples.tolist() == [1]
                assert not upload.layers["bn#stats"].any()
                sent = torch.cat([upload.layers[name] for name in result.spec.names], 1)
                seen[-1][order(asked.content).client] = sent
    plain, noised, again = seen
    for client, change in plain.items():
        torch.testing.assert_close(change.norm(), torch.tensor(0.01))
        assert abs(float((noised[client] - change).std()) / 0.02 - 1) < 0.2
        assert not torch.equal(noised[client], again[client])  # the seed is the same, and does not decide it
    with (tmp_path / "0" / "app" / "pfedla.toml").open() as file:
        text = file.read()
    (tmp_path / "0" / "app" / "pfedla.toml").write_text(text.replace("models = false", "models = true"))
    with pytest.raises(ConfigError, match=r"deploy.models = true would send the server models"):
        Deployment.load(tmp_path / "0" / "app")


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
    assert any("client site-1 is absent from round 2" in text and reason in text for text in caplog.messages)
    up = {
        (t, client): sizes.sum()
        for t, client, sizes in zip(ledger["round"], ledger["client"], ledger["up"], strict=True)
    }
    assert not up[2, 1]
    assert all(size for place, size in up.items() if place != (2, 1))
    versions = Vault(tmp_path / "state" / str(grid.node_of(1)), pfedla_id(tmp_path / "run"), "site-1").versions()
    assert versions == [1, 3]  # round 2 was never taken


def pfedla_id(run: Path) -> str:
    found: str = RunRecord(run).facts()["id"]
    return found


def test_too_few_answers_repeat_the_round_then_stop_it_and_the_run_is_resumed(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=SHORT, test_seed=9, timeout=0.1, fewest=3, tries=2)
    asked: list[tuple[int, int]] = []

    def silent(question: Message, answer: Message) -> Message | None:
        if question.metadata.message_type == "train":
            asked.append(order(question.content)[1:3])
        return None if asked and asked[-1] == (1, 2) else answer

    grid.change = silent
    with pytest.raises(RunError, match=r"round 2: only 2 of 3 sites answered, deploy.fewest is 3 \(site-1: no answer"):
        serve(made, grid, tmp_path / "run")
    assert asked.count((1, 2)) == 2  # repeated with who was missing
    assert asked.count((0, 2)) == 1
    assert RunRecord(tmp_path / "run").state == "failed"
    grid.change = lambda _, answer: answer
    same_run(serve(made, grid, tmp_path / "run", resume=True), simulated(made))


@pytest.mark.parametrize("fault", ["nan", "absurd", "missing"])
def test_answers_that_are_refused_do_not_count(tmp_path: Path, fault: str) -> None:
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=SHORT, test_seed=9, timeout=0.1, fewest=3, tries=2)
    spoil, spoiled = change_upload(fault), list[int]()

    def once(question: Message, answer: Message) -> Message:
        changed: Message = answer if spoiled else spoil(question, answer)
        spoiled.extend([1] * (changed is not answer))
        return changed

    grid.change = once
    same_run(serve(made, grid, tmp_path / "run"), simulated(made))  # asked again, the site sends what can be used
    asked = [order(question.content)[1:3] for question, _ in grid.messages if at(question, 2)]
    assert asked == [(0, 2), (1, 2), (2, 2), (1, 2)]

    grid.change, grid.messages = spoil, []
    with pytest.raises(RunError, match=r"round 2: only 2 of 3 sites answered, deploy.fewest is 3 \(site-1: .*resumed"):
        serve(made, grid, tmp_path / "again")
    assert [order(question.content).client for question, _ in grid.messages if at(question, 2)] == [0, 1, 2, 1]
    assert RunRecord(tmp_path / "again").state == "failed"
    grid.change = lambda _, answer: answer
    same_run(serve(made, grid, tmp_path / "again", resume=True), simulated(made))


def test_a_site_that_comes_later_takes_part_from_then_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, fewest=2)
    late = grid.nodes.pop(grid.node_of(2))

    def join(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "train" and order(question.content).t == 2:
            grid.nodes[grid.node_of(2)] = late
        return answer

    grid.change = join
    up = serve(made, grid, tmp_path / "run").ledger.arrays()
    took = {
        (t, client): bool(sizes.sum()) for t, client, sizes in zip(up["round"], up["client"], up["up"], strict=True)
    }
    assert [took[t, 2] for t in (1, 2, 3)] == [False, False, True]
    assert "the run starts without site-2" in caplog.text


def test_a_node_that_does_not_say_who_it_is_holds_nobody_up(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, fewest=2, timeout=600)

    def silent(question: Message, answer: Message) -> Message | None:
        metadata = question.metadata
        return None if metadata.message_type == CALL and metadata.dst_node_id == grid.node_of(2) else answer

    grid.change = silent
    up = serve(made, grid, tmp_path / "run").ledger.arrays()
    assert {int(client) for client, sizes in zip(up["client"], up["up"], strict=True) if sizes.any()} == {0, 1}
    asked = [question.metadata.dst_node_id for question, _ in grid.messages if question.metadata.message_type == CALL]
    assert sorted(asked) == sorted(grid.nodes)  # once each


def test_the_server_goes_back_to_an_earlier_checkpoint_and_the_sites_with_it(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=SHORT, test_seed=9, fewest=3, timeout=0.1, tries=1)
    grid.change = lambda question, answer: None if at(question, 3) else answer
    with pytest.raises(RunError, match="round 3"):
        serve(made, grid, tmp_path / "run")
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"damaged")  # that of round 2; there is that of round 1
    grid.change = lambda _, answer: answer
    same_run(serve(made, grid, tmp_path / "run", resume=True), simulated(made))


def at(question: Message, t: int) -> bool:
    return question.metadata.message_type == "train" and order(question.content).t == t


@pytest.mark.parametrize(
    "method", [PFedLA(retain=1), PFedLAPeers(retain=1, peers=2), FedPer()], ids=["pfedla", "pfedla-peers", "fedper"]
)
def test_a_site_that_lost_its_disk_is_sent_what_the_server_knows(tmp_path: Path, method: Algorithm[Any]) -> None:
    made, grid = deployed(tmp_path, method, schedule=Schedule(seed=3, rounds=4, eval_every=4), test_seed=9)

    def lose(question: Message, answer: Message) -> Message:
        if at(question, 2) and order(question.content).client == 2:
            shutil.rmtree(tmp_path / "state" / str(grid.node_of(0)))
        return answer

    grid.change = lose
    up = serve(made, grid, tmp_path / "run").ledger.arrays()
    took = {
        (t, client): bool(sizes.sum()) for t, client, sizes in zip(up["round"], up["client"], up["up"], strict=True)
    }
    assert [took[t, 0] for t in (1, 2, 3, 4)] == [True, True, False, True]
    sent = [decode(payload(q.content), made.setting(made.code()).spec.names).sent for q, _ in grid.messages if at(q, 4)]
    mine, others = sent[0], sent[1:]
    if isinstance(method, PFedLA | PFedLAPeers):  # all of it, the retained layer among it
        assert mine.all()
        assert all(not other.all() for other in others)
    else:  # the head never left it: it begins anew
        assert all(torch.equal(mine, other) for other in others)


def test_a_lost_disk_stops_a_run_that_needs_everybody_and_it_is_resumed(tmp_path: Path) -> None:
    schedule = Schedule(seed=3, rounds=3, eval_every=3)  # an evaluation would find it out before the round
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=schedule, fewest=3, timeout=0.1, tries=2)

    def lose(question: Message, answer: Message) -> Message:
        if at(question, 2) and order(question.content).client == 2:
            shutil.rmtree(tmp_path / "state" / str(grid.node_of(0)))
        return answer

    grid.change = lose
    with pytest.raises(RunError, match=r"round 3: only 2 of 3 .*site-0: it does not have what it kept after round 2"):
        serve(made, grid, tmp_path / "run")
    grid.change = lambda _, answer: answer
    assert serve(made, grid, tmp_path / "run", resume=True).ledger.arrays()["up"].sum(1).all()


def test_a_site_that_is_away_at_the_end_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=SHORT, test_seed=9, timeout=0.1, tries=2)
    kind, lost = "query.personalize", list[int]()

    def lose(question: Message, answer: Message) -> Message | None:
        if question.metadata.message_type != kind or lost:
            return answer
        lost.append(order(question.content).client)
        return None

    grid.change = lose
    same_run(serve(made, grid, tmp_path / "run"), simulated(made))
    asked = [order(question.content).client for question, _ in grid.messages if question.metadata.message_type == kind]
    assert asked == [0, 1, 2, 0]
    assert "asked again (site-0: no answer within 0.1 seconds)" in caplog.text

    grid.change, grid.messages = lambda q, answer: None if q.metadata.message_type == kind else answer, []
    result = serve(made, grid, tmp_path / "none")  # the run is complete, and says who lacks a model
    asked = [order(question.content).client for question, _ in grid.messages if question.metadata.message_type == kind]
    assert asked == [0, 1, 2] * 2
    assert not result.with_models
    assert "client site-2 did not send its personalized model: no answer within 0.1 seconds" in caplog.text


def test_after_a_restart_the_server_asks_who_still_has_what_it_kept(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=SHORT, fewest=3, timeout=0.1, tries=1)
    grid.change = lambda question, answer: None if at(question, 3) else answer
    with pytest.raises(RunError, match="round 3"):
        serve(made, grid, tmp_path / "run")
    shutil.rmtree(tmp_path / "state" / str(grid.node_of(0)))
    grid.change = lambda _, answer: answer
    ledger = serve(made, grid, tmp_path / "run", resume=True).ledger.arrays()
    assert ledger["up"].sum(1).all()  # everybody answered in every round


def changed(tmp_path: Path, **settings: Any) -> Path:
    return deployment(tmp_path / "other", PFedLA(), 3, **settings)


def test_who_is_no_site_of_ours_is_refused(tmp_path: Path) -> None:
    def refused(match: str, node: int, app: Path, name: str, key: str = "", **settings: Any) -> None:
        made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, **settings)
        for client in range(3):
            grid.registered[grid.node_of(client)] = f"site-{client}"
        grid.add(node, app, tmp_path / "state", name, key)
        with pytest.raises(RunError, match=match):
            serve(made, grid, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    app, node = tmp_path / "app", 993  # 993 is site-1's
    refused("an unknown site, 'site-9', is there", 5, app, "site-9")
    refused("there are two nodes of the name site-1", 2000, app, "site-1")
    refused(
        "calls itself site-1, but its key is registered as 'site-2'", node, app, "site-1", "site-2", registered=True
    )
    refused("its key is not registered under a name", node, app, "site-1", registered=True)
    refused(
        r"site-1 has another model than the server: bn has nothing there", node, changed(tmp_path, net="mlp"), "site-1"
    )


@pytest.mark.parametrize("where", ["import", "data"])
def test_a_site_that_cannot_take_part_is_left_out_and_its_words_stay_with_it(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, fewest=2)
    other, code = changed(tmp_path), (tmp_path / "app" / "site_code.py").read_text()
    words = "def data(site):\n    raise OSError('secret')" if where == "data" else "raise OSError('secret')"
    (other / "site_code.py").write_text(code.replace("def data(site):", words))
    grid.apps[grid.node_of(1)] = other
    up = serve(made, grid, tmp_path / "run").ledger.arrays()
    assert {int(client) for client, sizes in zip(up["client"], up["up"], strict=True) if sizes.any()} == {0, 2}
    why = "its code, data or model cannot be used; its own log says why"
    assert f"client site-1 is absent from round 1: it cannot take part: {why}" in caplog.text
    for _, answer in grid.messages:
        assert answer is not None
        assert b"secret" not in message_to_proto(answer).SerializeToString()
    strict = replace(made, deploy=replace(made.deploy, fewest=3))
    with pytest.raises(RunError, match=rf"only 2 of 3 sites came .* absent: site-1 \(it cannot take part: {why}"):
        serve(strict, grid, tmp_path / "none")


def test_a_fault_at_a_site_that_passes_does_not_bar_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.flower.roster.AGAIN", 0.0)
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, fewest=2)
    calls = list[int]()

    def broken_once(question: Message, answer: Message) -> Message:
        metadata = question.metadata
        if metadata.message_type == CALL and metadata.dst_node_id == grid.node_of(1):
            calls.append(1)
            if len(calls) == 1:
                return Message(fault("its disk is busy", "site-1"), reply_to=question)
        return answer

    grid.change = broken_once
    up = serve(made, grid, tmp_path / "run").ledger.arrays()
    assert [bool(up["up"][(up["round"] == t) & (up["client"] == 1)].any()) for t in (1, 2, 3)] == [True] * 3


def test_a_site_of_another_version_and_frozen_layers_of_another_shape_are_refused(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT)

    def older(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == CALL:
            answer.content["answer"]["version"] = "0.0.1"
        return answer

    grid.change = older
    with pytest.raises(RunError, match=r"site site-0 has version '0\.0\.1' of pfedla"):
        serve(made, grid, tmp_path / "run")
    frozen = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    frozen[0].requires_grad_(False)
    wider = torch.nn.Sequential(torch.nn.Linear(4, 8, dtype=torch.float64), torch.nn.Linear(8, 2))
    wider[0].requires_grad_(False)
    assert outline(LayerSpec.of(frozen), frozen) != outline(LayerSpec.of(wider), wider)


def test_a_site_with_another_key_than_before_is_refused_unless_the_operator_knows(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, fewest=3, timeout=0.1, tries=1, registered=True)
    for client in range(3):
        grid.registered[grid.node_of(client)] = f"site-{client}"
    grid.change = lambda question, answer: None if at(question, 3) else answer
    with pytest.raises(RunError, match="round 3"):
        serve(made, grid, tmp_path / "run")
    grid.change = lambda _, answer: answer
    moved = grid.nodes.pop(grid.node_of(1))
    grid.nodes[2**64 - 5], grid.apps[2**64 - 5] = moved, grid.apps[grid.node_of(1)]
    grid.registered[2**64 - 5] = "site-1"
    with pytest.raises(RunError, match="site site-1 has another key than before"):
        serve(made, grid, tmp_path / "run", resume=True)
    late = grid.nodes.pop(2**64 - 5)

    def join(question: Message, answer: Message) -> Message:  # it comes after the server has looked
        if at(question, 3):
            grid.nodes[2**64 - 5] = late
        return answer

    grid.change = join
    flexible = replace(made, deploy=replace(made.deploy, fewest=2, timeout=5.0))
    up = serve(flexible, grid, tmp_path / "run", resume=True).ledger.arrays()
    assert not up["up"][(up["round"] == 3) & (up["client"] == 1)].any()
    asked = [question.metadata.dst_node_id for question, _ in grid.messages if question.metadata.message_type != CALL]
    assert 2**64 - 5 not in asked
    longer = replace(made, experiment=replace(made.experiment, schedule=replace(SHORT, rounds=4)))
    with pytest.raises(RunError, match="site site-1 has another key than before"):
        serve(longer, grid, tmp_path / "run", resume=True)
    up = serve(longer, grid, tmp_path / "run", resume=True, accept=True).ledger.arrays()
    assert up["up"][(up["round"] == 4) & (up["client"] == 1)].any()


def test_a_checkpoint_older_than_what_sites_keep_is_not_gone_on_with_unasked(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, FedPer(), schedule=Schedule(seed=3, rounds=6, eval_every=6), test_seed=9, fewest=3)
    early = tmp_path / "early"

    def copy(question: Message, answer: Message) -> Message:
        if at(question, 2) and not early.exists():  # the checkpoint of round 1
            shutil.copytree(tmp_path / "run", early)
        return answer

    grid.change = copy
    serve(made, grid, tmp_path / "run")
    kept = Vault(tmp_path / "state" / str(grid.node_of(0)), pfedla_id(tmp_path / "run"), "site-0")
    assert kept.versions() == [3, 4, 5, 6]
    with pytest.raises(RunError, match=r"do not have what this checkpoint takes them to keep \(site-0: it does not"):
        serve(made, grid, early, resume=True)
    assert kept.versions() == [3, 4, 5, 6]
    state = tmp_path / "state" / str(grid.node_of(1)) / pfedla_id(early)
    shutil.copy(state / "round-00000006.safetensors", state / "round-00000001.safetensors")  # one has it, others newer
    with pytest.raises(RunError, match=r"takes them to keep \(site-0"):
        serve(made, grid, early, resume=True)
    serve(made, grid, early, resume=True, accept=True)


@pytest.mark.parametrize("more", [0, 2])
def test_a_complete_run_that_cannot_be_resumed_stays_complete(tmp_path: Path, more: int) -> None:
    made, grid = deployed(tmp_path, FedPer(), schedule=SHORT, test_seed=9)
    expected = serve(made, grid, tmp_path / "run")
    shutil.rmtree(tmp_path / "state")
    longer = replace(SHORT, rounds=SHORT.rounds + more)
    again = replace(made, experiment=replace(made.experiment, schedule=longer))
    with pytest.raises(RunError, match="do not have what this checkpoint takes them to keep"):
        serve(again, grid, tmp_path / "run", resume=True)
    assert RunRecord(tmp_path / "run").state == "done"
    same_run(pfedla.load(tmp_path / "run", model=made.code().model), expected)


def test_models_of_a_shorter_run_are_not_taken_for_those_of_a_longer_one(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, test_seed=9, timeout=0.1, tries=1)
    serve(made, grid, tmp_path / "run")

    def away(question: Message, answer: Message) -> Message | None:
        mine = question.metadata.dst_node_id == grid.node_of(1)
        return None if mine and question.metadata.message_type == "query.personalize" else answer

    grid.change = away
    longer = replace(made, experiment=replace(made.experiment, schedule=replace(SHORT, rounds=5)))
    serve(longer, grid, tmp_path / "run", resume=True)
    assert pfedla.load(tmp_path / "run", model=made.code().model).with_models == [0, 2]


def test_two_sites_cannot_share_a_state_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, grid = deployed(tmp_path, FedPer(), schedule=SHORT, test_seed=9, fewest=2, models=False)
    for config in grid.nodes.values():
        config["state"] = str(tmp_path / "shared")
    with pytest.raises(RunError, match="its state folder is another site's: every site needs one of its own"):
        serve(made, grid, tmp_path / "run")
    alone = replace(made, deploy=replace(made.deploy, fewest=1))
    serve(alone, grid, tmp_path / "alone")
    with safe_open(tmp_path / "shared" / "model.safetensors", "pt") as file:
        assert file.metadata()["site"] == (tmp_path / "shared" / "site").read_text()


def test_a_complete_run_is_resumed_to_hand_out_its_models_or_to_go_on(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(retain=1), schedule=SHORT, test_seed=9, timeout=0.1, tries=1)
    grid.change = lambda q, answer: None if q.metadata.message_type == "query.personalize" else answer
    serve(made, grid, tmp_path / "run")
    held = tmp_path / "state" / str(grid.node_of(1)) / "model.safetensors"
    held.unlink()
    grid.change = lambda _, answer: answer
    same_run(serve(made, grid, tmp_path / "run", resume=True), simulated(made))
    with safe_open(held, "pt") as file:
        assert file.metadata() == {"site": "site-1", "run": pfedla_id(tmp_path / "run"), "round": "3"}
    assert (held.parent / pfedla_id(tmp_path / "run") / "model.safetensors").read_bytes() == held.read_bytes()
    longer = replace(made, experiment=replace(made.experiment, schedule=replace(SHORT, rounds=5)))
    same_run(serve(longer, grid, tmp_path / "run", resume=True), simulated(longer))


@pytest.mark.parametrize("fault", ["type", "finite"])
def test_a_model_that_is_none_is_not_taken(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, test_seed=9, timeout=0.1, tries=1)

    def spoil(question: Message, answer: Message) -> Message:
        if question.metadata.message_type != "query.personalize" or order(question.content).client:
            return answer
        model = from_safetensors(payload(answer.content))
        model["fc"] = model["fc"].to(torch.int8) if fault == "type" else model["fc"] * torch.inf
        return Message(said(packed(to_safetensors(model))), reply_to=question)

    grid.change = spoil
    result, expected = serve(made, grid, tmp_path / "run"), simulated(made)
    assert "client site-0 did not send its personalized model: its answer cannot be read: fc is" in caplog.text
    for key, rows in expected.personalized.items():
        assert torch.equal(result.personalized[key][1:], rows[1:])


def test_scores_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, test_seed=9)

    def boast(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "evaluate":
            scores, client = answer.content["personalized"], order(question.content).client
            if client == 0:
                scores["accuracy"] = 1e300
            if client == 1:
                scores["invented"], scores["loss"] = 1.0, float("inf")
        return answer

    grid.change = boast
    history = serve(made, grid, tmp_path / "run").history
    for line, expected in zip(history, simulated(made).history, strict=True):
        assert line["clients"]["accuracy"] == [None, *expected["clients"]["accuracy"][1:]]
        assert line["clients"]["loss"][1] is None
        assert "invented" not in line["clients"]


def test_sites_may_keep_their_scores_to_themselves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pfedla")
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, test_seed=9, scores=False)
    result, expected = serve(made, grid, tmp_path / "run"), simulated(made)
    for key, rows in expected.personalized.items():
        assert torch.equal(result.personalized[key], rows)
    for _, answer in grid.messages:
        assert answer is not None
        assert not any(isinstance(record, MetricRecord) and record for record in answer.content.values())
    for line in pfedla.load(tmp_path / "run", model=made.code().model).history:
        assert line["accuracy_mean"] is None
        assert not line["clients"]
    scores = expected.history[-1]["clients"]["accuracy"]
    assert [f"after round 3, on this site's test data: accuracy {score:.4f}" in caplog.text for score in scores] == [
        True
    ] * 3


def test_a_reply_that_flower_cannot_unpack_is_its_sites_fault_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, timeout=0.1)
    pull = grid.pull_messages

    def broken(messages: Any) -> Any:
        found = list(pull(messages))
        for question, answer in grid.messages:
            if answer in found and at(question, 2) and order(question.content).client == 1:
                raise ValueError("\x1b[31mno array")
        return found

    grid.pull_messages = broken  # type: ignore[method-assign,assignment]
    serve(made, grid, tmp_path / "run")
    assert "client site-1 is absent from round 2: its answer cannot be read: ValueError" in caplog.text


def test_what_strangers_say_obeys_nobody() -> None:
    assert plain("a\nb\x1b[31m\u202ec" + "d" * 600) == "a b [31m c" + "d" * 490


def test_steps_tell_the_number_of_examples(tmp_path: Path, algorithm: Algorithm[Any]) -> None:
    """A method either sends the same whatever the number of steps and examples, or is refused."""
    methods = [algorithm, PFedLA(hyper_optimizer="mean-sgd")] if isinstance(algorithm, PFedLA) else [algorithm]
    for number, method in enumerate(methods):
        made, grid = deployed(tmp_path / str(number), method, schedule=replace(SHORT, rounds=1), examples=False)
        beside = set(method.uploads_beside)
        if beside and not isinstance(method, FedFomo):
            with pytest.raises(
                ConfigError, match=rf"examples = false: {type(method).__name__} uploads .*{min(beside)}"
            ):
                serve(made, grid, tmp_path / "run")
            continue
        names = serve(made, grid, tmp_path / "run" / str(number)).names
        assert json.loads((tmp_path / "run" / str(number) / "run.json").read_text())["samples"] == [[0, 0]] * len(names)
        for question, answer in grid.messages:
            if question.metadata.message_type == "train" and answer:
                upload = from_safetensors(payload(answer.content))
                assert int(upload.get("#examples", torch.ones(1))) == 1


def test_a_node_that_has_become_another_site_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, fewest=2)

    def swap(question: Message, answer: Message) -> Message:
        if at(question, 1) and order(question.content).client == 2:
            grid.nodes[grid.node_of(1)] = grid.nodes[grid.node_of(2)] | {"state": str(tmp_path / "state" / "other")}
        return answer

    grid.change = swap
    up = serve(made, grid, tmp_path / "run").ledger.arrays()
    assert [bool(up["up"][(up["round"] == t) & (up["client"] == 1)].any()) for t in (1, 2, 3)] == [True, False, False]
    assert "absent from round 2: its SuperNode is now site-2's, and was site-1's before" in caplog.text


@pytest.mark.parametrize("what", ["version", "model"])
def test_a_site_that_is_another_than_it_was_when_it_was_let_in_is_absent(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, fewest=2, timeout=0.1, tries=1)

    def changed(question: Message, answer: Message) -> Message:
        if at(question, 1) and order(question.content).client == 2:
            if what == "version":
                monkeypatch.setattr("pfedla.flower.site.__version__", "9.9.9")
            else:
                monkeypatch.setattr("pfedla.flower.site.outline", lambda *_: "{}")
        return answer

    grid.change = changed
    with pytest.raises(RunError, match="only 0 of 3 sites answered"):  # all of them are in this process
        serve(made, grid, tmp_path / "run")
    said = {
        "version": "it has version 9.9.9 of pfedla by now, and the server",
        "model": "its model is not the server's",
    }
    assert said[what] in caplog.text


def test_an_outline_that_cannot_be_read_is_a_refusal(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, fewest=2)
    key, told = "\x1b[2J" * 1000, "[" * 100_000

    def strange(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == CALL and question.metadata.dst_node_id == grid.node_of(1):
            answer.content["answer"]["outline"] = told
        return answer

    grid.change = strange
    with pytest.raises(RunError, match="site site-1 has another model than the server: it cannot be read"):
        serve(made, grid, tmp_path / "run")
    told = json.dumps({"slots": {key: [["weight", [2]]]}})
    with pytest.raises(RunError) as found:
        serve(made, grid, tmp_path / "run")
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 600


def test_a_messages_life_begins_when_it_is_sent() -> None:
    made, pushed = list[int](), list[int]()

    class Slow:
        def push_messages(self, messages: list[Any]) -> list[str]:
            pushed.append(len(made))
            return []

    def make(key: int) -> Any:
        made.append(key)
        return SimpleNamespace(metadata=SimpleNamespace(dst_node_id=key))

    grid: Any = Slow()
    exchange(grid, [4, 5, 6], make, 0.0)
    assert (made, pushed) == ([4, 5, 6], [1, 2, 3])


def test_a_disk_that_cannot_be_read_now_has_lost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = world.setting(PFedLA()).enroll()
    vault = Vault(tmp_path, RUN, "north")
    vault.write(1, kept, taken=0)

    def busy(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("pfedla.flower.vault.load_file", busy)
        with pytest.raises(RunError, match="it cannot read what it kept: Input/output error"):
            vault.read(1, kept)
    with monkeypatch.context() as patch:

        def denied(*_: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        patch.setattr(Path, "open", denied)
        with pytest.raises(RunError, match="it cannot read what it kept: Permission denied"):
            vault.read(1, kept)
    assert vault.read(1, kept) is not None
    assert vault.read(2, kept) is None


def test_a_site_is_held_to_its_test_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vault = Vault(tmp_path, RUN, "north")
    vault.hold_to("a")
    vault.hold_to("a")
    with pytest.raises(RunError, match="its test samples are not those that it began the run with"):
        vault.hold_to("b")
    (record,) = caplog.records
    assert f"delete {tmp_path / RUN / 'tested-on'} to go on with these" in record.getMessage()
    (tmp_path / RUN / "tested-on").unlink()
    vault.hold_to("b")
    assert (tmp_path / RUN).stat().st_mode & 0o777 == 0o700


def test_a_site_whose_rows_are_in_another_order_is_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, fewest=2, timeout=0.1, tries=1)
    site, turned = f"{grid.node_of(1)}", list[str]()

    def turn(question: Message, answer: Message) -> Message:
        if at(question, 2) and not turned:
            path = tmp_path / "state" / site / pfedla_id(tmp_path / "run") / "tested-on"
            turned.append(path.read_text())
            path.write_text("of other rows")
        return answer

    grid.change = turn
    serve(made, grid, tmp_path / "run")
    assert len(turned) == 1
    assert " targets, " in turned[0]
    assert "its test samples are not those that it began the run with" in caplog.text


def test_what_sites_tell_is_changed_on_resuming_only_if_that_is_accepted(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, scores=False, models=False)
    serve(made, grid, tmp_path / "run")
    other, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, scores=False, models=True)
    with pytest.raises(RunError, match=r"another deploy\.models: sites were told what leaves them"):
        serve(other, grid, tmp_path / "run", resume=True)
    serve(other, grid, tmp_path / "run", resume=True, accept=True)


def test_a_node_that_is_refused_during_a_run_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted SuperNode without a key is another node, and Flower takes the old one to be there for a while."""
    monkeypatch.setattr("pfedla.flower.roster.AGAIN", 0.0)
    schedule = Schedule(seed=3, rounds=4, eval_every=4)
    made, grid = deployed(tmp_path, PFedLA(), schedule=schedule, fewest=2, timeout=0.1)
    old, new = grid.node_of(1), 2000

    def restart(question: Message, answer: Message) -> Message | None:
        if at(question, 1) and new not in grid.nodes:
            grid.add(new, grid.apps[old], tmp_path / "state", "site-1")
            grid.nodes[new] = grid.nodes[old]
        if at(question, 3) and order(question.content).client == 2:
            del grid.nodes[old]
        return None if question.metadata.dst_node_id == old and at(question, 2) else answer

    grid.change = restart
    up = serve(made, grid, tmp_path / "run").ledger.arrays()
    took = [bool(up["up"][(up["round"] == t) & (up["client"] == 1)].any()) for t in (1, 2, 3, 4)]
    assert took == [True, False, True, True]
    assert caplog.text.count("node 2000 is refused: there are two nodes of the name site-1") == 1  # and not every time


def test_what_a_supernode_cannot_say_is_refused(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT)
    grid.nodes[grid.node_of(1)]["sate"] = "elsewhere"
    with pytest.raises(RunError, match="unknown setting in --node-config 'sate': did you mean 'state'"):
        serve(made, grid, tmp_path / "run")


LINE = """
import numpy as np
from torch import nn


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def data(site):
    rng = np.random.default_rng(int(site.removeprefix("site-")))
    x = rng.normal(size=(20, 3)).astype(np.float32)
    return x, x[:, :1] * 2, x[:5], x[:5, :1] * 2
"""


def test_other_objectives_are_scored_at_the_sites_too(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT)
    (tmp_path / "app" / "site_code.py").write_text(LINE)
    with (tmp_path / "app" / "pfedla.toml").open("a") as file:
        file.write('\n[objective]\nname = "regression"\n')
    made = Deployment.load(tmp_path / "app")
    history = serve(made, grid, tmp_path / "run").history
    code, objective = made.code(), made.experiment.objective
    clients = [code.data(site) for site in made.deploy.sites]
    how: dict[str, Any] = {"training": made.experiment.training, "eval_every": 2, "seed": 3, "workers": 0}
    expected = pfedla.run(PFedLA(), code.model, clients, 3, objective=objective, **how)
    assert [line["clients"] for line in history] == [line["clients"] for line in expected.history]
    assert objective.headline in history[-1]["clients"]


def test_an_upload_of_many_models_is_not_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, timeout=0.1)

    def bloat(question: Message, answer: Message) -> Message:
        return Message(said(packed(bytes(2**21))), reply_to=question) if at(question, 2) else answer

    grid.change = bloat
    with pytest.raises(RunError, match="round 2: only 0 of 3 sites answered"):
        serve(made, grid, tmp_path / "run")
    assert "it has 2,097,152 bytes" in caplog.text


def test_changed_settings_and_other_sites_are_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    made, grid = deployed(tmp_path, PFedLA(), schedule=SHORT, fewest=3, timeout=0.1, tries=1)
    grid.change = lambda question, answer: None if at(question, 2) else answer
    with pytest.raises(RunError, match="round 2"):
        serve(made, grid, tmp_path / "run")
    other, _ = deployed(tmp_path, PFedLA(retain=1), schedule=SHORT)
    with pytest.raises(RunError, match=r"algorithm.retain is 1 and was 0"):
        serve(other, grid, tmp_path / "run", resume=True)


def test_what_a_site_keeps_is_written_whole_and_what_is_damaged_is_not_taken(tmp_path: Path) -> None:
    made = world.setting(PFedLA())
    vault, kept = Vault(tmp_path, RUN, "north"), made.enroll()
    for t in range(1, 7):
        vault.write(t, kept._replace(rounds=torch.tensor([t])), taken=t - 1)
    assert vault.versions() == [3, 4, 5, 6]  # the newest, what it was trained from, and two before that
    found = vault.read(6, kept)
    assert found is not None
    world.same(found, kept._replace(rounds=torch.tensor([6])))
    assert vault.read(2, kept) is None
    (tmp_path / RUN / "round-00000005.safetensors.99.part").touch()  # of a process that was killed
    vault.write(6, kept._replace(rounds=torch.tensor([6])), taken=5)
    assert not list((tmp_path / RUN).glob("*.part"))
    path = tmp_path / RUN / "round-00000006.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert vault.read(6, kept) is None
    with pytest.raises(RunError, match="cannot be one"):
        Vault(tmp_path, "../../etc", "north")


def test_a_vault_keeps_what_a_server_that_went_back_may_want_again_and_is_one_sites(tmp_path: Path) -> None:
    made = world.setting(PFedLA())
    vault, kept = Vault(tmp_path, RUN, "north"), made.enroll()
    for t in range(1, 7):
        vault.write(t, kept, taken=t - 1)
    vault.write(4, kept, taken=0)  # a server that takes it to have nothing
    assert vault.versions() == [3, 4, 5, 6]
    vault.write(4, kept, taken=3)  # one that went back to round 3
    assert vault.versions() == [3, 4, 5, 6]
    vault.write(7, kept, taken=4)  # and whose rounds 5 and 6 were not taken
    assert vault.versions() == [3, 4, 7]
    for t in range(8, 30):
        vault.write(t, kept, taken=0)
    assert vault.versions() == list(range(20, 30))
    vault.write(6, kept, taken=0)  # a server that went far back
    assert vault.versions() == [6, *range(21, 30)]
    vault.write(29, kept, taken=0)
    vault.write(20, kept, taken=0)
    assert vault.versions() == list(range(20, 30))
    other = Vault(tmp_path, RUN, "east")
    assert other.read(29, kept) is None
    with pytest.raises(RunError, match="its state folder is another site's"):
        other.write(30, kept, taken=29)
    assert vault.versions() == list(range(20, 30))
    (tmp_path / "site").write_text("")  # half written
    vault.write(30, kept, taken=29)
    assert (tmp_path / "site").read_text() == "north"
