"""Data sets by name: one embedded in the package, the others in a folder on disk or fetched on demand.

The train and test files of a data set are merged, train first, since an experiment splits the images over
its clients and then splits each client's share. Files that are there are used: a subset serves, and says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import ascii_uppercase, digits
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from pfedla.data.download import Progress, Remote, download_files
from pfedla.data.files import Images, Labels, Reader, Shape, read_idx, read_pickle, read_records
from pfedla.errors import DataError, known_name

__all__ = [
    "DATASETS",
    "DEFAULT_DATASET",
    "Dataset",
    "DatasetSpec",
    "Layout",
    "cache_dir",
    "data_dir_default",
    "load_dataset",
]

DEFAULT_DATASET = "fashion-mnist-10k"
"""The data set that comes with the package."""


class Dataset(NamedTuple):
    """Images and labels in memory."""

    name: str  # that it was loaded by
    x: Images  # uint8 (n, channels, height, width)
    y: Labels  # int64 (n,), from 0
    classes: tuple[str, ...]  # their names, in the order of the labels
    note: str  # empty, or how many images of the official set were found


@dataclass(frozen=True)
class Layout:
    """One way for a data set's files to lie on disk."""

    folders: tuple[str, ...]  # below the data folder; the first is where a download goes
    suffixes: tuple[str, ...]  # of the files' names; a download brings the first, of several found the last is taken
    read: Reader  # of one part


@dataclass(frozen=True)
class DatasetSpec:
    """What a data set is made of."""

    classes: tuple[str, ...]  # their names, in the order of the labels
    images: int  # officially, train and test
    shape: Shape  # channels, height and width of an image
    parts: tuple[tuple[str, ...], ...]  # files, without suffix, of each part that can be read by itself; train first
    layouts: tuple[Layout, ...]  # to look for, in this order; the first is downloaded
    remotes: tuple[Remote, ...] = ()  # where files are fetched from; none for the embedded data set
    first_label: int = 0  # of the first class in the files
    transposed: bool = False  # the files store images with rows and columns swapped

    @property
    def files(self) -> tuple[str, ...]:
        """The names of all files, without suffix."""
        return tuple(file for part in self.parts for file in part)


