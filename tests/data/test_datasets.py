from __future__ import annotations

import collections
import gzip
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pfedla.data.datasets import (
    DATASETS,
    DEFAULT_DATASET,
    cache_dir,
    data_dir_default,
    load_dataset,
    load_folder,
)
from pfedla.data.files import load_column
from pfedla.errors import ConfigError, DataError

REAL = Path(__file__).parents[3] / "shared" / "data"
real_files = pytest.mark.skipif(not REAL.is_dir(), reason="the folder shared/data beside the project is missing")

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
Bytes = npt.NDArray[np.uint8]


@pytest.fixture(autouse=True)
def _no_data_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PFEDLA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pixels(*shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def idx(array: Bytes) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return path


def write_idx(folder: Path, prefix: str, x: Bytes, y: list[int], suffix: str = ".gz") -> None:
    write(folder / f"{prefix}-images-idx3-ubyte{suffix}", idx(x))
    write(folder / f"{prefix}-labels-idx1-ubyte{suffix}", idx(np.array(y, np.uint8)))


# Reading what is there


def test_the_embedded_set_is_whole_and_needs_nothing_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "embedded" / "t10k-images-idx3-ubyte", b"nonsense")
    monkeypatch.setenv("PFEDLA_DATA", str(tmp_path))
    for data in (
        load_dataset(DEFAULT_DATASET),
        load_dataset(DEFAULT_DATASET, tmp_path / "embedded", download=True),
    ):
        assert data.x.shape == (10_000, 1, 28, 28)
        assert data.x.dtype == np.uint8
        assert data.y.dtype == np.int64
        assert np.bincount(data.y).tolist() == [1000] * 10
        assert data.classes[9] == "Ankle boot"
        assert data.note == ""


@pytest.mark.parametrize("suffix", [".gz", ""])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw")])
def test_train_comes_before_test(tmp_path: Path, name: str, folder: str, suffix: str) -> None:
    train, test = pixels(3, 28, 28, seed=1), pixels(2, 28, 28, seed=2)
    write_idx(tmp_path / folder, "t10k", test, [9, 8], suffix)
    write_idx(tmp_path / folder, "train", train, [0, 1, 2], suffix)
    data = load_dataset(name, tmp_path)
    assert np.array_equal(data.x[:, 0], np.concatenate([train, test]))
    assert data.y.tolist() == [0, 1, 2, 9, 8]
    assert data.note == "5 of 70,000 images found"
    assert data.name == name


def test_an_unpacked_file_is_taken_before_the_packed_one(tmp_path: Path) -> None:
    write_idx(tmp_path, "train", pixels(1, 28, 28), [3], "")
    write(tmp_path / f"{IMAGES}.gz", b"not read")
    assert load_dataset("mnist", tmp_path).y.tolist() == [3]


@pytest.mark.parametrize("folder", ["EMNIST/raw", "EMNIST/gzip", "."])
def test_emnist_is_turned_upright_and_letters_start_at_zero(tmp_path: Path, folder: str) -> None:
    x = pixels(2, 28, 28)
    write_idx(tmp_path / folder, "emnist-letters-train", x, [1, 26])
    data = load_dataset("emnist-letters", tmp_path)
    assert np.array_equal(data.x[:, 0], x.transpose(0, 2, 1))
    assert data.x.flags.c_contiguous
    assert [data.classes[y] for y in data.y] == ["A", "Z"]


def test_emnist_balanced_has_its_47_classes(tmp_path: Path) -> None:
    write_idx(tmp_path, "emnist-balanced-test", pixels(4, 28, 28), [0, 10, 36, 46])
    data = load_dataset("emnist-balanced", tmp_path)
    assert len(set(data.classes)) == 47
    assert [data.classes[y] for y in data.y] == ["0", "A", "a", "t"]


