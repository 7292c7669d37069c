from __future__ import annotations

import importlib.util
import itertools
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import pfedla
from experiments import pages
from pfedla import cli
from pfedla.algorithms import ALGORITHMS
from pfedla.algorithms.pfedla import Hypernetworks
from pfedla.comparison import parse_variant
from pfedla.config import Experiment, merge, read_tables
from pfedla.data.federation import Data
from pfedla.modelfile import Description, save_model
from pfedla.models import MODELS
from pfedla.settings import names_of
from tests.data.official import write, write_idx

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    found = re.search(r"accuracy (0\.\d+)", capsys.readouterr().out)
    assert found
    assert float(found[1]) > 0.8


def test_the_readme_counts_the_methods() -> None:
    text, others = (ROOT / "README.md").read_text(), len(ALGORITHMS) - 10  # pFedLA, HeurpFedLA and eight baselines
    assert f"| methods | {len(ALGORITHMS)}, most of them personalized |" in text
    assert others == 15
    assert "eight baselines and fifteen more methods" in " ".join(text.split())


def test_the_quickstart_of_the_readme_is_the_example() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text().partition("\n\n")[2]
    assert blocks(ROOT / "README.md", "python")[0].strip() == code.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if target.startswith("http"):
            continue
        assert (page.parent / target).exists(), target
        if anchor:
            assert anchor in anchors((page.parent / target) if target else page), (target, anchor)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda path: path.name)
def test_tables_of_results_are_what_was_measured(page: Path) -> None:
    assert pages.written(page.read_text()) == page.read_text()


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda path: path.name)
def test_pages_know_nothing_of_the_machine_they_were_written_on(page: Path) -> None:
    assert str(ROOT) not in page.read_text()


def test_the_tables_that_readers_go_by_are_printed_from_results() -> None:
    found = {page.name: [match[2] for match in pages.TABLE.finditer(page.read_text())] for page in pages.PAGES[:-1]}
    shown = {word for commands in found.values() for command in commands for word in command.split() if "/" in word}
    assert {"results/demo.json", "results/seeds-cifar10-*.json"} <= shown
    assert found["README.md"]
    assert found["algorithms.md"]
    assert found["paper.md"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder in which the commands of the docs can be given: files of their names, and tiny data sets."""
    here = tmp_path_factory.mktemp("workplace")
    for name in ("experiments", "results", "examples"):
        (here / name).symlink_to(ROOT / name)
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (6000, 1 + 3 * 32 * 32), np.uint8)
    records[:, 0] = np.arange(6000) % 10
    write(here / "data" / "cifar-10-batches-bin" / "data_batch_1.bin", records.tobytes())
    images, labels = rng.integers(0, 256, (9000, 28, 28), np.uint8), (np.arange(9000) % 10).tolist()
    write_idx(here / "data" / "FashionMNIST" / "raw", "train", images, labels)
    (here / "my.toml").write_text("[training]\nlr = 0.02\n")
    (here / "my_package").mkdir()
    (here / "my_package" / "models.py").write_text("from pfedla.models import MLP\n\nmake = MLP\n")
    (here / "hospitals").mkdir()
    for site in range(3):
        x = rng.normal(size=(30, 5)).astype(np.float32)
        np.savez(here / "hospitals" / f"site-{site}.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    x = rng.normal(size=(30, 5)).astype(np.float32)
    np.savez(here / "new-site.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    np.savez(here / "new.npz", x=rng.normal(size=(3, 5)).astype(np.float32))
    about = Description("site-2", "mlp", (5,), 2, ("0", "1"), ("fc1", "fc2"), False)
    save_model(here / "site-2.safetensors", MODELS["mlp"]((5,), 2), about)
    return here


def commands(page: Path) -> list[str]:
    lines = [line for block in blocks(page, "") for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("pfedla ")]


def shrunk(words: list[str]) -> list[str]:
    """Return a command that does the same with less: one round, one seed, no processes."""
    if words[0] == "paper" and len(words) > 1:
        dataset = "cifar10" if "rounds" in words else "emnist"
        small = ["--scale", "smoke", "--dataset", dataset, "-a", "pfedla", "--workers", "0"]
        words = ["1" if before == "--at" else word for before, word in itertools.pairwise(["", *words])]
        return [*words, *small, "--results", "runs/collected"]
    if words[0] not in ("run", "compare"):
        return words
    small = ["--rounds", "1", "--local-epochs", "1", "--set", "model.name=mlp", "--test-samples-per-client", "20"]
    if "--model" in words or "--folder" in words:
        small = ["--rounds", "1"]
    if "machine.fleet=ray" not in words:
        small += ["--workers", "0"]
    return [*words, *small, *(["--seeds", "1"] if "--seeds" in words else [])]


def folder_of(words: list[str]) -> str:
    return words[words.index("--out") + 1] if "--out" in words else "runs/comparison"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_in_the_docs_run(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, so that one may use what another left; Ray in a process of its own."""
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(str(workplace))
    monkeypatch.setenv("PFEDLA_DATA", str(workplace / "data"))
    for line in commands(page):
        words = [word.replace("~", str(workplace)) for word in shlex.split(line, comments=True)]
        if "machine.fleet=ray" in words:
            if importlib.util.find_spec("ray") is not None:
                program = [sys.executable, "-c", "from pfedla.cli import main; main()", *shrunk(words[1:])]
                subprocess.run(program, check=True, capture_output=True)
            continue
        done = CliRunner().invoke(cli.cli, shrunk(words[1:]))
        assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception}"
        if line.startswith("pfedla compare") and not (workplace / "runs" / "another-comparison").exists():
            shutil.copytree(workplace / folder_of(words), workplace / "runs" / "another-comparison")


