from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pfedla.data.partition import Part, partition
from pfedla.data.splits import IID, Classes, Column, Dirichlet, Groups, NonIID1, NonIID2, Split
from pfedla.errors import ConfigError, DataError, PfedlaError
from tests.data.labels import TEN, all_of, class_counts, modest, shuffled


@st.composite
def federations(draw: st.DrawFn, demanding: bool = False) -> tuple[np.ndarray, Split, dict[str, Any]]:
    """Return labels, a split of any kind and the other arguments; enough samples unless `demanding`."""
    classes = draw(st.integers(2, 9))
    clients = draw(st.integers(1, 8))
    samples = draw(st.integers(30, 45))
    fewest = 0 if demanding else clients * samples
    sizes = draw(st.lists(st.integers(fewest, fewest + 60), min_size=classes, max_size=classes))
    assume(sum(sizes) >= 8 * 45 if not demanding else any(sizes))
    y = shuffled(sizes, draw(st.integers(0, 99)))
    few = draw(st.integers(1, min(classes, max(1, sum(n > 0 for n in sizes)))))
    lists = tuple(tuple((i + j) % classes for j in range(few)) for i in range(clients))
    split = draw(
        st.sampled_from(
            [
                NonIID1(few),
                NonIID2(few, dominance=draw(st.sampled_from([1.0, 1.5, 2.7, 3.0]))),
                Groups(draw(st.integers(1, clients)), few),
                Dirichlet(draw(st.sampled_from([0.001, 0.3, 50.0]))),
                IID(),
                Classes(lists),
                Column(),
            ]
        )
    )
    arguments = {
        "clients": clients,
        "samples_per_client": samples,
        "train_fraction": draw(st.sampled_from([0.1, 0.5, 0.7, 0.85])),
        "seed": draw(st.integers(0, 2**40)),
        "owner": np.arange(len(y)) % clients,
    }
    return y, split, arguments


def parts_or_message(y: np.ndarray, split: Split, **arguments: Any) -> list[Part] | str:
    try:
        return partition(y, split, **arguments)
    except PfedlaError as error:
        return str(error)


@modest
@given(federations())
def test_parts_are_disjoint_exact_and_stratified(
    federation: tuple[np.ndarray, Split, dict[str, Any]],
) -> None:
    y, split, arguments = federation
    parts = partition(y, split, **arguments)
    samples, fraction = arguments["samples_per_client"], arguments["train_fraction"]
    trained = round(fraction * samples)
    assert len(parts) == arguments["clients"]
    assert all(chosen.dtype == np.int64 for part in parts for chosen in part)
    assert [(len(part.train), len(part.test)) for part in parts] == [(trained, samples - trained)] * len(parts)
    used = all_of(parts)
    assert len(np.unique(used)) == len(used)
    counts = class_counts(y, parts)
    ideal = counts.sum(axis=2) * trained / samples
    assert (np.abs(counts[..., 0] - ideal) < 1).all()


UNOWNED = [NonIID1(4), NonIID2(2), Groups(3), Dirichlet(0.3), IID()]


@pytest.mark.parametrize("split", UNOWNED, ids=lambda split: split.name)
@pytest.mark.parametrize("tests", [None, 25])
def test_reused_samples_are_trained_on_or_tested_on_but_never_both(split: Split, tests: int | None) -> None:
    parts = partition(
        TEN, split, clients=200, samples_per_client=100, test_samples_per_client=tests, fewest_samples=20,
        reuse=True, seed=1,
    )  # fmt: skip
    assert sum(len(part.train) for part in parts) > len(TEN)
    trained, tested = (np.unique(np.concatenate(which)) for which in zip(*parts, strict=True))
    assert not np.intersect1d(trained, tested).size
    assert all(len(np.unique(part.train)) == len(part.train) for part in parts)
    assert all(len(np.unique(part.test)) == len(part.test) for part in parts)
    if tests:
        assert {len(part.test) for part in parts} == {tests}
    else:
        assert all(len(part.train) == round(0.7 * (len(part.train) + len(part.test))) for part in parts)
    counts = class_counts(TEN, parts)
    held, examined = counts[..., 0] > 0, counts[..., 1] > 0
    assert (examined <= held).mean() > 0.9  # tested on the classes it trains on


