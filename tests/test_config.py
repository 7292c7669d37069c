from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pfedla.algorithms import ALGORITHMS, FedAvg, HeurPFedLA, PFedLA, PFedLAPeers
from pfedla.codec import Codec
from pfedla.config import (
    Experiment,
    Machine,
    Tables,
    algorithm_name,
    merge,
    parse_assignments,
    parse_codec,
    read_tables,
)
from pfedla.data.federation import Data
from pfedla.data.splits import SPLITS, Classes, NonIID1, NonIID2, Split
from pfedla.errors import ConfigError
from pfedla.models import Model
from pfedla.objective import OBJECTIVES, Classification, Objective, PerPosition, Regression
from pfedla.privacy import Privacy
from pfedla.rounds import Schedule
from pfedla.training import Training


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("split", SPLITS)
def test_every_configuration_survives_toml(algorithm: str, split: str, tmp_path: Path) -> None:
    one = Experiment.from_tables({"algorithm": {"name": algorithm}, "split": {"name": split}})
    path = tmp_path / "config.toml"
    path.write_text(one.toml())
    assert Experiment.load(path) == one
    assert Experiment.from_tables(one.tables()) == one


OWN = Data(folder='a "quoted"\\folder', train_fraction=0.5, validation=0.25)
DEALT = Data("mnist", clients=2, samples_per_client=50, test_samples_per_client=9, validation=0.25, shift="labels")


@pytest.mark.parametrize(("data", "split"), [(OWN, NonIID1()), (DEALT, Classes(((0, 1), (2, 3))))])
def test_settings_that_are_not_defaults_survive_toml(data: Data, split: Split, tmp_path: Path) -> None:
    one = Experiment(
        HeurPFedLA(retain=2, hyper_lr=3e-4, hyper_optimizer="sgd"),
        data,
        split,
        Model("mlp", {"all": "fc*"}),
        Regression(),
        Training(lr=1e-7, momentum=0.9),
        Codec("top-k", "int4", keep=0.01),
        Schedule(seed=-3, rounds=7, participants=2),
        Machine(workers=0, storage="disk", ray_address="auto", checkpoints=False),
        Privacy(clip=0.5, noise=2.0, delta=1e-6),
    )
    path = tmp_path / "config.toml"
    path.write_text(one.toml())
    assert Experiment.load(path) == one


@pytest.mark.parametrize("tables", [{"data": {"folder": "clinics"}}, {"model": {"name": "python"}}])
def test_of_clients_own_data_no_data_set_and_split_are_told(tables: Tables) -> None:
    told = Experiment.from_tables(merge(tables, {"split": {"name": "iid"}, "data": {"validation": 0.2}})).tables()
    assert "split" not in told
    assert told["data"] == tables.get("data", {}) | {"train_fraction": 0.7, "validation": 0.2}


