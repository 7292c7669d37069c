"""Whatever comes from outside, changed at random: it works, or one clear line says why not."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pfedla
from pfedla import Experiment, FedAvg, PFedLA
from pfedla.algorithms import ALGORITHMS
from pfedla.config import parse_assignments, parse_value, read_tables
from pfedla.data.federation import own_data
from pfedla.data.files import load_column
from pfedla.data.splits import SPLITS
from pfedla.errors import PfedlaError
from pfedla.inspection import Inspector
from pfedla.layers import LayerSpec
from pfedla.models import MLP
from pfedla.objective import OBJECTIVES
from pfedla.record import RunRecord
from pfedla.wire import Payload, decode, encode
from tests.world import data as clients
from tests.world import fleet_of, outcome_of, server_of, setting

pytestmark = pytest.mark.slow

often = settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
seldom = settings(often, max_examples=200)


@contextmanager
def one_line() -> Iterator[None]:
    """Let errors of ours pass, if they are one line of text that can be printed."""
    try:
        yield
    except PfedlaError as error:
        text = str(error)
        assert text.strip()
        assert len(text) < 3000
        assert "Traceback" not in text


# ---- strategies

NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, -(2**63), 10**30]),
    st.floats(),
    st.sampled_from([1e308, 1e-308]),
)
LEAVES = st.one_of(NUMBERS, st.booleans(), st.text(max_size=8), st.none())
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))
NAMES = {
    "algorithm": [*ALGORITHMS, "pfedla:Algorithm", "os:system", "nowhere:Nothing", ":", "a:b:c"],
    "split": [*SPLITS, "pfedla.data.splits:Split"],
    "objective": [*OBJECTIVES, "pfedla:Objective"],
}
DEFAULTS = {name: table for method in ALGORITHMS for name, table in Experiment.from_tables(
    {"algorithm": {"name": method}}).tables().items()}  # fmt: skip
KEYS = {section: sorted({*table, "nonsense", "seed", "name"}) for section, table in DEFAULTS.items()}
SECTIONS = [*DEFAULTS, "run", "nonsense", ""]


@st.composite
def tables(draw: Any) -> dict[str, Any]:
    """Draw a configuration: sections and settings that there are, mostly, with values of any kind."""
    found: dict[str, Any] = {}
    for section in draw(st.lists(st.sampled_from(SECTIONS), max_size=3, unique=True)):
        keys = draw(st.lists(st.sampled_from(KEYS.get(section, ["x"])), max_size=4, unique=True))
        table = {key: draw(VALUES) for key in keys}
        if section in NAMES and draw(st.booleans()):
            table["name"] = draw(st.sampled_from(NAMES[section]))
        found[section] = draw(st.just(table) | st.just(table) | VALUES)
    return found


@st.composite
def damage(draw: Any) -> Callable[[bytes], bytes]:
    """Draw a way to damage bytes: bits flipped, pieces cut out, doubled or replaced."""
    kind = draw(st.sampled_from(["flip", "cut", "double", "replace", "truncate", "nothing"]))
    place, size = draw(st.floats(0, 1)), draw(st.integers(1, 40))
    filling: bytes = draw(st.binary(min_size=size, max_size=size))
    bits = draw(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), min_size=1, max_size=4))

    def damaged(content: bytes) -> bytes:
        start = int(place * max(len(content) - 1, 0))
        match kind:
            case "flip":
                changed = bytearray(content)
                for where, bit in bits:
                    changed[int(where * (len(changed) - 1))] ^= 1 << bit
                return bytes(changed)
            case "cut":
                return content[:start] + content[start + size :]
            case "double":
                return content[: start + size] + content[start:]
            case "replace":
                return content[:start] + filling + content[start + size :]
            case "truncate":
                return content[:start]
            case _:
                return content

    return damaged


# ---- configuration


@often
@given(tables())
def test_configurations(found: dict[str, Any]) -> None:
    with one_line():
        experiment = Experiment.from_tables(found)
        assert Experiment.from_tables(experiment.tables()) == experiment or "nan" in str(experiment)


@often
@given(st.text(max_size=40), st.text(max_size=40))
def test_assignments(address: str, value: str) -> None:
    parse_value(value)
    with one_line():
        Experiment.from_tables(parse_assignments([f"{address}={value}"]))


@seldom
@given(damage())
def test_configuration_files(tmp_path_factory: pytest.TempPathFactory, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    path.write_bytes(change(tomli_w.dumps(Experiment().tables()).encode()))
    with one_line():
        Experiment.from_tables(read_tables(path))


# ---- data


@pytest.fixture(scope="module")
def archive() -> bytes:
    found = io.BytesIO()
    np.savez_compressed(found, x=np.ones((6, 3), np.float32), y=np.arange(6) % 2, client=np.arange(6) % 3)
    return found.getvalue()


@seldom
@given(change=damage())
def test_data_files(archive: bytes, tmp_path_factory: pytest.TempPathFactory, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.npz"
    path.write_bytes(change(archive))
    with one_line():
        for client in load_column(path):
            assert len(client.x) == len(client.y)


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
KINDS = st.sampled_from(["f4", "f8", "f2", "i8", "u1", "u4", ">f4", "?", "c8", "U3", "S2", "M8[s]"])


@often
@given(st.data())
def test_clients_own_arrays(data: Any) -> None:
    def array() -> np.ndarray:
        shape, kind = data.draw(SHAPES), data.draw(KINDS)
        return np.full(shape, data.draw(st.sampled_from([0, 1, 3, 255])), "f8").astype(kind)

    own: list[Any] = [
        tuple(array() for _ in range(data.draw(st.sampled_from([2, 4, 3]))))
        for _ in range(data.draw(st.integers(0, 2)))
    ]
    with one_line():
        own_data(own, [str(i) for i in range(len(own))], 0.5, 0)


# ---- checkpoints and run directories


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with a checkpoint, stopped after its second round."""

    def stop(progress: Any) -> None:
        if progress.t == 2:
            raise KeyboardInterrupt

    record = RunRecord.create(tmp_path_factory.mktemp("stopped") / "run", "", {})
    with pytest.raises(KeyboardInterrupt):
        outcome_of(FedAvg(), record, stop)
    record.release()
    return record.path


