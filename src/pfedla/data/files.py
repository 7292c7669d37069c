"""Read image files and client files, and say plainly what is wrong with one that cannot be read.

Three official formats are known: IDX (MNIST and its kin, plain or gzipped), the CIFAR records and the CIFAR
pickles. A reader takes the files of one part of a data set and returns its images, uint8 `(n, channels,
height, width)`, and its labels as stored. `load_folder` reads a user's own data, one `.npz` for each client.
"""

from __future__ import annotations

import gzip
import math
import pickle
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pfedla.errors import DataError
from pfedla.npz import OversizedError, check_sizes

__all__ = [
    "ClientFile",
    "Images",
    "Labels",
    "Reader",
    "Shape",
    "load_client",
    "load_column",
    "load_folder",
    "load_inputs",
    "read_idx",
    "read_pickle",
    "read_records",
]

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Shape = tuple[int, int, int]
Reader = Callable[[Sequence[Traversable], Shape, int], tuple[Images, Labels]]
"""Files of one part, shape of an image, most images there can be -> images and labels."""

HOW = ": np.savez('name.npz', x=inputs, y=targets) writes such a file"
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile)


def _wrong(source: Traversable | Path, expected: str, found: object) -> DataError:
    return DataError(f"{source}: expected {expected}, found {found}")


@contextmanager
def _opened(source: Traversable) -> Iterator[IO[bytes]]:
    """Open `source`, unpacking gzip by its name; whatever the system says of it becomes a `DataError`."""
    try:
        if isinstance(source, Path) and source.exists() and not source.is_file():
            raise DataError(f"cannot read {source}: it is no regular file")
        with source.open("rb") as raw:
            if source.name.endswith(".gz"):
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield cast("IO[bytes]", unpacked)
            else:
                yield raw
    except _DAMAGE as error:
        raise _wrong(source, "a whole file", f"a damaged one ({error})") from None
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror or error}") from None


def _idx_array(source: Traversable, item: tuple[int, ...], limit: int) -> Images:
    """Read an IDX file of bytes whose items have the shape `item`."""
    kind = "images" if item else "labels"
    magic = 0x0800 + 1 + len(item)
    layout = struct.Struct(f">{2 + len(item)}I")
    with _opened(source) as stream:
        header = stream.read(layout.size)
        if len(header) < layout.size:
            raise _wrong(source, f"an IDX header of {layout.size} bytes", f"{len(header)} bytes")
        number, count, *dims = layout.unpack(header)
        if number != magic:
            raise _wrong(source, f"magic number {magic} (IDX {kind})", number)
        if tuple(dims) != item:
            raise _wrong(source, f"images of {' x '.join(map(str, item))}", " x ".join(map(str, dims)))
        if not 1 <= count <= limit:
            raise _wrong(source, f"1 to {limit:,} {kind}", f"{count:,}")
        size = count * math.prod(item)
        body = stream.read(size + 1)
    if len(body) != size:
        found = f"{len(body):,}" if len(body) < size else "more"
        raise _wrong(source, f"{size:,} bytes after the header, for {count:,} {kind}", found)
    return np.frombuffer(body, np.uint8).reshape(count, *item)


def read_idx(files: Sequence[Traversable], shape: Shape, limit: int) -> tuple[Images, Labels]:
    """Read a pair of IDX files, images and labels; a name that ends in `.gz` is unpacked.

    `shape` is an image's, channels (one), height and width; `limit` is how many images there can be at most.
    """
    images, labels = files
    x, y = _idx_array(images, shape[1:], limit), _idx_array(labels, (), limit)
    if len(x) != len(y):
        raise _wrong(labels, f"{len(x):,} labels, one for each image of {images.name}", f"{len(y):,}")
    return x.reshape(-1, *shape), y.astype(np.int64)


