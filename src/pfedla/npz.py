"""Archives of arrays are looked at before they are unpacked: a few kilobytes can hold gigabytes of zeros."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Collection
from typing import IO

import numpy as np

__all__ = ["OversizedError", "check_sizes"]

SUSPICIOUS_BYTES, SUSPICIOUS_RATIO = 2**28, 100  # arrays are seldom so large, and never packed so well


class OversizedError(ValueError):
    """An archive unpacks to more than it should."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}, found {found}")
        self.expected, self.found = expected, found


def check_sizes(stream: IO[bytes], names: Collection[str] | None = None) -> None:
    """Refuse an archive whose arrays declare more than it holds, or unpack to far more than its size.

    Only the arrays of these names are looked at, if any are given; the stream is then at its beginning again.
    """
    if not zipfile.is_zipfile(stream):
        stream.seek(0)
        return
    packed = stream.seek(0, os.SEEK_END)  # not what the members say of themselves
    stream.seek(0)
    with zipfile.ZipFile(stream) as archive:
        members = [x for x in archive.infolist() if names is None or x.filename.removesuffix(".npy") in names]
        size = sum(info.file_size for info in members)
        if size > SUSPICIOUS_BYTES and size > SUSPICIOUS_RATIO * packed:
            raise OversizedError("data", f"{size / 1e9:.3g} GB of arrays packed into {packed / 1e6:.3g} MB")
        for info in members:
            with archive.open(info) as part:
                version = np.lib.format.read_magic(part)
                if version == (1, 0):
                    shape, _, dtype = np.lib.format.read_array_header_1_0(part)
                else:
                    shape, _, dtype = np.lib.format.read_array_header_2_0(part)
                declared = math.prod(shape) * dtype.itemsize
            if declared > info.file_size and not dtype.hasobject:  # objects are pickled, and refused by who loads them
                raise OversizedError(f"an array {info.filename} of {declared:,} bytes", f"{info.file_size:,}")
    stream.seek(0)
