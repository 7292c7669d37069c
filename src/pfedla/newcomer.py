"""A client that joins a trained federation: it gets a model of its own, and the others stay as they are.

It is given a row on the server and the mean of all models. Its gradients at the model it would be served, on data that
no model was trained on, then say layer by layer whose models it mixes. After that it trains as everybody did, in rounds
of its own, and what it changes says how much of its own model it takes: faster than hypernetworks learn, for the others
stay as they are. The two steps were chosen on validation samples of two federations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from pfedla.client import Evaluation, Job, Runtime, Setting, threads
from pfedla.config import Experiment
from pfedla.data.federation import Client, Federation, own_data
from pfedla.engine import FlatModel
from pfedla.errors import ConfigError, DataError, RunError
from pfedla.experiment import load, setting_of
from pfedla.layers import Layers
from pfedla.ledger import Ledger
from pfedla.modelfile import Description, check_file, save_model
from pfedla.objective import Classification
from pfedla.randomness import stream
from pfedla.record import RunRecord
from pfedla.rounds import download
from pfedla.trained import numbered
from pfedla.training import ClientData, Task
from pfedla.wire import Payload

__all__ = ["Joined", "attracted", "join", "join_with"]

# How far a newcomer's logits move: by its k-th gradient, and after its k-th round, 1/√k of this.
FIRST_STEP = 1.0  # by a gradient, in the layer that matters most
OWN_STEP = 4.0  # after a round, in every layer, and to its own model above all


class Joined(NamedTuple):
    """What became of a newcomer."""

    history: list[dict[str, Any]]  # its metrics before its first round (0) and after each
    weights: dict[str, dict[str, float]]  # by layer, whose models it mixes; empty for methods without weights
    module: nn.Module  # its personalized model
    description: Description

    def save(self, path: Path | str) -> None:
        """Write its model to a file, which `pfedla.load_model` reads."""
        check_file(Path(path))
        try:
            save_model(Path(path), self.module, self.description)
        except (OSError, SafetensorError) as error:
            raise RunError(f"cannot write to {path}: {str(error).partition(chr(10))[0]}") from error


def join(
    path: Path | str,
    client: Client,
    *,
    name: str = "newcomer",
    rounds: int = 5,
    gradients: int = 10,
    train_fraction: float | None = None,
    model: Callable[[], nn.Module] | nn.Module | None = None,
) -> Joined:
    """Let a client join the federation that a complete run has trained. The run's folder is not changed.

    Parameters
    ----------
    path
        The run's folder. Its method is pFedLA, HeurpFedLA, pFedLA-X, or one with a shared model.
    client
        The newcomer's data: `(x, y)` or `(x, y, x_test, y_test)`, like that of the others.
    name
        What it is called.
    rounds
        How many rounds it trains.
    gradients
        How many gradients choose the mixture that it starts from; each is a model down and a gradient up.
    train_fraction
        The share of its samples to train on, if it brings no test data; the run's, if none is given.
    model
        Makes the module of a run that was started from Python.
    """
    record = RunRecord(path)
    if not record.complete:
        raise RunError(f"{record.path} holds no complete run")
    facts, experiment = record.facts(), Experiment.load(record.config)
    if not facts.get("data"):
        raise RunError(f"the clients of {record.path} are elsewhere: pfedla deploy add-site gives it one more")
    share = experiment.data.train_fraction if train_fraction is None else train_fraction
    data = _newcomer(client, name, facts, experiment, share).data[0]
    return join_with(path, data, name=name, rounds=rounds, gradients=gradients, model=model)


def join_with(
    path: Path | str,
    data: ClientData,
    *,
    name: str,
    rounds: int,
    gradients: int,
    model: Callable[[], nn.Module] | nn.Module | None = None,
) -> Joined:
    """Let a client with these samples join: see `join`."""
    counts: tuple[object, ...] = (rounds, gradients)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ConfigError(f"rounds = {rounds!r} and gradients = {gradients!r} must be at least 0, and whole")
    record, result = RunRecord(path), load(path, model)
    if result.template is None or result.spec is None:
        raise ConfigError("this run's model came from Python: name it, model=... (--model)")
    if name in result.names:
        raise ConfigError(f"the federation has a client {name!r} already: give the newcomer another name")
    experiment, n = Experiment.load(record.config), len(result.names)
    if experiment.privacy.clip is not None:
        raise ConfigError("privacy.clip: a newcomer's gradients are not noised, so nobody can join this run")
    setting = setting_of(experiment, result.template, result.spec, (*result.names, name))
    state, t = _trained(record, setting, n)
    state = setting.algorithm.admit(state, stream(setting.seed, "join", name))
    with threads(1):  # as everybody trained
        member = _Member(setting, n, data, attracted(setting, state, n, data, gradients), t)
        history = [member.scores()]
        for _ in range(rounds):
            member.train()
            history.append(member.scores())
        module = setting.spec.build(setting.template, member.model(), 0)
    description = Description.of(record.facts(), name, setting.spec.names)
    return Joined(history, _weights(setting, member.state), module, description)


def attracted(setting: Setting, state: Any, client: int, data: ClientData, gradients: int) -> Any:
    """Return the state after so many gradients of a newcomer, each taken at the mixture that the ones before chose."""
    algorithm, own = setting.algorithm, setting.enroll().own
    model = FlatModel(copy.deepcopy(setting.template), setting.spec, setting.objective, setting.device)
    task = Task(model, [data.train], [client], setting.training, setting.seed, 0, setting.called)
    for k in range(1, gradients + 1):
        served = task.normalized(download(algorithm, state, [client], [client]).fill(own))
        downhill = {key: -rows for key, rows in task.gradient(served).items()}
        state = algorithm.attract(state, client, downhill, FIRST_STEP / k**0.5, by_layer=False)
    return state


class _Member:
    """A newcomer in rounds of its own, in which nobody else takes part."""

    def __init__(self, setting: Setting, client: int, data: ClientData, state: Any, t: int) -> None:
        self.setting, self.client, self.state, self.t = setting, client, state, t
        self.kept, self.ledger = setting.enroll(), Ledger(setting.spec.names)
        self._runtime, self._rounds = Runtime(setting, {client: data}), 0

    def train(self) -> None:
        """Take part in a round."""
        self.t, self._rounds = self.t + 1, self._rounds + 1
        coding, ids, sent = self.setting.coding, [self.client], self._sent(self.t)
        self.kept, packed = self._runtime.run(Job("train", self.client, self.t, self.kept, sent))
        self.ledger.record(self.t, ids, sent, ids, packed)
        got, upload = coding.unpack(sent, "down"), coding.unpack(packed, "up")
        algorithm = self.setting.algorithm
        self.state = algorithm.update(self.state, torch.tensor(ids), got, upload)
        step = OWN_STEP / self._rounds**0.5
        self.state = algorithm.attract(self.state, self.client, upload.layers, step, by_layer=True)

    def scores(self) -> dict[str, Any]:
        """Return its metrics, and what it has been sent and has sent in its rounds."""
        found: Evaluation = self._runtime.run(self._job("evaluate"))
        return {
            "round": self._rounds,
            **found.personalized,
            "bytes_down": self.ledger.down,
            "bytes_up": self.ledger.up,
        }

    def model(self) -> Layers:
        """Return its personalized model."""
        found: Layers = self._runtime.run(self._job("personalize"))
        return found

    def _job(self, kind: Literal["evaluate", "personalize"]) -> Job:
        return Job(kind, self.client, self.t, self.kept, self._sent(self.t + 1))

    def _sent(self, t: int) -> Payload:
        """Return what it is sent, packed; before its first round every layer, for it has nothing to retain."""
        ids = [self.client]
        got = download(self.setting.algorithm, self.state, ids, () if int(self.kept.rounds) else ids)
        return self.setting.coding.pack(got, "down", ids, t)


def _newcomer(
    client: Client, name: str, facts: dict[str, Any], experiment: Experiment, train_fraction: float
) -> Federation:
    """Return the newcomer's samples, numbered as the run's classes are; refuse what its models cannot take."""
    classes = list(facts.get("classes", []))
    if isinstance(experiment.objective, Classification) and classes and len(client) in (2, 4):
        x, y, *test = (np.asarray(part) for part in client)
        client = (x, numbered(y, classes), test[0], numbered(test[1], classes)) if test else (x, numbered(y, classes))
    federation = own_data([client], [name], train_fraction, experiment.schedule.seed, experiment.objective)
    if federation.shape != tuple(facts["shape"]):
        raise DataError(
            f"{name}: the federation's inputs have the shape {tuple(facts['shape'])}, not {federation.shape}"
        )
    if federation.outputs > facts["outputs"]:
        raise DataError(f"{name}: targets need {federation.outputs} outputs, and the models have {facts['outputs']}")
    if "pixels" in facts and federation.pixels != facts["pixels"]:
        kind = "images of bytes" if federation.pixels else "no images of bytes"
        raise DataError(f"{name}: inputs are {kind}, unlike the federation's")
    return federation


def _trained(record: RunRecord, setting: Setting, n: int) -> tuple[Any, int]:
    """Return the server's state at the end of a run, and its last round."""
    state = setting.algorithm.init(setting.spec.read(setting.template), n, stream(setting.seed, "init"))
    saved = record.latest(state, setting.enroll_all(n))
    if saved is None:
        raise RunError(f"{record.path} has no checkpoint to join: run it with machine.checkpoints = true")
    return saved.state, saved.t


def _weights(setting: Setting, state: Any) -> dict[str, dict[str, float]]:
    alpha = setting.algorithm.diagnostics(state).get("alpha")
    if alpha is None:
        return {}
    rows = zip(setting.spec.names, alpha[-1].tolist(), strict=True)
    return {layer: dict(zip(setting.names, row, strict=True)) for layer, row in rows}
