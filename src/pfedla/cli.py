"""The command line."""

from __future__ import annotations

import functools
import inspect
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from pfedla import kernels
from pfedla.algorithms import ALGORITHMS
from pfedla.codec import PRESETS
from pfedla.comparison import COMPARISON, listed, parse_variant, read_comparison
from pfedla.comparison import compare as compare_variants
from pfedla.config import Experiment, Tables, algorithm_name, merge, parse_assignments, parse_codec, read_tables
from pfedla.data.datasets import DATASETS, load_dataset
from pfedla.data.federation import OWN_DATA
from pfedla.data.splits import Groups
from pfedla.demo import DEMO, DEMO_METHODS
from pfedla.deploy import deploy
from pfedla.errors import ConfigError, PfedlaError, RunError, known_name, unknown_name
from pfedla.experiment import experiment_of, federation_of, run_experiment
from pfedla.experiment import resume as resume_run
from pfedla.facts import ROUNDS
from pfedla.groups import groups, told_apart
from pfedla.interrupts import Stopped
from pfedla.options import DATA_OPTIONS, METHOD_OPTION, RUN_OPTIONS, stopped, with_options
from pfedla.paper.command import paper
from pfedla.privacy import statement
from pfedla.record import RunRecord
from pfedla.report import commands
from pfedla.report.federation import draw_federation, federation_table
from pfedla.report.figures import prepare_picture
from pfedla.report.live import Live
from pfedla.report.pareto import draw_pareto, everywhere, frontier, in_words, most_run, points
from pfedla.report.tables import VALUES, comparison_table, overview
from pfedla.report.weights import draw_result, draw_retained
from pfedla.result import Result
from pfedla.settings import described
from pfedla.trackers import TRACKERS
from pfedla.trained_commands import COMMANDS
from pfedla.version import __version__

__all__ = ["cli", "main"]

Command = Callable[..., None]


def _settings(*tables: tuple[tuple[str, str, type, str], ...]) -> Callable[[Command], Command]:
    """Add options that mirror the configuration; the command gets the tables that they and CONFIG.toml amount to.

    A file comes first, then options, then `--set`.
    """
    options = [option for table in tables for option in table]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def gathered(config: Path | None, download: bool, assign: tuple[str, ...], **rest: Any) -> None:
            given: Tables = {"machine": {"download": True}} if download else {}
            if track := rest.pop("track", ()):
                given.setdefault("machine", {})["track"] = list(track)
            for name, address, _, _ in options:
                value = rest.pop(name.replace("-", "_"))
                if value == "":
                    raise ConfigError(f"--{name} is empty: leave it out, or say what it is to be")
                if value is not None:
                    section, _, key = address.partition(".")
                    given.setdefault(section, {})[key] = value
            changes = merge(given | parse_codec(rest.pop("codec", ())), parse_assignments(assign))
            written = read_tables(config) if config else {}
            settings = merge(written, changes)
            _refuse_idle(settings, changes)
            _refuse_idle(written, written)
            if isinstance(table := settings.get("data"), dict) and isinstance(folder := table.get("folder"), str):
                settings["data"] = table | {"folder": folder and str(Path(folder).expanduser().absolute())}
            command(settings=settings, changes=changes, **rest)

        wrapped: Command = gathered
        wrapped = click.option(
            "--set",
            "assign",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="Any setting, such as algorithm.retain=2.",
        )(wrapped)
        wrapped = click.option("--download", is_flag=True, help="Fetch missing files from their official address.")(
            wrapped
        )
        for name, _, kind, text in reversed(options):
            wrapped = click.option(f"--{name}", type=kind, default=None, help=text)(wrapped)
        path = click.Path(path_type=Path, dir_okay=False)
        return click.argument("config", type=path, required=False, metavar="[CONFIG.toml]")(wrapped)

    return decorate


def _refuse_idle(settings: Tables, changes: Tables) -> None:
    """Refuse what would be ignored: own data decide who the clients are and what they hold."""
    data = settings.get("data")
    if not isinstance(data, dict) or not data.get("folder"):
        return
    idle = [f"data.{key}" for key in changes.get("data", {}) if key not in OWN_DATA]
    idle += [f"split.{key}" for key in changes.get("split", {})]
    if idle:
        raise ConfigError(
            f"{', '.join(idle)} cannot be set with data.folder: its files say who the clients are and what they hold"
        )


