"""The one loop: rounds of download, training and update, and the evaluations between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from pfedla.algorithm import Algorithm
from pfedla.client import Setting, threads
from pfedla.codec import AS_IT_IS, Coding
from pfedla.errors import ConfigError, RunError
from pfedla.fleet import Answers, Fleet
from pfedla.inspection import Inspector
from pfedla.interrupts import stoppable, uninterrupted
from pfedla.layers import Layers
from pfedla.ledger import Ledger
from pfedla.objective import Objective
from pfedla.randomness import numpy_stream, stream
from pfedla.record import LAYERS, ROUND, RunRecord, Snapshot
from pfedla.settings import Count, Settings
from pfedla.storage import let_go, zeros
from pfedla.training import Scores
from pfedla.wire import Payload

__all__ = [
    "Evaluated",
    "Outcome",
    "Progress",
    "Schedule",
    "Server",
    "Track",
    "Watch",
    "download",
    "evaluate",
    "participants",
    "run",
    "run_round",
]

CHUNK = 64  # clients that are sent something at once outside rounds
COST = 0.02  # at most this part of the time goes into checkpoints
log = logging.getLogger("pfedla")

RECORDS, RECORD_BYTES = 200, 64 * 2**20  # diagnostics over the rounds are thinned to this


@dataclass(frozen=True)
class Schedule(Settings):
    """How long, with whom, and from which seed: together with the other sections, all that decides the result."""

    section: ClassVar[str] = "schedule"
    seed: int = 0
    rounds: Count = 50
    participants: Count | None = None  # clients per round; all by default
    eval_every: Count = 5  # rounds between evaluations; the last round is always evaluated

    def evaluates(self, t: int) -> bool:
        """Say whether there is an evaluation after round `t`."""
        return t > 0 and (t % self.eval_every == 0 or t == self.rounds)


class Progress(NamedTuple):
    """What a watcher is told after every round."""

    t: int
    rounds: int
    record: dict[str, Any] | None  # the latest evaluation, as in metrics.jsonl
    bytes_down: int
    bytes_up: int
    seconds: float
    objective: Objective


Watch = Callable[[Progress], bool | None]  # False ends the run with this round
Track = Callable[[dict[str, Any], Mapping[str, np.ndarray]], None]  # of an evaluation: its metrics, the diagnostics


@dataclass
class Server:
    """The server between two rounds."""

    state: Any
    ledger: Ledger
    t: int = 0  # rounds completed
    inspector: Inspector = field(default_factory=Inspector)
    coding: Coding = AS_IT_IS


class Evaluated(NamedTuple):
    """All clients' metrics, `{metric: (clients,)}`; NaN where there is none."""

    personalized: Scores
    after_training: Scores
    missing: dict[int, str]  # who did not answer, and why


class Outcome(NamedTuple):
    """What a run ends with."""

    history: list[dict[str, Any]]  # one record for each evaluated round
    diagnostics: dict[str, np.ndarray]  # of the method, over the rounds of `diagnostics["round"]`
    ledger: Ledger
    personalized: Layers  # {entry: (clients, values)}; empty if models are not wanted
    seconds: float


def run(
    setting: Setting,
    fleet: Fleet,
    n: int,
    schedule: Schedule,
    record: RunRecord | None = None,
    watch: Watch | None = None,
    *,
    checkpoint_every: float | None = None,
    models: bool = True,
    track: Track | None = None,
) -> Outcome:
    """Run all rounds with `n` clients, from a record's checkpoint if there is one.

    Checkpoints are written every so many seconds, 0 for every round, and at the end; None for none of them.
    On Ctrl-C, SIGTERM or SIGHUP the record gets a checkpoint of the last complete round before `KeyboardInterrupt` is
    raised again. If `watch` returns False, the round it was told of is the last one. `track` is told of every
    evaluation: first of those in the checkpoint, as far as their diagnostics were kept.
    """
    with stoppable(), threads(1):  # so that the result does not depend on how many cores the server has
        return _run(setting, fleet, n, schedule, record, watch, checkpoint_every, models, track)


