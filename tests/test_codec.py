"""Codecs: what travels, what arrives, and what is owed."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, FedFomo, HeurPFedLA, PFedLA, Scaffold
from pfedla.client import Evaluation, Setting
from pfedla.codec import AS_IT_IS, PRESETS, SPARSE, Codec, Coding, owed_after, with_owed
from pfedla.comparison import parse_variant
from pfedla.errors import ConfigError, RunError
from pfedla.fleet import Answers, Judge, SimulatedFleet
from pfedla.layers import Layers, change
from pfedla.pool import InProcess
from pfedla.record import RunRecord
from pfedla.training import ClientData, Task
from pfedla.tree import flatten
from pfedla.wire import Payload, decode, encode
from tests.world import WireFleet, data, fleet_of, outcome_of, play, same, same_outcome, setting

NAMES = ("float16", "bfloat16", "int8", "int4", "top-k", "random-k")
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
Numbers = list[float]


def up(name: str, **more: Any) -> Codec:
    return Codec(up=name, **more)  # type: ignore[arg-type]


def payload_of(rows: Tensor, **values: Tensor) -> Payload:
    return Payload.of({"fc": rows}, torch.ones(len(rows), 1, dtype=torch.bool), ["fc"], **values)


def travelled(codec: Codec, x: Tensor, t: int = 1, seed: int = 0) -> tuple[Tensor, bytes]:
    """Send a layer up, as bytes; return what arrives, and the message."""
    coding = Coding(codec, {"fc": len(x)}, x.dtype, seed)
    packed = coding.pack(payload_of(x[None]), "up", [3], t)
    message = encode(packed)
    assert packed.layer_bytes().sum() + packed.header_bytes().sum() == len(message)
    arrived = coding.unpack(decode(message, ["fc"]), "up")
    same(arrived, coding.unpack(packed, "up"))
    assert (arrived.layers["fc"].shape, arrived.layers["fc"].dtype) == ((1, len(x)), x.dtype)
    return arrived.layers["fc"][0], message


def bytes_of(name: str, n: int, keep: float, size: int) -> int:
    """Return how long a code of `n` values of `size` bytes is."""
    k = min(n, max(1, round(keep * n)))
    places = min(-(-n // 8), 4 * k)
    by_name = {"float16": 2 * n, "bfloat16": 2 * n, "int8": 2 * size + n, "int4": 2 * size + (n + 1) // 2}
    return {**by_name, "top-k": places + size * k, "random-k": 8 + size * k}[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), max_size=70),
    keep=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
)
@example(numbers=[], keep=0.1)
@example(numbers=[-2.5], keep=0.1)
@example(numbers=[0.1] * 9, keep=0.1)
@example(numbers=[3.4e38, -3.4e38, 0.0], keep=0.5)
@example(numbers=[1e-45, -3e-45, 1e-40, 0.0, 2e-45], keep=0.1)
@example(numbers=[0.0] * 40, keep=0.01)
def test_every_codec_brings_back_what_it_can(name: str, dtype: torch.dtype, numbers: Numbers, keep: float) -> None:
    x = torch.tensor(numbers, dtype=dtype)
    if x.abs().gt(LARGEST.get(name, torch.inf)).any():
        with pytest.raises(
            RunError, match=f"fc of client 3 in round 1 cannot travel as {name} .*: it holds .*, beyond"
        ):
            travelled(up(name), x)
        return
    found, message = travelled(up(name, keep=keep) if name in SPARSE else up(name), x)
    assert len(message) - bytes_of(name, len(x), keep, dtype.itemsize) == int.from_bytes(message[:8], "little") + 8
    assert torch.isfinite(found).all()
    if name in LARGEST:
        short = getattr(torch, name)
        assert torch.equal(found, x.to(short).to(dtype))
    elif name in ("int8", "int4"):
        low, high = (float(end) for end in (x.min(), x.max())) if len(x) else (0.0, 0.0)
        step = (high - low) / (255 if name == "int8" else 15)
        assert ((found - x).double().abs() <= step * (1 + 1e-6)).all()
        assert ((low <= found) & (found <= high)).all()
        assert low < high or torch.equal(found, x)
    else:
        sent = found != 0
        assert torch.equal(found[sent], x[sent])
        k = min(len(x), max(1, round(keep * len(x))))
        assert sent.sum() <= k
        if name == "top-k":
            largest = x.abs().sort().values[len(x) - k :]
            assert torch.equal(found.abs().sort().values, torch.cat([x.new_zeros(len(x) - k), largest]))
        assert keep < 1 or torch.equal(found, x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused(name: str, wrong: float) -> None:
    refused = rf"^fc of client 3 in round 1 cannot travel as {name} \(codec.up\): it is not finite$"
    with pytest.raises(RunError, match=refused):
        travelled(up(name), torch.tensor([1.0, wrong, 2.0]))


def test_values_too_far_apart_for_their_type_are_refused() -> None:
    with pytest.raises(RunError, match=r"cannot travel as int4 .*: its values lie too far apart"):
        travelled(up("int4"), torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64))


@pytest.mark.parametrize(("name", "steps"), [("int8", 255), ("int4", 15)])
def test_rounding_is_right_on_average_and_different_every_time(name: str, steps: int) -> None:
    x = torch.tensor([0.0, 1.0, 0.1234, 0.8, 0.5001] * 40)
    found = torch.stack([travelled(up(name), x, t)[0] for t in range(60)])
    assert len({tuple(row.tolist()) for row in found}) == 60
    assert not torch.equal(travelled(up(name), x)[0], travelled(up(name), x, seed=1)[0])
    assert torch.equal(travelled(up(name), x)[0], travelled(up(name), x)[0])
    mean = found.view(60, 40, 5).mean((0, 1))  # of 2,400, whose deviation is at most half a step
    assert ((mean - x[:5]).abs() < 5 * 0.5 / steps / 2400**0.5).all()
    assert torch.equal(mean[:2], x[:2])


def test_random_k_draws_other_places_every_time_and_all_of_them_in_time() -> None:
    x = torch.arange(1.0, 51.0)
    sent = torch.stack([travelled(up("random-k", keep=0.2), x, t)[0] != 0 for t in range(80)])
    assert sent.sum(1).tolist() == [10] * 80
    assert sent.any(0).all()
    assert len({tuple(row.tolist()) for row in sent}) == 80


def test_two_clients_and_two_layers_are_rounded_apart() -> None:
    x = torch.rand(2, 40)
    x[1] = x[0]
    payload = Payload.of({"a": x, "b": x.clone()}, torch.ones(2, 2, dtype=torch.bool), ["a", "b"])
    coding = Coding(Codec(down="int4"), {"a": 40, "b": 40})
    found = coding.unpack(coding.pack(payload, "down", [0, 1], 1), "down").layers
    assert len({tuple(row.tolist()) for rows in found.values() for row in rows}) == 4


# ---- what is coded, and what travels as it is


@pytest.mark.parametrize("name", NAMES)
def test_trained_parameters_are_coded_and_nothing_else(name: str) -> None:
    layers = {
        "bn": torch.rand(1, 20),
        "bn#stats": torch.rand(1, 20) * 1e-9,
        "bn#control": torch.rand(1, 20),
        "bn#whole": torch.arange(20)[None],
    }
    values = {"examples": torch.tensor([7]), "gains": torch.rand(1, 3)}
    payload = Payload.of(layers, torch.tensor([[True]]), ["bn"], **values)
    coding = Coding(up(name), {"bn": 20})
    packed = coding.pack(payload, "up", [0], 1)
    arrived = coding.unpack(decode(encode(packed), ["bn"]), "up")
    assert packed.layers["bn"].nbytes < layers["bn"].nbytes
    assert not torch.equal(arrived.layers["bn"], layers["bn"])
    for found in (packed, arrived):
        same({k: x for k, x in found.layers.items() if k != "bn"}, {k: x for k, x in layers.items() if k != "bn"})
        same(found.values, values)
    same(coding.unpack(coding.pack(payload, "down", [0], 1), "down"), payload)  # the other way nothing is coded


def test_without_a_codec_a_payload_is_not_touched() -> None:
    payload = payload_of(torch.tensor([[torch.nan, 1.0]]))
    assert AS_IT_IS.pack(payload, "up", [0], 1) is payload
    assert AS_IT_IS.unpack(payload, "down") is payload


@pytest.mark.parametrize("name", ["float16", "int4"])
def test_what_is_not_sent_stays_blank(name: str) -> None:
    sent = torch.tensor([[True, False], [True, True], [False, False]])
    payload = Payload.of({"a": torch.rand(3, 4), "b": torch.rand(3, 3)}, sent, ["a", "b"])
    coding = Coding(Codec(down=name), {"a": 4, "b": 3})  # type: ignore[arg-type]
    packed = coding.pack(payload, "down", [0, 1, 2], 1)
    found = coding.unpack(packed, "down")
    assert torch.equal(found.layers["a"].isnan().all(1), ~sent[:, 0])
    assert torch.equal(found.layers["b"].isnan().any(1), ~sent[:, 1])
    same(found, coding.unpack(Payload.stack([decode(encode(packed.rows([row])), "ab") for row in range(3)]), "down"))
    assert (packed.layer_bytes() > 0).tolist() == sent.tolist()
    alone = coding.pack(payload.rows([2]), "down", [2], 1)
    assert alone.layers == coding.unpack(alone, "down").layers == {}


@pytest.mark.parametrize("codec", [Codec(up, up if up in PRESETS else "int4") for up in NAMES], ids=lambda c: c.up)  # type: ignore[arg-type]
def test_no_variance_becomes_negative(codec: Codec) -> None:
    played = play(PFedLA(), [[0, 1, 2]] * 4, codec=codec, lr=0.5)
    variance = slice(3, 6)  # of the three channels, after the means
    assert (played.state.theta["bn#stats"][:, variance] > 0).all()
    assert all(torch.isfinite(rows).all() for rows in played.personalized().values())


# ---- codes of strangers


def broken(name: str) -> dict[str, Tensor]:
    """Return codes of 100 values that no client of ours would send."""
    coding = Coding(up(name, keep=0.02 if name == "top-k" else None), {"fc": 100})
    good = coding.pack(payload_of(torch.rand(1, 100)), "up", [0], 1).layers["fc"]
    found = {"short": good[:, 1:], "long": torch.cat([good, good[:, :1]], 1), "type": torch.rand(1, 100)}
    found |= {"none": good[:, :0], "deep": good[..., None], "flat": good[0], "signed": good.to(torch.int8)}
    if name in ("int8", "int4"):
        for which, ends in {"turned": (1, 0), "nan": (torch.nan, 1), "inf": (0, torch.inf)}.items():
            found[which] = good.clone()
            found[which][0, :8] = torch.tensor(ends, dtype=torch.float32).view(torch.uint8)
    if name == "top-k":
        for places in ((0, 100), (5, 5), (7, 2), (-1, 2)):
            found[str(places)] = good.clone()
            found[str(places)][0, :8] = torch.tensor(places, dtype=torch.int32).view(torch.uint8)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_code_that_is_none_is_refused(name: str) -> None:
    coding = Coding(up(name, keep=0.02 if name == "top-k" else None), {"fc": 100})
    for which, code in broken(name).items():
        strange = payload_of(torch.zeros(1, 1))._replace(layers={"fc": code})
        try:
            coding.unpack(strange, "up")
        except ValueError as error:
            assert str(error).startswith(f"fc is no {name}: "), which  # noqa: PT017
        else:
            pytest.fail(f"{which} was taken")


def test_places_as_bits_are_as_many_as_were_agreed() -> None:
    coding = Coding(up("top-k", keep=0.5), {"fc": 12})
    packed = coding.pack(payload_of(torch.rand(1, 12)), "up", [0], 1)
    for bits in ((255, 0), (255, 240), (0, 63)):  # eight of them, all, and such that stand beyond the last value
        packed.layers["fc"][0, :2] = torch.tensor(bits, dtype=torch.uint8)
        with pytest.raises(ValueError, match="fc is no top-k: places that are not 6 of 12"):
            coding.unpack(packed, "up")


def test_a_layer_of_another_model_is_refused() -> None:
    coding = Coding(up("int8"), {"fc": 3})
    other = Payload.of({"head": torch.zeros(1, 3)}, torch.tensor([[True]]), ["head"])
    with pytest.raises(ValueError, match="the model has no layer head"):
        coding.unpack(other, "up")


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(NAMES), code=st.binary(max_size=40), n=st.integers(0, 40))
def test_whatever_bytes_come_are_values_or_refused(name: str, code: bytes, n: int) -> None:
    coding = Coding(up(name), {"fc": n})
    rows = torch.tensor(list(code), dtype=torch.uint8)[None]
    try:
        found = coding.unpack(payload_of(torch.zeros(1, 1))._replace(layers={"fc": rows}), "up")
    except ValueError:
        return
    assert found.layers["fc"].shape == (1, n)


# ---- what is owed


def test_what_is_lost_of_a_change_is_added_to_the_next() -> None:
    coding, owed = Coding(up("top-k", keep=0.25), {"fc": 4}), {"fc": torch.zeros(1, 4)}
    x = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    arrived = []
    for t in range(1, 5):
        due = with_owed(payload_of(x), owed)
        taken = coding.unpack(coding.pack(due, "up", [0], t), "up")
        owed = owed_after(due, taken, owed)
        arrived.append(taken.layers["fc"][0].tolist())
    assert arrived == [[4, 0, 0, 0], [0, 6, 0, 0], [8, 0, 0, 0], [0, 0, 8, 0]]
    assert owed["fc"].tolist() == [[4, 6, 0, 4]]


def test_what_is_not_sent_is_still_owed() -> None:
    owed = {"a": torch.ones(1, 2), "b": torch.ones(1, 2)}
    upload = Payload.of({"a": torch.zeros(1, 2)}, torch.tensor([[True, False]]), ["a", "b"])
    due = with_owed(upload, owed)
    assert list(due.layers) == ["a"]
    assert owed_after(due, due, owed)["a"].tolist() == [[0, 0]]
    assert owed_after(due, due, owed)["b"] is owed["b"]


CODECS = [Codec("float16", "float16"), Codec("int8", "int8"), Codec("int4", "float16"), Codec("top-k", "int8"),
          Codec("random-k", "bfloat16", keep=0.3)]  # fmt: skip
codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.up}-{codec.down}")


Side = Literal["client", "server"]


def watched(retain: int) -> tuple[PFedLA, list[tuple[Side, list[int], Payload, Layers]]]:
    """Return pFedLA that notes what each side got, and what the client changed or the server was told of it."""
    seen: list[tuple[Side, list[int], Payload, Layers]] = []

    @dataclass(frozen=True)
    class Watched(PFedLA):
        def train(self, own: Layers, got: Payload, task: Task) -> tuple[Layers, Payload]:
            kept, upload = super().train(own, got, task)
            seen.append(("client", list(task.ids), got, change(kept, got.fill(own))))
            return kept, upload

        def update(self, state: Any, ids: Tensor, got: Payload, upload: Payload) -> Any:
            seen.append(("server", ids.tolist(), got, copy.deepcopy(upload.layers)))
            return super().update(state, ids, got, upload)

    return Watched(retain=retain), seen


@codecs
def test_the_server_knows_a_clients_model_but_for_what_is_owed(codec: Codec) -> None:
    method, seen = watched(retain=3)  # every layer stays with its client
    played = play(method, [[0, 1, 2], [0, 2], [0, 1, 2]], codec=codec)
    assert isinstance(played.fleet, SimulatedFleet)
    owed, theta = played.fleet.kept.owed, played.state.theta
    assert set(owed) == {"conv", "bn", "fc"}
    for key in owed:
        torch.testing.assert_close(theta[key] + owed[key], played.own[key], atol=1e-5, rtol=1e-4)
        assert not torch.equal(theta[key], played.own[key])
    same({"bn#stats": theta["bn#stats"]}, {"bn#stats": played.own["bn#stats"]}, atol=1e-6)
    for client in range(3):
        mine = [delta for side, ids, _, delta in seen if side == "client" and ids == [client]]
        taken = [(delta, ids.index(client)) for side, ids, _, delta in seen if side == "server" and client in ids]
        for key in owed:
            moved = torch.cat([delta[key] for delta in mine]).sum(0)
            arrived = torch.stack([delta[key][row] for delta, row in taken]).sum(0)
            torch.testing.assert_close(arrived + owed[key][client], moved, atol=1e-5, rtol=1e-4)


@codecs
def test_both_sides_start_from_what_was_decoded(codec: Codec) -> None:
    method, seen = watched(retain=1)
    played = play(method, [[0, 1, 2]], codec=codec)
    clients, (server,) = ([noted for noted in seen if noted[0] == side] for side in ("client", "server"))
    got = {ids[0]: payload for _, ids, payload, _ in clients}
    same(server[2], Payload.stack([got[client] for client in (0, 1, 2)]))
    first = {key: rows for key, rows in played.setting.enroll().own.items() if "#counters" not in key}
    received = server[2].fill({key: rows.repeat(3, 1) for key, rows in first.items()})
    for key, rows in played.state.theta.items():
        torch.testing.assert_close(rows, received[key] + server[3][key])
    assert not torch.equal(received["fc"], first["fc"].repeat(3, 1))  # the download was rounded, too


def test_who_sends_models_owes_nothing_and_cannot_leave_values_out() -> None:
    assert setting(FedFomo(), codec=up("int8")).enroll().owed == {}
    for name in ("top-k", "random-k"):
        refused = f"codec.up = '{name}' sends a part of a change, and FedFomo sends whole models"
        with pytest.raises(ConfigError, match=refused):
            setting(FedFomo(), codec=up(name))


def test_only_layers_that_are_sent_are_owed(algorithm: Algorithm[Any]) -> None:
    made = setting(algorithm, codec=up("int8"))
    upload = play(made, [[0, 1]], fleet=WireFleet)
    assert isinstance(upload.fleet, WireFleet)
    sent = {layer for *_, way, message in upload.fleet.messages if way == "up"
            for layer in decode(message, made.spec.names).layers if "#" not in layer}  # fmt: skip
    assert set(made.enroll().owed) == (sent if algorithm.uploads_changes else set())
    assert setting(algorithm).enroll().owed == {}


def test_what_is_owed_is_no_part_of_a_model() -> None:
    played = play(Scaffold(), codec=up("top-k"))
    assert isinstance(played.fleet, SimulatedFleet)
    assert any(rows.any() for rows in played.fleet.kept.owed.values())
    assert set(played.personalized()) == set(played.setting.spec.slots)
    assert set(played.own) == set(setting(Scaffold()).enroll().own)


def test_who_is_not_taken_still_owes_what_it_owed() -> None:
    made = setting(FedAvg(), codec=up("top-k"))
    fleet = fleet_of(made, data(3))
    sent = made.coding.pack(made.algorithm.download(play(made, []).state, torch.arange(3)), "down", range(3), 1)
    fleet.train(range(3), sent, 1)
    fleet.commit([0, 2])
    assert (fleet.kept.owed["fc"] != 0).any(1).tolist() == [True, False, True]


# ---- in whole runs


@codecs
def test_messages_in_bytes_change_nothing(codec: Codec) -> None:
    rounds = [[0, 1], [1, 2], [0, 1, 2]]
    here, apart = (play(HeurPFedLA(), rounds, codec=codec, fleet=fleet) for fleet in (fleet_of, WireFleet))
    same(apart.state, here.state)
    assert isinstance(apart.fleet, WireFleet)
    assert isinstance(here.fleet, SimulatedFleet)
    for client, device in apart.fleet.devices.items():
        mine = {path: rows[client : client + 1] for path, rows in flatten(here.fleet.kept).items()}
        same(device.kept, mine)
    same(apart.personalized(), here.personalized())
    table = here.server.ledger.arrays()
    for way in ("down", "up"):
        sent = sum(len(message) for *_, found, message in apart.fleet.messages if found == way)
        assert sent == sum(int(x.sum()) for key, x in table.items() if key.partition(":")[0] == way)
    for key, column in apart.server.ledger.arrays().items():
        assert np.array_equal(column, table[key])


@pytest.mark.parametrize(
    "codec",
    [Codec("top-k", "int8"), *(pytest.param(Codec(up), marks=pytest.mark.slow) for up in ("int8", "random-k"))],
)
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(codec: Codec, tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.t == 3:
            raise KeyboardInterrupt

    made = setting(PFedLA(retain=1), codec=codec)
    record = RunRecord.create(tmp_path / "run", "", {})
    with pytest.raises(KeyboardInterrupt):
        outcome_of(made, record, stop)
    same_outcome(outcome_of(made, record), outcome_of(made))


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Codec("int8", "int4"), Codec("random-k", "int8")], ids=lambda codec: codec.up)
def test_any_number_of_workers_gives_the_same(codec: Codec) -> None:
    made = setting(PFedLA(retain=1), codec=codec)
    one, other = (outcome_of(made, fleet=partial(fleet_of, workers=workers)) for workers in (0, 2))
    same_outcome(one, other)


def test_what_is_scored_is_what_the_next_round_sends() -> None:
    trained, scored = list[Payload](), list[Payload]()

    class Noting(SimulatedFleet):
        def train(self, ids: Sequence[int], sent: Payload, t: int, judge: Judge | None = None) -> Answers[Payload]:
            trained.append(sent)
            return super().train(ids, sent, t, judge)

        def evaluate(self, ids: Sequence[int], sent: Payload, t: int) -> Answers[Evaluation]:
            scored.append(sent)
            return super().evaluate(ids, sent, t)

    def fleet(made: Setting, clients: dict[int, ClientData]) -> SimulatedFleet:
        return Noting(made, clients, InProcess(made, clients))

    outcome_of(setting(PFedLA(), codec=Codec(down="int4")), fleet=fleet, participants=4, rounds=2, eval_every=1)
    same(scored[0], trained[1])
    assert not torch.equal(scored[0].layers["fc"], trained[0].layers["fc"])


# ---- settings


def test_a_download_cannot_be_sparse_and_the_message_says_why() -> None:
    for name in ("top-k", "random-k"):
        with pytest.raises(ConfigError, match=re.escape(f"codec.down = '{name}': the server sends models, no changes")):
            Codec(down=name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"up": "int2"}, "codec.up = 'int2': choose one of float16, bfloat16, int8, int4, top-k, random-k"),
        ({"down": "half"}, "codec.down = 'half': choose one of float16, bfloat16, int8, int4"),
        ({"keep": 0.0}, "codec.keep = 0.0 must be above 0 and at most 1"),
        ({"keep": 1.5}, "codec.keep = 1.5 must be above 0 and at most 1"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Codec(**wrong)


def test_variants_of_a_comparison_may_differ_by_codec() -> None:
    found = parse_variant("pfedla,retain=2,codec.up=top-k,codec.keep=0.05,hyper_lr=0.1")
    assert found.label == "pfedla,retain=2,codec.up=top-k,codec.keep=0.05,hyper_lr=0.1"
    assert found.changes == {
        "algorithm": {"name": "pfedla", "retain": 2, "hyper_lr": 0.1},
        "codec": {"up": "top-k", "keep": 0.05},
    }
    assert parse_variant("fedavg,codec=int4").changes["codec"] == {"up": "int4", "down": "int4"}
    assert "codec" not in parse_variant("fedavg").changes


def test_presets_are_settings() -> None:
    for preset in PRESETS.values():
        Codec(**preset)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"up": "int8"}, {"down": "float16"}])
def test_a_share_to_keep_is_refused_where_nothing_is_left_out(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^codec\.keep = 0\.05 is for codec\.up = 'top-k' or 'random-k'$"):
        Codec(**settings, keep=0.05)
