from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pfedla import version


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a checkout of one commit, with the package's file for its version in the usual place."""
    place = tmp_path / "src" / "pfedla" / "version.py"
    for path in (place, tmp_path / "results" / "some.json"):
        path.parent.mkdir(parents=True)
        path.write_text("[]\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(version, "__file__", str(place))
    version.commit.cache_clear()
    yield tmp_path
    version.commit.cache_clear()


def git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_commit_is_dirty_if_anything_but_results_was_changed(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")[:12]
    assert version.commit() == head
    assert version.code() == f"{version.__version__} ({head})"
    (checkout / "results" / "some.json").write_text("[1]\n")
    version.commit.cache_clear()
    assert version.commit() == head  # measuring adds to results: what is measured next is of the same commit
    (checkout / "src" / "pfedla" / "version.py").write_text("changed\n")
    version.commit.cache_clear()
    assert version.commit() == f"{head}-dirty"


def test_without_a_checkout_there_is_no_commit(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    assert version.commit() is None
    assert version.code() == version.__version__


def test_a_checkout_without_a_commit_has_none(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    git(checkout, "init", "--quiet")
    assert version.commit() is None
