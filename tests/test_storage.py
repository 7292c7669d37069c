"""Rows on disk are rows: the same numbers, little memory, and a refusal where there is no room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pfedla
from pfedla import tensorfile
from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, PFedLA
from pfedla.errors import RunError
from pfedla.record import RunRecord
from pfedla.rounds import Progress
from pfedla.storage import is_mapped, let_go, mapped, repeat, stack, zeros
from pfedla.tree import flatten, restore
from tests.world import net, outcome_of, same, same_outcome, same_result, samples, setting, theta_of


def test_rows_on_disk_are_the_rows_in_memory_and_leave_no_file(tmp_path: Path) -> None:
    row, pieces = torch.rand(1, 5), [torch.rand(2, 3), torch.rand(1, 3)]

    def make() -> tuple[torch.Tensor, ...]:
        return (
            repeat(row, 7),
            stack(iter(pieces), (4, 3)),
            zeros((2, 3), torch.int64),
            repeat(row.double()[:, :0], 3),
            zeros((0, 2)),
        )

    with mapped(tmp_path):
        on_disk = make()
    same(on_disk, make())
    assert [is_mapped(x) for x in on_disk] == [True, True, True, False, False]
    assert not any(is_mapped(x) for x in make())
    assert list(tmp_path.iterdir()) == []
    on_disk[0][3] = 9
    assert on_disk[0][3].tolist() == [9] * 5
    assert torch.equal(on_disk[0][2:3], row)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_that_are_let_go_take_no_memory_and_keep_their_numbers(tmp_path: Path) -> None:
    def resident() -> int:  # kB
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))

    with mapped(tmp_path):
        rows = repeat(torch.ones(1, 2**20), 16)  # 64 MB
    rows.mul_(3)
    before = resident()
    let_go()
    assert resident() < before - 60_000
    assert rows.sum() == 3 * rows.numel()


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    with mapped(tmp_path / "missing"), pytest.raises(RunError, match=r"cannot keep .* GB in .*missing: No such file"):
        zeros((3,))


def test_too_little_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with mapped(tmp_path), pytest.raises(RunError, match=r"cannot keep 4e\+06 GB in .*(No space left|too large)"):
        zeros((10**9, 10**6))
    assert list(tmp_path.iterdir()) == []


def test_without_a_way_to_reserve_space_the_free_space_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.posix_fallocate", raising=False)
    with mapped(tmp_path), pytest.raises(RunError, match="No space left"):
        zeros((10**9, 10**6))
    with mapped(tmp_path):
        assert zeros((3,)).tolist() == [0, 0, 0]


def test_a_state_on_disk_is_restored_in_place(tmp_path: Path) -> None:
    made, path = setting(PFedLA()), tmp_path / "state.safetensors"
    saved = made.algorithm.init(theta_of(made), 5, torch.Generator().manual_seed(1))
    with path.open("wb") as file:
        tensorfile.write(file, flatten(saved))
    with mapped(tmp_path):
        state = made.algorithm.init(theta_of(made), 5, torch.Generator().manual_seed(2))
    places = {key: x.data_ptr() for key, x in flatten(state).items() if is_mapped(x)}
    assert {"theta/conv", "heads/value/weight", "heads/first/weight", "body/second/weight1"} <= set(places)
    restored = restore(state, load_file(path))
    same(restored, saved)
    assert places == {key: x.data_ptr() for key, x in flatten(restored).items() if key in places}


# ---- whole runs


@pytest.mark.slow
def test_a_run_on_disk_is_a_run_in_memory(algorithm: Algorithm[Any], tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "run", "", {})
    with mapped(record.path):
        found = outcome_of(algorithm, record, rounds=4)
    same_outcome(found, outcome_of(algorithm, rounds=4))
    assert all(is_mapped(rows) for rows in found.personalized.values())
    record.release()
    assert sorted(path.name for path in record.path.iterdir()) == ["config.toml", "metrics.jsonl", "run.json"]


def test_a_run_on_disk_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.t == 2:
            raise KeyboardInterrupt

    record = RunRecord.create(tmp_path / "run", "", {})
    with mapped(record.path):
        with pytest.raises(KeyboardInterrupt):
            outcome_of(PFedLA(), record, stop, rounds=4)
        found = outcome_of(PFedLA(), record, rounds=4)
    same_outcome(found, outcome_of(PFedLA(), rounds=4))


@pytest.mark.parametrize("recorded", [False, True])
def test_storage_on_disk_is_in_the_runs_folder_or_in_a_temporary_one(
    recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Path | None] = []

    def telling(directory: Path | None) -> Any:
        places.append(directory)
        return mapped(directory)

    monkeypatch.setattr("pfedla.experiment.mapped", telling)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = tmp_path / "run" if recorded else None
    clients = [mine.take(slice(None), torch.empty(0)) for mine in samples(3)]
    on_disk = pfedla.run(FedAvg(), net, clients, rounds=1, workers=0, storage="disk", out=out)
    in_memory = pfedla.run(FedAvg(), net, clients, rounds=1, workers=0)
    assert places == [out or tmp_path, None]
    same_result(on_disk, in_memory)
    assert [is_mapped(result.personalized["conv"]) for result in (on_disk, in_memory)] == [True, False]
    assert [path.name for path in tmp_path.rglob("*.rows")] == []


RESIDENT = """
import sys
from pathlib import Path

import torch

from pfedla.algorithms import PFedLAPeers
from pfedla.storage import mapped
from pfedla.wire import Payload


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def play(clients):
    before = resident()
    with mapped(Path(sys.argv[1])):
        state = algorithm.init({"a": torch.ones(1, numbers)}, clients, torch.Generator())
    made = resident()
    algorithm.update(state, ids, algorithm.download(state, ids), upload)
    after = resident()
    return before, made, after, float(state.clients.theta["a"].sum(dtype=torch.float64)), resident()


torch.set_num_threads(1)
numbers, ids = 250_000, torch.tensor([3, 1])
algorithm = PFedLAPeers(peers=3, embedding=4, hidden=4)
upload = Payload.of({"a": torch.ones(2, numbers)}, torch.ones(2, 1, dtype=torch.bool), ("a",))
play(6)  # brings the code to memory
print(*play(200))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_the_rows_of_participants_and_candidates_come_to_memory(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", RESIDENT, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    before, made, updated, total, read = map(float, answer.split())
    assert made - before < 50  # a bank of 200 MB
    assert updated - made < 50  # 8 rows of 1 MB, and a few copies of the two clients'
    assert total == 200 * 250_000 + 2 * 250_000
    assert read - updated > 100  # this measure can tell: now every row was read
