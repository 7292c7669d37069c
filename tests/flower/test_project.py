from __future__ import annotations

import re
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pfedla.cli import cli
from pfedla.errors import ConfigError, DataError, ModelError, PfedlaError

pytest.importorskip("flwr")
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from pfedla.flower.deployment import Deploy, Deployment
from pfedla.flower.project import check, init

DOCS = Path(__file__).parents[2] / "docs" / "deploy.md"


def made(tmp_path: Path, **settings: Any) -> Path:
    init(tmp_path / "trial", ["north", "east"], **{"address": "server.example.org", "port": 8000, **settings})
    return tmp_path / "trial"


def test_the_command_writes_a_deployment_that_passes_its_check(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    words = ["deploy", "init", str(folder), "--sites", "north,east", "--address", "10.0.0.1", "--port", "8123"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0
    assert "for a trial" in done.output
    checked = CliRunner().invoke(cli, ["deploy", "check", str(folder)])
    assert checked.exit_code == 0, checked.output
    assert "site east: 70 samples to train on, 30 to test on" in checked.output
    assert "a round of one epoch works" in checked.output
    readme = (folder / "README.md").read_text()
    assert "--superlink 10.0.0.1:8123 --root-certificates ca.crt" in readme
    assert "--enable-supernode-auth --host 127.0.0.1 --port 8124 " in readme  # nobody outside reaches it
    assert "pfedla deploy gate --port 8123 --superlink 127.0.0.1:8124" in readme
    assert isinstance(CliRunner().invoke(cli, words).exception, PfedlaError)  # it is there already


def test_the_page_has_the_commands_that_are_written(tmp_path: Path) -> None:
    text = DOCS.read_text()
    commands = [line.strip() for line in re.findall(r"^    (?! )(.*(?:\\\n.*)?)$", text, flags=re.MULTILINE)]
    (start,) = [words for words in commands if words.startswith("pfedla deploy init")]
    _, _, _, folder, *options = start.split()
    done = CliRunner().invoke(cli, ["deploy", "init", str(tmp_path / folder), *options])
    assert done.exit_code == 0, done.output
    readme = " ".join((tmp_path / folder / "README.md").read_text().split())
    given = [words for words in commands if words.startswith(("export", "flower-", "flwr", "pfedla deploy gate"))]
    given = [words for words in given if "run-5" not in words and "northwest" not in words]  # of a site that is added
    assert len(given) == 8
    for words in given:
        assert " ".join(words.split()) in readme, words


def test_secrets_are_their_owners_and_never_in_the_app(tmp_path: Path) -> None:
    folder = made(tmp_path)
    secrets = [folder / "server" / "ca.key", folder / "server" / "server.key", *folder.glob("sites/*/key")]
    assert len(secrets) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert {path.name for path in (folder / "app").iterdir()} == {
        "app.py",
        "pfedla.toml",
        "pyproject.toml",
        "site_code.py",
    }
    keys = set()
    for site in ("north", "east"):
        private = load_ssh_private_key((folder / "sites" / site / "key").read_bytes(), None)
        public = load_ssh_public_key((folder / "sites" / site / "key.pub").read_bytes())
        assert private.public_key() == public
        keys.add((folder / "sites" / site / "key.pub").read_bytes())
    assert len(keys) == 2
    certificate = x509.load_pem_x509_certificate((folder / "server" / "server.pem").read_bytes())
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate((folder / "server" / "ca.crt").read_bytes()))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "server.example.org" in names.get_values_for_type(x509.DNSName)


def test_plaintext_is_for_this_machine_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be this machine's own"):
        made(tmp_path, insecure=True)
    folder = made(tmp_path, insecure=True, address="127.0.0.1")
    assert not list(folder.rglob("*key*"))
    assert "--host 127.0.0.1" in (folder / "README.md").read_text()
    assert not Deployment.load(folder / "app").deploy.registered


def test_the_check_finds_what_is_wrong(tmp_path: Path) -> None:
    folder = made(tmp_path)
    code = (folder / "app" / "site_code.py").read_text()

    def wrong(kind: type[PfedlaError], match: str, old: str, new: str, name: str = "site_code.py") -> None:
        path = folder / "app" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(kind, match=match):
            check(folder)
        path.write_text(text)

    assert code
    wrong(ConfigError, "cannot be imported: ModuleNotFoundError", "import numpy as np", "import no_such_module")
    wrong(ConfigError, r"has no function data\(\)", "def data", "def date")
    wrong(ModelError, "site north: the model does not take the data", "784", "783")
    wrong(ModelError, r"model\(\) failed: NameError", "return nn", "return no")
    wrong(
        ModelError,
        r"site north: its data: labels go from 0 to 3, but the model has 2",
        "Linear(64, 10)",
        "Linear(64, 2)",
    )
    wrong(ConfigError, "cannot be imported: SystemExit", "import numpy as np", "raise SystemExit")
    wrong(DataError, r"data\('north'\) failed: FileNotFoundError", "data.npz", "date.npz")
    wrong(ConfigError, "did you mean 'deploy.fewest'", "fewest =", "fewst =", "pfedla.toml")
    for section, key in (("model", "name"), ("data", "dataset"), ("split", "name"), ("machine", "workers")):
        given = f'[{section}]\n{key} = "mnist"\n\n[algorithm]'
        wrong(ConfigError, rf"{section}\.{key} says nothing to a deployment", "[algorithm]", given, "pfedla.toml")
    wrong(ConfigError, "deploy.fewest = 9 is more than there are sites", "fewest = 1", "fewest = 9", "pfedla.toml")
    np.savez(folder / "sites" / "east" / "data.npz", x=np.zeros((9, 1, 28, 28), np.uint8), y=np.full(9, -1))
    with pytest.raises(DataError, match="east: label -1"):
        check(folder)


def test_the_check_takes_what_is_here(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "app" / "beside.py").write_text("WIDTH = 64\n")
    code = folder / "app" / "site_code.py"
    code.write_text(code.read_text().replace("import numpy as np", "import beside\nimport numpy as np"))
    (folder / "sites" / "east" / "data.npz").unlink()
    with pytest.raises(DataError, match=r"data\('east'\) failed: FileNotFoundError.* leave data out here"):
        check(folder)
    done = CliRunner().invoke(cli, ["deploy", "check", str(folder), "--no-data"], catch_exceptions=False)
    assert done.output.splitlines()[1:] == ["data are left out: no round was tried"]
    assert not any("east" in line for line in check(folder, ["north"]))
    with pytest.raises(ConfigError, match="did you mean 'north'"):
        check(folder, ["nort"])
    shutil.rmtree(folder / "sites" / "east")
    with pytest.raises(DataError, match="site east: there is no folder"):
        check(folder, ["east"])
    shutil.rmtree(folder / "sites")
    assert check(folder)[-1] == "no site has a folder here: no data and no round were tried"


BROUGHT = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def data(site):
    with np.load("data.npz") as file:
        x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    return WHAT


class Pairs(Dataset):
    def __init__(self, pair):
        self.pair = pair

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return self.pair(index)


class Endless(IterableDataset):
    def __iter__(self):
        yield 1
"""


@pytest.mark.parametrize(
    ("what", "train", "test"),
    [
        ("x, y", 70, 30),
        ("[x, y]", 70, 30),
        ("x[:60], y[:60], x[60:], y[60:]", 60, 40),
        ("TensorDataset(x, y)", 70, 30),
        ("(TensorDataset(x, y),)", 70, 30),
        ("TensorDataset(x[:60], y[:60]), TensorDataset(x[60:], y[60:])", 60, 40),
        ("x[:60], y[:60], x[60:65], y[60:65]", 60, 5),
    ],
)
def test_a_site_may_bring_tensors_or_datasets(tmp_path: Path, what: str, train: int, test: int) -> None:
    folder = made(tmp_path)
    (folder / "app" / "site_code.py").write_text(BROUGHT.replace("WHAT", what))
    found = check(folder)
    assert f"site east: {train} samples to train on, {test} to test on" in found
    assert any("Scores of so few are rough" in line for line in found) == (test < 10)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("None", "must return"),
        ("x, y, x", "must return"),
        ("TensorDataset(x, y), x", "must return"),
        ("Endless()", "returned a Endless without a length"),
        ("TensorDataset(x[:0], y[:0])", "returned an empty Dataset"),
        ("TensorDataset(x)", r"items are not all pairs"),
        ("Pairs(lambda i: {'x': x[i], 'y': y[i]})", r"items are not all pairs"),
        ("Pairs(lambda i: (x[i, :, i:], y[i]))", r"inputs have different shapes: \(1, 20, 28\) and"),
        ("Pairs(lambda i: 1 / 0)", "failed: ZeroDivisionError"),
        ("exit(3)", "failed: SystemExit"),
    ],
)
def test_what_is_no_data_is_refused_in_words(tmp_path: Path, what: str, why: str) -> None:
    folder = made(tmp_path)
    (folder / "app" / "site_code.py").write_text(BROUGHT.replace("WHAT", what))
    with pytest.raises(DataError, match=rf"data\('north'\) .*{why}"):
        check(folder)


def test_a_sites_own_code_is_checked_with_its_data(tmp_path: Path) -> None:
    folder, mine = made(tmp_path), tmp_path / "mine.py"
    text = (folder / "app" / "site_code.py").read_text()
    mine.write_text(text.replace("data.npz", "my.npz"))
    (folder / "sites" / "east" / "data.npz").rename(folder / "sites" / "east" / "my.npz")
    words = ["deploy", "check", str(folder), "--site", "east", "--code", str(mine)]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert "site east: 70 samples to train on, 30 to test on" in done.output
    mine.write_text(text.replace("64", "32"))
    with pytest.raises(ModelError, match="site east has another model than the server: 1 has"):
        check(folder, ["east"], str(mine))
    with pytest.raises(ConfigError, match="name that site"):
        check(folder, ["east", "north"], str(mine))


@pytest.mark.parametrize(
    "address", ["", "host:8000", "https://a.b", "a b", 'a"b;rm', "exämple.org", "-a", "::1", "a/b"]
)
def test_what_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="the server's address must be"):
        made(tmp_path, address=address)


@pytest.mark.parametrize("sites", [(), ("a", "a"), ("../a",), ("a b",), ("",), ("é",), ("-a",), ("..",), ("a" * 61,)])
def test_names_that_cannot_be_sites_are_refused(sites: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"deploy\.sites"):
        Deploy(sites=sites)