@pytest.mark.parametrize("direct", [False, True])
def test_cifar10_records(tmp_path: Path, direct: bool) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    x = pixels(3, 3, 32, 32)
    records = [bytes([label]) + image.tobytes() for label, image in zip([7, 0, 9], x, strict=True)]
    write(folder / "test_batch.bin", records[2])
    write(folder / "data_batch_4.bin", records[0] + records[1])
    data = load_dataset("cifar10", folder if direct else tmp_path)
    assert np.array_equal(data.x, x)
    assert data.y.tolist() == [7, 0, 9]
    assert data.note == "3 of 60,000 images found"


def test_cifar100_records_carry_the_fine_label_second(tmp_path: Path) -> None:
    x = pixels(1, 3, 32, 32)
    write(tmp_path / "cifar-100-binary" / "train.bin", bytes([3, 99]) + x.tobytes())
    data = load_dataset("cifar100", tmp_path)
    assert np.array_equal(data.x, x)
    assert [data.classes[y] for y in data.y] == ["worm"]


def pickled(x: object, labels: object, key: str = "labels", protocol: int = 2) -> bytes:
    return pickle.dumps({b"data": x, key.encode(): labels, b"filenames": [b"a.png"]}, protocol)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("labels", [[5, 1], [np.int64(5), np.int64(1)], np.array([5, 1], ">i4")])
def test_cifar10_pickles(tmp_path: Path, labels: object, protocol: int) -> None:
    x = pixels(2, 3, 32, 32)
    write(
        tmp_path / "cifar-10-batches-py" / "data_batch_1",
        pickled(x.reshape(2, -1), labels, protocol=protocol),
    )
    data = load_dataset("cifar10", tmp_path)
    assert np.array_equal(data.x, x)
    assert data.y.tolist() == [5, 1]


def test_a_pickle_of_the_older_numpy_and_python_is_read(tmp_path: Path) -> None:
    x = pixels(1, 3, 32, 32)
    body = x.tobytes()
    old = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"U\x01bq\x05\x87Rq\x06(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x07U\x02u1K\x00K\x01\x87Rq\x08(K\x03U\x01|"
        b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(body)) + body + b"tb"
        b"U\x06labelsq\x09]q\x0aK\x04au."
    )
    write(tmp_path / "test_batch", old)
    data = load_dataset("cifar10", tmp_path)
    assert np.array_equal(data.x, x)
    assert data.y.tolist() == [4]


def test_cifar100_pickles_and_records_first(tmp_path: Path) -> None:
    x = pixels(1, 3, 32, 32)
    write(tmp_path / "cifar-100-python" / "test", pickled(x.reshape(1, -1), [42], "fine_labels"))
    assert load_dataset("cifar100", tmp_path).y.tolist() == [42]
    write(tmp_path / "cifar-100-binary" / "test.bin", bytes([0, 43]) + x.tobytes())
    assert load_dataset("cifar100", tmp_path).y.tolist() == [43]


# Where to look


def test_the_variable_names_the_folder_and_the_argument_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "a" / "MNIST/raw", "train", pixels(1, 28, 28), [1])
    write_idx(tmp_path / "b" / "MNIST/raw", "train", pixels(1, 28, 28), [2])
    assert data_dir_default() is None
    monkeypatch.setenv("PFEDLA_DATA", "")
    assert data_dir_default() is None
    monkeypatch.setenv("PFEDLA_DATA", str(tmp_path / "a"))
    assert data_dir_default() == tmp_path / "a"
    assert load_dataset("mnist").y.tolist() == [1]
    assert load_dataset("mnist", tmp_path / "b").y.tolist() == [2]


def test_earlier_downloads_are_found_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path / "cache" / "pfedla" / "data"
    write_idx(cache_dir() / "MNIST/raw", "train", pixels(1, 28, 28), [6])
    assert load_dataset("mnist").y.tolist() == [6]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "pfedla" / "data"


def test_without_any_file_the_error_says_what_was_looked_for_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset("cifar10", tmp_path)
    for part in (
        "cifar10",
        "--data-dir",
        "$PFEDLA_DATA",
        "--download",
        f"test_batch.bin in {tmp_path / 'cifar-10-batches-bin'} or {tmp_path}",
        f"test_batch in {tmp_path / 'cifar-10-batches-py'} or {tmp_path}",
    ):
        assert part in str(caught.value)
    with pytest.raises(DataError, match=r"-ubyte\[\.gz\] in .*cache"):
        load_dataset("mnist")


