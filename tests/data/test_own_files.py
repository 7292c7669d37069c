"""A user's own clients: a folder with a file for each, or one file with a column that says whose each sample is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pfedla.data.files import load_column, load_folder
from pfedla.errors import DataError
from tests.data.official import Command


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
        ({"X": X, "Y": Y}, "an array 'x', found X, Y: np.savez"),
        ({"a": X}, "an array 'x', found a: np.savez"),
        ({"x": X, "y": Y, "x_test": X}, "an array 'y_test'"),
        ({"x": X, "y": Y, "y_test": Y}, "an array 'x_test'"),
        ({"x": X, "y": Y[:1]}, "as many y as x, at least one, found 1 and 2"),
        ({"x": X[:0], "y": Y[:0]}, "at least one, found 0 and 0"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y[:1]}, "as many y_test as x_test"),
        (
            {"x": X, "y": Y / 2},
            r"y as integers of shape \(n,\), found float64 \(2,\); y.astype\(np.int64\) if they are",
        ),
        ({"x": X, "y": Y > 0}, r"found bool \(2,\); y.astype"),
        ({"x": X, "y": Y[:, None]}, r"found int64 \(2, 1\); y.ravel\(\) makes one number of each row"),
        ({"x": X, "y": np.eye(2)}, r"found float64 \(2, 2\); y.argmax\(1\) makes one number of each row"),
        ({"x": X, "y": np.zeros((2, 2, 2))}, r"found float64 \(2, 2, 2\)$"),
        ({"x": X, "y": np.array(["ill", "well"])}, r"np.unique\(y, return_inverse=True\)\[1\] numbers them"),
        ({"x": X, "y": -Y}, "y from 0 on, found -1"),
        ({"x": np.array(["a", "b"]), "y": Y}, "x as numbers"),
        ({"x": X[:, 0], "y": Y}, r"found float32 \(2,\)"),
        ({"x": np.array([[1.0], [np.nan]]), "y": Y}, "finite numbers in x"),
        ({"x": np.array([[{}], [{}]]), "y": Y}, "plain arrays, found objects, as text columns of pandas are"),
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


def test_targets_that_are_no_labels_are_kept_as_they_are(tmp_path: Path) -> None:
    y = np.array([[0.5, -2.0], [1.0, 3.0]])
    save(tmp_path, "one", x=X, y=y, x_test=X, y_test=-y)
    (one,) = load_folder(tmp_path, labels=False)
    assert one.y_test is not None
    assert one.y.dtype == np.float64
    assert (one.y.tolist(), one.y_test.tolist()) == (y.tolist(), (-y).tolist())
    np.savez(tmp_path / "all.npz", x=X, y=y, client=np.array([1, 0]))
    assert [c.y.tolist() for c in load_column(tmp_path / "all.npz", labels=False)] == [[[1.0, 3.0]], [[0.5, -2.0]]]
    with pytest.raises(DataError, match=r"y as integers of shape \(n,\), found float64 \(2, 2\)"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X, "y": np.array([0.0, np.nan])}, "finite numbers in y, found NaN"),
        ({"x": X, "y": Y, "x_test": X, "y_test": np.array([0.0, np.inf])}, "finite numbers in y_test"),
        ({"x": X, "y": np.zeros((3, 2))}, "as many y as x, at least one, found 3 and 2"),
        ({"x": X, "y": np.array(["a", "b"])}, "y as numbers"),
        ({"x": X, "y": np.array(1.0)}, "y as numbers"),
    ],
)
def test_targets_that_are_no_numbers_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    save(tmp_path, "one", **arrays)
    with pytest.raises(DataError, match=message):
        load_folder(tmp_path, labels=False)


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
    (tmp_path / "site.csv").write_text("1,2\n")
    with pytest.raises(DataError, match=r"found 1 \.csv: np.savez\('name.npz', x=inputs, y=targets\) writes such"):
        load_folder(tmp_path)
    with pytest.raises(DataError, match=r"site.csv: expected an \.npz archive, found another kind of file: np.savez"):
        load_column(tmp_path / "site.csv")
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


def test_a_column_with_test_samples_is_refused(tmp_path: Path) -> None:
    """Nobody says whose they are."""
    x, y = np.zeros((6, 2), np.float32), np.array([0, 1] * 3)
    np.savez(tmp_path / "all.npz", x=x, y=y, client=np.array([0, 0, 0, 1, 1, 1]), x_test=x, y_test=y)
    with pytest.raises(DataError, match="x_test and y_test as well"):
        load_column(tmp_path / "all.npz")


def test_a_column_of_objects_is_told_how_to_become_text(tmp_path: Path) -> None:
    x, y = np.zeros((3000, 2), np.float32), np.arange(3000) % 2
    np.savez(tmp_path / "all.npz", x=x, y=y, client=np.array(["north", "south"] * 1500, dtype=object))
    with pytest.raises(DataError, match=r"\.astype\(str\) makes text of them"):
        load_column(tmp_path / "all.npz")