_path = click.Path(path_type=Path)
_overwrite = click.option("--overwrite", is_flag=True, help="Replace what the folder holds.")
_quiet = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON to standard output, and nothing else there.")
_codec = click.option(
    "--codec",
    multiple=True,
    metavar="[up=|down=]NAME",
    help="How layers travel: up=int8, down=float16, keep=0.05 for up=top-k; or a name alone: "
    f"{', '.join(name for name in PRESETS if name != 'small')} mean both ways, "
    f"small is {in_words(PRESETS['small'])}.",
)
_track = click.option(
    "--track",
    multiple=True,
    metavar="NAME",
    help=f"Send figures, weights and settings to {', '.join(TRACKERS)} as the run goes on.",
)
_seeds = click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    help="How many seeds to run, from --seed on: 0, 1, ... by default.",
)


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        _say(f"pfedla, version {__version__} (compiled loops: {kernels.level()})")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def cli() -> None:
    """Personalized federated learning with layer-wise aggregation (pFedLA)."""
    kernels.level()  # or say now what is wrong with it


cli.add_command(deploy)


@cli.command()
@_settings(METHOD_OPTION, DATA_OPTIONS, RUN_OPTIONS)
@_codec
@_track
@click.option("--out", type=_path, help="The run directory; a new one under runs/ by default.")
@click.option("--resume", type=_path, metavar="DIR", help="Resume the run in DIR; with --rounds it becomes longer.")
@_overwrite
@_quiet
@_json
def run(
    settings: Tables,
    changes: Tables,
    out: Path | None,
    resume: Path | None,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run one method."""
    console = Console(stderr=True, quiet=quiet)
    machine, rounds = changes.get("machine", {}), changes.get("schedule", {}).get("rounds")
    if resume:
        named = {f"{section}.{key}" for section in settings for key in settings[section]}
        elsewhere = {"machine.data_dir", "machine.download"}  # a checksum tells whether data are the same
        if named - {"machine.workers", "machine.track", ROUNDS, *elsewhere} or out or overwrite:
            raise ConfigError(
                "a run is resumed as it was configured: --resume takes --workers, --track, --data-dir, --download and "
                "--rounds alone"
            )
        out = resume
        experiment = experiment_of(resume, rounds)
        where = {key: machine[key] for key in ("data_dir", "download") if key in machine}
        experiment = replace(experiment, machine=replace(experiment.machine, **where))
    else:
        experiment = Experiment.from_tables(settings)
        out = out or _new_folder(experiment)
    label = algorithm_name(experiment.algorithm)
    try:
        federation = federation_of(experiment, _download_progress(console))
        if federation.note:
            console.print(f"note: {federation.note}", markup=False, highlight=False, soft_wrap=True)
        with redirect_stdout(sys.stderr), Live(console) as live:
            live.start(label, experiment.schedule.rounds)
            if resume:
                other = {key: machine.get(key) for key in ("workers", "track")}
                result = resume_run(resume, live, rounds=rounds, federation=federation, **other)
            else:
                result = run_experiment(experiment, out, overwrite=overwrite, watch=live, federation=federation)
    except KeyboardInterrupt:
        console.print(_how_to_resume(out), markup=False, highlight=False, soft_wrap=True)
        raise
    _draw(out, experiment, result)
    if as_json:
        sys.stdout.write(json.dumps(result.summary, indent=2) + "\n")
    elif not quiet:
        _say(comparison_table([(label, [result.summary])]))
        if guarantee := statement(result.summary):
            _say(guarantee)
        _say(f"run directory: {out}")


@cli.command()
@_settings(DATA_OPTIONS, RUN_OPTIONS)
@_codec
@_track
@click.option(
    "--algorithm",
    "-a",
    "methods",
    multiple=True,
    metavar="NAME[,KEY=VALUE...]",
    help="A method, with its own settings.",
)
@click.option(
    "--all", "everything", is_flag=True, help="All methods that the model allows, but those with peers, and clustered."
)
@_seeds
@click.option("--out", type=_path, default=Path("runs/comparison"), show_default=True, help="For the run directories.")
@click.option("--results", type=_path, metavar="FILE", help="Collect figures here; what it holds is not run again.")
@_overwrite
@_quiet
@_json
def compare(
    settings: Tables,
    changes: Tables,
    methods: tuple[str, ...],
    everything: bool,
    seeds: int,
    out: Path,
    results: Path | None,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run several methods on the same data and seeds, side by side.

    Complete runs are kept and unfinished ones resumed: the same command continues a comparison.
    """
    if not methods and not everything:
        raise ConfigError(f"name at least one method with -a, or --all of {', '.join(ALGORITHMS)}")
    if table := changes.get("algorithm"):
        key, value = next(iter(table.items()))
        raise ConfigError(f"algorithm.{key} is a setting of one method: name it there, as in -a NAME,{key}={value}")
    every = [name for name in ALGORITHMS if not name.endswith("-peers")]  # with few clients the same once more
    listed = [*(every if everything else ()), *methods]
    _compare(settings, listed, seeds, out, overwrite, quiet, as_json, lenient=everything, results=results)


@cli.command()
@_seeds
@_codec
@click.option("--workers", type=int, help="Processes; one per core by default. Never changes the result.")
@click.option("--out", type=_path, default=Path("runs/demo"), show_default=True, help="For the run directories.")
@_overwrite
@_quiet
def demo(seeds: int, codec: tuple[str, ...], workers: int | None, out: Path, overwrite: bool, quiet: bool) -> None:
    """Compare four methods on the embedded images: clients in hidden groups, with few images each."""
    machine: Tables = {} if workers is None else {"machine": {"workers": workers}}
    settings = merge(DEMO, machine | parse_codec(codec))
    experiment = Experiment.from_tables(settings)
    assert isinstance(experiment.split, Groups)
    data, split = experiment.data, experiment.split
    images = round(data.train_fraction * data.samples_per_client)
    if not quiet:
        _say(
            f"{data.clients} clients in {split.groups} hidden groups. Clients of a group hold the same "
            f"{split.classes_per_client} of 10 kinds of clothes, {images} training images each; nobody tells the "
            "server who belongs together.\n"
        )
    _compare(settings, DEMO_METHODS, seeds, out, overwrite, quiet, as_json=False)
    if not quiet:
        picture = RunRecord(out / f"pfedla-seed{experiment.schedule.seed}").picture("weights.png")
        _say(f"who learns from whom, layer by layer, the hidden groups outlined: {picture}")
        try:
            _say(f"everything on one page, for a browser: {commands.write_report((out,))}")
        except ConfigError as error:  # without the extra
            _say(f"no page is written: {error}")
        if seeds == 1:
            _say("one seed is an anecdote: pfedla demo --seeds 5 runs four more")


def _compare(
    settings: Tables,
    methods: Sequence[str],
    seeds: int,
    out: Path,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
    lenient: bool = False,
    results: Path | None = None,
) -> None:
    console = Console(stderr=True, quiet=quiet)
    first = Experiment.from_tables({"schedule": settings.get("schedule", {})}).schedule.seed
    variants, failed = [parse_variant(text) for text in methods], list[str]()

    def fail(run: str, error: RunError) -> None:
        failed.append(f"{run}: {error}")
        console.print(f"{run} failed: {error}", markup=False, highlight=False, soft_wrap=True)

    try:
        with redirect_stdout(sys.stderr), Live(console) as live:

            def start(label: str, rounds: int) -> Live:
                live.start(label, rounds)
                return live

            runs = compare_variants(
                settings,
                variants,
                range(first, first + seeds),
                out,
                overwrite=overwrite,
                lenient=lenient,
                results=results,
                start=start,
                finished=_draw,
                fail=fail,
                tell=lambda text: console.print(with_options(text), markup=False, highlight=False, soft_wrap=True),
            )
    except KeyboardInterrupt:
        console.print(stopped(overwrite), soft_wrap=True)
        raise
    if as_json:
        sys.stdout.write(json.dumps(listed(runs), indent=2) + "\n")
    elif runs and not quiet:
        _say(comparison_table(runs))
        for label, summaries in runs:
            if guarantee := statement(summaries[0]):
                _say(f"{label}: {guarantee}")
        _say(f"run directories: {out}")
    if failed:
        raise RunError(f"not everything could be run. {' '.join(failed)}")


@cli.command()
@click.argument("comparisons", nargs=-1, required=True, type=_path)
@click.option(
    "--value",
    type=click.Choice(VALUES),
    default=VALUES[:1],
    show_default=True,
    multiple=True,
    help="What to show; several give a column each.",
)
@click.option("--against", metavar="METHOD", help="Show differences from this method, taken seed by seed.")
@click.option("--mean", is_flag=True, help="Add the mean over the comparisons.")
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    help="Show the first seeds alone, 0, 1, ...: the same for every method where some have more than others.",
)
@click.option(
    "--algorithm", "-a", "labels", metavar="LABEL", multiple=True, help="Show these methods alone, in this order."
)
def table(
    comparisons: tuple[Path, ...],
    value: tuple[str, ...],
    against: str | None,
    mean: bool,
    seeds: int | None,
    labels: tuple[str, ...],
) -> None:
    """Put comparisons side by side: a Markdown table with a row per method and a column per comparison.

    A comparison is a folder that `pfedla compare` wrote, or its comparison.json under any name.
    """
    paths = [path.absolute() for path in comparisons]
    if twice := {str(path) for path in paths if paths.count(path) > 1}:
        raise ConfigError(f"named twice: {', '.join(sorted(twice))}")
    found = dict(zip(told_apart(paths), map(_comparison, comparisons), strict=True))
    if seeds is not None:
        found = {name: [run for run in runs if run["seed"] < seeds] for name, runs in found.items()}
        if empty := [name for name, runs in found.items() if not runs]:
            raise ConfigError(f"--seeds {seeds}: {', '.join(empty)} has no run with such a seed")
    if labels:
        known = {run["label"].casefold(): run["label"] for runs in found.values() for run in runs}
        for label in labels:
            if label.casefold() not in known:
                raise unknown_name("method", label, known.values())
        rows = [known[label.casefold()] for label in labels]
        if against is not None and against not in rows:
            rows.append(against)  # what the others are held against
        found = {name: [run for label in rows for run in runs if run["label"] == label] for name, runs in found.items()}
        if empty := [name for name, runs in found.items() if not runs]:
            raise ConfigError(f"there are none of these methods in {', '.join(empty)}")
    _say(overview(found, value, against, mean).rstrip())