def test_a_folder_of_another_set_is_not_taken_for_this_one(tmp_path: Path) -> None:
    folder = tmp_path / "FashionMNIST" / "raw"
    write_idx(folder, "train", pixels(1, 28, 28), [1])
    assert load_dataset("fashion-mnist", folder).y.tolist() == [1]
    with pytest.raises(DataError, match="mnist: found none"):
        load_dataset("mnist", folder)


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        load_dataset("cifar-10")


# Files that are damaged or foreign


def gz(data: bytes) -> bytes:
    return gzip.compress(data, 1)


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


class Command:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch PWNED",)


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


# A user's own clients


def save(folder: Path, name: str, **arrays: Any) -> None:
    np.savez(folder / f"{name}.npz", **arrays)


def test_clients_come_in_natural_order(tmp_path: Path) -> None:
    for i in (10, 2, 1):
        save(tmp_path, f"client{i}", x=np.full((i, 4), i, np.float32), y=np.zeros(i, np.uint8))
    save(
        tmp_path,
        "client2b",
        x=np.ones((1, 4), np.float32),
        y=[3],
        x_test=np.zeros((2, 4), np.float32),
        y_test=[0, 1],
    )
    save(tmp_path, ".hidden", x=[0], y=[0])
    clients = load_folder(tmp_path)
    assert [client.name for client in clients] == ["client1", "client2", "client2b", "client10"]
    assert [len(client.x) for client in clients] == [1, 2, 1, 10]
    assert {client.y.dtype for client in clients} == {np.dtype(np.int64)}
    assert clients[0].x_test is None
    assert clients[0].y_test is None
    assert clients[2].y_test is not None
    assert clients[2].y_test.tolist() == [0, 1]


