"""What a run leaves on disk, with one writer and one reader.

======================  ==========================================================================
config.toml             the complete configuration; `pfedla run config.toml` repeats the run
run.json                what else is known from the start: data, clients' names, objective, version
metrics.jsonl           a line for each evaluated round
summary.json            the final figures; a folder with it is complete
ledger.npz              bytes by round, client, layer and direction
diagnostics.npz         the method's diagnostics over the rounds: `round`, `layers` and, of pFedLA,
                        `alpha (rounds, clients, layers, clients)`; with candidates `alpha` has their
                        columns, and `candidates (rounds, clients, columns)` says whose they are
models/                 every client's personalized model, by number, as safetensors
checkpoint.safetensors  where the run is resumed, or made longer; the one before it beside it
error.txt               why the run failed
writer.json             while a process writes here: which
report.html             the page that `pfedla report` wrote
tensorboard/            what TensorBoard shows of the run, if it is tracked there
======================  ==========================================================================
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import socket
import time
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from pfedla import tensorfile, tree
from pfedla.errors import RunError
from pfedla.layers import Layers, LayerSpec
from pfedla.ledger import Ledger
from pfedla.modelfile import Description, save_model
from pfedla.npz import check_sizes
from pfedla.result import Result
from pfedla.version import code

fcntl: Any
try:
    import fcntl
except ImportError:  # not on Windows: there is no lock, and no run is seen to be under way
    fcntl = None

__all__ = ["EVENTS", "LAYERS", "PAGE", "ROUND", "RunRecord", "Snapshot", "State", "locked", "sync", "write_text"]

CONFIG, FACTS, METRICS, SUMMARY = "config.toml", "run.json", "metrics.jsonl", "summary.json"
LEDGER, DIAGNOSTICS, ERROR = "ledger.npz", "diagnostics.npz", "error.txt"
CHECKPOINTS = "checkpoint.safetensors", "checkpoint-before.safetensors"  # the latest, and the one before it
MODELS, EVENTS, PICTURES, PAGE = "models", "tensorboard", ("weights.png", "retained.png"), "report.html"
WRITER = "writer.json"  # who writes here now
OURS = {CONFIG, FACTS, METRICS, SUMMARY, LEDGER, DIAGNOSTICS, ERROR, WRITER, MODELS, EVENTS, PAGE}
OURS |= {*CHECKPOINTS, *PICTURES}
MOST_COUNTS = 50_000_000  # of clients' classes that are read at once
FORMAT = 2  # of what lies here: a run is resumed only if it is the same
ROUND, LAYERS = "round", "layers"  # beside a method's own names in the diagnostics

PATIENCE = 1.0  # seconds to wait for a lock

log = logging.getLogger("pfedla")
_locks: set[int] = set()  # handles of the folders that this process writes to

State = Literal["running", "done", "failed", "resumable"]


class Snapshot(NamedTuple):
    """A run after round `t`: all that is needed to resume it."""

    t: int
    state: Any
    clients: Any
    ledger: Ledger
    history: list[dict[str, Any]]
    diagnostics: dict[int, dict[str, np.ndarray]]
    seconds: float
    lengths: dict[str, Tensor]  # of the latest uploads, by kind of entry
    usual: dict[str, str]  # what they held
    refused: int  # uploads so far


class RunRecord:
    """A folder that holds one run: the one place that writes and reads it.

    A process that writes holds a lock on the folder, which ends with the process.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._longer: tuple[str, dict[str, Any]] | None = None  # the configuration and facts of a run to be made longer

    # ---- to write

    @classmethod
    def create(cls, path: Path | str, config: str, facts: dict[str, Any], *, overwrite: bool = False) -> RunRecord:
        """Make a new run's folder; one that holds a run already is refused unless `overwrite` is set."""
        record = cls(path)
        path = record.path
        try:
            record._refuse_to_create(overwrite)
            path.mkdir(parents=True, exist_ok=True)
            record._hold()
            record._refuse_to_create(overwrite)  # somebody may have been faster
            record._clear()
            known = {"format": FORMAT, "id": uuid.uuid4().hex, **facts}
            write_text(path / FACTS, json.dumps(known, indent=2) + "\n")
            write_text(path / CONFIG, config)
        except (OSError, ValueError) as error:
            record.release()
            raise RunError(f"cannot write to {path}: {_why(error)}") from None
        except RunError:
            record.release()
            raise
        return record

    def _refuse_to_create(self, overwrite: bool) -> None:
        """Refuse to make a new run of what is a file, another run, or a folder of other things."""
        path = self.path
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file: choose another folder (out)")
        if self.exists:
            if not overwrite:
                kind, go_on = ("a complete", "") if self.complete else ("an unfinished", ", resume it")
                raise RunError(f"{path} already holds {kind} run: choose another folder (out){go_on}, or overwrite it")
        elif path.is_dir() and any(file.name.removesuffix(".part") not in OURS for file in path.iterdir()):
            raise RunError(f"{path} is not empty and holds no run: choose another folder (out)")

    @classmethod
    def unfinished(cls, path: Path | str, *, longer: bool = False) -> RunRecord:
        """Return the record of an unfinished run, to be read; `longer` takes a complete one that can be made longer."""
        record = cls(path)
        if not record.exists:
            raise RunError(f"{record.path} holds no run to resume: it has no {CONFIG}")
        if record.complete and not longer:
            raise RunError(f"the run in {record.path} is complete: only more rounds could be added to it")
        if record.complete and not any((record.path / name).exists() for name in CHECKPOINTS):
            raise RunError(
                f"the run in {record.path} is complete and has no checkpoint that more rounds could start from"
            )
        if record.facts().get("format") != FORMAT:
            raise RunError(f"the run in {record.path} is of another version, which cannot be resumed: run it anew")
        return record

    @classmethod
    def resume(cls, path: Path | str, config: str | None = None, **facts: Any) -> RunRecord:
        """Open the folder of an unfinished run, to continue writing.

        With another configuration, which may differ in what does not change the rounds so far, a complete run is opened
        to be made longer; `facts` are then noted beside it. It stays as it is until it `goes_on`.
        """
        record = cls.unfinished(path, longer=config is not None)
        try:
            with record._writing():
                record._hold()
                cls.unfinished(path, longer=config is not None)  # somebody may have been faster
                if config is not None and config != record.config.read_text(encoding="utf-8"):
                    record._longer = config, facts
                (record.path / ERROR).unlink(missing_ok=True)
        except RunError:
            record.release()
            raise
        return record

    def goes_on(self) -> None:
        """Make a run that was opened with more rounds a longer one: the results of the shorter are removed."""
        if self._longer is None:
            return
        (config, facts), self._longer = self._longer, None
        with self._writing():
            (self.path / SUMMARY).unlink(missing_ok=True)
            for model in (self.path / MODELS).glob("*"):
                model.unlink()
            self.reconfigure(config, **facts)  # before the facts: one that is ahead can still be resumed

    def reconfigure(self, config: str, **facts: Any) -> None:
        """Write another configuration, of a run that became longer or shorter, and `facts` beside it."""
        with self._writing():
            write_text(self.path / CONFIG, config)
            write_text(self.path / FACTS, json.dumps(self.facts() | facts, indent=2) + "\n")

    def append(self, record: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        with self._writing(), (self.path / METRICS).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def checkpoint(self, snapshot: Snapshot) -> None:
        """Save where the run stands; the checkpoint before stays, in case this one is damaged later."""
        ledger = {key: torch.from_numpy(x) for key, x in snapshot.ledger.arrays().items() if key != "layers"}
        diagnostics = {
            str(t): {name: torch.from_numpy(value) for name, value in record.items()}
            for t, record in snapshot.diagnostics.items()
        }
        history = torch.frombuffer(bytearray(json.dumps(snapshot.history).encode()), dtype=torch.uint8)
        value = {
            "state": snapshot.state,
            "clients": snapshot.clients,
            "ledger": ledger,
            "diagnostics": diagnostics,
            "history": history,
            "lengths": snapshot.lengths,
        }
        tensors, known = tree.flatten(value), self.facts()
        facts = {
            "format": FORMAT,
            "run": known.get("id"),
            "fingerprint": known.get("fingerprint"),
            "code": code(),
            "t": snapshot.t,
            "seconds": snapshot.seconds,
            "refused": snapshot.refused,
            "usual": snapshot.usual,
            "layers": list(snapshot.ledger.layers),
            "checksums": {name: tensorfile.checksum(tensor) for name, tensor in tensors.items()},
        }
        text = json.dumps(facts)
        path, before = (self.path / name for name in CHECKPOINTS)
        part = path.with_name(path.name + ".part")
        with self._writing(part):
            with part.open("wb") as file:
                tensorfile.write(file, tensors, {"facts": text, "checksum": _checksum_of(text)})
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                path.replace(before)
            part.replace(path)
            sync(self.path)

    def restore(self, state: Any, clients: Any) -> Snapshot | None:
        """Return the latest whole checkpoint, shaped as the given state, or None if there is none.

        Metrics are as they were then. A damaged checkpoint is left for the one before it, and a warning says so.
        """
        found, damaged = self._latest(state, clients)
        if found is not None:
            with self._writing():
                for path in damaged:  # or it would take the place of the whole one when the next is written
                    path.unlink(missing_ok=True)
            self.rewrite(found.history)
            return found
        with self._writing():
            (self.path / METRICS).unlink(missing_ok=True)
        return None

    def latest(self, state: Any, clients: Any) -> Snapshot | None:
        """Return the latest whole checkpoint, shaped as the given state; nothing is written."""
        return self._latest(state, clients)[0]

    def _latest(self, state: Any, clients: Any) -> tuple[Snapshot | None, list[Path]]:
        """Return the latest whole checkpoint, and the damaged ones that would have come before it."""
        damaged: dict[Path, str] = {}
        for path in (self.path / name for name in CHECKPOINTS):
            if not path.exists():
                continue
            try:
                found = self._restored(path, state, clients)
            except RunError as error:
                damaged[path] = str(error)
                continue
            for why in damaged.values():
                log.warning("%s. The checkpoint before it is used, of round %d", why, found.t)
            return found, list(damaged)
        if damaged:
            raise RunError(f"{'; '.join(damaged.values())}. No whole checkpoint is left: run it anew")
        return None, []

    def rewrite(self, history: list[dict[str, Any]]) -> None:
        """Have the metrics hold these lines and no others."""
        with self._writing():
            write_text(self.path / METRICS, "".join(json.dumps(record) + "\n" for record in history))

    def _restored(self, path: Path, state: Any, clients: Any) -> Snapshot:
        """Read a checkpoint of this run; refuse one of another run or version, and one that is damaged."""
        known = self.facts()
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
            if metadata["checksum"] != _checksum_of(metadata["facts"]):
                raise RunError(f"{path} is damaged: what it tells of itself is not what was written")
            facts = json.loads(metadata["facts"])
            of = facts["format"], facts["run"], facts["fingerprint"]
            if of != (FORMAT, known.get("id"), known.get("fingerprint")):
                raise RunError(f"{path} is the checkpoint of another run")
            tensors, checksums = load_file(path), dict(facts["checksums"])
            wrong = {name for name in tensors.keys() | checksums if _checksum(tensors, name) != checksums.get(name)}
            if wrong:
                raise RunError(f"{path} is damaged: {', '.join(sorted(wrong)[:3])} is not what was written")
            diagnostics: dict[int, dict[str, np.ndarray]] = {}
            for key, tensor in _under("diagnostics", tensors).items():
                t, _, name = key.partition("/")
                diagnostics.setdefault(int(t), {})[name] = tensor.numpy()
            ledger = {key: tensor.numpy() for key, tensor in _under("ledger", tensors).items()}
            snapshot = Snapshot(
                t=int(facts["t"]),
                state=tree.restore(state, tensors, "state"),
                clients=tree.restore(clients, tensors, "clients"),
                ledger=Ledger.of({**ledger, "layers": np.array(facts["layers"])}),
                history=_tables(json.loads(tensors["history"].numpy().tobytes())),
                diagnostics=dict(sorted(diagnostics.items())),
                seconds=float(facts["seconds"]),
                lengths={kind: tensor.clone() for kind, tensor in _under("lengths", tensors).items()},
                usual=dict(facts["usual"]),
                refused=int(facts["refused"]),
            )
        except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RunError(f"cannot read {path}: {error!r}") from error
        if facts["code"] != code():
            log.warning("%s was written by version %s, this is %s", path, facts["code"], code())
        return snapshot

    def finish(self, result: Result, *, resumable: bool = False) -> None:
        """Write the results; the summary comes last, so that a folder with it is complete.

        The checkpoint is that of the last round if the run is `resumable`: more rounds may then be added.
        """
        with self._writing():
            self._finish(result, resumable)
        self.release()

    def _finish(self, result: Result, resumable: bool) -> None:
        (self.path / SUMMARY).unlink(missing_ok=True)  # of a complete run that handed out its models again
        ledger = result.ledger.arrays()
        _save(self.path / LEDGER, ledger)
        if result.diagnostics:
            _save(self.path / DIAGNOSTICS, {LAYERS: ledger["layers"], **result.diagnostics})
        (self.path / MODELS).mkdir(exist_ok=True)
        facts = self.facts()
        for client in result.with_models:
            about = Description.of(facts, result.names[client], result.spec.names if result.spec else ())
            save_model(self._model(client), result.model(client), about)
            _settle(self._model(client))
        for name in (LEDGER, DIAGNOSTICS, METRICS):
            if (self.path / name).exists():
                _settle(self.path / name)
        sync(self.path / MODELS)
        write_text(self.path / SUMMARY, json.dumps(result.summary, indent=2) + "\n")
        for name in CHECKPOINTS[1 if resumable else 0 :]:
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def _writing(self, part: Path | None = None) -> Iterator[None]:
        """Say in one sentence that something cannot be written; half a file is removed."""
        try:
            if self._lock is not None and not os.path.samestat(os.fstat(self._lock), self.path.stat()):
                raise RunError(f"cannot write to {self.path}: another folder has taken its place")
            yield
        except (OSError, SafetensorError) as error:
            if part:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
            raise RunError(f"cannot write to {self.path}: {_why(error)}") from error

    def fail(self, error: BaseException) -> None:
        """Note why the run ended, if it is not because somebody stopped it."""
        if not isinstance(error, KeyboardInterrupt):
            with suppress(RunError), self._writing():
                write_text(self.path / ERROR, f"{str(error) or type(error).__name__}\n")
        self.release()

    def release(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            with suppress(RunError), self._writing():
                (self.path / WRITER).unlink(missing_ok=True)
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            _locks.discard(self._lock)
            os.close(self._lock)
        self._lock = None

    def picture(self, name: str) -> Path:
        """Return where a picture of the run is drawn."""
        assert name in PICTURES
        return self.path / name

    # ---- to read

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / CONFIG).exists()

    @property
    def complete(self) -> bool:
        """Whether the run here reached its end."""
        return (self.path / SUMMARY).exists()

    @property
    def state(self) -> State:
        """How the run stands: under way in some process, done, failed, or stopped and resumable."""
        if not self.exists:
            raise RunError(f"{self.path} holds no run")
        if self.complete:
            return "done"
        if not self._take_lock(peek=True):
            return "running"
        return "failed" if (self.path / ERROR).exists() else "resumable"

    @property
    def config(self) -> Path:
        """The configuration file."""
        return self.path / CONFIG

    @property
    def error(self) -> str:
        """Why the run failed, if it did."""
        path = self.path / ERROR
        with suppress(OSError):
            return path.read_text(encoding="utf-8", errors="replace").strip()
        return ""

    def changed(self) -> tuple[int, ...]:
        """Return when and how much was written last: another value means that there is something new to read."""
        found: list[int] = []
        for name in (FACTS, METRICS, SUMMARY, ERROR, CHECKPOINTS[0]):
            try:
                status = (self.path / name).stat()
                found += [status.st_mtime_ns, status.st_size]
            except OSError:
                found += [0, 0]
        return tuple(found)

    def facts(self) -> dict[str, Any]:
        """Return what was known from the start beside the configuration; nothing for runs of older versions."""
        return self._json(FACTS) if (self.path / FACTS).exists() else {}

    def summary(self) -> dict[str, Any]:
        """Return the final figures of a complete run."""
        return self._json(SUMMARY)

    def history(self) -> list[dict[str, Any]]:
        """Return the metrics of all evaluated rounds; a last line that was cut off in the middle is left out."""
        path = self.path / METRICS
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            whole = [json.loads(line) for line in lines[:-1]]
            with suppress(ValueError):
                whole += [json.loads(line) for line in lines[-1:]]
            return _tables(whole)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise RunError(f"cannot read {path}: {error}") from error

    def ledger(self) -> Ledger:
        """Return the bytes that crossed the wire."""
        arrays = self._arrays(LEDGER)
        try:
            return Ledger.of(arrays)
        except KeyError as error:
            raise RunError(f"cannot read {self.path / LEDGER}: it has no {error}") from error

    def diagnostics(self) -> dict[str, np.ndarray]:
        """Return the method's diagnostics over the rounds, and the layers' names; empty if it has none."""
        return self._arrays(DIAGNOSTICS) if (self.path / DIAGNOSTICS).exists() else {}

    def so_far(self) -> tuple[Ledger | None, dict[str, np.ndarray]]:
        """Return the ledger and the diagnostics, as they were at the latest checkpoint if the run is not complete.

        None and nothing if there is no checkpoint yet, or only a damaged one.
        """
        if self.complete:
            return self.ledger(), self.diagnostics()
        try:
            with safe_open(self.path / CHECKPOINTS[0], "np") as file:
                layers = np.array(json.loads(file.metadata()["facts"])["layers"], dtype=np.str_)
                keys = {key: key.split("/", 2) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
                lines = {way[1]: file.get_tensor(key) for key, way in keys.items() if way[0] == "ledger"}
                kept: dict[str, dict[int, np.ndarray]] = {}
                for key, way in keys.items():
                    if way[0] == "diagnostics":
                        kept.setdefault(way[2], {})[int(way[1])] = file.get_tensor(key)
            rounds = sorted(next(iter(kept.values()), {}))
            values = {name: np.stack([by_round[t] for t in rounds]) for name, by_round in kept.items()}
            diagnostics = {LAYERS: layers, ROUND: np.array(rounds), **values} if rounds else {}
            return Ledger.of({**lines, "layers": layers}), diagnostics
        except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError):
            return None, {}

    def holdings(self) -> np.ndarray | None:
        """Return who holds what, `(clients, classes, 2)` training and test samples; None if there are no classes."""
        facts = self.facts()
        classes, rows = len(facts.get("classes", ())), facts.get("holdings")
        if not classes or not rows:
            return None
        if len(rows) * classes > MOST_COUNTS:
            raise RunError(f"cannot read {self.path / FACTS}: {len(rows)} clients with {classes} classes are too many")
        counts = np.zeros((len(rows), classes, 2), np.int64)
        try:
            for client, row in enumerate(rows):
                for c, both in row.items():
                    counts[client, int(c)] = both
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise RunError(f"cannot read {self.path / FACTS}: {error}") from error
        return counts

    def models(self, template: nn.Module, spec: LayerSpec, n: int) -> Layers:
        """Return the personalized models that were kept, `{entry: (clients, values)}`; NaN where there is none."""
        personalized: Layers = {}
        template = copy.deepcopy(template)
        for client in range(n):
            if self._fill(template, client):
                for key, row in spec.read(template).items():
                    blank = torch.nan if row.is_floating_point() else 0
                    personalized.setdefault(key, torch.full((n, row.shape[1]), blank, dtype=row.dtype))[client] = row[0]
        return personalized

    def freeze(self, template: nn.Module, spec: LayerSpec) -> None:
        """Give a template the parameters that no client trains, from the models that were kept."""
        first = spec.read(template)
        self._fill(template, 0)
        spec.write(template, first)

    def _fill(self, module: nn.Module, client: int) -> bool:
        """Read a client's model into a module, if it was kept."""
        path = self._model(client)
        try:
            if path.exists():
                module.load_state_dict(load_file(path))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise RunError(f"cannot read {path} into the model: {error}") from error
        return path.exists()

    def _model(self, client: int) -> Path:
        return self.path / MODELS / f"{client}.safetensors"

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"cannot read {self.path / name}: {error}") from error
        if not isinstance(value, dict):
            raise RunError(f"cannot read {self.path / name}: it holds no table")
        return value

    def _arrays(self, name: str) -> dict[str, np.ndarray]:
        try:
            with (self.path / name).open("rb") as file:
                check_sizes(file)
                with np.load(file) as arrays:
                    return dict(arrays)
        except Exception as error:  # a damaged archive can raise nearly anything
            raise RunError(f"cannot read {self.path / name}: {error}") from error

    # ---- both

    def _hold(self) -> None:
        """Take the lock, or say that somebody else has it."""
        last = time.monotonic() + PATIENCE  # who looks at the run has it for a moment
        while not self._take_lock():
            if time.monotonic() < last:
                time.sleep(0.02)
                continue
            raise RunError(
                f"{_writer(self.path)} is writing to {self.path}: wait for it, or choose another folder (out)"
            )
        with suppress(OSError):
            write_text(self.path / WRITER, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")

    def _take_lock(self, *, peek: bool = False) -> bool:
        """Return whether the lock could be had; keep it unless it was only a peek."""
        if fcntl is None or not self.path.is_dir() or (self._lock is not None and not peek):
            return True
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if peek else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            return not isinstance(error, BlockingIOError)  # another reason: this file system has no locks
        if peek:
            os.close(handle)
        else:
            self._lock = handle
            _locks.add(handle)
        return True

    def _clear(self) -> None:
        for name in OURS - {WRITER, MODELS, EVENTS}:
            (self.path / name).unlink(missing_ok=True)
        for name in (MODELS, EVENTS):
            shutil.rmtree(self.path / name, ignore_errors=True)


def _let_go_of_locks() -> None:
    """Close the locks that came along with a fork: they are the parent's alone, and end with it."""
    for handle in _locks:
        os.close(handle)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_of_locks)


