"""`pfedla groups`: where clients differ, read off the weights that runs learned."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from pfedla.errors import RunError
from pfedla.experiment import load
from pfedla.record import RunRecord
from pfedla.report.figures import prepare_picture
from pfedla.report.groups import PARTS, draw_groups, groups_table, measured

__all__ = ["groups", "read_groups", "told_apart"]

KEYS = {"label", "seed", "layers", "groups", "even", "rounds", "shares", "index", "pair", "chance"}


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Draw a picture, too: the file to write.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON to standard output, and nothing else there.")
def groups(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Show what runs' weights say about hidden groups of clients, layer by layer, as a Markdown table.

    Each of RUNS is a run directory, a folder of them as `pfedla compare` leaves it, or what --json wrote before. Runs
    that differ in nothing but the seed are averaged.
    """
    if out is not None:
        prepare_picture(out)
    found = read_groups(runs)
    if out is not None:
        draw_groups(out, found)
    click.echo(json.dumps(found, indent=1) if as_json else groups_table(found).rstrip())


def read_groups(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what is measured of all runs that these paths stand for, each with its label, method by method."""
    by_source: dict[Path, list[dict[str, Any]]] = {}
    for path, whole in ((path, path.absolute()) for path in paths):  # links keep their names
        if path.is_file():
            by_source.setdefault(whole, []).extend(_read(path))
        elif RunRecord(path).exists:
            if (run := _measure(path)) is None:
                raise RunError(f"{path} has no weights by client, or its clients have no groups: see data.shift")
            by_source.setdefault(whole.parent, []).append(run)
        else:
            if not path.exists():
                raise RunError(f"{path} does not exist")
            folders = sorted(child for child in path.glob("*") if child.is_dir() and RunRecord(child).complete)
            measures = [run for run in map(_measure, folders) if run is not None]
            if not measures:
                raise RunError(f"{path} holds no complete run with weights by client, and groups of clients")
            by_source.setdefault(whole, []).extend(measures)
    runs = [
        run | ({"label": f"{source}, {run['label']}"} if len(by_source) > 1 else {})
        for source, found in zip(told_apart(list(by_source)), by_source.values(), strict=True)
        for run in found
    ]
    _check(runs)
    methods = [run["label"].rpartition(", ")[2] for run in runs]  # labels of methods have no blanks
    order = sorted(range(len(runs)), key=lambda place: methods.index(methods[place]))
    return [runs[place] for place in order]  # a method's federations side by side


def told_apart(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of different paths, as few as tell each from all others; no .json where that is enough."""

    def tail(path: Path, parts: int) -> str:
        return str(Path(*path.parts[-parts:]))

    def needed(path: Path) -> int:
        others, parts = [other for other in paths if other != path], 1
        while tail(path, parts) in [tail(other, parts) for other in others]:
            parts += 1
        return parts

    names = [tail(path, needed(path)) for path in paths]
    short = [name.removesuffix(".json") for name in names]
    return short if len(set(short)) == len(short) else names


def _measure(path: Path) -> dict[str, Any] | None:
    """Return what is measured of a run, None if it has no weights or its clients no groups."""
    known, result = RunRecord(path).facts().get("groups"), load(path)
    if known is None or result.alpha is None:
        return None
    label = re.sub(r"-seed\d+$", "", path.resolve().name)
    known_by = ("algorithm", "seed", "commit", "compiled_loop")
    about = {"label": label, **{key: result.summary.get(key) for key in known_by}}
    rounds, layers = result.diagnostics["round"], result.ledger.layers
    return about | measured(result.alpha, rounds, layers, np.array(known))


def _read(path: Path) -> list[dict[str, Any]]:
    """Read what --json wrote."""
    try:
        runs = json.loads(path.read_text())
        if not (isinstance(runs, list) and runs and all(isinstance(run, dict) and run.keys() >= KEYS for run in runs)):
            raise ValueError("it holds no runs")
        if not all(map(_whole, runs)):
            raise ValueError("its figures are damaged")
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is nothing that pfedla groups --json wrote: {error}") from None
    return list(runs)


def _whole(run: dict[str, Any]) -> bool:
    """Say whether a run has a figure for every layer and round."""
    try:
        over_time = [*(run["shares"][part] for part in PARTS), run["index"]]
        return (
            np.array(over_time, float).shape == (len(over_time), len(run["rounds"]), len(run["layers"]))
            and np.array([run["pair"], run["chance"]], float).shape == (2, len(run["layers"]))
            and all(isinstance(run["even"][part], float) for part in PARTS)
        )
    except (ValueError, TypeError, KeyError):
        return False


def _check(runs: Sequence[dict[str, Any]]) -> None:
    """Refuse to average what does not go together."""
    first: dict[str, dict[str, Any]] = {}
    seen = set[tuple[str, int]]()
    for run in runs:
        other = first.setdefault(run["label"], run)
        if any(run[key] != other[key] for key in ("layers", "rounds", "groups")):
            raise RunError(f"the runs of {run['label']} differ in their layers, rounds or groups: name them one by one")
        if (run["label"], run["seed"]) in seen:
            raise RunError(f"{run['label']}, seed {run['seed']}, is there twice: name every run once")
        seen.add((run["label"], run["seed"]))
