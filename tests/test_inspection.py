"""Uploads of strangers: what cannot be right is refused, and its client is absent from the round."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, FedFomo, HeurPFedLA, Local, PFedLA, PFedLAX, Scaffold
from pfedla.client import Setting
from pfedla.codec import Codec, Coding
from pfedla.fleet import Answers, Judge, SimulatedFleet
from pfedla.inspection import LATEST, Inspector
from pfedla.layers import Layers, entry, kind_of
from pfedla.pool import InProcess
from pfedla.record import RunRecord
from pfedla.training import ClientData, Task
from pfedla.wire import Payload
from tests.world import METHODS, outcome_of, same, server_of, setting, task_of, timeless

Change = Callable[[Payload], Payload | None]
NOTHING: Any = [1, 2]  # that is no tensor
BAD, ROUND = 2, 3  # the client, and the round in which it sends something strange


class Strange(SimulatedFleet):
    """A fleet in which one client's upload of one round is changed on its way, or lost."""

    def __init__(self, made: Setting, everybody: dict[int, ClientData], change: Change) -> None:
        super().__init__(made, everybody, InProcess(made, everybody))
        self.change, self.committed = change, list[list[int]]()

    def train(self, ids: Sequence[int], sent: Payload, t: int, judge: Judge | None = None) -> Answers[Payload]:
        answers = super().train(ids, sent, t, judge)
        if t == ROUND:
            changed = self.change(answers.by_client.pop(BAD))
            if changed is None:
                self._staged.pop(BAD)
                return Answers(answers.by_client, {BAD: "out of reach"})
            return Answers(dict(sorted({**answers.by_client, BAD: changed}.items())))
        return answers

    def commit(self, clients: Collection[int] | None = None) -> None:
        assert clients is not None
        self.committed.append(list(clients))
        super().commit(clients)


def layers(change: Callable[[Layers], Any]) -> Change:
    def changed(upload: Payload) -> Payload:
        some = {key: rows.clone() for key, rows in upload.layers.items()}
        change(some)
        return upload._replace(layers=some)

    return changed


def put(key: str, value: float) -> Change:
    return layers(lambda some: some[key].view(-1)[3:4].fill_(value))


def without(name: str) -> Change:
    def changed(upload: Payload) -> Payload:
        sent = upload.sent.clone()
        sent[0, upload.names.index(name)] = False
        return Payload.of({k: x for k, x in upload.layers.items() if k.partition("#")[0] != name}, sent, upload.names,
                          **upload.values)  # fmt: skip

    return changed


def value(**values: Any) -> Change:
    return lambda upload: upload._replace(values=upload.values | values)


def scaled(times: float) -> Change:
    return layers(lambda some: [rows.mul_(times) for key, rows in some.items() if key in ("conv", "bn", "fc")])


def code(place: int, value: float) -> Change:
    """Write a number into the code of layer fc, from this byte on."""

    def changed(some: Layers) -> None:
        some["fc"][0, place : place + 4 or None] = torch.tensor([value]).view(torch.uint8)

    return layers(changed)


