from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from pfedla.data import datasets, download
from pfedla.data.datasets import DATASETS, Dataset, cache_dir, load_dataset
from pfedla.data.download import Remote, download_files, fetch
from pfedla.errors import DataError

BODY = np.random.default_rng(0).bytes(100_000)


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class Server(HTTPServer):
    """Serves `files`; each request uses up one of `faults`, if any is left."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: list[int | str] = []
        self.asked: list[tuple[str, str | None]] = []
        self.closing = threading.Event()

    def remote(self, name: str, data: bytes, *members: str) -> Remote:
        self.files[f"/{name}"] = data
        return Remote(f"http://127.0.0.1:{self.server_port}/{name}", md5(data), members)

    def handle_error(self, *_: object) -> None:
        """Keep quiet when a client hangs up."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        fault = self.server.faults.pop(0) if self.server.faults else ""
        body = self.server.files.get(self.path)
        if isinstance(fault, int) or body is None:
            self.send_error(fault if isinstance(fault, int) else 404)
            return
        if fault == "silent":
            self.server.closing.wait(5)
            return
        if fault == "wrong":
            body = bytes(len(body))
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and fault != "no range" else 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            place = start + 1 if fault == "misplaced" else start
            self.send_header("Content-Range", f"bytes {place}-{len(body) - 1}/{len(body)}")
        if fault != "no length":
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:][: len(body[start:]) // 2] if fault == "cut" else body[start:])

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collect the pauses instead of making them."""
    pauses: list[float] = []
    monkeypatch.setattr("pfedla.data.download.time.sleep", pauses.append)
    return pauses


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# One file


def test_a_file_arrives_whole_and_progress_is_told(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "CHUNK_BYTES", 40_000)
    told: list[tuple[str, int, int | None]] = []
    path = fetch(server.remote("a.gz", BODY), tmp_path, lambda *progress: told.append(progress))
    assert path == tmp_path / "a.gz"
    assert path.read_bytes() == BODY
    assert told == [("a.gz", done, 100_000) for done in (40_000, 80_000, 100_000)]
    assert names(tmp_path) == ["a.gz"]


def test_an_unknown_length_is_told_as_none(server: Server, tmp_path: Path) -> None:
    told: list[int | None] = []
    server.faults = ["no length"]
    fetch(server.remote("a.gz", BODY), tmp_path, lambda _name, _done, total: told.append(total))
    assert told == [None]
    assert (tmp_path / "a.gz").read_bytes() == BODY


def test_pauses_double_after_each_failure(server: Server, tmp_path: Path, delays: list[float]) -> None:
    server.faults = [500, 503, 429, 408]
    assert fetch(server.remote("a", BODY), tmp_path).read_bytes() == BODY
    assert delays == [1, 2, 4, 8]
    assert len(server.asked) == 5


def test_failures_without_end_are_given_up(server: Server, tmp_path: Path) -> None:
    server.faults = [500] * 9
    with pytest.raises(DataError, match=r"cannot fetch http://127.*/a \(5 attempts\): the server answers 500"):
        fetch(server.remote("a", BODY), tmp_path)
    assert len(server.asked) == 5


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_refusal_is_final(server: Server, tmp_path: Path, status: int) -> None:
    server.faults = [status]
    with pytest.raises(DataError, match=f"/a: the server answers {status}"):
        fetch(server.remote("a", BODY), tmp_path)
    assert len(server.asked) == 1
    assert names(tmp_path) == []


def test_a_cut_off_body_is_resumed_where_it_ended(server: Server, tmp_path: Path) -> None:
    server.faults = ["cut", "cut"]
    assert fetch(server.remote("a", BODY), tmp_path).read_bytes() == BODY
    assert [wanted for _, wanted in server.asked] == [None, "bytes=50000-", "bytes=75000-"]


def test_a_body_that_is_always_cut_off_is_given_up_and_kept(server: Server, tmp_path: Path) -> None:
    server.faults = ["cut"] * 5
    with pytest.raises(DataError, match="only 96,875 of 100,000 bytes came"):
        fetch(server.remote("a", BODY), tmp_path)
    assert (tmp_path / "a.part").read_bytes() == BODY[:96_875]


def test_the_part_of_an_earlier_call_is_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(BODY[:99_000])
    told: list[tuple[int, int | None]] = []
    path = fetch(server.remote("a", BODY), tmp_path, lambda _name, done, total: told.append((done, total)))
    assert path.read_bytes() == BODY
    assert server.asked == [("/a", "bytes=99000-")]
    assert told == [(100_000, 100_000)]


@pytest.mark.parametrize("fault", ["no range", "misplaced"])
def test_a_server_that_does_not_resume_sends_it_all_again(server: Server, tmp_path: Path, fault: str) -> None:
    (tmp_path / "a.part").write_bytes(BODY[:500])
    server.faults = [fault]
    assert fetch(server.remote("a", BODY), tmp_path).read_bytes() == BODY


def test_a_part_that_is_already_whole_only_needs_its_checksum(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(BODY)
    assert fetch(server.remote("a", BODY), tmp_path).read_bytes() == BODY
    assert server.asked == [("/a", f"bytes={len(BODY)}-")]


@pytest.mark.parametrize("part", [b"other contents", bytes(len(BODY) + 1)])
def test_a_part_of_something_else_is_thrown_away(server: Server, tmp_path: Path, part: bytes) -> None:
    (tmp_path / "a.part").write_bytes(part)
    assert fetch(server.remote("a", BODY), tmp_path).read_bytes() == BODY
    assert [wanted for _, wanted in server.asked] == [f"bytes={len(part)}-", None]


def test_a_wrong_checksum_gets_one_more_try(server: Server, tmp_path: Path) -> None:
    server.faults = ["wrong"]
    assert fetch(server.remote("a", BODY), tmp_path).read_bytes() == BODY
    server.faults, server.asked = ["wrong"] * 2, []
    with pytest.raises(DataError, match=f"expected MD5 {md5(BODY)}, found {md5(bytes(len(BODY)))}"):
        fetch(server.remote("b", BODY), tmp_path)
    assert len(server.asked) == 2
    assert names(tmp_path) == ["a"]


def test_a_silent_server_times_out(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    server.faults = ["silent"]
    with pytest.raises(DataError, match="timed out"):
        fetch(server.remote("a", BODY), tmp_path)


def test_no_server_at_all(tmp_path: Path, server: Server, delays: list[float]) -> None:
    remote = server.remote("a", BODY)
    with HTTPServer(("127.0.0.1", 0), Handler) as closed:
        url = remote.url.replace(str(server.server_port), str(closed.server_port))
    with pytest.raises(DataError, match="refused"):
        fetch(replace(remote, url=url), tmp_path)
    assert len(delays) == 4


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*file"):
        download_files([], tmp_path / "file" / "folder", [])


# Archives


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


ARCHIVES = pytest.mark.parametrize(("name", "pack"), [("a.tar.gz", tar_of), ("a.zip", zip_of)])
Pack = Callable[[dict[str, bytes]], bytes]


@ARCHIVES
def test_only_the_wanted_members_are_taken(server: Server, tmp_path: Path, name: str, pack: Pack) -> None:
    remote = server.remote(name, pack({"top/x": b"1", "top/y": b"2", "top/z": b"3"}), "x", "y")
    download_files([remote], tmp_path / "new", {"x"})
    assert names(tmp_path / "new") == ["x"]
    assert (tmp_path / "new" / "x").read_bytes() == b"1"
    server.asked.clear()
    download_files([remote], tmp_path / "new", {"another"})
    assert server.asked == []


@ARCHIVES
@pytest.mark.parametrize("evil", ["../x", "top/../../x", "/tmp/x", "..\\x"])
def test_a_member_that_leads_out_is_refused(server: Server, tmp_path: Path, name: str, pack: Pack, evil: str) -> None:
    folder = tmp_path / "in" / "side"
    with pytest.raises(DataError, match="leads out of the folder"):
        download_files([server.remote(name, pack({evil: b"1"}), "x")], folder, {"x"})
    assert names(folder) == []
    assert names(tmp_path / "in") == ["side"]


def test_links_in_a_tar_are_not_followed(server: Server, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo("x")
        link.type, link.linkname = tarfile.SYMTYPE, "../../secret"
        tar.addfile(link)
    with pytest.raises(DataError, match="expected x in it, found no such member"):
        download_files([server.remote("a.tar.gz", buffer.getvalue(), "x")], tmp_path, {"x"})
    assert names(tmp_path) == []


@ARCHIVES
def test_a_damaged_archive_is_refused_and_removed(server: Server, tmp_path: Path, name: str, pack: Pack) -> None:
    whole = pack({"x": BODY})
    flipped = whole.replace(BODY[600:610], bytes(10))  # random bytes are stored as they are
    for data in (b"no archive", whole[:50_000], *([flipped] if name == "a.zip" else [])):
        with pytest.raises(DataError, match="a damaged one"):
            download_files([server.remote(name, data, "x")], tmp_path, {"x"})
        assert names(tmp_path) == []


# Whole data sets


def idx_gz(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    return gzip.compress(struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes())


def official(server: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the server stand in for the official address of a data set, with two images in each part."""
    spec, contents = DATASETS[name], {}
    for number, file in enumerate(spec.files):
        if "images" in file:
            contents[f"{file}.gz"] = idx_gz(np.full((2, 28, 28), number, np.uint8))
        elif "labels" in file:
            contents[f"{file}.gz"] = idx_gz(np.array([number, number + 1], np.uint8))
        else:
            contents[f"{file}.bin"] = (b"\0" * (name == "cifar100") + bytes([number]) + bytes(3072)) * 2
    if spec.remotes[0].members:
        (remote,) = spec.remotes
        pack = zip_of if remote.name.endswith(".zip") else tar_of
        data = pack({f"folder/{file}": content for file, content in contents.items()})
        remotes = [server.remote(remote.name, data, *remote.members)]
    else:
        remotes = [server.remote(remote.name, contents[remote.name]) for remote in spec.remotes]
    monkeypatch.setattr(datasets, "DATASETS", {**DATASETS, name: replace(spec, remotes=tuple(remotes))})


@pytest.mark.parametrize("name", [name for name, spec in DATASETS.items() if spec.remotes])
def test_every_data_set_is_fetched_once_into_the_cache(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    official(server, monkeypatch, name)
    data = load_dataset(name, download=True)
    spec = DATASETS[name]
    assert len(data.x) == 2 * len(spec.parts)
    folder = cache_dir() / spec.layouts[0].folders[0]
    assert names(folder) == sorted(file + spec.layouts[0].suffixes[0] for file in spec.files)
    server.asked.clear()
    again: list[Dataset] = [load_dataset(name, download=True), load_dataset(name)]
    assert server.asked == []
    assert all(np.array_equal(other.x, data.x) and np.array_equal(other.y, data.y) for other in again)


@pytest.mark.parametrize("direct", [False, True])
def test_only_missing_files_are_fetched_beside_those_that_are_there(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direct: bool
) -> None:
    official(server, monkeypatch, "mnist")
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    mine = gzip.decompress(idx_gz(np.full((2, 28, 28), 77, np.uint8)))
    (folder / "train-images-idx3-ubyte").write_bytes(mine)
    data = load_dataset("mnist", folder if direct else tmp_path, download=True)
    assert data.x[:, 0, 0, 0].tolist() == [77, 77, 2, 2]
    assert [path for path, _ in server.asked] == [
        "/train-labels-idx1-ubyte.gz",
        "/t10k-images-idx3-ubyte.gz",
        "/t10k-labels-idx1-ubyte.gz",
    ]


def test_nothing_is_fetched_unless_asked(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    official(server, monkeypatch, "cifar10")
    with pytest.raises(DataError, match=r"machine\.download = true"):
        load_dataset("cifar10", tmp_path / "data")
    assert server.asked == []


def test_incomplete_pickles_are_replaced_by_the_records(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    official(server, monkeypatch, "cifar10")
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"never read")
    assert len(load_dataset("cifar10", tmp_path, download=True).x) == 12


def test_official_addresses_are_well_formed() -> None:
    for spec in DATASETS.values():
        available = [file for remote in spec.remotes for file in remote.files]
        suffix = spec.layouts[0].suffixes[0]
        assert available == ([file + suffix for file in spec.files] if available else [])
        for remote in spec.remotes:
            assert remote.url.startswith("http")
            assert len(bytes.fromhex(remote.md5)) == 16


@pytest.mark.parametrize("fault", ["", "no length"])
def test_more_than_was_to_come_is_refused(fault: str, server: Server, tmp_path: Path) -> None:
    remote, most = server.remote("file", BODY), len(BODY) - 1
    server.faults.append(fault)
    with pytest.raises(DataError, match=rf"file: refused, it is larger than {most:,} bytes"):
        fetch(replace(remote, most=most), tmp_path)
    (tmp_path / "file.part").unlink(missing_ok=True)
    assert fetch(replace(remote, most=len(BODY)), tmp_path).read_bytes() == BODY


@ARCHIVES
def test_a_member_larger_than_the_limit_is_refused(server: Server, tmp_path: Path, name: str, pack: Pack) -> None:
    remote = replace(server.remote(name, pack({"x": bytes(10**6)}), "x"), most=10**5)
    with pytest.raises(DataError, match=r"refused, it is larger than 100,000 bytes"):
        download_files([remote], tmp_path, {"x"})
    assert names(tmp_path) == []


def test_official_addresses_are_secured() -> None:
    assert all(remote.url.startswith("https://") for spec in DATASETS.values() for remote in spec.remotes)
