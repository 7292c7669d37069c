"""The version of this package, and the commit it runs from."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

__all__ = ["__version__", "code", "commit"]

__version__ = "0.1.0"


@cache
def commit() -> str | None:
    """Return the commit of the checkout that this package runs from, "-dirty" if files were changed; None elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def code() -> str:
    """Return the version and, in a checkout, the commit."""
    return f"{__version__} ({found})" if (found := commit()) else __version__
