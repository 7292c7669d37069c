from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import version
from importlib.resources import files

import pytest

import pfedla

MODULES = ["pfedla", *(found.name for found in pkgutil.walk_packages(pfedla.__path__, "pfedla."))]


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_offers_exists(name: str) -> None:
    if name == "pfedla.ray":
        pytest.importorskip("ray")
    module = importlib.import_module(name)
    offered = getattr(module, "__all__", [])
    assert len(set(offered)) == len(offered)
    for attribute in offered:
        assert hasattr(module, attribute), attribute


def test_the_package_is_typed_and_knows_its_version() -> None:
    assert (files("pfedla") / "py.typed").is_file()
    assert pfedla.__version__ == version("pfedla")