def read_records(files: Sequence[Traversable], shape: Shape, limit: int, *, label_bytes: int) -> tuple[Images, Labels]:
    """Read one file of CIFAR records: `label_bytes` labels, of which the last counts, then the pixels.

    The other parameters are those of `read_idx`.
    """
    (source,) = files
    size = label_bytes + math.prod(shape)
    with _opened(source) as stream:
        body = stream.read(limit * size + 1)
    if not body or len(body) % size or len(body) > limit * size:
        raise _wrong(source, f"1 to {limit:,} records of {size:,} bytes each", f"{len(body):,} bytes")
    records = np.frombuffer(body, np.uint8).reshape(-1, size)
    return records[:, label_bytes:].reshape(-1, *shape), records[:, label_bytes - 1].astype(np.int64)


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


def _latin1(text: str, encoding: str | bytes) -> bytes:
    """Stand in for `_codecs.encode`, which pickles of bytes call with this one encoding."""
    if _text(encoding) != "latin1":
        raise ValueError(f"encoding {encoding!r}")
    return text.encode("latin1")


class _PickledType:
    """Stands in for `numpy.dtype`, which must not take its state from a file that nobody vouches for."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name, self.order = _text(name), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = _text(state[1])

    def array(self, data: bytes) -> npt.NDArray[Any]:
        """Return the numbers of this type in `data`."""
        dtype = np.dtype(self.order + self.name)
        if dtype.kind not in "uif":
            raise ValueError(f"numbers of type {dtype}")
        return np.frombuffer(data, dtype)


class _PickledArray:
    """Stands in for `numpy.ndarray`; `array` is what was pickled."""

    array: npt.NDArray[Any]

    def __setstate__(self, state: tuple[int, tuple[int, ...], _PickledType, bool, bytes]) -> None:
        _, shape, kind, fortran, data = state
        self.array = kind.array(data).reshape(shape, order="F" if fortran else "C")


_PICKLE_NAMES: dict[tuple[str, str], Callable[..., object]] = {
    ("_codecs", "encode"): _latin1,
    ("numpy", "dtype"): _PickledType,
    ("numpy", "ndarray"): _PickledArray,
}
for _core in ("core", "_core"):
    _PICKLE_NAMES[f"numpy.{_core}.multiarray", "_reconstruct"] = lambda *_: _PickledArray()
    _PICKLE_NAMES[f"numpy.{_core}.multiarray", "scalar"] = lambda kind, data: kind.array(data)[0]


class _ForbiddenNameError(Exception):
    """A pickle asks for something that is no part of an array."""


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickle arrays, containers, text and numbers, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        try:
            return _PICKLE_NAMES[module, name]
        except KeyError:
            raise _ForbiddenNameError(f"{module}.{name}") from None


def read_pickle(files: Sequence[Traversable], shape: Shape, limit: int, *, label_key: str) -> tuple[Images, Labels]:
    """Read one CIFAR pickle: a dictionary with `data` and, under `label_key`, the labels.

    Only arrays and plain containers are unpickled. The other parameters are those of `read_idx`.
    """
    (source,) = files
    with _opened(source) as stream:
        try:
            batch = _ArrayUnpickler(stream, encoding="bytes").load()
            if isinstance(batch, dict):
                fields = {_text(key): getattr(value, "array", value) for key, value in batch.items()}
        except _ForbiddenNameError as error:
            raise _wrong(source, "a pickle of arrays only", f"the forbidden name {error}") from None
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise _wrong(source, "a whole pickle", f"a damaged one ({error})") from None
    if not isinstance(batch, dict):
        raise _wrong(source, "a dictionary", f"a {type(batch).__name__}")
    for key in ("data", label_key):
        if key not in fields:
            raise _wrong(source, f"the key {key!r}", ", ".join(sorted(map(str, fields))) or "none")
    x, labels, pixels = fields["data"], fields[label_key], math.prod(shape)
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != pixels:
        found = f"{x.dtype} {x.shape}" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
        raise _wrong(source, f"data of type uint8 and shape (n, {pixels})", found)
    if not 1 <= len(x) <= limit:
        raise _wrong(source, f"1 to {limit:,} images", f"{len(x):,}")
    if not isinstance(labels, list | np.ndarray) or not all(isinstance(y, int | np.integer) for y in labels):
        raise _wrong(source, f"a list of integers under {label_key!r}", "something else")
    if len(labels) != len(x):
        raise _wrong(source, f"{len(x):,} labels, one for each image", f"{len(labels):,}")
    return x.reshape(-1, *shape), np.array([int(y) for y in labels], np.int64)


class ClientFile(NamedTuple):
    """The data of one client, as its file holds it; without test samples the experiment divides it."""

    name: str  # the file's, without .npz
    x: npt.NDArray[Any]
    y: npt.NDArray[Any]  # labels, int64 from 0, or other targets
    x_test: npt.NDArray[Any] | None
    y_test: npt.NDArray[Any] | None


def load_folder(path: Path, *, labels: bool = True) -> list[ClientFile]:
    """Read a folder that holds one `.npz` file for each client.

    Each file has the arrays `x` and `y`, and may have `x_test` and `y_test`. Clients come in the natural
    order of their names: `client2` before `client10`. All must agree in the type and shape of a sample. `y` holds
    `labels`, whole numbers from 0, or else any numbers.

    Raises
    ------
    DataError
        The folder has no such file, or one of them is damaged or does not fit.
    """
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    found = (file for file in path.iterdir() if file.suffix.lower() == ".npz" and file.name[0] != ".")
    files = sorted(found, key=_natural)
    if not files:
        kinds = Counter(file.suffix for file in path.iterdir() if file.suffix and file.suffix.isprintable())
        other = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common(3))
        raise DataError(f"{path}: expected one .npz file for each client, found {other + HOW if other else 'none'}")
    clients = [load_client(file, labels=labels) for file in files]
    first = clients[0].x
    for file, client in zip(files, clients, strict=True):
        for key, x in (("x", client.x), ("x_test", client.x_test)):
            if x is not None and (x.dtype, x.shape[1:]) != (first.dtype, first.shape[1:]):
                expected = f"{key} of {first.dtype} samples {first.shape[1:]} as in {files[0].name}"
                raise _wrong(file, expected, f"{x.dtype} {x.shape[1:]}")
    return clients


def _natural(file: Path) -> tuple[list[tuple[int, str]], str]:
    pieces = re.split(r"([0-9]+)", file.stem)
    return [(int(piece), "") if i % 2 else (0, piece) for i, piece in enumerate(pieces)], file.name


def load_column(file: Path, *, labels: bool = True) -> list[ClientFile]:
    """Read one `.npz` file whose array `client` says whose each sample of `x` and `y` is.

    Clients come in the order of the column's values, whole numbers or text, and are named by them.

    Raises
    ------
    DataError
        The file is damaged or does not fit.
    """
    if file.suffix.lower() != ".npz" and file.is_file() and not zipfile.is_zipfile(file):
        raise _wrong(file, "an .npz archive", f"another kind of file{HOW}")
    arrays = _archive(file, ("x", "y", "client", "x_test", "y_test"))
    x, y = _samples(file, arrays, "x", "y", labels)
    if tests := [name for name in ("x_test", "y_test") if name in arrays]:
        expected = (
            "x, y and client alone, for nobody says whose test samples are: a file for each client may bring them"
        )
        raise _wrong(file, expected, f"{' and '.join(tests)} as well")
    if "client" not in arrays:
        raise _wrong(file, "an array 'client' that says whose each sample is", ", ".join(arrays))
    column = arrays["client"]
    if column.shape != y.shape[:1] or column.dtype.kind not in "uiU":
        expected = f"client as whole numbers or text, one for each of {len(y):,} samples"
        raise _wrong(file, expected, f"{column.dtype} {column.shape}")
    return [ClientFile(str(name), x[column == name], y[column == name], None, None) for name in np.unique(column)]


def load_client(file: Path, *, labels: bool = True) -> ClientFile:
    """Read one client's `.npz` file, with `x` and `y`, and `x_test` and `y_test` if it brings test data.

    Raises
    ------
    DataError
        The file is damaged or does not fit.
    """
    arrays = _archive(file, ("x", "y", "x_test", "y_test"))
    x, y = _samples(file, arrays, "x", "y", labels)
    if "x_test" in arrays or "y_test" in arrays:
        return ClientFile(file.stem, x, y, *_samples(file, arrays, "x_test", "y_test", labels))
    return ClientFile(file.stem, x, y, None, None)


def load_inputs(file: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Read inputs `x`, and targets `y` if there are any, from an `.npz` file.

    Raises
    ------
    DataError
        The file is damaged or does not fit.
    """
    arrays = _archive(file, ("x", "y"), needed=1)
    x, y = arrays["x"], arrays.get("y")
    if x.dtype.kind not in "uif" or x.ndim < 2 or not len(x):
        raise _wrong(file, "x as numbers of shape (n, ...), at least one", f"{x.dtype} {x.shape}")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise _wrong(file, "finite numbers in x", "NaN or infinity")
    if y is not None and (y.dtype.kind not in "uifb" or y.shape[:1] != x.shape[:1]):
        raise _wrong(file, "y as numbers, one for each x", f"{y.dtype} {y.shape}")
    return x, y