def _run(
    setting: Setting,
    fleet: Fleet,
    n: int,
    schedule: Schedule,
    record: RunRecord | None,
    watch: Watch | None,
    checkpoint_every: float | None,
    models: bool,
    track: Track | None,
) -> Outcome:
    algorithm, spec = setting.algorithm, setting.spec
    state = algorithm.init(spec.read(setting.template), n, stream(schedule.seed, "init"))
    inspector = Inspector(spec, counted=setting.counted and setting.privacy.clip is None)
    server = Server(state, Ledger(spec.names), inspector=inspector, coding=setting.coding)
    history, before = list[dict[str, Any]](), 0.0
    diagnostics = _Diagnostics(schedule)
    if record and (saved := record.restore(state, fleet.snapshot())):
        if saved.t > schedule.rounds:
            raise RunError(f"the run is at round {saved.t} already: schedule.rounds = {schedule.rounds} cannot be less")
        server.state, server.ledger, server.t = saved.state, saved.ledger, saved.t
        inspector.lengths, inspector.usual, inspector.refused = saved.lengths, saved.usual, saved.refused
        fleet.restore(saved.clients)
        history = [line for line in saved.history if schedule.evaluates(line["round"])]  # a longer run has another last
        if len(history) < len(saved.history):
            record.rewrite(history)
        before = saved.seconds
        diagnostics.records = {t: x for t, x in saved.diagnostics.items() if schedule.evaluates(t)}
    if record:
        record.goes_on()
    started = time.perf_counter()
    due_at, took = started + (checkpoint_every or 0), 0.0  # the next checkpoint, and what the latest one took
    safe = 0  # the round of a checkpoint that was written before its evaluation

    def seconds() -> float:
        return before + time.perf_counter() - started

    def snapshot() -> Snapshot:
        clients, records, seen = fleet.snapshot(), diagnostics.records, server.inspector
        found = server.t, server.state, clients, server.ledger, history, records, seconds()
        return Snapshot(*found, seen.lengths, seen.usual, seen.refused)

    try:
        if track:
            for line in history:
                track(line, diagnostics.records.get(line["round"], {}))
        while True:
            if schedule.evaluates(server.t) and (not history or history[-1]["round"] < server.t):
                if record and checkpoint_every == 0:  # clients elsewhere may take long to be scored
                    record.checkpoint(snapshot())
                    safe = server.t
                scores = evaluate(algorithm, server.state, fleet, n, server.t, server.coding)
                values = algorithm.diagnostics(server.state)
                with uninterrupted():  # a checkpoint has both, or neither
                    diagnostics.keep(server.t, values)
                    history.append(_record(server, scores, setting, seconds()))
                    if record:
                        record.append(history[-1])
                if track:
                    track(history[-1], {name: value.numpy() for name, value in values.items()})
            if watch and server.t:
                latest, ledger = history[-1] if history else None, server.ledger
                told = Progress(server.t, schedule.rounds, latest, ledger.down, ledger.up, seconds(), setting.objective)
                if watch(told) is False and server.t < schedule.rounds:
                    schedule = diagnostics.schedule = replace(schedule, rounds=server.t)
                    watch = None
                    if latest and latest["round"] == server.t:
                        diagnostics.keep(server.t, algorithm.diagnostics(server.state))  # or it may be thinned out
                    continue  # to be evaluated as the last round
            if server.t >= schedule.rounds:
                break
            if record and checkpoint_every is not None and server.t > safe and time.perf_counter() >= due_at:
                begun = time.perf_counter()
                record.checkpoint(snapshot())
                took = time.perf_counter() - begun
                due_at = time.perf_counter() + max(checkpoint_every, took / COST if checkpoint_every else 0)
            missing = run_round(algorithm, server, fleet, participants(schedule, server.t + 1, n))
            for client, why in missing.items():
                log.warning("%s is absent from round %d: %s", setting.called(client), server.t, why)
        elapsed = seconds()
        if record and checkpoint_every is not None:
            record.checkpoint(snapshot())
        personalized = _personalized(setting, server, fleet, n) if models else {}
    except KeyboardInterrupt:
        if record:
            with uninterrupted():
                record.checkpoint(snapshot())
        raise
    return Outcome(history, diagnostics.arrays(), server.ledger, personalized, elapsed)


