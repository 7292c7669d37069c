"""Files that are damaged or foreign end in an error that names the file and what is wrong with it."""

from __future__ import annotations

import collections
import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from pfedla.data.datasets import load_dataset
from pfedla.data.files import load_folder
from pfedla.errors import DataError
from tests.data.official import IMAGES, LABELS, Command, idx, pickled, pixels, write, write_idx


def gz(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


GOOD = gz(idx(pixels(2, 28, 28)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header of 16 bytes, found 0 bytes"),
        (b"plain text", "damaged"),
        (GOOD[:-400], "damaged"),
        (GOOD[:-8] + bytes(8), "damaged.*CRC"),
        (GOOD[:300] + bytes(300) + GOOD[600:], "damaged"),
        (gz(b"\0\0"), "found 2 bytes"),
        (gz(idx(np.array([1] * 20, np.uint8))), "magic number 2051.*found 2049"),
        (gz(idx(pixels(2, 32, 28))), "images of 28 x 28, found 32 x 28"),
        (gz(idx(pixels(0, 28, 28))), "1 to 70,000 images, found 0"),
        (gz(struct.pack(">4I", 2051, 2**32 - 1, 28, 28)), "1 to 70,000 images, found 4,294,967,295"),
        (gz(idx(pixels(2, 28, 28))[:-1]), "1,568 bytes after the header, for 2 images, found 1,567"),
        (gz(idx(pixels(2, 28, 28)) + b"?"), "found more"),
        (gz(idx(pixels(3, 28, 28))), "3 labels, one for each image of .*found 2"),
    ],
)
def test_bad_idx_images(tmp_path: Path, content: bytes, message: str) -> None:
    write_idx(tmp_path, "train", pixels(2, 28, 28), [0, 1])
    (tmp_path / f"{IMAGES}.gz").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset("mnist", tmp_path)
    assert str(tmp_path / "train-") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "prefix", "labels", "message"),
    [
        ("mnist", "train", [3, 10], "labels from 0 to 9, found 3 to 10"),
        ("emnist-letters", "emnist-letters-train", [0, 5], "labels from 1 to 26, found 0 to 5"),
        ("emnist-letters", "emnist-letters-train", [5, 27], "labels from 1 to 26, found 5 to 27"),
    ],
)
def test_labels_out_of_range(tmp_path: Path, name: str, prefix: str, labels: list[int], message: str) -> None:
    write_idx(tmp_path, prefix, pixels(2, 28, 28), labels)
    with pytest.raises(DataError, match=f"{prefix}-labels-idx1-ubyte.gz: expected {message}"):
        load_dataset(name, tmp_path)


@pytest.mark.parametrize(("kept", "absent"), [(IMAGES, LABELS), (LABELS, IMAGES)])
def test_half_a_pair(tmp_path: Path, kept: str, absent: str) -> None:
    write(tmp_path / f"{kept}.gz", idx(pixels(1, 28, 28)))
    with pytest.raises(DataError, match=f"expected {absent} beside {kept}"):
        load_dataset("mnist", tmp_path)


@pytest.mark.parametrize("content", [b"", bytes(3072), bytes(3073) + b"?"])
def test_bad_records(tmp_path: Path, content: bytes) -> None:
    file = write(tmp_path / "test_batch.bin", content)
    with pytest.raises(DataError, match=rf"{file}: expected .* 3,073 bytes each, found {len(content):,} bytes"):
        load_dataset("cifar10", tmp_path)


def test_a_record_label_out_of_range(tmp_path: Path) -> None:
    write(tmp_path / "test_batch.bin", b"\x0a" + bytes(3072))
    with pytest.raises(DataError, match=r"test_batch.bin: expected labels from 0 to 9, found 10 to 10"):
        load_dataset("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Command()), "forbidden name (posix|nt).system"),
        (pickle.dumps({b"data": collections.OrderedDict()}), "forbidden name collections.OrderedDict"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "forbidden name builtins.eval"),
        (b"c_codecs\nencode\n(S'1'\nS'rot13'\ntR.", "damaged"),
        (b"", "damaged"),
        (b"plain text", "damaged"),
        (pickled(pixels(1, 3072), [1])[:-50], "damaged"),
        (pickled(np.array([[None]]), [1]), "damaged one .numbers of type object"),
        (pickle.dumps([1]), "a dictionary, found a list"),
        (pickle.dumps({"data": 1, 3: 4}), "the key 'labels', found 3, data"),
        (pickle.dumps({}), "the key 'data', found none"),
        (pickled([1], [1]), r"shape \(n, 3072\), found a list"),
        (pickled(pixels(1, 3071), [1]), r"found uint8 \(1, 3071\)"),
        (pickled(pixels(1, 3072).astype(float), [1]), "found float64"),
        (pickled(pixels(0, 3072), [], protocol=4), "1 to 60,000 images, found 0"),
        (pickled(pixels(1, 3072), ["cat"]), "list of integers"),
        (pickled(pixels(1, 3072), 1), "list of integers"),
        (pickled(pixels(2, 3072), [1]), "2 labels, one for each image, found 1"),
        (pickled(pixels(1, 3072), [-1]), "labels from 0 to 9, found -1"),
    ],
)
def test_bad_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "data_batch_2", content)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset("cifar10", tmp_path)
    assert str(file) in str(caught.value)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("name", [f"{IMAGES}.gz", "test_batch", "test_batch.bin", "own.npz"])
def test_any_damage_ends_in_a_data_error_or_in_data(tmp_path: Path, name: str) -> None:
    if name == "own.npz":
        np.savez_compressed(tmp_path / name, x=pixels(4, 6), y=np.arange(4))
    elif name == "test_batch":
        write(tmp_path / name, pickled(pixels(1, 3072) // 128, [1]))
    elif name == "test_batch.bin":
        write(tmp_path / name, bytes(3073))
    else:
        write_idx(tmp_path, "train", pixels(2, 28, 28) // 128, [0, 1])
    file, rng = tmp_path / name, np.random.default_rng(0)
    whole, refused = file.read_bytes(), 0
    for _ in range(100):
        damaged = bytearray(whole)
        for place in rng.integers(0, min(len(whole), 400), 2):
            damaged[place] = rng.integers(0, 256)
        file.write_bytes(damaged[: rng.integers(1, len(whole) + 1)] if rng.random() < 0.2 else damaged)
        try:
            if name == "own.npz":
                load_folder(tmp_path)
            else:
                load_dataset("mnist" if name.endswith(".gz") else "cifar10", tmp_path)
        except DataError:
            refused += 1
    assert refused > 10


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    write(tmp_path / "test_batch.bin", bytes(3073))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*test_batch.bin: Permission denied"):
        load_dataset("cifar10", tmp_path)