def _archive(file: Path, keys: Sequence[str], needed: int = 2) -> dict[str, npt.NDArray[Any]]:
    """Read those of the arrays `keys` that an `.npz` file has, of which the first are needed."""
    try:
        with _opened(file) as stream:
            check_sizes(stream, keys)
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise _wrong(file, "an .npz archive", "a single array")
            with archive:
                for key in keys[:needed]:
                    if key not in archive.files:
                        raise _wrong(file, f"an array {key!r}", _listed(archive.files) + HOW)
                return {key: archive[key] for key in keys if key in archive.files}
    except OversizedError as error:
        raise _wrong(file, error.expected, error.found) from None
    except (ValueError, struct.error, NotImplementedError, RuntimeError, MemoryError, OverflowError) as error:
        found = f"another thing ({error})"
        if "Object arrays" in str(error):
            found = "objects, as text columns of pandas are; .astype(str) makes text of them"
        elif "pickled data" in str(error):  # what numpy takes all else for
            found = "no archive" + HOW
        raise _wrong(file, "an .npz archive of plain arrays", found) from None


def _labels_from(y: npt.NDArray[Any]) -> str:
    """Return how labels come of what is none, for a message."""
    if y.ndim > 1:
        how = ".ravel()" if y.shape[1:] == (1,) else ".argmax(1)" if y.ndim == 2 else ""
        return f"; y{how} makes one number of each row" if how else ""
    if y.dtype.kind in "US":
        return "; np.unique(y, return_inverse=True)[1] numbers them"
    return (
        "; y.astype(np.int64) if they are labels, else --set objective.name=regression" if y.dtype.kind in "fb" else ""
    )


