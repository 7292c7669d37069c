"""Several methods on the same federations, over several seeds; what is done already is not done again."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pfedla.algorithms import ALGORITHMS
from pfedla.config import Experiment, Tables, merge, parse_codec, parse_value
from pfedla.data.federation import Federation
from pfedla.errors import ConfigError, ModelError, PfedlaError, RunError, told
from pfedla.experiment import federation_of, prepare, resume, run_experiment
from pfedla.facts import flat, settings_of
from pfedla.record import RunRecord, locked, write_text
from pfedla.result import Result
from pfedla.rounds import Watch

__all__ = [
    "COMPARISON",
    "Standing",
    "Variant",
    "carry_out",
    "changed",
    "check_place",
    "collect",
    "collected",
    "compare",
    "figures_of",
    "forget",
    "listed",
    "measured_otherwise",
    "parse_variant",
    "read_comparison",
    "refuse_other_data",
    "standing",
]

Summaries = list[tuple[str, list[dict[str, Any]]]]
COMPARISON = "comparison.json"
OUTER_COMMA = re.compile(r",(?![^\[]*\])")  # one that is not within a list
Standing = Literal["new", "complete", "unfinished", "shorter"]  # than it is now to be


class Variant(NamedTuple):
    """A method with settings of its own, under the label that tables and folders use."""

    label: str
    changes: Tables


def parse_variant(text: str) -> Variant:
    """Read `NAME` or `NAME,KEY=VALUE,...`, such as `pfedla,hyper_lr=0.003,codec.up=int8` or `clustered,groups=[0,1]`.

    Keys are the method's settings, `codec.KEY` those of the codec, and `codec` one of its presets.
    """
    name, *settings = (part.strip() for part in OUTER_COMMA.split(text))
    name = {known.casefold(): known for known in ALGORITHMS}.get(name.casefold(), name)
    table: dict[str, Any] = {"name": name}
    codec: list[str] = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key and equals):
            raise ConfigError(f"a method is given as NAME or NAME,KEY=VALUE, not {text!r}")
        if key.partition(".")[0] == "codec":
            codec.append(value if key == "codec" else f"{key.removeprefix('codec.')}={value}")
        else:
            table[key] = parse_value(value)
    label = ",".join([name.replace(":", ".").replace("/", "."), *settings])
    return Variant(label, {"algorithm": table, **parse_codec(codec)})


def _raised(run: str, error: RunError) -> None:
    """End the comparison, with the run's name."""
    raise RunError(f"{run}: {error}") from error


def compare(
    base: Tables,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    out: Path,
    *,
    overwrite: bool = False,
    lenient: bool = False,
    results: Path | None = None,
    start: Callable[[str, int], Watch | None] = lambda *_: None,
    finished: Callable[[Path, Experiment, Result], None] = lambda *_: None,
    fail: Callable[[str, RunError], None] = _raised,
    tell: Callable[[str], None] = lambda _: None,
) -> Summaries:
    """Run every variant with every seed into `out/LABEL-seedK`, and keep `out/comparison.json` up to date.

    Complete runs with the same configuration are kept, unfinished ones resumed, and those of fewer rounds made longer.
    The file lists complete runs of earlier comparisons in the same folder, too, if they differ in nothing but the
    method and the seed.

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
    lenient
        Leave out what the model does not allow (FedBN needs batch norm, say) instead of refusing the comparison.
    results
        A file that collects the final figures of runs. What it holds, with the same settings, is not run again, even if
        the run's folder is gone; what it holds of other methods stays.
    start
        Called with a label and the number of rounds before each run; returns who watches it.
    finished
        Called with the folder, the configuration and the result after each run.
    fail
        Called with the label and seed, in words, of a run that failed, and why; unless it raises, the others go on.
    tell
        Called with sentences for the user.
    """
    labels = [variant.label for variant in variants]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise ConfigError(f"named twice: {', '.join(sorted(twice))}")
    plan = {seed: {v.label: _experiment(base, v, seed) for v in variants} for seed in seeds}
    done: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    _check_places(out, results)
    held = {} if results is None or overwrite else collected(results)
    if not overwrite:
        _check_standing(plan, held, out, results)
    before = _listed_before(base, plan, out)
    for seed, experiments in plan.items():
        own = next((experiment for experiment in experiments.values() if experiment.own_data), None)
        federation = federation_of(own) if own else None  # which may have changed
        looked_at = False
        given: dict[str, str | None] = {}  # what runs were measured on, by where they are
        for label, experiment in experiments.items():
            if label not in done:
                continue
            if known := held.get((label, seed)):
                if "data" in known:
                    given[f"{results}, {label}, seed {seed},"] = known["data"]
                    refuse_other_data(given, federation)
                tell(f"{label}, seed {seed}, is in {results}: kept")
                done[label].append(known)
                _write(out, done, before, results)
                continue
            path = out / f"{label}-seed{seed}"
            stands = "new" if overwrite else standing(path, experiment)
            if stands == "complete":
                given[str(path)] = RunRecord(path).facts().get("data")
                refuse_other_data(given, federation)
                tell(f"{path} is complete: kept (overwrite it to run it anew)")
                done[label].append(figures_of(path))
                _write(out, done, before, results)
                continue
            if federation is None or not looked_at:
                looked_at, federation = True, federation or federation_of(experiment)
                if federation.note:
                    tell(federation.note)
                for refused, error in _refused(experiments, federation):
                    if not lenient:
                        raise type(error)(f"{refused}: {error}")
                    if done.pop(refused, None) is not None:
                        tell(f"{refused} is left out: {error}")
                if label not in done:
                    continue
            refuse_other_data(given, federation)
            if overwrite and results is not None:
                forget(results, label, seed)  # else a run that is stopped would be taken for finished
            watch = start(f"{label} {seed}" if len(seeds) > 1 else label, experiment.schedule.rounds)
            try:
                result = carry_out(path, experiment, stands, federation, watch=watch, overwrite=overwrite)
            except RunError as error:
                fail(f"{label}, seed {seed}", error)
                continue
            except PfedlaError:
                raise
            except Exception as error:  # of a method of the user's own: the others go on
                fail(f"{label}, seed {seed}", RunError(told(error)))
                continue
            finished(path, experiment, result)
            done[label].append(figures_of(path))
            _write(out, done, before, results)
    return [(label, summaries) for label, summaries in done.items() if summaries]


