"""Fetch official files: resumed where they broke off, checked, and in place only when whole."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import ssl
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

from pfedla.errors import DataError

__all__ = ["Progress", "Remote", "download_files", "fetch"]

Progress = Callable[[str, int, int | None], None]
"""Told the file's name, the bytes that are here and the bytes in all (None if the server does not say)."""

ATTEMPTS = 5
BACKOFF_SECONDS = 1.0
TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 18
_TRANSIENT_STATUS = {408, 429}
_TRANSIENT = (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class Remote:
    """A file at its official address."""

    url: str
    md5: str  # as its publisher gives it
    members: tuple[str, ...] = ()  # the files to take from it, by name, if it is an archive (.zip or .tar.gz)
    most: int = 2**30  # bytes: more is not what was asked for, neither of the file nor of one that it holds

    @property
    def name(self) -> str:
        """The file's name."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files it leaves behind."""
        return self.members or (self.name,)


class _BrokenOffError(Exception):
    """A transfer ended early; another attempt may succeed."""


def download_files(
    remotes: Iterable[Remote], folder: Path, wanted: Collection[str], progress: Progress | None = None
) -> None:
    """Put the `wanted` files into `folder`, from those of `remotes` that have them.

    Archives are removed once the wanted files are out of them.

    Raises
    ------
    DataError
        A file cannot be fetched, is not what its checksum promises, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for remote in remotes:
            files = set(wanted).intersection(remote.files)
            if files:
                path = fetch(remote, folder, progress)
                if remote.members:
                    try:
                        _extract(path, folder, files, remote.most)
                    finally:
                        path.unlink()
    except OSError as error:
        where = error.filename or folder
        raise DataError(f"cannot write {where}: {error.strerror or error}") from None


def fetch(remote: Remote, folder: Path, progress: Progress | None = None) -> Path:
    """Fetch one file into `folder` and return its path.

    What has come so far stays in `NAME.part`, from which the next attempt, or the next call, goes on.
    """
    part = folder / f"{remote.name}.part"
    reason, mismatches = "", 0
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
        try:
            _transfer(remote, part, progress)
        except _BrokenOffError as error:
            reason = str(error)
            continue
        with part.open("rb") as stream:
            found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found == remote.md5:
            return part.replace(folder / remote.name)
        part.unlink()
        reason = f"expected MD5 {remote.md5}, found {found}"
        mismatches += 1
        if mismatches == 2:
            break
    raise DataError(f"cannot fetch {remote.url} ({attempt + 1} attempts): {reason}")


def _transfer(remote: Remote, part: Path, progress: Progress | None) -> None:
    """Bring `part` up to the whole file, or raise `_BrokenOffError` and leave what came."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "pfedla"} | ({"Range": f"bytes={have}-"} if have else {})
    request = urllib.request.Request(remote.url, headers=headers)  # noqa: S310 - a registry's address
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310
            if response.status == 206:
                if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                    part.unlink()
                    raise _BrokenOffError("the server resumed at another place")
            else:
                have = 0
            if remote.url.startswith("https:") and not response.geturl().startswith("https:"):
                raise DataError(f"cannot fetch {remote.url}: the server leads to an address that is not secured")
            length = response.headers.get("Content-Length")
            total = have + int(length) if length and length.isdigit() else None
            if total is not None and total > remote.most:
                raise _too_large(remote.url, remote.most)
            with part.open("ab" if have else "wb") as out:
                while chunk := response.read(CHUNK_BYTES):
                    out.write(chunk)
                    have += len(chunk)
                    if have > remote.most:
                        raise _too_large(remote.url, remote.most)
                    if progress:
                        progress(remote.name, have, total)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and have:
                return  # nothing is left to send: the checksum tells whether the part is the file
            if error.code < 500 and error.code not in _TRANSIENT_STATUS:
                message = f"cannot fetch {remote.url}: the server answers {error.code} {error.reason}"
                raise DataError(message) from None
            raise _BrokenOffError(f"the server answers {error.code} {error.reason}") from None
    except _TRANSIENT as error:
        raise _BrokenOffError(str(error) or type(error).__name__) from None
    if total is not None and have < total:
        raise _BrokenOffError(f"only {have:,} of {total:,} bytes came")


def _too_large(what: object, most: int) -> DataError:
    return DataError(f"{what}: refused, it is larger than {most:,} bytes")


def _extract(archive: Path, folder: Path, files: Collection[str], most: int) -> None:
    """Copy `files` out of `archive`; no path that the archive names is ever written to."""
    missing = set(files)
    try:
        with closing(_members(archive)) as members, TemporaryDirectory(dir=folder) as scratch:
            for member, stream in members:
                path = PurePosixPath(member.replace("\\", "/"))
                if path.is_absolute() or ".." in path.parts:
                    raise DataError(f"{archive}: refused, its member {member!r} leads out of the folder")
                if path.name in missing:
                    part = Path(scratch, path.name)
                    with part.open("wb") as out:
                        while chunk := stream.read(CHUNK_BYTES):
                            out.write(chunk)
                            if out.tell() > most:
                                raise _too_large(f"{archive}, {member}", most)
                    part.replace(folder / path.name)
                    missing.remove(path.name)
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive}: expected a whole archive, found a damaged one ({error})") from None
    if missing:
        raise DataError(f"{archive}: expected {', '.join(sorted(missing))} in it, found no such member")


def _members(archive: Path) -> Generator[tuple[str, IO[bytes]], None, None]:
    """Yield the name and the content of each plain file in the archive."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                with zipped.open(info) as stream:
                    yield info.filename, stream
    else:
        with tarfile.open(archive) as tar:
            for entry in tar:
                content = tar.extractfile(entry) if entry.isfile() else None
                if content:
                    with content:
                        yield entry.name, content
