"""Write the tables of the documentation anew from what lies in results/: `python -m experiments.pages`.

A table stands in a page between two comments, of which the first is the command that prints it:

    <!-- pfedla table results/demo.json --value headline --value worst -->
    <!-- end -->

`pfedla paper NAME --print --results results/paper` stands in a page in the same way, and so do the tables of
`python -m experiments.newcomers --json results/newcomers.json`, of `experiments.samples` and `experiments.over_rounds`.

A test runs the same and compares. Pictures of the paper's figures, `docs/images/paper-NAME.png`, are what
`pfedla paper NAME --print --draw` draws; they are drawn anew, too, and so are those of
`pfedla groups` and `pfedla pareto`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from experiments import newcomers, over_rounds, samples
from pfedla.cli import cli

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results" / "README.md")
SCRIPTS: dict[str, Callable[[Any], str]] = {
    "newcomers": newcomers.table,
    "over_rounds": over_rounds.table,
    "samples": samples.table,
}
SCRIPT = re.compile(
    r"(<!-- python -m experiments\.(\w+) --json (\S+)(?: --print)? -->\n).*?(<!-- end -->\n)", re.DOTALL
)
TABLE = re.compile(r"(<!-- pfedla ((?:table|groups|paper) [^>]*?) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def written(text: str) -> str:
    """Return a page with its tables printed anew."""
    text = TABLE.sub(lambda found: found[1] + printed(found[2]) + found[3], text)
    return SCRIPT.sub(
        lambda found: found[1] + SCRIPTS[found[2]](json.loads((ROOT / found[3]).read_text())) + found[4], text
    )


def printed(command: str) -> str:
    """Return what a command prints in the repository's folder; names with `*` stand for all such files in it."""
    words: list[str] = []
    for word in shlex.split(command):
        words += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(word)) if "*" in word else [word]
    with contextlib.chdir(ROOT):
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
    if done.exit_code:
        raise SystemExit(f"pfedla {command}: {done.output}")
    return done.stdout


def pictures() -> dict[str, Path]:
    """Return the pictures of the paper's figures that pages show, by the name that they are drawn under."""
    return {path.stem.removeprefix("paper-"): path for path in sorted((ROOT / "docs" / "images").glob("paper-*.png"))}


def draw() -> None:
    """Draw the pictures of the paper's figures, of where clients differ and of codecs anew."""
    with tempfile.TemporaryDirectory() as folder:
        printed(f"paper fig1 fig5 fig6 fig7 --print --results results/paper --draw {shlex.quote(folder)}")
        for name, path in pictures().items():
            shutil.copy(Path(folder) / f"{name}.png", path)
    for name in ("fashion-mnist", "cifar10"):
        found = " ".join(f"results/where-{name}-{shift}.json" for shift in ("labels", "inputs"))
        printed(f"groups {found} --out docs/images/where-{name}.png")
    found = " ".join(f"results/codecs-{name}.json" for name in ("cifar10", "fashion-mnist"))
    printed(f"pareto {found} --against pfedla --out docs/images/codecs.png")


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text()))
    draw()