FAULTS: dict[str, tuple[Change, str]] = {
    "NaN": (put("conv", torch.nan), "conv is not finite"),
    "infinite": (put("fc", -torch.inf), "fc is not finite"),
    "statistics": (put("bn#stats", torch.nan), "bn#stats is not finite"),
    "no layer": (without("fc"), "it lacks fc"),
    "statistics alone": (layers(lambda some: some.pop("bn")), "it lacks bn"),
    "no statistics": (layers(lambda some: some.pop("bn#stats")), "it lacks bn#stats"),
    "shorter": (layers(lambda some: some.update(fc=some["fc"][:, 1:])), r"fc has the shape \(\d+,\), not \(\d+,\)"),
    "more rows": (layers(lambda some: some.update(fc=some["fc"].repeat(2, 1))), "fc has the shape"),
    "a new layer": (layers(lambda some: some.update({"conv#stats": some["conv"]})), "conv#stats has the shape"),
    "double": (layers(lambda some: some.update(conv=some["conv"].double())), "conv is torch.float64, not"),
    "whole numbers": (layers(lambda some: some.update(conv=some["conv"].long())), "conv is torch.int64, not"),
    "another model": (lambda upload: upload._replace(names=("conv", "bn", "head")), "it is of another model"),
    "no examples": (value(examples=torch.tensor([0])), "it claims 0 examples"),
    "fewer than none": (value(examples=torch.tensor([-5])), "it claims -5 examples"),
    "too many": (value(examples=torch.tensor([10**12])), "it claims 1000000000000 examples"),
    "half an example": (value(examples=torch.tensor([0.5])), r"it claims 0\.5 examples"),
    "no value": (lambda upload: upload._replace(values={}), "it lacks the value examples"),
    "a value of its own": (value(more=torch.ones(1)), "it holds the value more, which others do not send"),
    "another count": (value(examples=torch.tensor([[3]])), r"it claims \[3\] examples"),
    "a smaller type": (value(examples=torch.tensor([3], dtype=torch.int32)), "it claims 3 examples"),
    "yes": (value(examples=torch.tensor([True])), "it claims True examples"),
    "an entry of its own": (
        layers(lambda some: some.update({"fc#more": torch.ones(1, 3)})),
        "it holds fc#more, which others do not send",
    ),
    "an entry of no layer": (
        layers(lambda some: some.update({"head#more": torch.ones(1, 3)})),
        "it holds head#more, which it does not say to have sent",
    ),
    "another mask": (
        lambda upload: upload._replace(sent=torch.ones(1, 7, dtype=torch.bool)),
        r"what it says to have sent is torch\.bool \(1, 7\)",
    ),
    "shares of layers": (
        lambda upload: upload._replace(sent=upload.sent * torch.nan),
        r"what it says to have sent is torch\.float32",
    ),
    "a list": (layers(lambda some: some.__setitem__("fc", NOTHING)), "it cannot be read: "),
    "long statistics": (
        layers(lambda some: some["bn#stats"].fill_(1e9)),
        r"its stats is .* long, .* times the usual upload",
    ),
    "a negative variance": (
        layers(lambda some: some["bn#stats"].fill_(-10.0)),
        r"bn\.running_var would be negative",
    ),
    "long": (scaled(1e5), r"it is .* long, .* times the usual upload"),
}
CODED: dict[str, tuple[Codec, Change, str]] = {
    "short": (
        Codec("int8"),
        layers(lambda some: some.update(fc=some["fc"][:, 1:])),
        "it cannot be unpacked: fc is no int8",
    ),
    "not coded": (
        Codec("int4"),
        layers(lambda some: some.update(conv=some["conv"].float())),
        "it cannot be unpacked: conv",
    ),
    "from -inf": (Codec("int8"), code(0, -torch.inf), "it cannot be unpacked: fc is no int8: values from -inf to"),
    "NaN kept": (Codec("top-k"), code(-4, torch.nan), "fc is not finite"),
    "infinite": (Codec("float16"), put("conv", torch.inf), "conv is not finite"),
    "another model": (
        Codec("int8"),
        lambda upload: upload._replace(names=("conv", "bn", "head")),
        "it cannot be unpacked",
    ),
}
BAD_UPLOADS = [
    *(pytest.param(Codec(), *fault, id=name) for name, fault in FAULTS.items()),
    *(pytest.param(*fault, id=f"{fault[0].up}, {name}") for name, fault in CODED.items()),
]


