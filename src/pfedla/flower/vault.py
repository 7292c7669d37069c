"""What a site keeps between rounds, on its own disk.

A file for each of the latest rounds that the site trained in. The server says in every message which of them it has
taken; so a server that goes back to a checkpoint, or never got an answer, and its sites agree without further words.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from pfedla import tensorfile, tree
from pfedla.client import Kept
from pfedla.errors import RunError
from pfedla.record import sync

__all__ = ["Vault", "durably"]

EARLIER = 2  # versions before the latest that the server took: its checkpoint before the latest may need them
MOST = 10  # versions where the server has taken none
OWNER, TESTED = "site", "tested-on"
NAME = re.compile(r"round-(\d{8})\.safetensors")

log = logging.getLogger("pfedla")


class Vault:
    """The versions that one site has of one run."""

    def __init__(self, folder: Path, run: str, site: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise RunError(f"the server names a run {run[:80]!r}, which cannot be one")
        self.state, self.folder, self.site = folder, folder / run, site

    def versions(self) -> list[int]:
        """Return the rounds of which there is something, in ascending order."""
        names = [NAME.fullmatch(path.name) for path in self.folder.glob("*")] if self.folder.is_dir() else []
        return sorted(int(name[1]) for name in names if name)

    def read(self, version: int, like: Kept) -> Kept | None:
        """Return what was kept after a round, shaped as `like`; None if it is not there or damaged.

        A disk that cannot be read just now has lost nothing: that is an error.
        """
        path = self._path(version)
        if not path.exists():
            return None
        try:
            path.open("rb").close()  # or it would be hard to tell a file that may not be read from one that is gone
            with safe_open(path, "pt") as file:
                facts = file.metadata() or {}
            if facts.get("site") != self.site:
                raise RunError(f"it is {str(facts.get('site'))[:80]}'s: every site needs a state folder of its own")
            checksums = json.loads(facts["checksums"])
            tensors = load_file(path)
            if {name: tensorfile.checksum(tensor) for name, tensor in tensors.items()} != checksums:
                raise RunError("its tensors are not what was written")
            return tree.restore(like, tensors)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunError(f"it cannot read what it kept: {error.strerror or type(error).__name__}") from error
        except (SafetensorError, LookupError, ValueError, RunError) as error:
            log.warning("cannot read %s: %s", path, error)
            return None

    def write(self, version: int, kept: Kept, taken: int) -> None:
        """Keep what was trained in a round, beside what the server has `taken`; remove what nobody can ask for.

        What is newer stays: the server may have gone back to a checkpoint by mistake. Where it takes the site to have
        nothing, the latest do.
        """
        tensors = {name: tensor.contiguous() for name, tensor in tree.flatten(kept).items()}
        checksums = {name: tensorfile.checksum(tensor) for name, tensor in tensors.items()}
        try:
            self.claim()
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with durably(self._path(version)) as file:
                tensorfile.write(file, tensors, {"checksums": json.dumps(checksums), "site": self.site})
            before = [found for found in self.versions() if found < taken]
            between = [found for found in self.versions() if taken < found < version]
            others = [found for found in self.versions() if found != version]
            for old in [*before[:-EARLIER], *between] if taken else others[: 1 - MOST]:
                self._path(old).unlink(missing_ok=True)
            for part in self.folder.glob("*.part"):  # of a process that was killed
                if part.name < self._path(version).name:
                    part.unlink(missing_ok=True)
        except OSError as error:
            log.error("cannot write to %s: %s", self.folder, error)
            raise RunError(f"it cannot keep what it trained: {error.strerror}") from error

    def claim(self) -> None:
        """Write down whose state folder this is; refuse another site's."""
        path = self.state / OWNER
        if not path.exists() or not path.read_text():
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            with durably(path) as file:
                file.write(self.site.encode())
        if (owner := path.read_text()) != self.site:
            log.error("%s is site %s's", self.state, owner[:80])
            raise RunError("its state folder is another site's: every site needs one of its own")

    def hold_to(self, tested_on: str) -> None:
        """Write down what tells the site's test samples at its first message of the run; refuse others later."""
        path = self.folder / TESTED
        try:
            self.claim()
            if path.exists() and path.read_text():
                known = path.read_text()
            else:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with durably(path) as file:
                    file.write(tested_on.encode())
                known = tested_on
        except OSError as error:
            raise RunError(f"it cannot read what it kept: {error.strerror}") from error
        if known != tested_on:
            log.error(
                "the test samples are not those that this run began with: samples that models were trained on may be "
                "among them. Restore the data, in their order and number, or delete %s to go on with these",
                path,
            )
            raise RunError("its test samples are not those that it began the run with; its own log says more")

    def _path(self, version: int) -> Path:
        return self.folder / f"round-{version:08d}.safetensors"


@contextmanager
def durably(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` once it is whole and on the disk."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)