def participants(schedule: Schedule, t: int, n: int) -> list[int]:
    """Return who takes part in round `t`, sorted: the same for every algorithm, known before any training."""
    count = n if schedule.participants is None else schedule.participants
    if not 1 <= count <= n:
        raise ConfigError(f"schedule.participants = {count} must be from 1 to the number of clients, {n}")
    chosen = numpy_stream(schedule.seed, "participants", t).choice(n, count, replace=False)
    return sorted(int(client) for client in chosen)


def run_round(algorithm: Algorithm[Any], server: Server, fleet: Fleet, ids: Sequence[int]) -> dict[int, str]:
    """Run the next round with the clients `ids`; return who did not answer or was refused, and why.

    Ctrl-C before the clients have answered leaves everything as it was; after that it waits for the update.
    """
    t, coding = server.t + 1, server.coding
    sent = coding.pack(download(algorithm, server.state, ids, fleet.forgot), "down", ids, t)
    row = {client: row for row, client in enumerate(ids)}

    def got(client: int) -> Payload:
        return sent.rows([row[client]])

    answers = fleet.train(ids, sent, t, lambda found: server.inspector.judge(algorithm, found, coding, got).refused)
    with uninterrupted():
        answered, refused = server.inspector.inspect(algorithm, answers.by_client, coding, got)
        packed = Payload.stack([answers.by_client[client] for client in answered]) if answered else None
        server.ledger.record(t, ids, sent, answered, packed)
        if packed is not None:
            theirs = sent if answered == list(ids) else sent.rows([row[client] for client in answered])
            received, upload = coding.unpack(theirs, "down"), coding.unpack(packed, "up")
            server.state = algorithm.update(server.state, torch.tensor(answered), received, upload)
        server.t = t
        fleet.commit(answered)
    let_go()
    return {**answers.missing, **{client: f"its upload was refused: {why}" for client, why in refused.items()}}


def download(algorithm: Algorithm[Any], state: Any, ids: Sequence[int], forgot: Collection[int]) -> Payload:
    """Return what these clients are sent; those that `forgot` what they kept get what the server knows of it, too."""
    sent = algorithm.download(state, torch.tensor(ids))
    lost = torch.tensor([client in forgot for client in ids])
    if not lost.any() or not (known := algorithm.known(state, torch.tensor(ids))):
        return sent
    told = torch.tensor([name in known for name in sent.names])
    layers = sent.fill(known)
    return Payload.of(sent.layers | layers, sent.sent | (lost[:, None] & told), sent.names, **sent.values)


def evaluate(
    algorithm: Algorithm[Any], state: Any, fleet: Fleet, n: int, t: int, coding: Coding = AS_IT_IS
) -> Evaluated:
    """Score all clients' models as the server would send them now; nothing changes."""
    found = _ask(fleet, fleet.evaluate, algorithm, state, n, t, coding)
    metrics = dict.fromkeys(metric for scores in found.by_client.values() for metric in scores.personalized)

    def gather(which: int) -> Scores:
        by_client = {client: scores[which] for client, scores in found.by_client.items()}
        return {m: np.array([by_client.get(i, {}).get(m, np.nan) for i in range(n)]) for m in metrics}

    return Evaluated(gather(0), gather(1), found.missing)


def _ask(
    fleet: Fleet,
    ask: Callable[..., Answers[Any]],
    algorithm: Algorithm[Any],
    state: Any,
    n: int,
    t: int,
    coding: Coding,
) -> Answers[Any]:
    """Ask all clients for something, a chunk at a time, so that what is sent at once stays small.

    They are sent after round `t` what they would be sent in the next.
    """
    everybody = Answers[Any]({}, {})
    for start in range(0, n, CHUNK):
        ids = range(start, min(start + CHUNK, n))
        found = ask(ids, coding.pack(download(algorithm, state, ids, fleet.forgot), "down", ids, t + 1), t)
        everybody.by_client.update(found.by_client)
        everybody.missing.update(found.missing)
        let_go()
    return everybody


