"""What hidden groups have differently: labels, images, sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from pfedla.cli import cli
from pfedla.config import Experiment
from pfedla.data.federation import Data, Federation, federate
from pfedla.data.partition import partition
from pfedla.data.shifts import IMAGES, blocks_of, imaged, relabelled, shift_words, shifted
from pfedla.data.splits import IID, Dirichlet, Groups, NonIID1, Split
from pfedla.errors import ConfigError, DataError
from pfedla.training import Samples


def federation(split: Split | None = None, seed: int = 2, **settings: Any) -> Federation:
    return federate(Data(**{"clients": 6, "samples_per_client": 20, **settings}), split or IID(), seed)


def pixels(samples: Samples) -> np.ndarray:
    return np.rint((samples.take(slice(0, len(samples)), torch.empty(0))[0].numpy() + 1) * 127.5)


def test_groups_are_blocks_one_after_another() -> None:
    assert blocks_of(12, 3).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert blocks_of(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert blocks_of(3, 3).tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"^data\.shift_groups = 4 must be at most data\.clients, 3$"):
        blocks_of(3, 4)
    assert blocks_of(12, 4).tolist() == Groups(4).group_of(12).tolist()


def test_each_group_names_every_class_in_its_own_way() -> None:
    y = np.arange(10)
    named = [relabelled(y, group, 10, seed=1) for group in range(10)]
    assert np.array_equal(named[0], y)
    for one in range(10):
        assert sorted(named[one]) == list(range(10))  # a permutation
        for other in range(one):
            assert not (named[one] == named[other]).any()
    assert np.array_equal(named[2], named[1][named[1]])  # two places on
    assert not np.array_equal(named[1], relabelled(y, 1, 10, seed=2))
    assert not np.array_equal(named[1], (y + 1) % 10)


def test_images_of_each_kind() -> None:
    x = np.random.default_rng(0).integers(0, 256, (3, 2, 6, 6), np.uint8)
    found = [imaged(x, group, np.random.default_rng(1)) for group in range(len(IMAGES))]
    assert all(kind.dtype == np.uint8 and kind.shape == x.shape for kind in found)
    assert np.array_equal(found[0], x)
    assert np.array_equal(found[1].astype(int) + x, np.full(x.shape, 255))
    for row in range(6):
        for column in range(6):
            assert np.array_equal(found[2][..., 5 - column, row], x[..., row, column])  # anticlockwise


def test_the_blur_is_a_binomial_one_with_noise_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).integers(0, 256, (2, 1, 5, 5), np.uint8)
    noisy = imaged(x, 3, np.random.default_rng(1))
    monkeypatch.setattr("pfedla.data.shifts.NOISE", 0.0)
    smooth, weights = imaged(x, 3, np.random.default_rng(1)), [1, 4, 6, 4, 1]
    for n, row, column in np.ndindex(2, 5, 5):
        total = 0.0
        for a in range(-2, 3):
            for b in range(-2, 3):
                total += (
                    weights[a + 2] * weights[b + 2] / 256 * x[n, 0, min(max(row + a, 0), 4), min(max(column + b, 0), 4)]
                )
        assert abs(smooth[n, 0, row, column] - total) <= 0.5001
    flat = imaged(np.full((40, 1, 20, 20), 128, np.uint8), 3, np.random.default_rng(1))
    assert (flat == 128).all()
    monkeypatch.undo()
    flat = imaged(np.full((40, 1, 20, 20), 128, np.uint8), 3, np.random.default_rng(1))
    assert flat.std() == pytest.approx(25, rel=0.03)
    assert not np.array_equal(noisy, smooth)
    dark, light = (imaged(np.full((40, 1, 20, 20), value, np.uint8), 3, np.random.default_rng(1)) for value in (0, 255))
    assert (dark.min(), light.max()) == (0, 255)
    assert (dark == 0).mean() == pytest.approx(0.5, abs=0.02)  # noise beyond black and white is cut off
    assert light.min() > 100


@pytest.mark.parametrize("split", [IID(), NonIID1(3)])
def test_a_shift_is_laid_over_any_split(split: Split) -> None:
    plain, both = federation(split), federation(split, shift="both")
    assert (plain.groups, both.groups) == (None, (0, 0, 1, 1, 2, 2))
    assert both.shifts[1] == "group 1: images inverted, labels moved by 1 along a cycle"
    for client, group in enumerate(both.groups or ()):
        for part in (0, 1):
            before, after = plain.data[client][part], both.data[client][part]
            expected = relabelled(before.targets.numpy(), group, 10, seed=2)
            assert np.array_equal(after.targets.numpy(), expected)
            images = pixels(before)
            kinds = [images, 255 - images, np.rot90(images, axes=(2, 3))]
            assert np.array_equal(pixels(after), kinds[group])
            assert both.counts[client, :, part].tolist() == np.bincount(expected, minlength=10).tolist()


def test_each_kind_of_shift_changes_what_it_says() -> None:
    plain, labels, inputs, none = (federation(shift=kind) for kind in (None, "labels", "inputs", "none"))
    assert labels.groups == inputs.groups == none.groups == (0, 0, 1, 1, 2, 2)
    assert none.fingerprint() == plain.fingerprint()
    for client in range(6):
        for part in (0, 1):
            mine = [found.data[client][part] for found in (plain, labels, inputs)]
            images, targets = ([part(samples) for samples in mine] for part in (pixels, lambda s: s.targets.numpy()))
            assert np.array_equal(images[0], images[1])
            assert np.array_equal(targets[0], targets[2])
            assert np.array_equal(images[0], images[2]) == np.array_equal(targets[0], targets[1]) == (client < 2)


def test_a_shift_is_the_same_for_a_seed_and_its_training_part_whatever_is_tested() -> None:
    one, other = (federation(shift="both", shift_groups=4, test_samples_per_client=k) for k in (5, 40))
    assert one.fingerprint() == federation(shift="both", shift_groups=4, test_samples_per_client=5).fingerprint()
    for client in range(6):
        assert np.array_equal(pixels(one.data[client].train), pixels(other.data[client].train))
    assert (
        one.fingerprint() != federation(shift="both", shift_groups=4, test_samples_per_client=5, seed=3).fingerprint()
    )
    x, y = np.full((2, 1, 4, 4), 128, np.uint8), np.zeros(2, np.int64)
    noise = [
        shifted("inputs", x, y, 3, 10, 0, part, client)[0] for part, client in (("train", 0), ("test", 0), ("train", 1))
    ]
    assert not any(np.array_equal(noise[i], noise[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_validation_part_is_shifted_as_the_training_part() -> None:
    whole, held = federation(shift="labels"), federation(shift="labels", validation=0.3)
    assert held.groups == whole.groups
    for client in range(6):
        parts = [held.data[client].train.targets, held.data[client].test.targets]
        assert sorted(torch.cat(parts).tolist()) == sorted(whole.data[client].train.targets.tolist())


def test_groups_of_a_split_are_known_and_those_of_a_shift_come_first() -> None:
    assert federation(Groups(2)).groups == (0, 0, 0, 1, 1, 1)
    assert federation(Groups(2), shift="none").groups == (0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shift": "lables"}, r"data\.shift = 'lables': choose one of none, labels, inputs, both"),
        ({"shift": "labels", "shift_groups": 0}, r"data\.shift_groups = 0 must be at least 1"),
        ({"shift_groups": 2}, r"data\.shift_groups = 2 needs data\.shift"),
        ({"shift": "none", "folder": "x"}, r"data\.shift is for data sets: own data, data\.folder, stay as they are"),
        ({"shift": "labels", "shift_groups": 7}, r"data\.shift_groups = 7 must be at most data\.clients, 6"),
        ({"shift": "inputs", "shift_groups": 5}, r"data\.shift_groups = 5: there are 4 kinds of inputs at most"),
        ({"size_power": 0}, r"data\.size_power = 0\.0 must be above 0"),
        *(
            ({name: value, "folder": "x"}, rf"data\.{name} is for data sets: own data")
            for name, value in (("size_power", 1.0), ("fewest_samples", 2), ("reuse", True))
        ),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        federation(**settings)


def test_as_many_groups_as_classes_and_square_images() -> None:
    with pytest.raises(ConfigError, match="there are 10 classes, and as many ways to name them"):
        shift_words("labels", 11, 10, (1, 28, 28))
    with pytest.raises(ConfigError, match="these are not square"):
        shift_words("both", 3, 10, (1, 28, 30))
    assert len(shift_words("both", 2, 10, (1, 28, 30))) == 2
    assert len(shift_words("labels", 10, 10, (1, 28, 28))) == 10
    assert shift_words("none", 2, 10, (3,)) == [f"group {g}: images as they are, labels as they are" for g in (0, 1)]


def test_a_shift_is_a_setting_like_any_other() -> None:
    experiment = Experiment.from_tables({"data": {"shift": "inputs", "shift_groups": 2}})
    assert Experiment.from_tables(experiment.tables()) == experiment
    assert "shift" not in Experiment().tables()["data"]  # runs of before know nothing of it


def test_sizes_by_a_power_law() -> None:
    y = np.arange(4000) % 10
    how: dict[str, Any] = {"clients": 8, "samples_per_client": 100, "seed": 3}
    found = [len(part.train) + len(part.test) for part in partition(y, IID(), size_power=1.0, **how)]
    assert sorted(found, reverse=True) == [round(100 / rank) for rank in range(1, 9)]
    assert found != sorted(found, reverse=True)  # in a random order
    least = [len(part.train) + len(part.test) for part in partition(y, IID(), size_power=3.0, fewest_samples=10, **how)]
    assert sorted(least, reverse=True) == [100, 12, 10, 10, 10, 10, 10, 10]
    steep = [len(part.train) + len(part.test) for part in partition(y, IID(), size_power=1e3, **how)]
    assert sorted(steep) == [2] * 7 + [100]


@pytest.mark.parametrize("split", [IID(), Dirichlet(0.3)])
def test_unequal_clients_need_no_more_samples_than_they_hold(split: Split) -> None:
    how: dict[str, Any] = {"clients": 8, "samples_per_client": 100, "seed": 3}
    y = np.arange(271) % 10  # 100 (1 + 1/2 + ... + 1/8)
    parts = partition(y, split, size_power=1.0, **how)
    assert sorted(len(part.train) + len(part.test) for part in parts) == [round(100 / k) for k in range(8, 0, -1)]
    assert len(np.unique(np.concatenate([np.concatenate(part) for part in parts]))) == 271
    with pytest.raises(DataError, match="8 clients of up to 100 samples need 271, the data set has 270"):
        partition(y[:-1], split, size_power=1.0, **how)


def test_the_command_line_shows_groups_and_what_they_have(tmp_path: Path) -> None:
    settings = ("--clients", "4", "--split", "iid", "--set", "data.shift=labels", "--set", "data.shift_groups=2")
    shown = CliRunner().invoke(cli, ["data", "show", *settings, "--out", str(tmp_path / "who.png")])
    assert shown.exit_code == 0
    assert "fashion-mnist-10k, iid, shift of labels, seed 0" in shown.output
    assert "group 1: images as they are, labels moved by 1 along a cycle" in shown.output
    assert (tmp_path / "who.png").exists()
