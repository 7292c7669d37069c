"""Where rows of clients lie: in memory, or in files that are mapped into it.

Inside `with mapped(directory):` the tensors made here are files on disk. They are used as any tensor: the operating
system reads the rows that are touched, and lets go of them when memory is needed. N models may then exceed it.

The files have no name once they are mapped: their space is free again when the process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from pfedla.errors import RunError

__all__ = ["is_mapped", "let_go", "mapped", "repeat", "stack", "zeros"]

PIECE = 2**22  # bytes written at once

_mapped: list[weakref.ref[Tensor]] = []  # what lies in files and is still in use
_directory: ContextVar[Path | None] = ContextVar("directory", default=None)


@contextmanager
def mapped(directory: Path | None) -> Iterator[None]:
    """Let tensors made inside be files in `directory`; in memory as ever if it is None."""
    token = _directory.set(directory)
    try:
        yield
    finally:
        _directory.reset(token)


def zeros(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros; on disk they take space, but nothing is written."""
    return stack((), shape, dtype)


def repeat(row: Tensor, n: int) -> Tensor:
    """Return `n` copies of a row `(1, values)`."""
    step = max(1, PIECE // max(1, row.numel() * row.element_size()))
    pieces = (row.expand(min(step, n - start), -1) for start in range(0, n, step))
    return stack(pieces, (n, row.shape[1]), row.dtype)


def stack(pieces: Iterable[Tensor], shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return pieces of rows one after another, in a tensor of this shape; what they leave over is zero."""
    directory, start = _directory.get(), 0
    if directory is None or not math.prod(shape):
        tensor = torch.zeros(*shape, dtype=dtype)
        for piece in pieces:
            tensor[start : start + len(piece)] = piece
            start += len(piece)
        return tensor
    size = math.prod(shape) * dtype.itemsize
    try:
        with _nameless(directory) as (file, name):
            _reserve(file.fileno(), size, directory)
            for piece in pieces:  # written, not mapped: these pages never count as this process's
                file.write(piece.contiguous().numpy().data)
            file.flush()
            tensor = torch.from_file(name, shared=True, size=math.prod(shape), dtype=dtype).view(*shape)
            _mapped.append(weakref.ref(tensor))
            return tensor
    except OSError as error:
        raise RunError(f"cannot keep {size / 1e9:.3g} GB in {directory}: {error.strerror}") from None


@contextmanager
def _nameless(directory: Path) -> Iterator[tuple[BinaryIO, str]]:
    """Open a file that is gone when the process ends, and say how to open it again; it never has a name on Linux."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is not None and Path("/proc/self/fd").is_dir():
        try:
            handle = os.open(directory, flag | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
        else:
            with os.fdopen(handle, "w+b") as file:
                yield file, f"/proc/self/fd/{handle}"
            return
    with tempfile.NamedTemporaryFile(suffix=".rows", dir=directory) as named:
        yield named.file, named.name  # type: ignore[misc]


def is_mapped(tensor: Tensor) -> bool:
    """Say whether a tensor was made inside `mapped`."""
    return tensor.untyped_storage().filename is not None


def let_go() -> None:
    """Give back the memory that rows on disk take in this process; their files keep every change.

    The rows that are touched next come from the system's cache, or from the disk. A no-op where nothing is mapped.
    """
    _mapped[:] = [reference for reference in _mapped if reference() is not None]
    if not _mapped or sys.platform != "linux":
        return
    libc, dont_need = ctypes.CDLL(None), 4  # MADV_DONTNEED: of a shared mapping it drops pages and loses nothing
    for reference in _mapped:
        if (tensor := reference()) is not None:
            memory = tensor.untyped_storage()
            libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes()), dont_need)


def _reserve(handle: int, size: int, directory: Path) -> None:
    """Make sure of the space now: a mapped file on a full disk would end the process at some later write."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
        return
    if shutil.disk_usage(directory).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(handle, size)