def _listed_before(base: Tables, plan: Mapping[int, Mapping[str, Experiment]], out: Path) -> list[dict[str, Any]]:
    """Return what the folder's comparison lists of other methods and seeds, if all else is as it is now."""
    try:
        held = collected(out / COMPARISON)
    except RunError:  # it is written anew
        return []
    found = []
    for (label, seed), known in held.items():
        if label in plan.get(seed, {}) or not RunRecord(out / f"{label}-seed{seed}").complete:
            continue
        now = Experiment.from_tables(merge(base, {"schedule": {"seed": seed}}))
        if all(name.partition(".")[0] in ("algorithm", "codec") for name in changed(known, now)):
            found.append(known)
    return found


def figures_of(path: Path) -> dict[str, Any]:
    """Return a complete run's final figures, with the checksum of the data that it was given, if it is known."""
    record = RunRecord(path)
    data = record.facts().get("data")
    return record.summary() | ({"data": data} if data else {})


def standing(path: Path, experiment: Experiment) -> Standing:
    """Say how a run's folder stands to a configuration; refuse one that holds a run with another."""
    record = RunRecord(path)
    if not record.exists:
        return "new"
    before, rounds = Experiment.load(record.config), experiment.schedule.rounds
    shorter = before.schedule.rounds < rounds
    if shorter:
        before = replace(before, schedule=replace(before.schedule, rounds=rounds))
    if differing := _differing(settings_of(before), settings_of(experiment)):
        raise RunError(
            f"{path} holds a run with another configuration ({', '.join(differing)}): choose another folder (out), or "
            "overwrite it"
        )
    if record.complete and not shorter and "settings" in record.summary() and changed(record.summary(), experiment):
        raise RunError(f"{path} holds figures of other settings than its configuration: overwrite it")
    return "shorter" if shorter else "complete" if record.complete else "unfinished"


def _check_standing(
    plan: Mapping[int, Mapping[str, Experiment]],
    held: Mapping[tuple[str, int], dict[str, Any]],
    out: Path,
    results: Path | None,
) -> None:
    """Refuse what was measured otherwise, in files and folders, before the first run and not when its turn comes."""
    for seed, experiments in plan.items():
        for label, experiment in experiments.items():
            known = held.get((label, seed))
            if known is None:
                standing(out / f"{label}-seed{seed}", experiment)
            elif differing := changed(known, experiment):
                raise RunError(f"{measured_otherwise(results, known, differing)}: choose another file")


def refuse_other_data(given: Mapping[str, str | None], federation: Federation | None) -> None:
    """Refuse to set runs beside each other that were not given the same data: that of now, if it is at hand.

    `given` has the checksums of what runs were given, by where they are.
    """
    first = next(iter(given), None)
    if first is None:
        return
    data = given[first] if federation is None else federation.fingerprint()
    for place, other in given.items():
        if other != data:
            than = "are found now" if federation else f"{first.rstrip(',')} does"
            raise RunError(
                f"{place} holds a run on other data than {than}: choose another folder (out), or overwrite it"
            )


def carry_out(
    path: Path,
    experiment: Experiment,
    stands: Standing,
    federation: Federation,
    *,
    watch: Watch | None = None,
    overwrite: bool = False,
) -> Result:
    """Run what is new, resume what is unfinished, and make longer what is shorter."""
    if stands == "new":
        return run_experiment(experiment, path, overwrite=overwrite, watch=watch, federation=federation)
    more = experiment.schedule.rounds if stands == "shorter" else None
    machine = experiment.machine
    return resume(path, watch, workers=machine.workers, rounds=more, track=machine.track, federation=federation)


