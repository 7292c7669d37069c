from __future__ import annotations

import numpy as np
import pytest

from pfedla.paper.grid import ITEMS, KEEP, METHODS
from pfedla.paper.printed import CLIENTS, DATASETS, TABLE1, TABLE2, TABLE3, Place
from pfedla.paper.retained import layer_sizes, megabytes

TEN = {column.place.dataset: column for column in ITEMS["table3"].columns}


@pytest.mark.parametrize("table", [TABLE1, TABLE2])
def test_every_method_has_every_column_but_fedbn_those_without_batch_norm(
    table: dict[str, dict[Place, object]],
) -> None:
    everywhere = {Place(dataset, clients) for dataset in DATASETS for clients in CLIENTS}
    assert list(table) == [method.name for method in METHODS if method.printed]
    for method, row in table.items():
        absent = {place for place in everywhere if place.dataset in ("EMNIST", "FashionMNIST")}
        assert row.keys() == everywhere - (absent if method == "FedBN" else set())


def test_table_3_repeats_table_1() -> None:
    for dataset, columns in TABLE3.items():
        assert [column.k for column in columns] == list(range(len(columns)))
        for column, method in zip(columns[:2], ("pFedLA", "HeurpFedLA"), strict=True):
            assert column.accuracy == TABLE1[method][Place(dataset, 10)].mean


def test_two_of_the_columns_agree_with_what_section_4_says_of_them() -> None:
    emnist, cifar = (TABLE3[name] for name in ("EMNIST", "CIFAR10"))
    assert all(column.accuracy > emnist[0].accuracy for column in emnist[1:])  # "can even increase"
    assert all(column.accuracy < cifar[0].accuracy for column in cifar[1:])  # "will be compromised"


@pytest.mark.parametrize(("dataset", "hundredths"), [("EMNIST", 0), ("CIFAR10", 2)])
def test_megabytes_of_table_3_come_from_the_sizes_of_the_layers(dataset: str, hundredths: int) -> None:
    sizes = layer_sizes(TEN[dataset])
    for column in TABLE3[dataset]:
        found = megabytes(sizes, dict.fromkeys(column.layers, 1.0))
        assert abs(round(100 * found) - round(100 * column.megabytes)) <= hundredths, column


def test_no_other_layers_give_these_megabytes() -> None:
    for dataset, columns in TABLE3.items():
        sizes = layer_sizes(TEN[dataset])
        before: tuple[str, ...] = ()
        for column in columns[1:]:
            fits = [
                name
                for name in sizes.keys() - set(before)
                if abs(megabytes(sizes, dict.fromkeys([*before, name], 1.0)) - column.megabytes) < 0.1
            ]
            assert fits == [column.layers[-1]]
            before = column.layers


def test_half_a_download_saves_half() -> None:
    sizes = {"a": 1000, "b": 10}
    whole, half, none = (megabytes(sizes, {"a": share}) for share in (1.0, 0.5, 0.0))
    assert np.isclose(half, (whole + none) / 2)
    assert np.isclose(none, 2 * 1010 * 4 * 750 / 2**20)


def test_retained_layers_are_counted_up_to_three() -> None:
    assert [method.variant.changes["algorithm"].get("retain", 0) for method in KEEP] == [0, 1, 2, 3]
