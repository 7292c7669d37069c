"""How the documentation is built: `make docs`; warnings are errors."""

import re
from typing import Any

from pfedla import __version__

project = "pfedla"
author = "The pfedla authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"pfedla {__version__}"
exclude_patterns = ["notebooks"]

myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
# Links to files of the repository that are no pages; tests/test_docs.py holds that every link leads somewhere.
suppress_warnings = ["myst.xref_missing"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = False
napoleon_use_rtype = False


def norms(*_: Any) -> None:
    """Take |θ| in a docstring for a norm: elsewhere in reStructuredText such bars are substitutions."""
    lines: list[str] = _[-1]
    lines[:] = [re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or "\\|", line) for line in lines]


def setup(app: Any) -> None:
    """Have docstrings read that way."""
    app.connect("autodoc-process-docstring", norms)