@pytest.mark.parametrize("page", PAGES[2:], ids=lambda page: page.name)
def test_python_in_the_docs_runs(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_functions_and_tests_in_the_docs_exist(page: Path) -> None:
    sources = "\n".join(path.read_text() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py"))
    for name in set(re.findall(r"`(test_\w+)`", page.read_text())) - set(names_of(Data)):
        assert f"def {name}(" in sources, name


SETTING = re.compile(r"`(\w+)` = (?:`(\w+)` = )?(-?\d[\d.]*|true|false|fo|adam|two)(?=[\s,;)]|$)(?! /)")


def test_the_table_of_methods_has_every_method_and_its_defaults() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text().partition("| name |")[2].partition("\n\n")[0]
    named, compared = set[str](), 0
    for line in text.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        methods = re.findall(r"`([\w-]+)`", cells[0])
        named |= set(methods)
        for one, another, value in SETTING.findall(cells[-1].replace("10⁴", "10000")):
            for method, name in itertools.product(methods, filter(None, (one, another))):
                made = ALGORITHMS[method]()
                default = getattr(made, name)
                if default is None and isinstance(made, Hypernetworks):
                    default = made._optimizer.lr
                assert str(default).lower() == value or float(default) == float(value), (method, name, default)
                compared += 1
    assert named == set(ALGORITHMS)
    assert compared >= 40


def test_experiments_are_valid(caplog: pytest.LogCaptureFixture) -> None:
    for path in [*(ROOT / "experiments").glob("*.toml"), *(ROOT / "experiments" / "paper").glob("*.toml")]:
        Experiment.load(path)
    assert not caplog.records  # none is of an earlier version


def test_commands_of_experiments_name_methods_and_settings_that_there_are() -> None:
    lines = [line for page in (ROOT / "experiments").glob("*.md") for line in commands(page) if " compare " in line]
    assert lines
    for line in lines:
        words = shlex.split(line)[2:]
        tables = read_tables(ROOT / words[0])
        for option, value in itertools.pairwise(words[1:]):
            if option == "-a":
                Experiment.from_tables(merge(tables, parse_variant(value).changes))


@pytest.mark.parametrize("name", MODELS)
def test_the_toy_method_of_the_protocol_works_on_every_model(name: str) -> None:
    text = pfedla.algorithm.__doc__ or ""
    code = "\n".join(
        line.removeprefix("    ") for line in text.partition("::\n")[2].partition("\nA method")[0].splitlines()
    )
    names: dict[str, Any] = {}
    preamble = (
        "from dataclasses import dataclass\nfrom typing import NamedTuple\nfrom pfedla import Algorithm, Layers\n"
        "from pfedla.layers import bank\n"
    )
    exec(preamble + code, names)
    y = torch.arange(24) % 2
    x = torch.randn(24, 1, 16, 16, generator=torch.Generator().manual_seed(0)) + 4 * y[:, None, None, None]
    how: dict[str, Any] = {"rounds": 3, "training": pfedla.Training(lr=0.1), "workers": 0}
    result = pfedla.run(names["Average"](), lambda: MODELS[name]((1, 16, 16), 2), [(x, y)] * 2, **how)
    assert result.summary["accuracy_mean"] == 1.0


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel, as a reader would: where a run shows its progress."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    book = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)  # they would grow old
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(out.get("text", "") for cell in book.cells for out in cell.get("outputs", ()))
    assert re.search(r"accuracy \D*0\.\d+", printed)
    if path.stem == "own_data":
        assert "pfedla: round 15/20  accuracy" in printed


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    extensions = "myst_parser,sphinx.ext.autodoc,sphinx.ext.napoleon"  # no theme, no sources: half of the time
    words = f"-q -W --keep-going -b html -D html_theme=basic -D extensions={extensions}".split()
    program = [sys.executable, "-m", "sphinx", *words, str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pfedla.trained.predict" in (tmp_path / "api.html").read_text()


def test_the_reference_shows_every_module() -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("api.md", "methods.md"))
    shown = set(re.findall(r"automodule:: (\S+)", text))
    packages = {f"pfedla.{name}" for name in ("algorithms", "data", "flower", "paper", "report")}
    found = {module.name for module in pkgutil.walk_packages(pfedla.__path__, "pfedla.")} - packages
    assert shown == {name for name in found if not name.rpartition(".")[2].startswith("_")}