def _listed(names: Sequence[str]) -> str:
    """Return the names of some arrays, for a message."""
    shown = [name if name.isprintable() else ascii(name) for name in names[:6]]
    return ", ".join(f"{name:.40}" for name in shown) + (", ..." if len(names) > 6 else "") or "no array"


def _samples(
    file: Path, arrays: dict[str, npt.NDArray[Any]], x_key: str, y_key: str, labels: bool
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the checked pair of samples and labels under these keys."""
    for key in (x_key, y_key):
        if key not in arrays:
            raise _wrong(file, f"an array {key!r}", ", ".join(arrays) or "none of x, y, x_test, y_test")
    x, y = arrays[x_key], arrays[y_key]
    if x.dtype.kind not in "uif" or x.ndim < 2:
        raise _wrong(file, f"{x_key} as numbers of shape (n, ...)", f"{x.dtype} {x.shape}")
    if labels and (y.dtype.kind not in "ui" or y.ndim != 1):
        raise _wrong(file, f"{y_key} as integers of shape (n,)", f"{y.dtype} {y.shape}{_labels_from(y)}")
    if y.dtype.kind not in "uifb" or not y.ndim:
        raise _wrong(file, f"{y_key} as numbers of shape (n, ...)", f"{y.dtype} {y.shape}")
    if not len(x) or len(x) != len(y):
        raise _wrong(file, f"as many {y_key} as {x_key}, at least one", f"{len(y):,} and {len(x):,}")
    if labels and y.min() < 0:
        raise _wrong(file, f"{y_key} from 0 on", y.min())
    for key, values in ((x_key, x), (y_key, y)):
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise _wrong(file, f"finite numbers in {key}", "NaN or infinity")
    return x, y.astype(np.int64) if labels else y
