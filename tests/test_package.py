"""The package as a whole: what its modules offer, and which of them import which."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest

import pfedla
from pfedla.algorithms import ALGORITHMS

SOURCE = Path(pfedla.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
MODULES = ["pfedla", *(found.name for found in pkgutil.walk_packages(pfedla.__path__, "pfedla."))]


def module(name: str) -> ModuleType:
    if name == "pfedla.ray":
        pytest.importorskip("ray")
    if name.startswith("pfedla.flower"):
        pytest.importorskip("flwr")
    return importlib.import_module(name)


def own(name: str) -> set[str]:
    """Return the public functions and classes that a module defines."""
    found = vars(module(name)).items()
    kinds = (inspect.isfunction, inspect.isclass)
    return {
        key
        for key, value in found
        if key[0] != "_" and any(is_kind(value) for is_kind in kinds) and value.__module__ == name
    }


def re_exported(name: str) -> set[str]:
    """Return the public names that a package imports from its own modules."""
    path = SOURCE.joinpath(*name.split(".")[1:], "__init__.py")
    if not path.exists():
        return set()
    return {
        exported
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{name}.")
        for alias in node.names
        for exported in (module(str(node.module)).__all__ if alias.name == "*" else [alias.asname or alias.name])
        if exported == "__version__" or not exported.startswith("_")
    }


def test_the_library_is_imported_without_what_only_some_of_its_parts_need() -> None:
    code = "import sys, pfedla; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert not loaded & {"matplotlib", "plotly", "starlette", "flwr", "ray", "mlflow", "tensorboard", "dp_accounting"}


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_offers_exists(name: str) -> None:
    offered = getattr(module(name), "__all__", [])
    assert len(set(offered)) == len(offered)
    for attribute in offered:
        assert hasattr(module(name), attribute), attribute


@pytest.mark.parametrize("name", [name for name in MODULES if not name.rpartition(".")[2].startswith("_")])
def test_a_module_offers_what_it_defines_and_no_more(name: str) -> None:
    found = module(name)
    offered = set(getattr(found, "__all__", []))
    callables = {
        key for key in offered if inspect.isfunction(getattr(found, key)) or inspect.isclass(getattr(found, key))
    }
    assert callables - re_exported(name) == own(name)
    assert offered >= re_exported(name)
    for key in offered - callables - re_exported(name):  # what is left are the module's own constants and aliases
        assert key in assigned(name), key


def assigned(name: str) -> set[str]:
    """Return the names that a module gives values to, or decorates into something other than a function."""
    tree = ast.parse(Path(str(module(name).__file__)).read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return found


def test_the_package_is_typed_and_knows_its_version() -> None:
    assert (files("pfedla") / "py.typed").is_file()
    assert pfedla.__version__ == version("pfedla")


# ---- imports point one way


def sources() -> dict[str, Path]:
    """Return every module of the package, without its own face, `pfedla/__init__.py`."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del found[""]
    return found


def imports(path: Path, modules: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """Yield the modules of the package that a module imports, and whether only when a function is called."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, "imports are absolute"
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    yield (whole if whole.removeprefix("pfedla.") in modules else str(child.module)), lazy
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, lazy or inside)

    for name, lazy in visit(ast.parse(path.read_text()), False):
        if name.partition(".")[0] == "pfedla":
            yield name.removeprefix("pfedla").removeprefix("."), lazy


@cache
def graph(lazy: bool = False) -> dict[str, set[str]]:
    """Return which modules each one imports, when it is itself imported or when its functions are called.

    What a package imports from itself is compiled.
    """
    modules = sources()
    return {
        name: {found for found, late in imports(path, modules) if late == lazy and found != name}
        for name, path in modules.items()
    }


def cycle(of: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, if there are any."""
    done: set[str] = set()

    def follow(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        for other in () if name in done else sorted(of[name]):
            if found := follow(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in of if (found := follow(name, []))), [])


def by_folder(of: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph with a folder as one word."""
    joined: dict[str, set[str]] = {}
    for name, others in of.items():
        folder = name.partition(".")[0]
        joined.setdefault(folder, set()).update(other.partition(".")[0] for other in others)
        joined[folder].discard(folder)
    return joined


def test_the_graph_finds_circles() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"a"}}) == ["a", "a"]


def test_imports_have_no_circles_and_none_goes_through_the_face() -> None:
    found = graph()
    assert found["config"] >= {"algorithms", "data.federation", "settings"}  # the graph is read at all
    assert cycle(found) == []
    assert cycle(by_folder(found)) == []
    assert [name for name, others in found.items() if "" in others] == []


def test_only_the_cluster_the_sites_and_a_trackers_pictures_are_imported_late() -> None:
    late = {"ray", "flower.gate", "flower.growth", "flower.project", "report.weights"}
    assert set().union(*graph(lazy=True).values()) == late
    assert not any("ray" in others for others in graph().values())
    assert not any("flower" in others for name, others in by_folder(graph()).items() if name != "flower")


def test_flower_is_imported_in_its_own_folder_alone_and_no_method_is_named_there() -> None:
    for name, path in sources().items():
        text, inside = path.read_text(), name.partition(".")[0] == "flower"
        found = {
            *(alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names),
            *(str(node.module) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)),
        }
        assert inside or not any(module.partition(".")[0] == "flwr" for module in found), name
        if inside:
            assert not any(module.startswith("pfedla.algorithms") for module in found), name
            words = set(re.findall(r"\w+", text))
            assert not words & {kind.__name__ for kind in ALGORITHMS.values()}, name
            named = [method for method in ALGORITHMS if f'"{method}"' in text and method != "pfedla"]  # the logger's
            assert not named, name


def test_contributing_shows_the_imports_as_they_are() -> None:
    """Every line of the block imports from the lines above it, and stands as high up as it can."""
    _, heading, rest = CONTRIBUTING.read_text().partition("## Imports point one way\n")
    assert heading
    block = rest.split("\n## ")[0].split("```")[1]
    shown = [sorted(line.split()) for line in block.strip().splitlines()]
    left, levels = by_folder(graph()), []
    while left:
        level = sorted(name for name, others in left.items() if not others & left.keys())
        levels.append(level)
        left = {name: others for name, others in left.items() if name not in level}
    assert shown == levels, "\n".join("  ".join(level) for level in levels)