def test_unequal_clients_have_all_sizes_and_their_classes_in_proportion() -> None:
    parts = partition(TEN, NonIID1(2), clients=40, samples_per_client=70, fewest_samples=10, seed=0)
    sizes = [len(part.train) + len(part.test) for part in parts]
    assert min(sizes) >= 10
    assert max(sizes) <= 70
    assert np.std(sizes) == pytest.approx(60 / 12**0.5, rel=0.25)
    assert len(np.unique(all_of(parts))) == sum(sizes)
    for classes in class_counts(TEN, parts).sum(axis=-1):
        assert np.ptp(classes[classes > 0]) <= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fewest_samples": 1}, "data.fewest_samples must be from 2 to data.samples_per_client, 100, not 1"),
        ({"fewest_samples": 101}, "data.fewest_samples must be from 2"),
        ({"samples_per_client": 2000}, r"client \d+ needs 3\d\d training samples of class \d, 210 are for that"),
        ({"test_samples_per_client": 900}, r"client \d+ needs \d+ test samples of class \d, 90 are for that"),
        ({"split": Column()}, "data.reuse: the split 'column' says whose"),
    ],
)
def test_what_cannot_be_reused_is_refused(change: dict[str, Any], words: str) -> None:
    arguments = {"split": NonIID1(4), "clients": 30, "samples_per_client": 100, "reuse": True, "seed": 0, **change}
    with pytest.raises(PfedlaError, match=words):
        partition(TEN, **arguments)


@modest
@given(federations(demanding=True))
def test_scarce_classes_end_in_a_sound_partition_or_a_clear_error(
    federation: tuple[np.ndarray, Split, dict[str, Any]],
) -> None:
    y, split, arguments = federation
    enough = len(y) >= arguments["clients"] * arguments["samples_per_client"]
    parts = parts_or_message(y, split, **arguments)
    if isinstance(parts, str):
        assert re.search(r"data\.[a-z]|split\.", parts)  # the message names a setting
        assert "--" not in parts  # and no option: Python has none
        assert not (enough and isinstance(split, Dirichlet | IID))
    else:
        assert enough
        used = all_of(parts)
        assert len(np.unique(used)) == len(used) == arguments["clients"] * arguments["samples_per_client"]


@modest
@given(federations(), st.integers(1, 70))
def test_further_test_samples_leave_training_alone(
    federation: tuple[np.ndarray, Split, dict[str, Any]], wanted: int
) -> None:
    y, split, arguments = federation
    y = np.concatenate([y, y, y])  # three times the samples, so that some are unused
    arguments["owner"] = np.arange(len(y)) % arguments["clients"]
    plain = partition(y, split, **arguments)
    parts = partition(y, split, **arguments, test_samples_per_client=wanted)
    training = np.concatenate([part.train for part in parts])
    held = class_counts(y, plain).sum(axis=2) > 0
    for client, (before, after) in enumerate(zip(plain, parts, strict=True)):
        np.testing.assert_array_equal(before.train, after.train)
        assert len(np.unique(after.test)) == len(after.test) == wanted
        own = len(before.test)
        assert set(after.test[:own].tolist()) <= set(before.test.tolist())
        assert not np.isin(after.test, training).any()
        assert not np.isin(after.test[own:], all_of(plain)).any()
        assert held[client, y[after.test]].all()


@modest
@given(federations())
def test_same_arguments_same_parts_and_another_seed_others(
    federation: tuple[np.ndarray, Split, dict[str, Any]],
) -> None:
    y, split, arguments = federation
    first, again = partition(y, split, **arguments), partition(y, split, **arguments)
    other = partition(y, split, **{**arguments, "seed": arguments["seed"] + 1})
    assert all_of(first).tolist() == all_of(again).tolist()
    assert all_of(first).tolist() != all_of(other).tolist()


@pytest.mark.slow
def test_parts_do_not_depend_on_hash_randomisation() -> None:
    script = (
        "import sys; import numpy as np; from pfedla.data.partition import *; from pfedla.data.splits import *\n"
        "y, sizes = np.repeat(np.arange(10), 300), dict(samples_per_client=30, test_samples_per_client=12)\n"
        "for split in (NonIID1(), NonIID2(), Groups(), Dirichlet(), IID()):\n"
        "    for part in partition(y, split, clients=5, seed=3, **sizes):\n"
        "        sys.stdout.write(repr((part.train.tolist(), part.test.tolist())))"
    )
    command, env = [sys.executable, "-c", script], {**os.environ, "PYTHONHASHSEED": "12345"}
    elsewhere = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    here = [
        (part.train.tolist(), part.test.tolist())
        for split in (NonIID1(), NonIID2(), Groups(), Dirichlet(), IID())
        for part in partition(TEN, split, clients=5, seed=3, samples_per_client=30, test_samples_per_client=12)
    ]
    assert elsewhere == "".join(map(repr, here))


def test_further_test_samples_follow_the_class_distribution() -> None:
    split = Classes(((0, 1), (0, 9)))
    parts = partition(TEN, split, clients=2, samples_per_client=20, test_samples_per_client=206, seed=0)
    counts = class_counts(TEN, parts)
    assert counts[0, :2].tolist() == [[7, 103], [7, 103]]
    assert counts[1, [0, 9]].tolist() == [[7, 103], [7, 103]]
    fewer = partition(TEN, split, clients=2, samples_per_client=20, test_samples_per_client=4, seed=0)
    assert class_counts(TEN, fewer)[0, :2].tolist() == [[7, 2], [7, 2]]