def _personalized(setting: Setting, server: Server, fleet: Fleet, n: int) -> Layers:
    """Return every client's personalized model, `{entry: (clients, values)}`; blank (NaN) if it did not answer."""
    personalized: Layers = {}

    def place(ids: Sequence[int], sent: Payload, t: int) -> Answers[None]:
        found = fleet.personalize(ids, sent, t)
        for client, model in found.by_client.items():
            for key, row in model.items():
                if key not in personalized:
                    personalized[key] = zeros((n, row.shape[1]), row.dtype)
                personalized[key][client] = row[0]
        return Answers({}, found.missing)

    for client, why in _ask(fleet, place, setting.algorithm, server.state, n, server.t, server.coding).missing.items():
        log.warning("%s did not send its personalized model: %s", setting.called(client), why)
        for rows in personalized.values():
            rows[client] = torch.nan if rows.is_floating_point() else 0
    return personalized


class _Diagnostics:
    """A method's diagnostics, recorded over the rounds."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.records: dict[int, dict[str, np.ndarray]] = {}

    def keep(self, t: int, values: dict[str, torch.Tensor]) -> None:
        """Keep this round's values unless they are thinned out: every so many, counted from the planned last round.

        So a run of more than 200 evaluations, or of large diagnostics, that is made longer or shorter keeps other
        rounds than one that was planned so.
        """
        if taken := {ROUND, LAYERS} & values.keys():
            raise RunError(f"a method's diagnostics cannot be named {', '.join(taken)}: the record has its own")
        first = next(iter(self.records.values()), None)
        if first and {name: x.shape for name, x in first.items()} != {name: x.shape for name, x in values.items()}:
            raise RunError("a method's diagnostics must have the same names and shapes in every round")
        size = sum(value.nbytes for value in values.values())
        if not size:
            return
        keep = max(2, min(RECORDS, RECORD_BYTES // size))
        after = -(-self.schedule.rounds // self.schedule.eval_every) - -(-t // self.schedule.eval_every)  # evaluations
        every = -(-self.schedule.rounds // self.schedule.eval_every // keep)  # rounded up
        if after % every == 0:  # counted from the end: the last is always kept
            self.records[t] = {name: value.numpy().copy() for name, value in values.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the values over the rounds that were kept."""
        if not self.records:
            return {}
        names = sorted(next(iter(self.records.values())))
        stacked = {name: np.stack([record[name] for record in self.records.values()]) for name in names}
        return {ROUND: np.array(list(self.records)), **stacked}


def _record(server: Server, scores: Evaluated, setting: Setting, seconds: float) -> dict[str, Any]:
    """Return one line of metrics.jsonl."""
    objective, names = setting.objective, dict(enumerate(setting.names))
    name, up = objective.headline, objective.higher_is_better
    headline = scores.personalized.get(name, np.array([]))
    known = headline[~np.isnan(headline)]
    tail = 10 if up else 90
    spread: dict[str, Callable[[], Any]] = {
        f"{name}_mean": known.mean,
        f"{name}_std": known.std,
        f"{name}_worst": known.min if up else known.max,
        f"{name}_p{tail}": lambda: np.percentile(known, tail),
    }
    controls, nobody = objective.control_names, np.array([])
    metrics = dict.fromkeys([name, *scores.personalized, "loss", *controls])  # the same in every record
    means = {metric: _mean(scores.personalized.get(metric, nobody)) for metric in metrics if metric != name}
    return {
        "round": server.t,
        **{key: _finite(figure()) if len(known) else None for key, figure in spread.items()},
        **{metric if metric in controls else f"{metric}_mean": mean for metric, mean in means.items()},
        **{f"{metric}_after_training": _mean(scores.after_training.get(metric, nobody)) for metric in metrics},
        "bytes_down": server.ledger.down,
        "bytes_up": server.ledger.up,
        "refused_uploads": server.inspector.refused,
        "seconds": round(seconds, 3),
        "clients": {
            **{metric: _plain(values) for metric, values in scores.personalized.items()},
            **{f"{metric}_after_training": _plain(values) for metric, values in scores.after_training.items()},
        },
        **({"missing": {names.get(i, str(i)): why for i, why in scores.missing.items()}} if scores.missing else {}),
    }


def _mean(values: np.ndarray) -> float | None:
    """Return the mean over those who have a value."""
    known = values[~np.isnan(values)]
    return _finite(known.mean()) if len(known) else None


def _plain(values: np.ndarray) -> list[float | None]:
    return [_finite(round(float(value), 6)) for value in values]


def _finite(value: float) -> float | None:
    """Return a number, None if JSON has no word for it."""
    return float(value) if np.isfinite(value) else None