def _idx_parts(*prefixes: str) -> tuple[tuple[str, ...], ...]:
    return tuple((f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte") for prefix in prefixes)


def _idx_layout(*folders: str) -> tuple[Layout, ...]:
    return (Layout(folders, (".gz", ""), read_idx),)


def _mnist_like(folder: str, url: str, checksums: Sequence[str], classes: Sequence[str]) -> DatasetSpec:
    parts = _idx_parts("train", "t10k")
    files = [f"{file}.gz" for part in parts for file in part]
    remotes = tuple(Remote(url + file, md5) for file, md5 in zip(files, checksums, strict=True))
    return DatasetSpec(tuple(classes), 70_000, (1, 28, 28), parts, _idx_layout(folder), remotes)


def _emnist(split: str, images: int, classes: str, first_label: int = 0) -> DatasetSpec:
    parts = _idx_parts(f"emnist-{split}-train", f"emnist-{split}-test")
    archive = Remote(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "58c8d27c78d21e728a6bc7b3cc06412e",
        tuple(f"{file}.gz" for part in parts for file in part),
    )
    layouts = _idx_layout("EMNIST/raw", "EMNIST/gzip")
    return DatasetSpec(tuple(classes), images, (1, 28, 28), parts, layouts, (archive,), first_label, True)


def _cifar(
    name: str, md5: str, files: Sequence[str], bin_layout: Layout, py_layout: Layout, classes: Sequence[str]
) -> DatasetSpec:
    archive = Remote(
        f"https://www.cs.toronto.edu/~kriz/{name}-binary.tar.gz", md5, tuple(f"{file}.bin" for file in files)
    )
    parts = tuple((file,) for file in files)
    return DatasetSpec(tuple(classes), 60_000, (3, 32, 32), parts, (bin_layout, py_layout), (archive,))


def _words(text: str) -> list[str]:
    return text.split()


_CLOTHES = [*_words("T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag"), "Ankle boot"]
_CIFAR10 = _words("airplane automobile bird cat deer dog frog horse ship truck")
_CIFAR100 = _words("""
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
    lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal
    shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
    telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
""")

DATASETS: Mapping[str, DatasetSpec] = MappingProxyType(
    {
        DEFAULT_DATASET: DatasetSpec(tuple(_CLOTHES), 10_000, (1, 28, 28), _idx_parts("t10k"), _idx_layout("embedded")),
        "fashion-mnist": _mnist_like(
            "FashionMNIST/raw",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
            _CLOTHES,
        ),
        "mnist": _mnist_like(
            "MNIST/raw",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
            digits,
        ),
        "emnist-digits": _emnist("digits", 280_000, digits),
        "emnist-letters": _emnist("letters", 145_600, ascii_uppercase, first_label=1),
        # Small letters that look like their capitals are merged with them; these eleven do not.
        "emnist-balanced": _emnist("balanced", 131_600, digits + ascii_uppercase + "abdefghnqrt"),
        "cifar10": _cifar(
            "cifar-10",
            "c32a1d4ab5d03f1284b67883e8d87530",
            [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"],
            Layout(("cifar-10-batches-bin",), (".bin",), partial(read_records, label_bytes=1)),
            Layout(("cifar-10-batches-py",), ("",), partial(read_pickle, label_key="labels")),
            _CIFAR10,
        ),
        "cifar100": _cifar(
            "cifar-100",
            "03b5dce01913d631647c71ecec9e9cb8",
            ["train", "test"],
            Layout(("cifar-100-binary",), (".bin",), partial(read_records, label_bytes=2)),
            Layout(("cifar-100-python",), ("",), partial(read_pickle, label_key="fine_labels")),
            _CIFAR100,
        ),
    }
)
"""Every data set by its name."""


def data_dir_default() -> Path | None:
    """Return the folder that `$PFEDLA_DATA` names, or None."""
    value = os.environ.get("PFEDLA_DATA")
    return Path(value).expanduser() if value else None


def cache_dir() -> Path:
    """Return the folder for downloads when the user names none."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pfedla" / "data"


def load_dataset(
    name: str, data_dir: Path | str | None = None, *, download: bool = False, progress: Progress | None = None
) -> Dataset:
    """Load a data set.

    Parameters
    ----------
    name
        One of `DATASETS`. The embedded one depends on nothing outside the package.
    data_dir
        The folder that holds the official folders, or the very folder that holds the files. By default
        `$PFEDLA_DATA`, and without that the folder of earlier downloads, `cache_dir()`.
    download
        Whether to fetch the files that are missing. Files that are there are never replaced.
    progress
        Told about each chunk that comes: file name, bytes so far, bytes in all or None.

    Raises
    ------
    ConfigError
        There is no data set of this name.
    DataError
        No file is there, or one is damaged or foreign, or cannot be fetched.
    """
    name = known_name("data set", name, DATASETS)
    spec = DATASETS[name]
    if not spec.remotes:
        layout = spec.layouts[0]
        return _read(name, spec, layout, resources.files("pfedla.data").joinpath(layout.folders[0]))
    root = Path(data_dir).expanduser() if data_dir else data_dir_default() or cache_dir()
    place = _find(spec, root)
    if download and (place is None or len(_present(spec, *place)) < len(spec.files)):
        place = _download(spec, root, place, progress)
    if place is None:
        raise _nothing_found(name, spec, root)
    return _read(name, spec, *place)


def _candidates(spec: DatasetSpec, layout: Layout, root: Path) -> list[Path]:
    """Return the folders to look in: below `root`, and `root` itself if it is no other data set's folder."""
    own = {folder for layout in spec.layouts for folder in layout.folders}
    others = {folder for other in DATASETS.values() for layout in other.layouts for folder in layout.folders}
    path = root.absolute().as_posix()
    foreign = any(path.endswith(f"/{folder}") for folder in others - own)
    return [*(root / folder for folder in layout.folders), *([] if foreign else [root])]


def _present(spec: DatasetSpec, layout: Layout, folder: Traversable) -> dict[str, Traversable]:
    """Return those of the data set's files that `folder` holds."""
    paths = ((file, folder.joinpath(file + suffix)) for file in spec.files for suffix in layout.suffixes)
    return {file: path for file, path in paths if path.is_file()}


def _find(spec: DatasetSpec, root: Path) -> tuple[Layout, Path] | None:
    """Return the first layout and folder that hold any of the files."""
    for layout in spec.layouts:
        for folder in _candidates(spec, layout, root):
            if _present(spec, layout, folder):
                return layout, folder
    return None


def _download(
    spec: DatasetSpec, root: Path, place: tuple[Layout, Path] | None, progress: Progress | None
) -> tuple[Layout, Path]:
    """Fetch what is missing, beside files of the first layout if there are any."""
    layout = spec.layouts[0]
    folder = place[1] if place and place[0] == layout else root / layout.folders[0]
    missing = set(spec.files) - _present(spec, layout, folder).keys()
    download_files(spec.remotes, folder, {file + layout.suffixes[0] for file in missing}, progress)
    return layout, folder


def _nothing_found(name: str, spec: DatasetSpec, root: Path) -> DataError:
    looked = []
    for layout in spec.layouts:
        suffix = layout.suffixes[0] if len(layout.suffixes) == 1 else f"[{layout.suffixes[0]}]"
        folders = " or ".join(map(str, _candidates(spec, layout, root)))
        looked.append(f"{', '.join(file + suffix for file in spec.files)} in {folders}")
    return DataError(
        f"{name}: found none of its files; looked for {'; for '.join(looked)}. "
        "Name their folder in machine.data_dir or $PFEDLA_DATA, or fetch them with machine.download = true."
    )


def _read(name: str, spec: DatasetSpec, layout: Layout, folder: Traversable) -> Dataset:
    """Read every part that is there and merge them."""
    present = _present(spec, layout, folder)
    images, labels = [], []
    for part in spec.parts:
        files = [present[file] for file in part if file in present]
        if not files:
            continue
        if len(files) < len(part):
            absent = ", ".join(file for file in part if file not in present)
            raise DataError(f"{folder}: expected {absent} beside {files[0].name}, found no such file")
        x, y = layout.read(files, spec.shape, spec.images)
        y = y - spec.first_label
        if y.min() < 0 or y.max() >= len(spec.classes):
            low, high = spec.first_label, spec.first_label + len(spec.classes) - 1
            found = f"{y.min() + low} to {y.max() + low}"
            raise DataError(f"{files[-1]}: expected labels from {low} to {high}, found {found}")
        images.append(x.swapaxes(2, 3) if spec.transposed else x)
        labels.append(y)
    x, y = np.concatenate(images), np.concatenate(labels)
    note = f"{len(x):,} of {spec.images:,} images found" if len(x) < spec.images else ""
    return Dataset(name, np.ascontiguousarray(x), y, spec.classes, note)