def _writer(path: Path) -> str:
    """Return who holds a folder's lock, as far as it is known."""
    try:
        found = json.loads((path / WRITER).read_text())
        return f"process {int(found['pid'])} on {found['host']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"


def write_text(path: Path, text: str) -> None:
    """Write a text file so that it is there as a whole or not at all, whatever happens to the machine."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync(path.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process is inside this block for the same folder, where there are locks."""
    handle = os.open(folder, os.O_RDONLY) if fcntl else None
    try:
        if handle is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def sync(folder: Path) -> None:
    """Have the names in a folder reach the disk, where a folder can be asked to."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _settle(file: Path) -> None:
    """Have a file's content reach the disk."""
    with file.open("r+b") as written:
        os.fsync(written.fileno())


def _why(error: Exception) -> object:
    return (isinstance(error, OSError) and error.strerror) or error


def _tables(values: Any) -> list[dict[str, Any]]:
    """Return a list of tables as it is; refuse anything else."""
    if not isinstance(values, list) or not all(isinstance(value, dict) and "round" in value for value in values):
        raise TypeError("it holds other things than the metrics of rounds")
    return values


def _under(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one part, without its name."""
    return {key.removeprefix(f"{name}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}


def _checksum_of(text: str) -> str:
    return str(zlib.crc32(text.encode()))


def _checksum(tensors: Mapping[str, Tensor], name: str) -> int | None:
    return tensorfile.checksum(tensors[name]) if name in tensors else None


def _save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as a compressed `.npz`; numpy's own function takes some names for its arguments."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, values in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(part, values, allow_pickle=False)