@seldom
@given(change=damage())
def test_checkpoints(stopped: Path, tmp_path_factory: pytest.TempPathFactory, change: Callable[[bytes], bytes]) -> None:
    here = tmp_path_factory.getbasetemp() / "fuzzed-checkpoint"
    shutil.copytree(stopped, here, dirs_exist_ok=True)
    path = here / "checkpoint.safetensors"
    content = path.read_bytes()
    path.write_bytes(change(content))
    made = setting(FedAvg())
    like = server_of(made, 4).state, fleet_of(made, clients(4)).snapshot()
    with one_line():
        found = RunRecord(here).restore(*like)
        assert found is not None
        assert found.t == 2
    path.write_bytes(content)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a complete run."""
    path = tmp_path_factory.mktemp("complete") / "run"
    y = np.arange(12) % 2
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    pfedla.run(PFedLA(retain=1), MLP((3,), 2), [(x, y)] * 2, 2, eval_every=1, workers=0, out=path)
    return path


@seldom
@given(
    name=st.sampled_from(["config.toml", "run.json", "metrics.jsonl", "summary.json", "ledger.npz", "diagnostics.npz",
                          "models/0.safetensors", "models/1.safetensors"]),
    change=damage(),
)  # fmt: skip
def test_run_directories(
    complete: Path, tmp_path_factory: pytest.TempPathFactory, name: str, change: Callable[[bytes], bytes]
) -> None:
    here = tmp_path_factory.getbasetemp() / "fuzzed-run"
    shutil.copytree(complete, here, dirs_exist_ok=True)
    (here / name).write_bytes(change((here / name).read_bytes()))
    with one_line():
        found = pfedla.load(here, model=MLP((3,), 2))
        found.model(0)
        found.rows()
        json.dumps(found.summary)
        assert found.alpha is None or found.alpha.ndim == 4
    shutil.copytree(complete, here, dirs_exist_ok=True)


# ---- messages

MESSAGE = encode(
    Payload.of(
        {"fc1": torch.ones(1, 256), "fc2": torch.ones(1, 130)},
        torch.ones(1, 2, dtype=torch.bool),
        ("fc1", "fc2"),
        examples=torch.tensor([5]),
    )
)


@often
@given(damage())
def test_messages(change: Callable[[bytes], bytes]) -> None:
    spec = LayerSpec.of(MLP((3,), 2))
    assert [spec.size(name) for name in spec.names] == [256, 130]
    try:
        upload = decode(change(MESSAGE), spec.names)
    except ValueError:
        return
    found = Inspector(spec).inspect(FedAvg(), {0: upload, 1: decode(MESSAGE, spec.names)})
    assert 1 in found.accepted
    if 0 in found.accepted:
        assert all(torch.isfinite(rows).all() for rows in upload.layers.values())
        assert {key: rows.shape for key, rows in upload.layers.items() if "#" not in key} == {
            "fc1": (1, 256),
            "fc2": (1, 130),
        }