def read_comparison(path: Path) -> list[dict[str, Any]]:
    """Read the summaries that a comparison wrote, each with its label."""
    try:
        flat = json.loads(path.read_text())
        runs = flat if isinstance(flat, list) else []
        named = (isinstance(run, dict) and isinstance(run.get("label"), str) for run in runs)
        if not runs or not all(named) or not all(isinstance(run.get("seed"), int) for run in runs):
            raise ValueError("it holds no runs")
    except FileNotFoundError:
        raise RunError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is no comparison that pfedla compare wrote: {error}") from error
    return list(flat)


def _write(
    out: Path, done: dict[str, list[dict[str, Any]]], before: Sequence[dict[str, Any]], results: Path | None
) -> None:
    """Write what is done so far, method by method, and what was before; and add it to the results."""
    found = listed(list(done.items()))
    with _writing(out / COMPARISON):
        write_text(out / COMPARISON, _lines(_in_order([*found, *before])))
    if results is not None:
        collect(results, found)


def collect(results: Path, found: Iterable[dict[str, Any]]) -> None:
    """Add final figures to a file of results, beside whatever other processes add."""
    with _writing(results):
        all_of_them = collected(results) | {(summary["label"], summary["seed"]): summary for summary in found}
        write_text(results, _lines(_in_order(list(all_of_them.values()))))


def forget(results: Path, label: str, seed: int) -> None:
    """Take a run's figures out of a file of results, if it has them."""
    with _writing(results):
        held = collected(results)
        if held.pop((label, seed), None) is None:
            return
        if held:
            write_text(results, _lines(held.values()))
        else:
            results.unlink()


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Have others wait who want to write this file, and say in one sentence if it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.parent):
            yield
    except OSError as error:
        raise RunError(f"cannot write {file}: {error.strerror}") from None


def _check_places(out: Path, results: Path | None) -> None:
    """Find out before any work whether figures can be written; nothing is left behind."""
    for file in (out / COMPARISON, *([results] if results else [])):
        check_place(file)


def check_place(file: Path) -> None:
    """Find out whether a file can be written; nothing is left behind."""
    try:
        if file.is_dir():
            raise RunError(f"cannot write {file}: it is a folder")
        with tempfile.TemporaryFile(dir=next(folder for folder in file.absolute().parents if folder.exists())):
            pass
    except OSError as error:
        raise RunError(f"cannot write {file}: {error.strerror}") from None


def _in_order(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return runs method by method, as methods come first, and seed by seed."""
    labels = list(dict.fromkeys(summary["label"] for summary in summaries))
    return sorted(summaries, key=lambda summary: (labels.index(summary["label"]), summary["seed"]))


def _lines(summaries: Iterable[dict[str, Any]]) -> str:
    """Return a list as JSON, one line for each run."""
    return "[\n" + ",\n".join(json.dumps(summary) for summary in summaries) + "\n]\n"


def changed(known: dict[str, Any], experiment: Experiment) -> list[str]:
    """Return the settings in which a measured run differs; one that came later than the run has its default."""
    try:
        before = settings_of(Experiment.from_tables(known["settings"]))
    except (ConfigError, KeyError, TypeError, AttributeError):
        return ["settings"]
    return _differing(before, settings_of(experiment))


def _differing(before: Tables, now: Tables) -> list[str]:
    """Return the full names of the settings in which two configurations differ."""
    old, new = flat(before), flat(now)
    return [key for key in sorted(old.keys() | new) if old.get(key) != new.get(key)]


def measured_otherwise(results: Path | None, known: dict[str, Any], differing: Sequence[str]) -> str:
    """Say that a file holds a run with other settings: which, and which commit measured it."""
    label, seed, commit = known["label"], known["seed"], known.get("commit") or "an unknown commit"
    return f"{results} holds {label}, seed {seed}, with other settings ({', '.join(differing)}), measured by {commit}"


def collected(results: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the figures that a file of results holds, by label and seed."""
    if not results.exists():
        return {}
    return {(summary["label"], summary["seed"]): summary for summary in read_comparison(results)}


def listed(runs: Summaries) -> list[dict[str, Any]]:
    """Return all summaries in one list, each with its label."""
    return [{**summary, "label": label} for label, summaries in runs for summary in summaries]


def _experiment(base: Tables, variant: Variant, seed: int) -> Experiment:
    return Experiment.from_tables(merge(merge(base, variant.changes), {"schedule": {"seed": seed}}))


def _refused(experiments: dict[str, Experiment], federation: Federation) -> Iterator[tuple[str, PfedlaError]]:
    """Yield what cannot run on this data and model, and why: before the first run, not after hours."""
    for label, experiment in experiments.items():
        try:
            prepare(experiment, federation)
        except (ConfigError, ModelError) as error:
            yield label, error