X, Y = np.zeros((2, 4), np.float32), np.array([0, 1])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": Y}, "an array 'x', found y"),
        ({"x": X}, "an array 'y', found x"),
        ({"a": X}, "an array 'x', found none of"),
        ({"x": X, "y": Y, "x_test": X}, "an array 'y_test'"),
        ({"x": X, "y": Y, "y_test": Y}, "an array 'x_test'"),
        ({"x": X, "y": Y[:1]}, "as many y as x, at least one, found 1 and 2"),
        ({"x": X[:0], "y": Y[:0]}, "at least one, found 0 and 0"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y[:1]}, "as many y_test as x_test"),
        ({"x": X, "y": Y / 2}, r"y as integers of shape \(n,\), found float64"),
        ({"x": X, "y": Y > 0}, "found bool"),
        ({"x": X, "y": Y[:, None]}, r"found int64 \(2, 1\)"),
        ({"x": X, "y": -Y}, "y from 0 on, found -1"),
        ({"x": np.array(["a", "b"]), "y": Y}, "x as numbers"),
        ({"x": X[:, 0], "y": Y}, r"found float32 \(2,\)"),
        ({"x": np.array([[1.0], [np.nan]]), "y": Y}, "finite numbers in x"),
        ({"x": np.array([[{}], [{}]]), "y": Y}, "plain arrays.*Object arrays"),
        (
            {"x": X, "y": Y, "x_test": X[:, :3], "y_test": Y},
            r"x_test of float32 samples \(4,\).*found float32 \(3,\)",
        ),
    ],
)
def test_bad_client_files(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    save(tmp_path, "one", **arrays)
    with pytest.raises(DataError, match=message) as caught:
        load_folder(tmp_path)
    assert str(tmp_path / "one.npz") in str(caught.value)


@pytest.mark.parametrize("other", [np.zeros((2, 5), np.float32), np.zeros((2, 4), np.uint8)])
def test_clients_must_agree(tmp_path: Path, other: npt.NDArray[Any]) -> None:
    save(tmp_path, "c1", x=X, y=Y)
    save(tmp_path, "c2", x=other, y=Y)
    with pytest.raises(DataError, match=r"c2.npz: expected x of float32 samples \(4,\) as in c1.npz"):
        load_folder(tmp_path)


def test_folders_without_clients(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found none"):
        load_folder(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load_folder(tmp_path / "absent")
    np.save(tmp_path / "array.npy", X)
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    with pytest.raises(DataError, match=r"an \.npz archive, found a single array"):
        load_folder(tmp_path)
    for content, message in (
        (b"", "damaged"),
        (b"text", "plain arrays"),
        (pickle.dumps(Command()), "plain arrays"),
    ):
        (tmp_path / "array.npz").write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_folder(tmp_path)


# The real files


@real_files
@pytest.mark.parametrize(
    ("name", "counts", "note"),
    [
        ("fashion-mnist", [7000] * 10, ""),
        ("mnist", [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958], ""),
        ("emnist-digits", (10, 796, 903, 8_317), "8,317 of 280,000 images found"),
        ("emnist-letters", (26, 774, 2_220, 36_626), "36,626 of 145,600 images found"),
        (
            "cifar10",
            [2989, 2981, 3042, 3011, 3009, 2925, 3038, 3027, 3012, 2966],
            "30,000 of 60,000 images found",
        ),
        ("cifar100", (100, 167, 225, 20_000), "20,000 of 60,000 images found"),
    ],
)
def test_real_counts(name: str, counts: list[int] | tuple[int, ...], note: str) -> None:
    data = load_dataset(name, REAL)
    found = np.bincount(data.y)
    if isinstance(counts, list):
        assert found.tolist() == counts
    else:
        assert (len(found), found.min(), found.max(), found.sum()) == counts
    assert len(data.x) == len(data.y)
    assert data.note == note
    assert data.x.shape[1:] == DATASETS[name].shape
    assert len(data.classes) == len(found)


@real_files
def test_the_embedded_set_is_the_test_part_of_fashion_mnist() -> None:
    whole, embedded = load_dataset("fashion-mnist", REAL), load_dataset(DEFAULT_DATASET)
    assert np.array_equal(whole.x[60_000:], embedded.x)
    assert np.array_equal(whole.y[60_000:], embedded.y)


@real_files
def test_emnist_digits_stand_as_those_of_mnist_do() -> None:
    def class_means(name: str) -> npt.NDArray[np.float64]:
        data = load_dataset(name, REAL)
        means = [data.x[data.y == digit, 0].mean(0) for digit in range(10)]
        return np.stack([mean - mean.mean() for mean in means])

    mnist, emnist = class_means("mnist"), class_means("emnist-digits")
    upright, lying = (mnist * emnist).sum((1, 2)), (mnist * emnist.transpose(0, 2, 1)).sum((1, 2))
    assert (upright[1:] > lying[1:]).all()  # a zero looks the same both ways


@real_files
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10", "cifar-10-batches-bin/batches.meta.txt"),
        ("cifar100", "cifar-100-binary/fine_label_names.txt"),
    ],
)
def test_cifar_class_names_are_the_official_ones(name: str, file: str) -> None:
    assert list(DATASETS[name].classes) == (REAL / file).read_text().split()


def test_a_column_says_whose_each_sample_is(tmp_path: Path) -> None:
    file = tmp_path / "all.npz"
    x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 0, 1, 2, 2])
    np.savez(file, x=x, y=y, client=np.array(["west", "east", "west", "east", "east", "west"]))
    east, west = load_column(file)
    assert (east.name, west.name) == ("east", "west")
    assert np.array_equal(east.x, x[[1, 3, 4]])
    assert west.y.tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "an array 'client'"),
        ({"client": np.zeros(5, int)}, "one for each of 6 samples"),
        ({"client": np.zeros(6)}, "whole numbers or text"),
    ],
)
def test_a_column_that_does_not_fit_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    file = tmp_path / "all.npz"
    np.savez(file, x=np.zeros((6, 2)), y=np.zeros(6, int), **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        load_column(file)
