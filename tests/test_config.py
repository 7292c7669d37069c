from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pfedla.algorithms import ALGORITHMS, FedAvg, HeurPFedLA
from pfedla.config import Data, Experiment, Model, Run, Tables, algorithm_name, merge, parse_assignments, read_tables
from pfedla.data.splits import SPLITS, Classes, NonIID2
from pfedla.errors import ConfigError
from pfedla.training import Training


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("split", SPLITS)
def test_every_configuration_survives_toml(algorithm: str, split: str, tmp_path: Path) -> None:
    one = Experiment.from_tables({"algorithm": {"name": algorithm}, "split": {"name": split}})
    path = tmp_path / "config.toml"
    path.write_text(one.toml())
    assert Experiment.load(path) == one
    assert Experiment.from_tables(one.tables()) == one


def test_settings_that_are_not_defaults_survive_toml(tmp_path: Path) -> None:
    one = Experiment(
        HeurPFedLA(retain=2, hyper_lr=3e-4, hyper_optimizer="sgd"),
        Data(clients=2, data_dir='a "quoted"\\folder', train_fraction=0.5),
        Classes(((0, 1), (2, 3))),
        Model("mlp", {"all": "fc*"}),
        Training(lr=1e-7, momentum=0.9),
        Run(seed=-3, rounds=7, workers=0),
    )
    path = tmp_path / "config.toml"
    path.write_text(one.toml())
    assert Experiment.load(path) == one


def test_a_configuration_is_complete() -> None:
    tables = Experiment().tables()
    assert list(tables) == ["algorithm", "data", "split", "model", "training", "run"]
    assert tables["algorithm"]["name"] == "pfedla"
    assert tables["split"]["name"] == "non-iid-1"
    assert set(tables["training"]) == {"local_epochs", "batch_size", "lr", "momentum", "weight_decay"}
    assert Experiment.from_tables({}) == Experiment()


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("trainig", "lr", 0.1, "unknown section 'trainig': did you mean 'training'"),
        ("training", "learning_rat", 0.1, "unknown setting 'training.learning_rat'"),
        ("training", "momentun", 0.1, "unknown setting 'training.momentun': did you mean 'training.momentum'"),
        ("algorithm", "retian", 1, r"setting \(of PFedLA\) 'algorithm.retian': did you mean 'algorithm.retain'"),
        ("algorithm", "name", "pfedal", "unknown algorithm 'pfedal': did you mean 'pfedla'"),
        ("algorithm", "name", "pfedla.training:Training", "not a dataclass derived from pfedla.Algorithm"),
        ("algorithm", "name", "nowhere.at.all:X", "cannot import 'nowhere.at.all'"),
        ("algorithm", "name", ":X", "algorithm.name"),
        ("algorithm", "name", ["pfedla"], "unknown algorithm"),
        ("split", "name", "non-idd-1", "unknown split 'non-idd-1': did you mean 'non-iid-1'"),
        ("split", "name", ["iid"], "unknown split"),
        ("data", "dataset", "cifar01", "unknown data set 'cifar01': did you mean 'cifar10"),
        ("training", "lr", "fast", "training.lr = 'fast' must be a number"),
        ("training", "lr", True, "training.lr = True must be a number"),
        ("run", "rounds", 1.5, "run.rounds = 1.5 must be a whole number"),
        ("run", "rounds", True, "run.rounds = True must be a whole number"),
        ("run", "rounds", 0, "run.rounds = 0 must be at least 1"),
        ("run", "workers", -2, "run.workers = -2 must be at least -1"),
        ("data", "download", 1, "data.download = 1 must be true or false"),
        ("data", "folder", 1, "data.folder = 1 must be text"),
        ("data", "clients", 0, "data.clients = 0 must be at least 1"),
        ("data", "train_fraction", 1.0, "data.train_fraction = 1.0 must lie between 0 and 1"),
        ("model", "layers", "fc*", "model.layers = 'fc\\*' must be a table"),
        ("algorithm", "hyper_optimizer", "lion", "algorithm.hyper_optimizer = 'lion': choose one of adam, sgd"),
    ],
)
def test_what_is_wrong_is_refused_with_the_nearest_name(section: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Experiment.from_tables({section: {key: value}})


def test_a_section_must_be_a_table() -> None:
    with pytest.raises(ConfigError, match=r"\[run\] must be a section of settings, not 3"):
        Experiment.from_tables({"run": 3})  # type: ignore[dict-item]


def test_a_change_over_what_is_no_section_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("run = 3\n")
    with pytest.raises(ConfigError, match="run"):
        Experiment.load(tmp_path / "config.toml", {"run": {"seed": 1}})


def test_whole_numbers_are_numbers() -> None:
    assert Experiment.from_tables({"training": {"lr": 1}}).training.lr == 1.0


@pytest.mark.parametrize(
    ("content", "message"), [(None, "there is no configuration file"), (b"a = [", "TOML"), (b"\xff\xfe", "TOML")]
)
def test_a_file_that_cannot_be_read_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_tables(path)


def test_assignments_are_toml_values_and_bare_words() -> None:
    texts = ["run.rounds=3", "training.lr = 1e-2", "data.download=true", "algorithm.name=fedavg", 'model.name="mlp"']
    assert parse_assignments([*texts, "split.classes=[[0, 1], [2]]", "data.folder="]) == {
        "run": {"rounds": 3},
        "training": {"lr": 0.01},
        "data": {"download": True, "folder": ""},
        "algorithm": {"name": "fedavg"},
        "model": {"name": "mlp"},
        "split": {"classes": [[0, 1], [2]]},
    }


@pytest.mark.parametrize("text", ["rounds=3", "run.rounds", "=3", ".a=3", "run.=3", ""])
def test_other_assignments_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--set takes SECTION\.KEY=VALUE"):
        parse_assignments([text])


def test_changes_are_laid_over_and_another_method_starts_from_its_defaults() -> None:
    tables: Tables = {"algorithm": {"name": "pfedla", "retain": 2}, "run": {"seed": 1, "rounds": 9}}
    assert merge(tables, {"run": {"seed": 2}})["run"] == {"seed": 2, "rounds": 9}
    assert merge(tables, {"algorithm": {"name": "fedavg"}})["algorithm"] == {"name": "fedavg"}
    assert merge(tables, {"algorithm": {"name": "pfedla"}})["algorithm"] == {"name": "pfedla", "retain": 2}
    assert merge(tables, {"split": {"name": "iid"}})["split"] == {"name": "iid"}
    assert tables == {"algorithm": {"name": "pfedla", "retain": 2}, "run": {"seed": 1, "rounds": 9}}


@dataclass(frozen=True)
class Mine(FedAvg):
    """A method from outside the package."""


def test_methods_are_named_shortly_or_by_where_they_are() -> None:
    for name, kind in ALGORITHMS.items():
        assert algorithm_name(kind()) == name
    assert algorithm_name(Mine()) == f"{Mine.__module__}:Mine"
    outside = Experiment.from_tables({"algorithm": {"name": "pfedla.algorithms.pfedla:HeurPFedLA", "retain": 3}})
    assert outside.algorithm == HeurPFedLA(retain=3)


def test_a_splits_settings_are_its_own() -> None:
    split = Experiment.from_tables({"split": {"name": "non-iid-2", "dominant_classes": 3, "dominance": 2}}).split
    assert split == NonIID2(3, 2.0)