def test_a_class_that_is_absent_is_given_to_nobody() -> None:
    y = np.repeat([1, 2, 4], 50)
    for split in (NonIID1(2), NonIID2(1), Groups(2, 2), Dirichlet(), IID()):
        counts = class_counts(y, partition(y, split, clients=2, samples_per_client=20, seed=0))
        assert counts.shape == (2, 5, 2)
        assert counts[:, [0, 3]].sum() == 0


@pytest.mark.parametrize(
    ("split", "arguments", "words"),
    [
        (Classes(((0, 1), (0, 2))), {"clients": 2, "samples_per_client": 400}, ["class 0", "400", "300"]),
        (NonIID1(1), {"clients": 10, "samples_per_client": 301}, ["301", "300", "data.samples_per_client"]),
        (Groups(1, 2), {"clients": 8, "samples_per_client": 100}, ["400", "300", "split.groups"]),
        (NonIID2(1, 50.0), {"clients": 1, "samples_per_client": 590}, ["500", "300", "split.dominance"]),
        (IID(), {"clients": 31, "samples_per_client": 100}, ["3100", "3000", "data.clients"]),
        (Dirichlet(), {"clients": 31, "samples_per_client": 100}, ["3100", "3000", "data.clients"]),
        (
            Classes(((0,), (1,))),
            {"clients": 2, "samples_per_client": 100, "test_samples_per_client": 231},
            ["201", "200", "class 0", "client 0", "data.test_samples_per_client"],
        ),
        (Column(), {"clients": 2, "samples_per_client": 2000}, ["client 0", "1500", "2000"]),
    ],
)
def test_too_few_samples_are_named_with_their_numbers(
    split: Split, arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        partition(TEN, split, **arguments, seed=0, owner=np.arange(3000) % 2)
    assert [word for word in words if word not in str(caught.value)] == []


def test_more_classes_help_only_if_there_are_samples_enough() -> None:
    with pytest.raises(DataError, match=r"data\.clients, or raise split\.classes_per_client$"):
        partition(TEN, NonIID1(1), clients=1, samples_per_client=301, seed=0)
    with pytest.raises(DataError, match=r"lower data\.samples_per_client or data\.clients$"):
        partition(TEN, NonIID1(1), clients=11, samples_per_client=300, seed=0)


@pytest.mark.parametrize(
    ("split", "change", "words"),
    [
        (IID(), {"samples_per_client": None}, "data.samples_per_client must be given unless the split is 'column'"),
        (NonIID1(11), {}, "split.classes_per_client must be from 1 to 10, the number of classes, not 11"),
        (
            NonIID1(5),
            {"samples_per_client": 4},
            "data.samples_per_client must be at least 5, one per class, not 4",
        ),
        (NonIID2(11), {}, "split.dominant_classes must be from 1 to 10, the number of classes, not 11"),
        (NonIID2(), {"samples_per_client": 13}, "data.samples_per_client must be at least 14 for every client"),
        (Groups(5), {}, "split.groups must be at most 4, as many as data.clients, not 5"),
        (Groups(2, 11), {}, "split.classes_per_client must be from 1 to 10, the number of classes, not 11"),
        (Classes(((1,), (2,))), {}, "split.classes must have one list for each of the 4 clients (data.clients), not 2"),
        (Classes(((1, 1), (2,), (3,), (4,))), {}, "split.classes of client 0 must be distinct classes"),
        (Classes(((1,), (2,), (3,), (10,))), {}, "client 3 must be distinct classes from 0 to 9"),
        (Classes(((1,), (), (3,), (4,))), {}, "split.classes of client 1 must"),
        (Column(), {}, "needs a column that says whose each sample is"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(split: Split, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        partition(TEN, split, **{"clients": 4, "samples_per_client": 20, "seed": 0, **change})
    assert words in str(caught.value)


@pytest.mark.parametrize("y", [TEN.reshape(2, -1), TEN.astype(float), TEN - 1, TEN[:0], TEN > 3])
def test_labels_that_are_not_class_numbers_are_refused(y: np.ndarray) -> None:
    with pytest.raises(DataError, match="labels must be one whole number from 0 per sample"):
        partition(y, IID(), clients=2, samples_per_client=10, seed=0)


def test_a_client_column_of_another_length_is_refused() -> None:
    with pytest.raises(DataError, match="has 5 entries for 3000 labels"):
        partition(TEN, Column(), clients=2, samples_per_client=10, seed=0, owner=np.arange(5))


def test_an_owner_without_samples_is_named() -> None:
    owner = np.repeat([0, 2], 1500)
    with pytest.raises(DataError, match="client 1: of the 2 samples that a client needs at least, there are 0"):
        partition(TEN, Column(), clients=3, samples_per_client=None, seed=0, owner=owner)
