from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import pfedla
from pfedla import cli
from pfedla.config import Experiment

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    found = re.search(r"accuracy (0\.\d+)", capsys.readouterr().out)
    assert found
    assert float(found[1]) > 0.8


def test_the_quickstart_of_the_readme_is_the_example() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text().partition("\n\n")[2]
    assert blocks(ROOT / "README.md", "python")[0].strip() == code.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_table_of_all_methods_is_what_was_measured() -> None:
    files = [str(path) for path in sorted((ROOT / "results").glob("methods-*.json"))]
    done = CliRunner().invoke(cli.cli, ["table", *files])
    assert done.exit_code == 0, done.output
    assert f"<!-- table: methods -->\n{done.stdout}<!-- end -->\n" in (ROOT / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_docs_parse(page: Path) -> None:
    lines = [line for block in blocks(page, "") for line in block.replace("\\\n", " ").splitlines()]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] != ["pfedla"]:
            continue
        command: click.Command = cli.cli
        context = click.Context(command)
        rest = words[1:]
        while isinstance(command, click.Group):
            found = command.get_command(context, rest[0])
            assert found, line
            command, rest = found, rest[1:]
        command.make_context(command.name, list(rest))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_functions_and_tests_in_the_docs_exist(page: Path) -> None:
    sources = "\n".join(path.read_text() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py"))
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert f"def {name}(" in sources, name


def test_experiments_are_valid() -> None:
    for path in (ROOT / "experiments").glob("*.toml"):
        Experiment.load(path)


def test_the_toy_method_of_the_protocol_works() -> None:
    text = pfedla.algorithm.__doc__ or ""
    code = "\n".join(line.removeprefix("    ") for line in text.partition("::\n")[2].splitlines())
    names: dict[str, object] = {}
    preamble = (
        "from dataclasses import dataclass\nfrom typing import NamedTuple\nfrom pfedla import Algorithm, Layers\n"
    )
    exec(preamble + code, names)
    kind = names["Average"]
    assert isinstance(kind, type)
    rows = [[0.0, 1.0], [1.0, 0.0]] * 10
    x = torch.tensor(rows)
    result = pfedla.run(kind(), lambda: nn.Linear(2, 2), [(x, x[:, 0].long())] * 2, rounds=10, workers=0)
    assert result.summary["accuracy_mean"] == 1.0
