"""Commands on a finished run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pfedla.data.files import load_client, load_inputs
from pfedla.errors import RunError
from pfedla.modelfile import check_file
from pfedla.models import import_object, needs_nothing
from pfedla.newcomer import Joined
from pfedla.newcomer import join as join_run
from pfedla.record import RunRecord
from pfedla.report.clients import clients_table
from pfedla.report.tables import counted
from pfedla.trained import FORMATS, Format, standing
from pfedla.trained import export as export_model
from pfedla.trained import predict as predict_with

__all__ = ["COMMANDS"]

_path = click.Path(path_type=Path)
_run = click.argument("run", type=_path)
_client = click.option("--client", required=True, metavar="NAME", help="The client, by name or number.")
_model = click.option(
    "--model",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="Makes the model, from nothing or from input shape and outputs: for a run that was started from Python.",
)


def _tell(text: str) -> None:
    """Print to standard error."""
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def _whose(run: Path, client: str) -> int | str:
    """Return a client's name, or the number that was given for it."""
    return int(client) if client.isdecimal() and client not in RunRecord(run).facts().get("names", []) else client


def _maker(run: Path, model: str | None) -> Callable[..., Any] | None:
    """Return what makes the run's model: a function without arguments, or one as `model.name` takes it."""
    if model is None:
        return None
    found, facts = import_object(model, "--model"), RunRecord(run).facts()
    return found if needs_nothing(found) else partial(found, tuple(facts["shape"]), facts["outputs"])


@click.command()
@_run
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def clients(run: Path, as_json: bool) -> None:
    """Print how each client of the run in folder RUN stands, by name."""
    found = standing(run)
    if as_json:
        sys.stdout.write(json.dumps(found.rows, indent=2, ensure_ascii=False) + "\n")
        return
    title = f"round {found.t}: {found.headline} of the personalized models, and after local training"
    table = clients_table(found.rows, found.headline, found.higher_is_better, found.percent, found.scored_on, title)
    Console().print(table, markup=False, highlight=False)


@click.command()
@_run
@_client
@click.option(
    "--input", "inputs", required=True, type=_path, metavar="FILE.npz", help="Inputs x; with y they are scored."
)
@click.option("-o", "--out", type=_path, metavar="FILE.csv", help="Where to write; standard output by default.")
@click.option("--probabilities", is_flag=True, help="Add a column with the probability of each class.")
@_model
def predict(run: Path, client: str, inputs: Path, out: Path | None, probabilities: bool, model: str | None) -> None:
    """Apply a client's model from the run in folder RUN to new inputs."""
    x, y = load_inputs(inputs)
    found = predict_with(run, _whose(run, client), x, y, model=_maker(run, model), probabilities=probabilities)
    if out is None:
        sys.stdout.write(found.csv())
    else:
        try:
            out.write_text(found.csv(), encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot write to {out}: {error.strerror}") from None
        _tell(f"{counted(len(x), 'prediction')} in {out}")
    if found.metrics:
        _tell(
            "by the targets in the file: " + ", ".join(f"{name} {value:.4g}" for name, value in found.metrics.items())
        )
    if found.recalls:
        each = (f"{name} {recall:.4g} of {count}" for name, (recall, count) in found.recalls.items())
        _tell(f"recall by class: {', '.join(each)}")


@click.command()
@_run
@_client
@click.option("--format", "form", type=click.Choice(FORMATS), default=FORMATS[0], show_default=True)
@click.option("-o", "--out", type=_path, required=True, metavar="FILE", help="The file to write.")
@_model
def export(run: Path, client: str, form: Format, out: Path, model: str | None) -> None:
    """Write a client's model from the run in folder RUN to a file, for use elsewhere."""
    about = export_model(run, _whose(run, client), out, form, model=_maker(run, model))
    shape = ", ".join(map(str, about.shape))
    _tell(f"the model of {about.client} is in {out}: inputs (samples, {shape}), {counted(about.outputs, 'output')}")
    if about.pixels:
        _tell("it was trained on pixels p from 0 to 255, scaled to p / 127.5 - 1: scale them before")
    if about.classes and about.classes != tuple(map(str, range(len(about.classes)))):
        _tell(f"outputs stand for {', '.join(about.classes)}")


@click.command()
@_run
@click.option("--data", "file", required=True, type=_path, metavar="FILE.npz", help="Its x and y; x_test, y_test.")
@click.option("--name", help="What the newcomer is called; its file's name by default.")
@click.option("--rounds", type=click.IntRange(0), default=5, show_default=True, help="How many rounds it trains.")
@click.option(
    "--gradients", type=click.IntRange(0), default=10, show_default=True, help="How many choose where it starts."
)
@click.option("-o", "--out", type=_path, metavar="FILE.safetensors", help="Where to write its model.")
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
@_model
def join(
    run: Path,
    file: Path,
    name: str | None,
    rounds: int,
    gradients: int,
    out: Path | None,
    as_json: bool,
    model: str | None,
) -> None:
    """Let a new client join the federation that the run in folder RUN has trained; RUN itself is not changed."""
    if not RunRecord(run).complete:
        raise RunError(f"{run} holds no complete run")
    if out is not None:
        check_file(out)  # before it trains
    facts = RunRecord(run).facts()
    own = load_client(file, labels=bool(facts.get("classes")))
    data: Any = (own.x, own.y) if own.x_test is None else (own.x, own.y, own.x_test, own.y_test)
    found = join_run(run, data, name=name or own.name, rounds=rounds, gradients=gradients, model=_maker(run, model))
    if as_json:
        shown = {"history": found.history, "weights": found.weights}
        sys.stdout.write(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")
    else:
        _tell_joined(found, facts)
    if out is not None:
        found.save(out)
        _tell(f"the model of {found.description.client} is in {out}")


def _tell_joined(found: Joined, facts: dict[str, Any]) -> None:
    """Print how a newcomer did, and from whom it learns."""
    headline, client = facts["headline"], found.description.client
    for line in found.history:
        value = f"{100 * line[headline]:.2f} %" if facts.get("percent") else f"{line[headline]:.4g}"
        when = "before its first round" if not line["round"] else f"after {counted(line['round'], 'round')}"
        sys.stdout.write(f"{headline} of {client} {when}: {value}\n")
    for layer, weights in found.weights.items():
        most = sorted(weights.items(), key=lambda pair: -pair[1])[:3]
        names = (f"{'itself' if other == client else other} {weight:.2f}" for other, weight in most)
        sys.stdout.write(f"{layer} is learned from {', '.join(names)}\n")


COMMANDS: tuple[click.Command, ...] = (clients, predict, export, join)
