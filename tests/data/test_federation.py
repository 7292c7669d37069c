"""Everybody's data, from data sets, from files and from arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pfedla.data.datasets import load_dataset
from pfedla.data.federation import Data, Federation, federate, named, own_data
from pfedla.data.partition import partition
from pfedla.data.splits import IID, Column, NonIID1
from pfedla.errors import ConfigError, DataError
from pfedla.objective import Regression
from pfedla.training import Samples


def inputs(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


def contents(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    x, y = samples.take(slice(0, len(samples)), torch.empty(0))
    return x.numpy(), y.numpy()


def sizes(federation: Federation) -> list[tuple[int, int]]:
    return [(len(own.train), len(own.test)) for own in federation.data.values()]


# ---- data sets


def gaps(folder: Path, labels: tuple[int, ...]) -> None:
    for name in ("a", "b"):
        y = np.resize(labels, 24)
        np.savez(folder / f"{name}.npz", x=inputs(24), y=y)


@pytest.mark.parametrize("labels", [(100, 110, 120), (0, 5), (7, 3, 40)])
def test_labels_that_number_no_classes_are_their_names(tmp_path: Path, labels: tuple[int, ...]) -> None:
    gaps(tmp_path, labels)
    found = federate(Data(folder=str(tmp_path)), IID(), 0)
    assert found.outputs == len(labels)
    assert found.classes == tuple(map(str, sorted(labels)))
    assert "are taken for names of" in found.note
    for samples in (part for client in found.data.values() for part in client):
        assert set(samples.targets.tolist()) == set(range(len(labels)))
    assert found.counts.sum(axis=(0, 2)).tolist() == [48 // len(labels)] * len(labels)


@pytest.mark.parametrize("labels", [(0, 1, 2), (1, 2), (0, 2, 4)])
def test_labels_that_number_classes_keep_their_places(tmp_path: Path, labels: tuple[int, ...]) -> None:
    gaps(tmp_path, labels)
    found = federate(Data(folder=str(tmp_path)), IID(), 0)
    assert found.outputs == 1 + max(labels)
    assert "names" not in found.note
    assert set(found.data[0].train.targets.tolist()) == set(labels)


def test_clients_with_few_test_samples_are_pointed_out() -> None:
    x, y = inputs(40), np.arange(40) % 2
    found = own_data([(x, y), (x[:20], y[:20]), (x, y)], ["big", "small", "other"], 0.7, 0)
    assert found.few == ("small",)
    assert found.note == "fewer than 10 test samples: small. Scores of so few are rough"


class Pairs:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.zeros(3), index


class Frame:
    def to_numpy(self) -> np.ndarray:
        return np.zeros((4, 2))


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ({"X": 1, "Y": 2}, "a dictionary with 'X', 'Y': give its arrays as a tuple"),
        (Pairs(), r"found a Pairs: x, y = map\(np.stack, zip\(\*dataset\)\) makes arrays"),
        (np.zeros((4, 2)), r"found an array of shape \(4, 2\)$"),
        ((Frame(), np.zeros(4)), r"its x is a Frame: x.to_numpy\(\) makes an array"),
        ((np.zeros((4, 2)), [0, 1, 0, 1]), r"its y is a list: np.asarray\(y\) makes an array"),
        (
            (np.full((4, 2), np.nan), np.arange(4) % 2),
            "site: inputs must be finite numbers in single precision; sample 0 has NaN",
        ),
        ((torch.tensor([[0.0], [torch.inf]]), np.arange(2)), "sample 1 has infinity"),
        ((np.array([[0.0], [1e39]]), np.arange(2)), "in single precision; sample 1 has infinity"),
    ],
)
def test_what_is_no_pair_of_arrays_is_named(client: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        own_data([client], ["site"], 0.5, 0)


def test_clients_are_a_list_or_named() -> None:
    pair = (inputs(4), np.arange(4) % 2)
    assert list(named([pair, pair])) == ["client-0", "client-1"]
    assert list(named({"Hôpital Saint-Jean": pair})) == ["Hôpital Saint-Jean"]
    with pytest.raises(DataError, match=r"a dictionary of names and .* found an array of shape"):
        named(np.zeros((3, 4)))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="a client's name must be text, not 3"):
        own_data([pair], [3], 0.5, 0)  # type: ignore[list-item]


def test_a_data_set_is_split_as_partition_says() -> None:
    settings = Data(clients=12, samples_per_client=30, test_samples_per_client=5, train_fraction=0.5)
    found = federate(settings, NonIID1(3), seed=4)
    dataset = load_dataset("fashion-mnist-10k")
    parts = partition(
        dataset.y, NonIID1(3), clients=12, samples_per_client=30, test_samples_per_client=5, train_fraction=0.5, seed=4
    )
    assert list(found.data) == list(range(12))
    for client, part in enumerate(parts):
        for samples, chosen in zip(found.data[client], part, strict=True):
            x, y = contents(samples)
            assert np.array_equal(y, dataset.y[chosen])
            np.testing.assert_allclose(x, dataset.x[chosen] / 127.5 - 1, atol=1e-6)
            assert found.counts[client, :, int(samples is found.data[client].test)].tolist() == [
                int((y == c).sum()) for c in range(10)
            ]
    assert (found.shape, found.outputs, found.classes) == ((1, 28, 28), 10, dataset.classes)
    assert found.counts.shape == (12, 10, 2)
    assert found.names[:2] + found.names[-1:] == ("client-00", "client-01", "client-11")
    assert found.note == (
        "fewer than 10 test samples: client-00, client-01, client-02 and 9 more. Scores of so few are rough"
    )


def test_ten_clients_need_one_digit_each() -> None:
    assert federate(Data(clients=10, samples_per_client=10), IID(), 0).names[-1] == "client-9"


def test_the_folder_of_the_data_is_the_machines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"in {tmp_path}"):
        federate(Data("cifar10"), IID(), 0, data_dir=str(tmp_path))


def test_a_data_set_has_labels_alone() -> None:
    with pytest.raises(ConfigError, match=r"'fashion-mnist-10k' has labels of classes: set objective\.name"):
        federate(Data(), IID(), 0, objective=Regression())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": 0}, r"data\.clients = 0 must be at least 1"),
        ({"samples_per_client": 1}, r"data\.samples_per_client = 1 must be at least 2"),
        ({"test_samples_per_client": 0}, r"data\.test_samples_per_client = 0 must be at least 1"),
        ({"fewest_samples": 1}, r"data\.fewest_samples = 1 must be at least 2"),
        ({"train_fraction": 1.0}, r"data\.train_fraction = 1\.0 must be above 0 and below 1"),
        ({"train_fraction": 0}, r"data\.train_fraction = 0\.0 must be above 0"),
        ({"reuse": 1}, r"data\.reuse = 1 must be true or false"),
        ({"reuse": True, "validation": 0.2}, r"data\.validation = 0\.2 does not go with data\.reuse"),
        ({"dataset": "cifar01"}, "unknown data set 'cifar01': did you mean 'cifar10"),
    ],
)
def test_settings_of_data_are_checked_when_they_are_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Data(**settings)


# ---- files


def test_data_are_called_by_their_set_or_their_folder() -> None:
    assert Data().name == "fashion-mnist-10k"
    assert Data(folder="some/where/hospitals").name == "hospitals"
    assert Data(folder="some/where/wards.npz").name == "wards"


def test_a_folder_decides_who_the_clients_are(tmp_path: Path) -> None:
    x, y = inputs(20), np.arange(20) % 3
    np.savez(tmp_path / "b.npz", x=x, y=y)
    np.savez(tmp_path / "a.npz", x=x, y=y, x_test=x[:4], y_test=y[:4])
    found = federate(Data(folder=str(tmp_path), clients=99, train_fraction=0.6), IID(), 0)
    assert found.names == ("a", "b")
    assert sizes(found) == [(20, 4), (12, 8)]
    assert np.array_equal(contents(found.data[0].test)[0], x[:4])
    assert found.counts.sum(axis=1).tolist() == [[20, 4], [12, 8]]
    assert (found.shape, found.outputs, found.classes) == ((4,), 3, ("0", "1", "2"))


def test_a_column_decides_who_the_clients_are(tmp_path: Path) -> None:
    x = inputs(30)
    file = tmp_path / "all.npz"
    np.savez(file, x=x, y=np.zeros(30, int), client=np.repeat(["z/../..", "ä", "a b"], 10))
    found = federate(Data(folder=str(file)), IID(), 0)
    assert found.names == ("a b", "z/../..", "ä")
    assert sizes(found) == [(7, 3)] * 3
    everything = np.concatenate([contents(part)[0] for part in found.data[1]])
    assert sorted(everything.tolist()) == sorted(x[:10].tolist())


def test_targets_that_are_no_labels_come_from_files_too(tmp_path: Path) -> None:
    x = inputs(10)
    np.savez(tmp_path / "a.npz", x=x, y=np.stack([x[:, 0], 2 * x[:, 1]], axis=1))
    found = federate(Data(folder=str(tmp_path)), IID(), 0, objective=Regression())
    for samples in found.data[0]:
        part, y = contents(samples)
        assert np.array_equal(y, np.stack([part[:, 0], 2 * part[:, 1]], axis=1))
    assert (found.outputs, found.classes, found.counts.shape) == (2, (), (1, 0, 2))


# ---- a validation part


def test_a_validation_part_comes_out_of_the_training_samples_class_by_class() -> None:
    settings: dict[str, Any] = {"clients": 6, "samples_per_client": 40, "train_fraction": 0.5}
    whole = federate(Data(**settings), NonIID1(4), seed=2)
    held = federate(Data(**settings, validation=0.25), NonIID1(4), seed=2)
    assert (whole.scored_on, held.scored_on) == ("test", "validation")
    assert sizes(held) == [(15, 5)] * 6
    assert held.counts.sum(2).tolist() == whole.counts[:, :, 0].tolist()
    for client, (train, validation) in held.data.items():
        before, tested = ({x.tobytes() for x in contents(part)[0]} for part in whole.data[client])
        left, taken = ({x.tobytes() for x in contents(part)[0]} for part in (train, validation))
        assert left | taken == before
        assert not taken & (left | tested)
        assert (np.abs(held.counts[client, :, 1] - 0.25 * whole.counts[client, :, 0]) < 1).all()
    again = federate(Data(**settings, validation=0.25), NonIID1(4), seed=2)
    for client, own in again.data.items():
        assert np.array_equal(contents(own.test)[0], contents(held.data[client].test)[0])


def test_own_data_have_a_validation_part_too() -> None:
    x, y = inputs(40), np.linspace(0, 1, 40, dtype=np.float32)
    clients: list[Any] = [(x, y), (x, y, x[:3] + 50, y[:3])]  # the second brings test data
    found = own_data(clients, ["a", "b"], 0.5, 1, Regression(), validation=0.2)
    assert sizes(found) == [(16, 4), (32, 8)]
    assert found.scored_on == "validation"
    assert contents(found.data[1].test)[0].max() < 20
    assert found.counts.shape == (2, 0, 2)
    with pytest.raises(ConfigError, match=r"a, data\.validation = 0\.001: .*train_fraction 0\.999"):
        own_data(clients, ["a", "b"], 0.5, 1, Regression(), validation=0.001)


# ---- arrays


def test_a_clients_samples_are_divided_class_by_class() -> None:
    y = np.repeat([0, 1], [10, 20])
    found = own_data([(inputs(30), y)], ["only"], 0.7, seed=0)
    assert found.counts.tolist() == [[[7, 3], [14, 6]]]


@pytest.mark.parametrize("by_class", [True, False])
def test_seed_and_number_of_samples_alone_decide_the_division(by_class: bool) -> None:
    x = inputs(40)

    def trained(y: np.ndarray, seed: int = 0) -> Any:
        return contents(
            own_data([(x, y)], ["a"], 0.5, seed, objective=None if by_class else Regression()).data[0].train
        )[0].tolist()

    once = trained(np.zeros(40, int))
    assert once == trained(np.zeros(40, int))
    assert once != trained(np.zeros(40, int), seed=1)
    assert len(once) == 20
    if not by_class:
        assert once == trained(x[:, 0])


def test_values_of_a_target_are_outputs_of_the_model() -> None:
    x = inputs(10)
    for targets, outputs in ((x[:, 0], 1), (x[:, :1], 1), (x[:, :3], 3), (np.ones((10, 2, 3)), 6)):
        assert own_data([(x, targets)], ["a"], 0.5, 0, objective=Regression()).outputs == outputs
    assert own_data([(x, np.arange(10))], ["a"], 0.5, 0).outputs == 10


def test_arrays_and_tensors_may_be_mixed() -> None:
    x, y = inputs(12), np.arange(12) % 2
    one = own_data([(x, y)], ["a"], 0.5, 0)
    other = own_data([(torch.from_numpy(x), y)], ["a"], 0.5, 0)
    assert contents(one.data[0].train)[0].tolist() == contents(other.data[0].train)[0].tolist()


X, Y = inputs(20), np.arange(20) % 3
V = X[:, 0]


@pytest.mark.parametrize(
    ("clients", "by_class", "message"),
    [
        ([], True, "there are no clients"),
        ([(X, Y), (X, Y - 1)], True, "client-1: label -1: labels are numbered from 0"),
        ([(X, Y.astype(float))], True, "client-0: labels must be whole numbers in one dimension, not float64"),
        ([(X, Y[:, None])], True, "labels must be whole numbers in one dimension"),
        ([(X, Y[:-1])], True, "client-0: 20 inputs but 19 labels"),
        ([(X[:0], Y[:0])], True, "client-0 has no samples"),
        ([(X, Y, X[:0], Y[:0])], True, "client-0 has no samples"),
        ([(X, Y, X)], True, r"client-0 must be \(x, y\) or \(x, y, x_test, y_test\), not 3 values"),
        ([(X, Y, X, Y - 1)], True, "client-0: label -1: labels are numbered from 0"),
        ([(X, Y), (X[:, :3], Y)], True, r"all clients' inputs must have one shape, not \(3,\) and \(4,\)"),
        ([(X, Y, X[:, :3], Y)], True, "inputs must have one shape"),
        ([(X[:1], Y[:1])], True, "client-0: of the 2 samples that a client needs at least, there are 1"),
        ([(X, V[:-1])], False, "client-0: 20 inputs but 19 targets"),
        ([(X, V), (X, X)], False, r"all clients' targets must have one shape, not \(\) and \(4,\)"),
        ([(X, np.where(V > 0, V, np.nan))], False, "client-0: targets must be finite"),
        ([(X, np.where(V > 0, V, np.inf))], False, "client-0: targets must be finite"),
        ([(X, np.array(["a"] * 20))], False, "client-0: targets must be numbers"),
        ([(X, np.array(1.0))], False, "client-0: targets must be numbers"),
    ],
)
def test_data_that_do_not_fit_are_refused(clients: Any, by_class: bool, message: str) -> None:
    with pytest.raises(DataError, match=message):
        own_data(
            clients, [f"client-{i}" for i in range(len(clients))], 0.7, 0, objective=None if by_class else Regression()
        )


def test_bytes_and_other_inputs_do_not_mix() -> None:
    """Bytes are scaled, others are not."""
    y = np.array([0, 1] * 5)
    small, large = np.zeros((10, 3, 2, 2), np.float32), np.zeros((10, 3, 2, 2), np.uint8)
    some: list[list[Any]] = [
        [(large, y, small, y)],
        [(large, y), (small, y)],
        [(small, y, small, y), (small, y, large, y)],
    ]
    for clients in some:
        with pytest.raises(DataError, match="images of bytes are scaled to"):
            own_data(clients, [f"c{i}" for i in range(len(clients))], 0.7, 0)
    rows = [(part.reshape(10, -1), y, small.reshape(10, -1), y) for part in (small, large)]  # codes and flags
    assert not own_data(rows, ["c0", "c1"], 0.7, 0).pixels


@pytest.mark.parametrize("change", [torch.Tensor.bfloat16, torch.Tensor.requires_grad_])
def test_tensors_that_numpy_cannot_look_at_are_taken(change: Any) -> None:
    y = torch.tensor([0, 1] * 5)
    federation = own_data([(change(torch.ones(10, 3)), y)], ["a"], 0.7, 0)
    assert federation.shape == (3,)
    assert not federation.data[0].train.take(slice(0, 2), torch.ones(1))[0].requires_grad


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sites").mkdir()
    np.savez(tmp_path / "sites" / "a.npz", x=np.zeros((10, 2), np.float32), y=np.array([0, 1] * 5))
    assert federate(Data(folder="~/sites", clients=1), Column(), 0).names == ("a",)
    with pytest.raises(DataError, match=str(tmp_path / "data")):
        load_dataset("mnist", "~/data")
