"""Trackers that people already use: TensorBoard, MLflow, and Weights & Biases without its network.

A tracker is told a run's configuration, every evaluation's figures, and the aggregation weights as pictures. Each
library is an extra of its own, `pfedla[tensorboard]`, and imported only when it is asked for; an object of your own
with the three methods of `Tracker` will do as well. A tracker that fails while a run is under way is left out of the
rest of it; the run goes on.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from pfedla.config import Experiment, algorithm_name
from pfedla.errors import ConfigError, RunError
from pfedla.facts import flat
from pfedla.layers import LayerSpec
from pfedla.record import EVENTS, RunRecord
from pfedla.result import weights_of
from pfedla.rounds import Schedule, Track

__all__ = [
    "TRACKERS",
    "End",
    "MLflow",
    "TensorBoard",
    "Tracked",
    "Tracker",
    "WandB",
    "asked_for",
    "tracked",
    "trackers_of",
    "tracking",
]

PICTURES = 20  # of the weights, about, over a run: each takes half a second to draw
MARK = "seconds"  # a figure that every evaluation has: a round that has it is known to a tracker
PARAMETERS, LONGEST = 100, 6000  # that MLflow takes at once, and the characters of one
PROJECT = "pfedla"

log = logging.getLogger("pfedla")

End = Literal["done", "stopped", "failed"]


class Tracked(NamedTuple):
    """What a tracker is told of a run before its first round."""

    id: str  # the same when the run is resumed
    name: str
    folder: Path | None  # the run's, if it leaves a record
    config: str  # all settings, as TOML
    settings: dict[str, Any]  # by full name, `training.lr`


@runtime_checkable
class Tracker(Protocol):
    """Where a run's figures go while it is under way."""

    def begin(self, run: Tracked) -> Collection[int]:
        """Open the run, or open it again if it is resumed; return the rounds that the tracker has already."""

    def log(self, t: int, figures: Mapping[str, float], pictures: Mapping[str, np.ndarray]) -> None:
        """Take in the figures after round `t`, as in metrics.jsonl, and pictures `(height, width, 3)` of bytes."""

    def end(self, end: End) -> None:
        """Close the run: it is done, was stopped, or failed."""


class TensorBoard:
    """Event files in the run's folder; `tensorboard --logdir runs` shows all runs below."""

    def __init__(self) -> None:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        self._open: Any = SummaryWriter
        self._read: Any = lambda path: EventAccumulator(str(path), size_guidance={SCALARS: 0})

    def begin(self, run: Tracked) -> Collection[int]:
        """Open the run's event files."""
        if run.folder is None:
            raise ConfigError("machine.track = 'tensorboard' writes into the run's folder: name one (out)")
        place = run.folder / EVENTS
        found = self._read(place).Reload() if place.exists() else None
        self._writer = self._open(str(place))
        if found is None:
            self._writer.add_text("configuration", "\n".join(f"    {line}" for line in run.config.splitlines()))
        return {event.step for event in found.Scalars(MARK)} if found and MARK in found.Tags()["scalars"] else ()

    def log(self, t: int, figures: Mapping[str, float], pictures: Mapping[str, np.ndarray]) -> None:
        """Write scalars and images."""
        for name, image in pictures.items():
            self._writer.add_image(name, image, t, dataformats="HWC")
        for name, value in figures.items():
            self._writer.add_scalar(name, value, t)
        self._writer.flush()

    def end(self, end: End) -> None:  # noqa: ARG002 (it knows of no states)
        """Close the files."""
        self._writer.close()


