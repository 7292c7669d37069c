"""Several methods on the same federations, over several seeds; what is done already is not done again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pfedla.config import Experiment, Tables, merge, parse_value
from pfedla.errors import ConfigError, RunError
from pfedla.experiment import Federation, federate, prepare, resume, run_experiment
from pfedla.rundirectory import CONFIG, RunDirectory
from pfedla.simulation import Watch

__all__ = ["Variant", "compare", "parse_variant"]

Summaries = list[tuple[str, list[dict[str, Any]]]]
COMPARISON = "comparison.json"


class Variant(NamedTuple):
    """A method with settings of its own, under the label that tables and folders use."""

    label: str
    changes: Tables


def parse_variant(text: str) -> Variant:
    """Read `NAME` or `NAME,KEY=VALUE,...`, such as `pfedla,hyper_lr=0.003,retain=1`."""
    name, *settings = (part.strip() for part in text.split(","))
    table: dict[str, Any] = {"name": name}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key and equals):
            raise ConfigError(f"a method is given as NAME or NAME,KEY=VALUE, not {text!r}")
        table[key] = parse_value(value)
    return Variant(",".join([name.replace(":", ".").replace("/", "."), *settings]), {"algorithm": table})


def compare(
    base: Tables,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    out: Path,
    *,
    overwrite: bool = False,
    start: Callable[[str, int], Watch | None] = lambda *_: None,
    tell: Callable[[str], None] = lambda _: None,
) -> Summaries:
    """Run every variant with every seed into `out/LABEL-seedK`, and keep `out/comparison.json` up to date.

    A complete run with the same configuration is kept, an unfinished one is gone on with.

    Parameters
    ----------
    base
        The configuration that all share.
    variants, seeds
        What differs.
    out
        The folder for the run directories.
    overwrite
        Run anew what is there already.
    start
        Called with a label and the number of rounds before each run; returns who watches it.
    tell
        Called with sentences for the user.
    """
    labels = [variant.label for variant in variants]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise ConfigError(f"named twice: {', '.join(sorted(twice))}")

    def experiment(variant: Variant, seed: int) -> Experiment:
        return Experiment.from_tables(merge(merge(base, variant.changes), {"run": {"seed": seed}}))

    plan = [(variant.label, seed, experiment(variant, seed)) for seed in seeds for variant in variants]
    done: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    federation: Federation | None = None
    loaded: int | None = None
    for label, seed, each in plan:
        path = out / f"{label}-seed{seed}"
        directory = RunDirectory(path)
        if directory.holds_run and not overwrite and not _same(each, path):
            raise RunError(f"{path} holds a run with another configuration: choose another --out, or --overwrite it")
        if directory.complete and not overwrite:
            tell(f"{path} is complete: kept (--overwrite runs it anew)")
            summary = directory.summary()
        else:
            if loaded != seed:
                federation, loaded = federate(each), seed
                for other_label, other_seed, other in plan:  # refuse what cannot run before the first run
                    if other_seed == seed:
                        try:
                            prepare(other, federation)
                        except ConfigError as error:
                            raise ConfigError(f"{other_label}: {error}") from None
                if federation.note:
                    tell(federation.note)
            watch = start(f"{label} {seed}" if len(seeds) > 1 else label, each.run.rounds)
            if directory.holds_run and not overwrite:
                summary = resume(path, watch, federation=federation).summary
            else:
                summary = run_experiment(each, path, overwrite=overwrite, watch=watch, federation=federation).summary
        done[label].append(summary)
        flat = [{**summary, "label": name} for name, summaries in done.items() for summary in summaries]
        (out / COMPARISON).write_text(json.dumps(flat, indent=2) + "\n")
    return list(done.items())


def _same(experiment: Experiment, path: Path) -> bool:
    """Say whether the run in `path` has this configuration; the number of workers decides nothing."""
    neutral: Tables = {"run": {"workers": -1}}
    there = Experiment.load(path / CONFIG, neutral)
    return there.tables() == merge(experiment.tables(), neutral)
