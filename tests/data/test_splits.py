"""What each split gives its clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pfedla.data.partition import partition
from pfedla.data.splits import IID, SPLITS, Classes, Column, Dirichlet, Groups, NonIID1, NonIID2
from pfedla.errors import ConfigError
from tests.data.labels import TEN, all_of, class_counts, modest, shuffled


@modest
@given(st.integers(1, 12), st.integers(2, 12), st.data())
def test_every_class_is_used_equally_often_to_within_one(clients: int, classes: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, classes))
    y = np.repeat(np.arange(classes), clients * 60)
    arguments: dict[str, Any] = {
        "clients": clients,
        "samples_per_client": 60,
        "seed": data.draw(st.integers(0, 9)),
    }
    held = class_counts(y, partition(y, NonIID1(k), **arguments)).sum(axis=2)
    assert ((held > 0).sum(axis=1) == k).all()
    assert held.max() - held[held > 0].min() <= 1
    favoured = class_counts(y, partition(y, NonIID2(k, 3.0), **arguments)).sum(axis=2)
    dominant = favoured >= 60 * 2 / (classes + 2 * k)  # above the middle between an ordinary and a dominant class
    for chosen in (held > 0, dominant):
        assert (chosen.sum(axis=1) == k).all()
        assert np.ptp(chosen.sum(axis=0)) <= 1


@modest
@given(
    st.lists(st.integers(0, 60), min_size=4, max_size=8),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_no_class_is_exhausted_needlessly(sizes: list[int], clients: int, k: int, seed: int) -> None:
    each = 5
    assume(sum(min(clients, size // each) for size in sizes) >= clients * k)  # else no assignment exists
    assume(k * each >= 2)
    y = shuffled(sizes, seed)
    parts = partition(y, NonIID1(k), clients=clients, samples_per_client=k * each, seed=seed)
    counts = class_counts(y, parts).sum(axis=2)
    assert set(np.unique(counts)) <= {0, each}
    uses = (counts > 0).sum(axis=0)
    room = np.minimum(np.bincount(y), clients * each) // each
    for c in np.flatnonzero(uses < room):  # a class that could be used more often is used as often as any, to one
        assert uses.max() - uses[c] <= 1


@modest
@given(st.integers(2, 10), st.integers(1, 10), st.integers(0, 999), st.data())
def test_groups_share_classes_and_differ_from_each_other(
    classes: int, groups: int, seed: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, classes))
    clients = groups + data.draw(st.integers(0, 9))
    split = Groups(min(groups, classes), k)
    y = np.repeat(np.arange(classes), clients * 20)
    held = class_counts(y, partition(y, split, clients=clients, samples_per_client=20, seed=seed)).sum(axis=2) > 0
    group = split.group_of(clients)
    assert np.ptp(np.bincount(group, minlength=split.groups)) <= 1
    assert (np.diff(group) >= 0).all()
    sets = [{held[i].tobytes() for i in np.flatnonzero(group == g)} for g in range(split.groups)]
    assert all(len(alike) == 1 for alike in sets)
    if k < classes:
        assert len(set().union(*sets)) == split.groups


def test_what_none_means_depends_on_the_number_of_classes() -> None:
    hundred = np.repeat(np.arange(100), 30)
    for y, held, dominant in ((TEN, 4, 2), (hundred, 12, 6)):
        one = class_counts(y, partition(y, NonIID1(), clients=3, samples_per_client=240, seed=0)).sum(axis=2)
        two = class_counts(y, partition(y, NonIID2(), clients=3, samples_per_client=224, seed=0)).sum(axis=2)
        assert ((one > 0).sum(axis=1) == held).all()
        assert (one[one > 0] == 240 // held).all()
        assert ((two == 3 * two.min()).sum(axis=1) == dominant).all()
        assert set(np.unique(two)) == {two.min(), 3 * two.min()}


def test_a_remainder_goes_to_the_first_classes_of_the_list() -> None:
    split = Classes(((5, 2, 7), (0,)))
    parts = partition(TEN, split, clients=2, samples_per_client=11, seed=0)
    counts = class_counts(TEN, parts)
    assert counts[0].sum(axis=1).tolist() == [0, 0, 4, 0, 0, 4, 0, 3, 0, 0]
    assert counts[1].tolist() == [[8, 3]] + [[0, 0]] * 9


def test_iid_takes_all_of_a_data_set_that_is_just_large_enough() -> None:
    parts = partition(TEN, IID(), clients=30, samples_per_client=100, seed=0)
    assert sorted(all_of(parts).tolist()) == list(range(3000))
    counts = class_counts(TEN, parts).sum(axis=2)
    assert counts.std() == pytest.approx(3.0, abs=0.6)  # hypergeometric: sqrt(100 * 0.1 * 0.9)


def test_concentration_decides_how_few_classes_a_client_holds() -> None:
    largest = []
    for concentration in (0.01, 1.0, 1000.0):
        parts = partition(TEN, Dirichlet(concentration), clients=5, samples_per_client=100, seed=1)
        largest.append(class_counts(TEN, parts).sum(axis=2).max(axis=1).mean())
    assert largest[0] > 80 > largest[1] > 15 > largest[2]


def test_column_gives_each_client_its_own_samples() -> None:
    owner = np.repeat([2, 0, 1, 3], [1200, 300, 500, 1000])
    y = np.tile(np.arange(10), 300)
    parts = partition(y, Column(), clients=3, samples_per_client=None, seed=0, owner=owner)
    for client, size in enumerate((300, 500, 1200)):
        assert sorted(np.concatenate(parts[client]).tolist()) == np.flatnonzero(owner == client).tolist()
        assert len(parts[client].train) == round(0.7 * size)
    some = partition(y, Column(), clients=3, samples_per_client=50, test_samples_per_client=90, seed=0, owner=owner)
    for client, part in enumerate(some):
        assert (owner[np.concatenate(part)] == client).all()
        assert (len(part.train), len(part.test)) == (35, 90)


def test_a_split_refuses_impossible_settings_at_once() -> None:
    with pytest.raises(ConfigError, match=r"split\.dominance = 0\.5 must be at least 1"):
        NonIID2(dominance=0.5)
    with pytest.raises(ConfigError, match=r"split\.dominance = inf must be finite"):
        NonIID2(dominance=float("inf"))
    with pytest.raises(ConfigError, match=r"split\.groups = 0 must be at least 1"):
        Groups(groups=0)
    for split in (NonIID1, Groups):
        with pytest.raises(ConfigError, match=r"split\.classes_per_client = 0 must be at least 1"):
            split(classes_per_client=0)
    with pytest.raises(ConfigError, match=r"split\.concentration = 0\.0 must be at least 0\.001 and at most 1000000"):
        Dirichlet(concentration=0.0)


def test_every_split_is_registered_under_its_name() -> None:
    names = {
        "classes": Classes,
        "column": Column,
        "dirichlet": Dirichlet,
        "groups": Groups,
        "iid": IID,
        "non-iid-1": NonIID1,
        "non-iid-2": NonIID2,
    }
    assert names == SPLITS


def test_no_swap_is_tried_once_every_set_of_classes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """None could help, and with hundreds of groups trying all takes minutes."""
    tried = list[int]()

    def product(*_: Any) -> tuple[()]:
        tried.append(1)
        return ()

    monkeypatch.setattr("pfedla.data.splits.itertools.product", product)
    y = np.repeat(np.arange(5), 400)
    held = class_counts(y, partition(y, Groups(40, 2), clients=40, samples_per_client=20, seed=0)).sum(axis=2) > 0
    assert len(np.unique(held, axis=0)) == 10
    assert not tried