cli.add_command(paper)


@cli.command()
@click.argument("comparisons", nargs=-1, required=True, type=_path, metavar="COMPARISON...")
@click.option(
    "--against",
    metavar="METHOD",
    help="What the others are held against; by default the first method with the most seeds.",
)
@click.option("--within", type=float, default=1.0, show_default=True, help="How much worse than that is good enough.")
@click.option("--out", type=_path, default=Path("pareto.png"), show_default=True, help="The picture to write.")
def pareto(comparisons: tuple[Path, ...], against: str | None, within: float, out: Path) -> None:
    """Draw the headline against all traffic, and name the least traffic that is good enough: in every comparison."""
    if not within >= 0:  # nor is NaN
        raise ConfigError(f"--within must be 0 or more, not {within:g}")
    prepare_picture(out)
    runs = {str(path): _comparison(path) for path in comparisons}
    found = {name: points(summaries, name) for name, summaries in runs.items()}
    ups = {summaries[0].get("higher_is_better", True) for summaries in runs.values()}
    if len(ups) > 1:
        raise ConfigError("comparisons in which more is better cannot be held against those in which less is")
    (up,) = ups
    against = against or most_run(next(iter(found.values())))
    good = everywhere(list(found.values()), against, within, up)
    draw_pareto(out, runs, against, within, good[0].label)
    for name, some in found.items():
        if len(found) > 1:
            _say(f"{name}, what no other beats in both:")
        for point in frontier(some, up):
            spread = "" if point.spread is None else f" ± {point.spread:.2f}"
            _say(f"{point.megabytes:10,.1f} MB  {point.score:.2f}{spread}  {point.label}")
    if len(found) > 1:
        _say(f"within {within:g} of {against} in all {len(found)} comparisons, the least traffic of all of them first:")
        for choice in good:
            _say(f"{choice.megabytes:10,.1f} MB  {choice.worst:+.2f} at worst  {choice.label}")
    least = good[0]
    _say(
        f"least traffic within {within:g} of {against}: {least.label}, {least.megabytes:,.1f} MB; codec: {least.codec}"
    )
    _say(f"picture: {out}")


