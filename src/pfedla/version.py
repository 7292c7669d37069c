"""The version of this package, and the commit it runs from."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

__all__ = ["__version__", "code", "commit"]

__version__ = "0.1.0"


@cache
def commit() -> str | None:
    """Return the commit of the checkout that this package runs from, None elsewhere.

    It ends in "-dirty" if files were changed, but for those in `results`: runs add to them.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = _git(root, "rev-parse", "--short=12", "HEAD")
        found.check_returncode()
        changed = _git(root, "diff", "--quiet", "HEAD", "--", ".", ":!results").returncode
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() + ("-dirty" if changed else "")


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10)  # noqa: S603


def code() -> str:
    """Return the version and, in a checkout, the commit."""
    return f"{__version__} ({found})" if (found := commit()) else __version__