def test_a_configuration_is_complete() -> None:
    tables = Experiment().tables()
    sections = ["algorithm", "data", "split", "model", "objective", "training", "codec", "schedule", "machine"]
    sections.append("privacy")
    assert list(tables) == sections
    assert tables["algorithm"]["name"] == "pfedla"
    assert tables["split"]["name"] == "non-iid-1"
    assert set(tables["training"]) == {"local_epochs", "batch_size", "lr", "momentum", "weight_decay"}
    assert tables["objective"] == {"name": "classification"}
    assert tables["codec"] == tables["privacy"] == {}  # layers travel as they are: nothing is written
    assert set(tables["schedule"]) == {"seed", "rounds", "eval_every"}  # all participate: nothing is written
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
        ("algorithm", "name", ["pfedla"], "algorithm.name must be text, not"),
        ("split", "name", "non-idd-1", "unknown split 'non-idd-1': did you mean 'non-iid-1'"),
        ("split", "name", ["iid"], "split.name must be text, not"),
        ("data", "dataset", "cifar01", "unknown data set 'cifar01': did you mean 'cifar10"),
        ("training", "lr", "fast", "training.lr = 'fast' must be a number"),
        ("training", "lr", True, "training.lr = True must be a number"),
        ("training", "lr", 0, "training.lr = 0.0 must be above 0"),
        ("training", "momentum", 1, "training.momentum = 1.0 must be at least 0 and below 1"),
        ("schedule", "rounds", 1.5, "schedule.rounds = 1.5 must be a whole number"),
        ("schedule", "rounds", True, "schedule.rounds = True must be a whole number"),
        ("schedule", "rounds", 0, "schedule.rounds = 0 must be at least 1"),
        ("schedule", "participants", 0, "schedule.participants = 0 must be at least 1"),
        ("machine", "workers", -1, "machine.workers = -1 must be at least 0"),
        ("machine", "download", 1, "machine.download = 1 must be true or false"),
        ("machine", "storage", "disc", "machine.storage = 'disc': choose one of memory, disk"),
        ("objective", "name", "regresion", "unknown objective 'regresion': did you mean 'regression'"),
        ("objective", "name", ["regression"], "objective.name must be text, not"),
        ("objective", "name", "pfedla.training:Training", "not a dataclass derived from pfedla.Objective"),
        (
            "objective",
            "name",
            "pfedla.objective:Custom",
            "Custom cannot be made from a table: .*loss_function",
        ),
        (
            "objective",
            "ignore",
            3,
            r"setting \(of Classification\) 'objective.ignore': there is nothing to set",
        ),
        ("data", "folder", 1, "data.folder = 1 must be text"),
        ("data", "clients", 0, "data.clients = 0 must be at least 1"),
        ("data", "train_fraction", 1.0, "data.train_fraction = 1.0 must be above 0 and below 1"),
        ("model", "layers", "fc*", "model.layers = 'fc\\*' must be a table"),
        (
            "algorithm",
            "hyper_optimizer",
            "lion",
            "algorithm.hyper_optimizer = 'lion': choose one of sgd, mean-sgd, adam",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_the_nearest_name(section: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Experiment.from_tables({section: {key: value}})


def test_codecs_are_given_by_direction_or_by_a_preset() -> None:
    assert parse_codec([]) == {}
    assert parse_codec(["up=int8", "down=float16"]) == {"codec": {"up": "int8", "down": "float16"}}
    assert parse_codec(["int8", "up=top-k", "keep=0.02"]) == {"codec": {"up": "top-k", "down": "int8", "keep": 0.02}}
    assert Experiment.from_tables(parse_codec(["small"])).codec == Codec("int4", "int8")
    assert Experiment.from_tables(parse_codec(["bfloat16"])).codec == Codec("bfloat16", "bfloat16")
    with pytest.raises(ConfigError, match="unknown codec 'int9': did you mean 'int8'"):
        parse_codec(["int9"])
    with pytest.raises(ConfigError, match=r"unknown setting 'codec\.upp': did you mean 'codec\.up'"):
        Experiment.from_tables(parse_codec(["upp=int8"]))


def test_a_section_must_be_a_table() -> None:
    for name in ("schedule", "algorithm", "run"):
        with pytest.raises(ConfigError, match=rf"\[{name}\] must be a section of settings, not 3"):
            Experiment.from_tables({name: 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["schedule", "algorithm", "run"])
def test_a_change_over_what_is_no_section_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f"{name} = 3\n")
    for changes in ({}, {name: {"seed": 1}}):
        with pytest.raises(ConfigError, match=rf"\[{name}\] must be a section of settings, not 3"):
            Experiment.load(tmp_path / "config.toml", changes)


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
    texts = ["schedule.rounds=3", "training.lr = 1e-2", "machine.download=true", "algorithm.name=fedavg"]
    assert parse_assignments([*texts, 'model.name="mlp"', "split.classes=[[0, 1], [2]]", "data.folder="]) == {
        "schedule": {"rounds": 3},
        "training": {"lr": 0.01},
        "machine": {"download": True},
        "data": {"folder": ""},
        "algorithm": {"name": "fedavg"},
        "model": {"name": "mlp"},
        "split": {"classes": [[0, 1], [2]]},
    }


@pytest.mark.parametrize("text", ["rounds=3", "schedule.rounds", "=3", ".a=3", "schedule.=3", ""])
def test_other_assignments_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SECTION\.KEY=VALUE, such as algorithm\.retain=2, not"):
        parse_assignments([text])


def test_changes_are_laid_over_and_another_method_starts_from_its_defaults() -> None:
    tables: Tables = {"algorithm": {"name": "pfedla", "retain": 2}, "schedule": {"seed": 1, "rounds": 9}}
    assert merge(tables, {"schedule": {"seed": 2}})["schedule"] == {"seed": 2, "rounds": 9}
    assert merge(tables, {"algorithm": {"name": "fedavg"}})["algorithm"] == {"name": "fedavg"}
    assert merge(tables, {"algorithm": {"name": "pfedla"}})["algorithm"] == {"name": "pfedla", "retain": 2}
    assert merge(tables, {"split": {"name": "iid"}})["split"] == {"name": "iid"}
    assert tables == {"algorithm": {"name": "pfedla", "retain": 2}, "schedule": {"seed": 1, "rounds": 9}}


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


# ---- objectives


class Absolute(Regression):
    """An objective from outside the package."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [*OBJECTIVES.items(), (f"{__name__}:Absolute", Absolute)],
)
def test_every_objective_survives_toml(name: str, kind: type[Objective], tmp_path: Path) -> None:
    one = Experiment.from_tables({"objective": {"name": name}})
    assert type(one.objective) is kind
    assert one.tables()["objective"] == {"name": name, **({"ignore": -100} if kind is PerPosition else {})}
    path = tmp_path / "config.toml"
    path.write_text(one.toml())
    again = Experiment.load(path)
    assert type(again.objective) is kind
    assert again.tables() == one.tables()


def test_settings_of_an_objective_survive_toml(tmp_path: Path) -> None:
    one = Experiment.from_tables({"objective": {"name": "per-position", "ignore": 7}})
    assert one.objective == PerPosition(ignore=7)
    (tmp_path / "config.toml").write_text(one.toml())
    assert Experiment.load(tmp_path / "config.toml") == one


def test_a_class_of_ones_own_is_named_by_where_it_is() -> None:
    assert Absolute().name == f"{__name__}:Absolute"
    assert Experiment(objective=Absolute()).tables()["objective"] == {"name": f"{__name__}:Absolute"}
    assert Classification().name == "classification"


# ---- what decides the result


def test_the_machine_decides_nothing() -> None:
    one = Experiment(PFedLA(retain=1), schedule=Schedule(rounds=3))
    elsewhere = Machine(3, "cuda", "disk", "ray", "auto", "/data", True, False, 7, False, ("mlflow",))
    defaults = Machine()
    assert all(getattr(elsewhere, name) != getattr(defaults, name) for name in vars(defaults))
    assert one.decisive() == replace(one, machine=elsewhere).decisive()
    assert one.tables() != replace(one, machine=elsewhere).tables()
    for other in (
        replace(one, algorithm=PFedLA(retain=2)),
        replace(one, data=Data(clients=3)),
        replace(one, split=NonIID2()),
        replace(one, model=Model("mlp")),
        replace(one, objective=Regression()),
        replace(one, training=Training(lr=0.1)),
        replace(one, schedule=Schedule(rounds=4)),
    ):
        assert other.decisive() != one.decisive()


def test_what_no_file_can_hold_is_refused_when_it_is_written() -> None:
    @dataclass(frozen=True)
    class Calls(FedAvg):
        callback: Callable[..., None] = print

    with pytest.raises(ConfigError, match="cannot be written to a file"):
        Experiment(Calls()).toml()


# ---- files of earlier versions

OLD = """
[algorithm]
name = "pfedla"
retain = 1
peers = 5
refresh = 4

[data]
dataset = "cifar10"
folder = ""
data_dir = "/data/sets"
download = true
clients = 4
test_samples_per_client = 0
fewest_samples = 0

[training]
lr = 0.5

[run]
seed = 3
rounds = 7
participants = 0
eval_every = 2
checkpoint_every = 0
workers = -1
device = "cpu"
storage = "disk"
keep_models = false
fleet = "local"
ray_address = ""
"""

NEW = """
[algorithm]
name = "pfedla-peers"
retain = 1
peers = 5
refresh = 4

[data]
dataset = "cifar10"
clients = 4

[training]
lr = 0.5

[schedule]
seed = 3
rounds = 7
eval_every = 2

[machine]
data_dir = "/data/sets"
download = true
checkpoints = false
storage = "disk"
keep_models = false
"""


def load(text: str, folder: Path) -> Experiment:
    (folder / "some.toml").write_text(text)
    return Experiment.load(folder / "some.toml")


def test_a_file_of_the_earlier_version_is_read_as_its_new_form(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pfedla"):
        new = load(NEW, tmp_path)
        assert not caplog.records
        old = load(OLD, tmp_path)
    assert old == new
    assert (new.algorithm, new.schedule) == (PFedLAPeers(retain=1, peers=5, refresh=4), Schedule(3, 7, None, 2))
    (warning,) = caplog.records
    assert f"{tmp_path / 'some.toml'} is of an earlier version" in warning.getMessage()
    for moved in (
        "run.seed is now schedule.seed",
        "run.rounds is now schedule.rounds",
        "run.participants = 0 is now written by leaving it out",
        "run.eval_every is now schedule.eval_every",
        "run.checkpoint_every is now machine.checkpoints",
        "run.workers = -1 is now written by leaving it out",
        "run.device is now machine.device",
        "run.storage is now machine.storage",
        "run.keep_models is now machine.keep_models",
        "run.fleet is now machine.fleet",
        "run.ray_address = '' is now written by leaving it out",
        "data.data_dir is now machine.data_dir",
        "data.download is now machine.download",
        "data.folder = '' is now written by leaving it out",
        "data.test_samples_per_client = 0 is now written by leaving it out",
        "data.fewest_samples = 0 is now written by leaving it out",
        "algorithm.peers and algorithm.refresh are now settings of the algorithm pfedla-peers",
    ):
        assert moved in warning.getMessage()


@pytest.mark.parametrize(
    ("old", "algorithm"),
    [
        ('name = "pfedla"\nrefresh = 10', PFedLA()),  # as every pFedLA run wrote it
        ('name = "heurpfedla"\nretain = 2\nrefresh = 10', HeurPFedLA(retain=2)),
        ('name = "pfedla"\npeers = 0\nrefresh = 3', PFedLA()),
        ("peers = 4", PFedLAPeers(peers=4)),
        ('name = "heurpfedla"\npeers = 4', PFedLAPeers(retain=1, peers=4)),
        ('name = "heurpfedla"\npeers = 4\nretain = 0', PFedLAPeers(retain=0, peers=4)),
    ],
)
def test_candidates_of_the_earlier_version_are_a_method_of_their_own(
    old: str, algorithm: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pfedla"):
        assert load(f"[algorithm]\n{old}\n", tmp_path).algorithm == algorithm
    assert len(caplog.records) == 1


def test_what_is_no_sentinel_of_the_earlier_version_is_checked_as_ever(tmp_path: Path) -> None:
    for text, message in (
        ("[run]\nrounds = 0", "schedule.rounds = 0 must be at least 1"),
        ("[run]\nworkers = -2", "machine.workers = -2 must be at least 0"),
        ("[schedule]\nparticipants = 0", "schedule.participants = 0 must be at least 1"),
        ('[algorithm]\nname = "pfedla-peers"\npeers = 0', "algorithm.peers = 0 must be at least 1"),
        ("[run]\nround = 3", "unknown section 'run'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "now"),
    [
        ("run.rounds=3", "schedule.rounds"),
        ("run.workers=0", "machine.workers"),
        ("run.checkpoint_every=5", "machine.checkpoint_every"),
        ("data.data_dir=/data", "machine.data_dir"),
        ("data.download=true", "machine.download"),
    ],
)
def test_an_assignment_to_what_has_moved_is_refused_with_its_new_name(text: str, now: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown setting '{text.partition('=')[0]}': it is now '{now}'"):
        Experiment.from_tables(parse_assignments([text]))