def _comparison(path: Path) -> list[dict[str, Any]]:
    return read_comparison(path / COMPARISON if path.is_dir() else path)


@cli.command()
@click.argument("name", required=False)
def algorithms(name: str | None) -> None:
    """List the methods; or say what one of them is, and its settings, which --set algorithm.KEY=VALUE takes."""
    if name is not None:
        kind = ALGORITHMS[known_name("algorithm", name, ALGORITHMS)]
        _say(inspect.getdoc(kind) or "")
        settings = Table("setting", "what it may be", "default", box=None, header_style="bold")
        for line in described(kind):
            settings.add_row(*line)
        _say("")
        _say(settings if settings.row_count else "It has no settings.")
        return
    table = Table("name", "what it does", box=None, header_style="bold")
    for name, kind in ALGORITHMS.items():
        table.add_row(name, (inspect.getdoc(kind) or "").partition("\n")[0].partition(": ")[2])
    _say(table)


cli.add_command(groups)


@cli.group()
def data() -> None:
    """Look at data sets and how they are split."""


@data.command("list")
def data_list() -> None:
    """List the data sets."""
    table = Table("name", "images", "classes", "shape", box=None, header_style="bold")
    for name, spec in DATASETS.items():
        table.add_row(name, f"{spec.images:,}", str(len(spec.classes)), "x".join(map(str, spec.shape)))
    _say(table)