class MLflow:
    """A run of MLflow's, where $MLFLOW_TRACKING_URI says and by MLflow's default else."""

    def __init__(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric, self._param = MlflowClient, Metric, Param

    def begin(self, run: Tracked) -> Collection[int]:
        """Find the run by its tag, or make one with all settings as parameters."""
        self._at = client = self._client()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        found = client.search_runs([experiment], f"tags.pfedla_run = '{run.id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            return {metric.step for metric in client.get_metric_history(self._run, MARK)}
        self._run = client.create_run(experiment, tags={"pfedla_run": run.id}, run_name=run.name).info.run_id
        settings = [self._param(name, str(value)[:LONGEST]) for name, value in run.settings.items()]
        for start in range(0, len(settings), PARAMETERS):
            client.log_batch(self._run, params=settings[start : start + PARAMETERS])
        client.log_text(self._run, run.config, "config.toml")
        return ()

    def log(self, t: int, figures: Mapping[str, float], pictures: Mapping[str, np.ndarray]) -> None:
        """Log metrics and images with the round as their step."""
        for name, image in pictures.items():
            self._at.log_image(self._run, image, key=name, step=t)
        now = int(time.time() * 1000)
        self._at.log_batch(self._run, [self._metric(name, value, now, t) for name, value in figures.items()])

    def end(self, end: End) -> None:
        """Say how the run ended."""
        self._at.set_terminated(self._run, {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[end])


class WandB:
    """A run of Weights & Biases, kept on this machine; `wandb sync` uploads it.

    What lies on this machine cannot be added to: a resumed run is written anew, under the same id.
    """

    def __init__(self) -> None:
        import wandb

        self._wandb = wandb

    def begin(self, run: Tracked) -> Collection[int]:
        """Start a run without network."""
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            config=run.settings,
            mode="offline",
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="round")
        return ()

    def log(self, t: int, figures: Mapping[str, float], pictures: Mapping[str, np.ndarray]) -> None:
        """Log figures and images beside their round."""
        self._run.log({"round": t, **figures, **{name: self._wandb.Image(image) for name, image in pictures.items()}})

    def end(self, end: End) -> None:
        """Finish the run."""
        self._run.finish(exit_code=0 if end == "done" else 1)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def asked_for(track: Any) -> tuple[tuple[Any, ...], list[Tracker]]:
    """Tell trackers that are named from those that are brought; refuse anything else."""
    several = isinstance(track, Iterable) and not isinstance(track, str | Tracker)
    asked = list(track) if several else [track]
    if strange := [one for one in asked if not isinstance(one, str | Tracker)]:
        raise ConfigError(f"track must name a tracker, or have the methods of pfedla.Tracker: {strange[0]!r}")
    own = [one for one in asked if not isinstance(one, str)]
    return tuple(one for one in asked if isinstance(one, str)), own


def trackers_of(names: Iterable[str]) -> list[Tracker]:
    """Make the trackers of these names; refuse one whose extra is not installed."""
    made = []
    for name in names:
        try:
            made.append(TRACKERS[name]())
        except ImportError as error:
            words = f"machine.track = {name!r} needs its extra: pip install 'pfedla[{name}]' ({error})"
            raise RunError(words) from None
    return made


@contextmanager
def tracked(
    trackers: Sequence[Tracker],
    run: Tracked,
    schedule: Schedule,
    layers: Sequence[str],
    groups: Sequence[int] | None = None,
) -> Iterator[Track]:
    """Tell trackers of a run's beginning and end, and give what tells them of its evaluations."""
    telling = _Telling(run, schedule, layers, None if groups is None else np.array(groups))
    end: End = "failed"
    try:
        for tracker in trackers:
            telling.begin(tracker)
        yield telling.log
        end = "done"
    except KeyboardInterrupt:
        end = "stopped"
        raise
    finally:
        telling.end(end)


def tracking(
    trackers: Sequence[Tracker],
    experiment: Experiment,
    record: RunRecord | None,
    spec: LayerSpec,
    groups: Sequence[int] | None = None,
) -> AbstractContextManager[Track | None]:
    """Have trackers told of a run, if there are any."""
    if not trackers:
        return nullcontext()
    folder = record.path.resolve() if record else None
    known = record.facts()["id"] if record else uuid.uuid4().hex
    name = folder.name if folder else f"{algorithm_name(experiment.algorithm)}-seed{experiment.schedule.seed}"
    run = Tracked(known, name, folder, experiment.toml(), flat(experiment.tables()))
    return tracked(trackers, run, experiment.schedule, spec.names, groups)


class _Telling:
    """Trackers, and the rounds that each of them has; those that fail drop out."""

    def __init__(self, run: Tracked, schedule: Schedule, layers: Sequence[str], groups: np.ndarray | None) -> None:
        self._run, self._schedule, self._layers, self._groups = run, schedule, layers, groups
        self._known: list[tuple[Tracker, Collection[int]]] = []

    def begin(self, tracker: Tracker) -> None:
        """Open the run in a tracker; if it cannot be, nothing begins."""
        try:
            self._known.append((tracker, tracker.begin(self._run)))
        except ConfigError:
            raise
        except Exception as error:
            raise RunError(f"{type(tracker).__name__} cannot track the run: {_first_line(error)}") from error

    def log(self, line: dict[str, Any], diagnostics: Mapping[str, np.ndarray]) -> None:
        """Tell those trackers that do not have it of an evaluation."""
        t = line["round"]
        telling = [tracker for tracker, known in self._known if t not in known]
        if telling:
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
            figures = {name: float(numbers[name]) for name in numbers if name != "round"}
            pictures = self._pictures(t, diagnostics)
            for tracker in telling:
                self._try(tracker, lambda one: one.log(t, figures, pictures))

    def end(self, end: End) -> None:
        """Close the run everywhere."""
        for tracker, _ in list(self._known):
            self._try(tracker, lambda one: one.end(end))

    def _pictures(self, t: int, diagnostics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the weights as a picture after the last round, and after some evaluations before."""
        from pfedla.report.weights import MOST, picture  # with matplotlib, which runs without trackers do without

        schedule = self._schedule
        every = schedule.eval_every * -(-schedule.rounds // (schedule.eval_every * PICTURES))
        if len(diagnostics.get("alpha", ())) > MOST or (t % every and t != schedule.rounds):
            return {}
        if (alpha := weights_of(diagnostics)) is None:
            return {}
        title = f"Who learns from whom: the weights after round {t}"
        return {"weights": picture(alpha, self._layers, title, self._groups)}

    def _try(self, tracker: Tracker, tell: Any) -> None:
        try:
            tell(tracker)
        except Exception as error:
            kind = type(tracker).__name__
            log.warning("%s is left out of the rest of the run, it failed: %s", kind, _first_line(error))
            self._known = [(other, rounds) for other, rounds in self._known if other is not tracker]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