@pytest.mark.parametrize(("codec", "change", "why"), BAD_UPLOADS)
def test_a_bad_upload_is_refused_and_its_client_absent(
    codec: Codec, change: Change, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = setting(PFedLA(), codec=codec)
    fleets: list[Strange] = []

    def fleet(changed: Change) -> Callable[[Setting, dict[int, ClientData]], Strange]:
        def make(made: Setting, everybody: dict[int, ClientData]) -> Strange:
            fleets.append(Strange(made, everybody, changed))
            return fleets[-1]

        return make

    how: dict[str, Any] = {"participants": 4, "rounds": 5}
    found = outcome_of(method, fleet=fleet(change), **how)
    message = rf"client {BAD} is absent from round {ROUND}: its upload was refused: {why}"
    (warning,) = caplog.records
    assert re.fullmatch(f"{message}.*", warning.getMessage())
    expected = outcome_of(method, fleet=fleet(lambda _: None), **how)
    same(found.personalized, expected.personalized)
    same(fleets[0].kept, fleets[1].kept)
    assert fleets[0].committed[ROUND - 1] == [0, 1, 3]
    assert [line.pop("refused_uploads") for line in found.history] == [0, 1, 1]
    assert [line.pop("refused_uploads") for line in expected.history] == [0, 0, 0]
    assert list(map(timeless, found.history)) == list(map(timeless, expected.history))


@dataclass(frozen=True)
class Everybody(FedAvg):
    """A method whose clients all send nonsense from round 2 on."""

    def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
        kept, sent = super().train(own, got, task)
        return (kept, sent) if task.t == 1 else (kept, put("conv", torch.nan)(sent) or sent)


def test_a_round_of_bad_uploads_alone_changes_nothing_but_its_number() -> None:
    found, expected = outcome_of(Everybody(), rounds=4), outcome_of(FedAvg(), rounds=1)
    same(found.personalized, expected.personalized)
    assert [line["refused_uploads"] for line in found.history] == [3, 9]
    assert found.ledger.up == expected.ledger.up


@pytest.mark.parametrize("name", METHODS)
def test_no_method_sends_what_is_refused(name: str) -> None:
    assert outcome_of(METHODS[name](), participants=2).history[-1]["refused_uploads"] == 0


def payload(length: float, **extra: Tensor) -> Payload:
    return Payload.of({"fc": torch.tensor([[length, 0.0]])}, torch.ones(1, 1, dtype=torch.bool), ("fc",), **extra)


def judged(inspector: Inspector, *lengths: float, algorithm: Algorithm[Any] | None = None) -> list[int]:
    return inspector.inspect(algorithm or FedAvg(), {i: payload(x) for i, x in enumerate(lengths)}).accepted


def test_what_is_usual_is_learned_from_the_latest_uploads() -> None:
    inspector = Inspector()
    assert judged(inspector, 1e9, 1.0) == [0, 1]  # of two, nobody can tell
    inspector = Inspector()
    assert judged(inspector, 1.0, 2.0, 1e4) == [0, 1]
    assert judged(inspector, 90.0) == [0]
    assert judged(inspector, 1e4) == []
    for _ in range(LATEST):
        judged(inspector, 0.01)
    assert judged(inspector, 90.0) == []  # what is long now was not then
    assert judged(inspector, 0.0) == [0]
    assert inspector.lengths[""].shape == (LATEST,)
    assert inspector.refused == 3


def test_what_is_only_judged_is_not_remembered() -> None:
    inspector, uploads = Inspector(), {i: payload(x) for i, x in enumerate((1.0, 2.0, 1e4))}
    before = inspector.judge(FedAvg(), uploads)
    assert (before.accepted, list(before.refused)) == ([0, 1], [2])
    assert (inspector.lengths, inspector.usual, inspector.refused) == ({}, {}, 0)
    assert inspector.inspect(FedAvg(), uploads) == before
    assert inspector.refused == 1


@pytest.mark.parametrize(
    ("name", "strange", "why"),
    [
        ("start", 1e6, "start is not from 0 to 1"),
        ("serve", -0.1, "serve is not from 0 to 1"),
        ("path", 0.0, "path is not from 1e-12 to 1e+12"),
        ("path", -1.0, "path is not from 1e-12 to 1e+12"),
    ],
)
def test_values_that_a_method_bounds_are_refused_beyond(name: str, strange: float, why: str) -> None:
    """A share of a million would carry the sender's model, however small its change is, into everybody's."""
    made = setting(PFedLAX(), "mlp")
    own = made.enroll().own
    sent = made.algorithm.download(server_of(made, 3).state, torch.tensor([0]))
    _, upload = made.algorithm.train(own, sent, task_of(made, [0]))
    inspector = Inspector(made.spec)
    assert not inspector.judge(made.algorithm, {0: upload}).refused
    bad = upload._replace(values=upload.values | {name: torch.full_like(upload.values[name], strange)})
    assert inspector.judge(made.algorithm, {0: bad}).refused == {0: why}


@pytest.mark.parametrize("method", [PFedLAX(), Scaffold(), FedFomo(models=2)], ids=lambda method: type(method).__name__)
def test_what_a_method_needs_beside_layers_is_asked_of_one_client_alone(method: Algorithm[Any]) -> None:
    made = setting(method, "mlp")
    own = made.enroll().own
    sent = made.algorithm.download(server_of(made, 3).state, torch.tensor([0]))
    _, upload = made.algorithm.train(own, sent, task_of(made, [0]))
    assert not Inspector(made.spec).judge(made.algorithm, {0: upload}).refused
    for name in made.algorithm.uploads_beside:
        layers = {key: rows for key, rows in upload.layers.items() if kind_of(key) != name}
        values = {key: value for key, value in upload.values.items() if key != name}
        bad = upload._replace(layers=layers, values=values)
        assert Inspector(made.spec).judge(made.algorithm, {0: bad}).refused == {0: f"it lacks {name}"}


def test_a_variance_that_falls_from_another_start_is_not_refused() -> None:
    """What pFedLA-X starts from, or a retained layer, the server does not send: a change may be larger than that."""
    low = torch.full((1, 6), 0.1)
    for method in (PFedLAX(), HeurPFedLA(retain=3)):
        made = setting(method)
        own = made.enroll().own
        sent = made.algorithm.download(server_of(made, 3).state, torch.tensor([0]))
        _, upload = made.algorithm.train(own, sent, task_of(made, [0]))
        assert upload.layers["bn#stats"].shape == low.shape
        upload.layers["bn#stats"].fill_(-0.5)
        small = sent._replace(layers=sent.layers | {"bn#stats": low})
        assert not Inspector(made.spec).judge(made.algorithm, {0: upload}, got={0: small}.get).refused


def test_nothing_sent_is_nothing_to_refuse() -> None:
    upload = Payload.of({}, torch.zeros(1, 1, dtype=torch.bool), ("fc",), examples=torch.tensor([3]))
    assert Inspector().inspect(Local(), {0: upload, 1: upload}).accepted == [0, 1]


def test_what_cannot_be_unpacked_is_refused() -> None:
    coding = Coding(Codec(up="int8"), {"fc": 2})
    good = coding.pack(payload(1.0), "up", [0], 1)
    found = Inspector().inspect(FedAvg(), {0: good, 4: payload(2.0)}, coding)
    why = "it cannot be unpacked: fc is no int8: torch.float32 (2,), not torch.uint8 (10,)"
    assert found == ([0], {4: why})


def test_entries_of_the_methods_own_are_asked_of_everybody_when_most_have_them() -> None:
    own = entry("fc", "control")
    rows = [payload(1.0) for _ in range(3)]
    rows = [row._replace(layers=row.layers | ({own: torch.ones(1, 7)} if i else {})) for i, row in enumerate(rows)]
    found = Inspector().inspect(FedAvg(), dict(enumerate(rows)))
    assert found == ([1, 2], {0: "it lacks fc#control"})


def test_what_is_refused_is_remembered_by_a_checkpoint(tmp_path: Any) -> None:
    def stop(progress: Any) -> None:
        if progress.t == 3:
            raise KeyboardInterrupt

    record = RunRecord.create(tmp_path / "run", "", {})
    with pytest.raises(KeyboardInterrupt):
        outcome_of(Everybody(), record, stop)
    same(outcome_of(Everybody(), record).personalized, outcome_of(Everybody()).personalized)
    assert outcome_of(Everybody(), record).history[-1]["refused_uploads"] == 15


def test_fedfomos_gains_are_values_and_must_be_finite() -> None:
    made = setting(FedFomo(models=2), "mlp")
    assert made.algorithm.uploads("fc1")
    upload = payload(1.0, gains=torch.tensor([[torch.nan]]), examples=torch.tensor([3]))
    assert Inspector().inspect(FedAvg(), {0: upload}).refused == {0: "gains is not finite"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda rows: rows[:, 1:], r"conv#control is torch\.float32 \(\d+,\), not torch\.float32 \(\d+,\)"),
        (lambda rows: rows.double(), r"conv#control is torch\.float64 \(\d+,\), not torch\.float32 \(\d+,\)"),
        (lambda rows: rows + 1e15, "its control is .* long, .* times the usual upload"),
    ],
)
def test_what_a_method_sends_beside_the_model_is_judged_by_the_others(
    change: Callable[[Tensor], Tensor], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = layers(lambda some: some.update({"conv#control": change(some["conv#control"])}))
    found = outcome_of(Scaffold(), fleet=lambda made, data: Strange(made, data, bad), participants=4, rounds=5)
    assert [line["refused_uploads"] for line in found.history] == [0, 1, 1]
    assert re.search(why, caplog.text)


def test_one_upload_alone_is_judged_by_those_before_it() -> None:
    good = payload(1.0, examples=torch.tensor([3]))
    strange = [good._replace(values={}), payload(1.0, examples=torch.tensor([3]), more=torch.ones(1))]
    inspector = Inspector()
    inspector.inspect(FedAvg(), {0: good})
    for other in strange:
        assert inspector.inspect(FedAvg(), {1: other}).accepted == []
        assert inspector.inspect(FedAvg(), {0: good, 1: other}).accepted == [0]
    assert inspector.inspect(FedAvg(), {0: good}).accepted == [0]
    changed = dict.fromkeys(range(3), strange[1])  # the method itself sends more from now on
    assert inspector.inspect(FedAvg(), changed).accepted == [0, 1, 2]
    assert inspector.inspect(FedAvg(), {0: strange[1]}).accepted == [0]


def test_of_two_the_one_that_counts_its_examples_is_believed() -> None:
    found = Inspector().inspect(
        FedAvg(), {0: payload(1.0, x=torch.ones(1)), 1: payload(1.0, examples=torch.ones(1).long())}
    )
    assert found == ([1], {0: "it lacks the value examples"})


def test_what_is_no_upload_at_all_is_refused() -> None:
    nothing: Any = 5
    found = Inspector().inspect(FedAvg(), {0: nothing, 1: payload(1.0)})
    assert found.accepted == [1]
    assert found.refused[0].startswith("it cannot be read: ")


def test_where_examples_are_not_counted_everybody_has_one() -> None:
    uploads = {client: payload(1.0, examples=torch.tensor([count])) for client, count in enumerate((1, 10**9))}
    assert Inspector(counted=False).inspect(FedAvg(), uploads) == ([0], {1: "it claims 1000000000 examples"})
    assert Inspector().inspect(FedAvg(), uploads).accepted == [0, 1]