@data.command("download")
@click.argument("dataset")
@click.option("--data-dir", type=_path, help="Where to; $PFEDLA_DATA by default.")
def data_download(dataset: str, data_dir: Path | None) -> None:
    """Fetch a data set from its official address."""
    found = load_dataset(dataset, data_dir, download=True, progress=_download_progress(Console(stderr=True)))
    _say(f"{dataset}: {len(found.y):,} images. {found.note}".strip())


@data.command("show")
@_settings(DATA_OPTIONS)
@click.option("--out", type=_path, default=Path("federation.png"), show_default=True, help="The picture to write.")
def data_show(settings: Tables, changes: Tables, out: Path) -> None:  # noqa: ARG001
    """Print and draw who holds what."""
    prepare_picture(out)
    experiment = Experiment.from_tables(settings)
    federation = federation_of(experiment, _download_progress(Console(stderr=True)))
    if federation.note:
        Console(stderr=True).print(f"note: {federation.note}", markup=False, highlight=False, soft_wrap=True)
    title = experiment.data.name
    if not experiment.data.folder:
        shift = f", shift of {experiment.data.shift}" if experiment.data.shift else ""
        title += f", {experiment.tables()['split']['name']}{shift}, seed {experiment.schedule.seed}"
    groups = None if federation.groups is None else np.array(federation.groups)
    counts, classes = federation.counts, federation.classes
    if not classes:  # targets are no labels
        counts, classes = np.array([[[len(part) for part in own]] for own in federation.data.values()]), ("samples",)
    scored = federation.scored_on
    _say(federation_table(counts, classes, names=federation.names, title=title, groups=groups, scored=scored))
    for words in federation.shifts:
        _say(words)
    draw_federation(out, counts, classes, title, names=federation.names, groups=groups)
    _say(f"picture: {out}")


for _command in (*COMMANDS, commands.report, commands.watch, commands.plot):
    cli.add_command(_command)


def main() -> None:
    """Run the command line; a user's mistake ends in one sentence, never in a traceback.

    Modules of the working folder can be named, `package.module:Class`; they come after everything that is installed.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort) as stopped:
        cause = stopped.__cause__ or stopped  # click makes an Abort of it
        sys.exit(128 + (cause.number if isinstance(cause, Stopped) else signal.SIGINT))
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + 13)
    except PfedlaError as error:
        _complain(with_options(str(error)))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except OSError as error:  # of a place that was named, and that no part of ours looked after
        _complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        sys.exit(1)
    except MemoryError as error:
        _complain(f"out of memory{f': {error}' if str(error) else ''}")
        sys.exit(1)


def _complain(text: str) -> None:
    Console(stderr=True).print("error:", style="bold red", end=" ")
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def _say(what: Table | str) -> None:
    """Print to standard output; lines are never broken by us."""
    Console().print(what, markup=False, highlight=False, soft_wrap=isinstance(what, str))


def _new_folder(experiment: Experiment) -> Path:
    """Return a folder under runs/ that does not exist yet."""
    name = algorithm_name(experiment.algorithm).replace(":", ".")
    base = Path("runs") / f"{name}-{experiment.data.name}-seed{experiment.schedule.seed}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def _how_to_resume(out: Path) -> str:
    return (
        f"stopped. Resume with: pfedla run --resume {shlex.quote(str(out))}"
        if RunRecord(out).exists
        else "stopped before any work"
    )


def _draw(out: Path, experiment: Experiment, result: Result) -> None:
    """Draw the weights that a run learned and the layers it retained, if its method does so."""
    record, method = RunRecord(out), algorithm_name(experiment.algorithm)
    groups = record.facts().get("groups")
    draw_result(record.picture("weights.png"), result, method, None if groups is None else np.array(groups))
    draw_retained(record.picture("retained.png"), result, method)


def _download_progress(console: Console) -> Any:
    """Return a callback that shows a download; the bar appears with the first bytes."""
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    tasks: dict[str, Any] = {}

    def show(name: str, done: int, total: int | None) -> None:
        if name not in tasks:
            bar.start()
            tasks[name] = bar.add_task(name, total=total)
        bar.update(tasks[name], completed=done, total=total)
        if total is not None and done >= total:
            bar.stop()

    return show
