"""Bad input ends in one clear line, before any work and before memory is taken for it."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pfedla
from pfedla import Experiment, FedAvg
from pfedla.config import parse_assignments
from pfedla.data.federation import own_data
from pfedla.data.files import load_column, load_folder
from pfedla.errors import ConfigError, DataError, PfedlaError, RunError
from pfedla.models import MLP
from pfedla.record import RunRecord
from pfedla.rounds import Progress, Schedule
from tests.world import outcome_of


def arrays(count: int = 12, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(count, 4)).astype(np.float32), "y": np.arange(count) % 3, **more}


def peak(action: Callable[[], object]) -> int:
    """Return by how many bytes the process's largest size grew meanwhile."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    action()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


# ---- data files


def test_a_label_of_billions_takes_no_memory(tmp_path: Path) -> None:
    labels = np.arange(12) % 3
    labels[4] = 2_000_000_000
    np.savez(tmp_path / "a.npz", **arrays(y=labels))

    def read() -> None:
        with pytest.raises(DataError, match="label 2000000000: labels are numbered from 0, and at most 99,999"):
            pfedla.run_experiment(Experiment.from_tables({"data": {"folder": str(tmp_path)}}))

    assert peak(read) < 2**28


def packed(path: Path, name: str, header: bytes, size: int, method: int = zipfile.ZIP_DEFLATED) -> None:
    """Add an array of zeros to an archive, of whatever the header says."""
    with zipfile.ZipFile(path, "a", method) as file, file.open(f"{name}.npy", "w", force_zip64=True) as part:
        part.write(header)
        for _ in range(size // 2**20):
            part.write(bytes(2**20))
        part.write(bytes(size % 2**20))


def header_of(shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def test_an_archive_that_unpacks_to_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    np.savez(path, y=np.zeros(1, np.int64))
    packed(path, "x", header_of((2**26, 1)), 2**29)
    assert path.stat().st_size < 2**21

    def read() -> None:
        with pytest.raises(DataError, match=r"expected data, found 0\.537 GB of arrays packed into"):
            load_folder(tmp_path)

    assert peak(read) < 2**27


@pytest.mark.parametrize("name", ["ledger.npz", "diagnostics.npz"])
def test_a_run_whose_arrays_unpack_to_gigabytes_is_refused_unread(name: str, tmp_path: Path) -> None:
    np.savez(tmp_path / name, layers=np.array(["fc"]), round=np.arange(1))
    packed(tmp_path / name, "up", header_of((2**26, 1)), 2**29)
    record = RunRecord(tmp_path)

    def read() -> None:
        with pytest.raises(RunError, match=r"expected data, found 0\.537 GB of arrays packed into"):
            record._arrays(name)

    assert peak(read) < 2**27


def test_an_array_that_declares_more_than_it_holds_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "liar.npz"
    np.savez(path, y=np.zeros(3, np.int64), client=np.zeros(3, np.int64))
    packed(path, "x", header_of((2**40, 2)), 64)

    def read() -> None:
        loads: list[Callable[[], object]] = [lambda: load_folder(tmp_path), lambda: load_column(path)]
        for load in loads:
            with pytest.raises(DataError, match=r"an array x\.npy of 17,592,186,044,416 bytes, found"):
                load()

    assert peak(read) < 2**27


def test_an_archive_that_lies_about_its_own_size_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    np.savez(path, y=np.zeros(1, np.int64))
    packed(path, "x", header_of((2**26, 1)), 2**29)
    content = bytearray(path.read_bytes())
    start = content.index(b"x.npy", content.index(b"PK\x01\x02")) - 46  # the member's entry in the directory
    extra = content.index((1).to_bytes(2, "little"), start + 46 + 5) if content[start + 30] else None
    assert extra is None  # its sizes stand in the entry itself
    content[start + 20 : start + 24] = (2**31).to_bytes(4, "little")
    path.write_bytes(bytes(content))

    def read() -> None:
        with pytest.raises(DataError, match=r"expected data, found 0\.537 GB of arrays packed into"):
            load_folder(tmp_path)

    assert peak(read) < 2**27


def test_a_fifo_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(DataError, match="it is no regular file"):
        load_folder(tmp_path)


def test_an_unknown_way_of_packing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **arrays())
    content = bytearray(path.read_bytes())
    for start in (i for i in range(len(content)) if bytes(content[i : i + 4]) in (b"PK\x01\x02", b"PK\x03\x04")):
        place = start + (10 if content[start + 2] == 1 else 8)
        content[place : place + 2] = (77).to_bytes(2, "little")
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"expected an \.npz archive of plain arrays, found another thing"):
        load_folder(tmp_path)


