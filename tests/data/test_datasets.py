from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pfedla.data.datasets import DATASETS, DEFAULT_DATASET, cache_dir, data_dir_default, load_dataset
from pfedla.errors import ConfigError, DataError
from tests.data.official import IMAGES, pickled, pixels, write, write_idx

REAL = Path(__file__).parents[3] / "shared" / "data"
real_files = pytest.mark.skipif(not REAL.is_dir(), reason="the folder shared/data beside the project is missing")


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
        "machine.data_dir",
        "$PFEDLA_DATA",
        "machine.download = true",
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