@pytest.mark.parametrize("kind", [">f4", ">f8", "<f2", "<u2", ">u4", "u8", "g", ">i4"])
def test_numbers_of_any_order_and_width_are_read(kind: str, tmp_path: Path) -> None:
    plain = np.arange(48).reshape(12, 4) % 7
    np.savez(tmp_path / "a.npz", **arrays(x=plain.astype(kind), y=(np.arange(12) % 3).astype(">i8")))
    federation = pfedla.experiment.federation_of(Experiment.from_tables({"data": {"folder": str(tmp_path)}}))
    x, y = federation.data[0].train.take(slice(None), next(MLP((4,), 3).parameters()))
    assert {tuple(row) for row in x.tolist()} <= {tuple(row) for row in plain.tolist()}
    assert set(y.tolist()) == {0, 1, 2}


def test_two_clients_of_one_name_are_refused() -> None:
    x, y = arrays()["x"], arrays()["y"]
    with pytest.raises(DataError, match="two clients have the name 'a'"):
        own_data([(x, y), (x, y)], ["a", "a"], 0.7, 0)


# ---- configuration


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"schedule": {"seed": 2**64}}, r"schedule\.seed = 18446744073709551616\.\.\. must fit into 64 bits"),
        ({"machine": {"device": "meta"}}, r"machine\.device = 'meta' is not available"),
        ({"machine": {"device": "cuda"}}, r"machine\.device = 'cuda' is not available"),
        ({"machine": {"device": "toaster"}}, r"machine\.device = 'toaster' is not available"),
        ({"algorithm": {"name": "pfedla:Algorithm"}}, r"algorithm\.name = 'pfedla:Algorithm' is an abstract class"),
        ({"model": {"name": "torch.nn:Linear"}}, r"model\.name = 'torch\.nn:Linear' cannot be called with"),
        ({"model": {"name": "builtins:print"}}, "returned NoneType, not a torch.nn.Module"),
    ],
)
def test_settings_that_cannot_work_are_refused(tables: dict[str, Any], message: str) -> None:
    if "cuda" in message and torch.cuda.is_available():
        pytest.skip("there is one here")

    def prepare() -> None:
        experiment = Experiment.from_tables(tables)
        pfedla.experiment.prepare(experiment, pfedla.experiment.federation_of(experiment))

    with pytest.raises(ConfigError, match=message):
        prepare()


@pytest.mark.parametrize("setting", ["samples_per_client", "clients", "test_samples_per_client"])
@pytest.mark.parametrize("reuse", [False, True])
def test_numbers_beyond_all_samples_are_refused_before_they_are_planned_for(setting: str, reuse: bool) -> None:
    experiment = Experiment.from_tables({"data": {setting: 2**63 - 1, "reuse": reuse}})
    with pytest.raises(DataError, match=rf"data\.{setting} = 9223372036854775807: there"):
        pfedla.experiment.federation_of(experiment)


@pytest.mark.parametrize("text", ["[" * 9000, "1" * 5000])
def test_settings_that_python_itself_cannot_read_are_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(f"[schedule]\nseed = {text}")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        Experiment.load(tmp_path / "deep.toml")
    with pytest.raises(ConfigError, match=r"schedule\.seed = .* must be a whole number"):
        Experiment.from_tables(parse_assignments([f"schedule.seed={text}"]))


def test_numbers_that_32_bits_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.lr = 1e\+308 must be finite, in 32 bits, too"):
        Experiment.from_tables({"training": {"lr": 1e308}})


def test_a_billion_rounds_take_no_memory_before_they_are_run() -> None:
    def stop(_: Progress) -> None:
        raise KeyboardInterrupt

    def begin() -> None:
        with pytest.raises(KeyboardInterrupt):
            outcome_of(FedAvg(), watch=stop, rounds=10**9, eval_every=1)

    assert peak(begin) < 2**26
    assert [t for t in range(12) if Schedule(rounds=11, eval_every=4).evaluates(t)] == [4, 8, 11]


def test_an_unknown_instruction_set_is_one_line() -> None:
    command = [sys.executable, "-c", "from pfedla.cli import main; main()", "algorithms"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PFEDLA_KERNELS": "maybe"})
    assert done.returncode == 2
    assert "PFEDLA_KERNELS = 'maybe': here it may be" in done.stderr
    assert "Traceback" not in done.stderr


# ---- disk


def test_a_folder_that_disappears_is_one_line(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "run", "", {})
    shutil.rmtree(tmp_path / "run")
    for write in (lambda: record.append({"round": 1}), lambda: outcome_of(FedAvg(), record, checkpoint_every=0)):
        with pytest.raises(RunError, match=r"cannot write to .*run: No such file or directory"):
            write()
    record.release()


def test_every_error_of_ours_is_one_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)))
    with pytest.raises(PfedlaError) as caught:
        load_folder(tmp_path)
    assert "\n" not in str(caught.value)
