"""One client's runtime: what it keeps, its data, the method's client half, its scores.

Worker processes, the actors of a cluster and a site of its own all play clients with this code.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pfedla.algorithm import Algorithm
from pfedla.codec import SPARSE, Codec, Coding, owed_after, with_owed
from pfedla.engine import FlatModel
from pfedla.errors import ConfigError, PfedlaError, RunError
from pfedla.layers import STATS, Layers, LayerSpec, entry
from pfedla.objective import Classification, Objective
from pfedla.privacy import Privacy, normal_of, private, system_normal
from pfedla.storage import repeat
from pfedla.training import ClientData, Task, Training, score
from pfedla.wire import Payload

__all__ = ["Evaluation", "Job", "Kept", "Runtime", "Setting", "threads"]


@dataclass(frozen=True)
class Setting:
    """What is fixed for a whole run: the model, its layers, the method, what is trained for, how, and what travels."""

    template: nn.Module
    spec: LayerSpec
    algorithm: Algorithm[Any]
    training: Training
    seed: int
    device: str = "cpu"
    objective: Objective = field(default_factory=Classification)
    codec: Codec = field(default_factory=Codec)
    names: tuple[str, ...] = ()  # of the clients, for messages
    privacy: Privacy = field(default_factory=Privacy)
    deployed: bool = False  # clients are real: their noise comes from the operating system, not from the seed
    counted: bool = True  # clients say how many examples they have; else each says 1

    def __post_init__(self) -> None:
        """Refuse to leave values out of uploads that are no changes, and to call private what is not."""
        if self.privacy.clip is not None:
            self._refuse_to_reveal()
        if self.codec.up in SPARSE and not self.algorithm.uploads_changes:
            method = type(self.algorithm).__name__
            raise ConfigError(f"codec.up = {self.codec.up!r} sends a part of a change, and {method} sends whole models")

    def _refuse_to_reveal(self) -> None:
        algorithm, method = self.algorithm, type(self.algorithm).__name__
        if not algorithm.uploads_changes:
            raise ConfigError(f"privacy.clip bounds changes, and {method} sends whole models")
        if algorithm.uploads_beside:
            beside = ", ".join(algorithm.uploads_beside)
            raise ConfigError(f"privacy.clip: {method} uploads {beside}, which nothing here clips or noises")
        telling = [
            name for name in self.spec.names if algorithm.uploads(name) and entry(name, STATS) in self.spec.slots
        ]
        if telling and not algorithm.renews_statistics:
            raise ConfigError(
                f"privacy.clip: {method} uploads the running statistics of {', '.join(telling)} and needs them: "
                "choose a model without, such as mlp, or a method that keeps them at the client"
            )

    @property
    def coding(self) -> Coding:
        """How payloads are packed and unpacked."""
        sizes = {layer: self.spec.size(layer) for layer in self.spec.names}
        return Coding(self.codec, sizes, self.spec.dtype, self.seed)

    def called(self, client: int) -> str:
        """Return what messages call a client: by its name, or its number if it has none."""
        name = self.names[client] if client < len(self.names) else str(client)
        return name if name.startswith("client") else f"client {name}"

    def enroll(self) -> Kept:
        """Return what a client keeps before its first round, as one row."""
        theta = self.spec.read(self.template)
        lossy = self.codec.up is not None and self.algorithm.uploads_changes
        owing = [layer for layer in self.spec.names if lossy and self.algorithm.uploads(layer)]
        owed = {layer: torch.zeros_like(theta[layer]) for layer in owing}
        return Kept(self.algorithm.enroll(theta), torch.zeros(1, dtype=torch.int64), owed)

    def enroll_all(self, n: int) -> Kept:
        """Return what `n` clients keep before their first round."""
        first = self.enroll()
        own, owed = ({key: repeat(row, n) for key, row in part.items()} for part in (first.own, first.owed))
        return Kept(own, first.rounds.repeat(n), owed)


class Kept(NamedTuple):
    """What clients keep between rounds, one row per client."""

    own: Layers  # the method's: the model after local training, and whatever the method adds
    rounds: Tensor  # (clients,) int64: how often each has trained
    owed: Layers = {}  # noqa: RUF012 (never written): what a codec lost of their changes so far, by layer


class Evaluation(NamedTuple):
    """A client's metrics on its test data."""

    personalized: dict[str, float]  # of the model the server would have the client use now
    after_training: dict[str, float]  # of the model after its latest local training; NaN if it never trained


class Job(NamedTuple):
    """What one client is to do in round `t`, with what it keeps and what it was sent (packed)."""

    kind: Literal["train", "evaluate", "personalize"]
    client: int
    t: int
    kept: Kept
    sent: Payload


class Runtime:
    """Plays clients, one at a time, with one resident model."""

    def __init__(self, setting: Setting, data: Mapping[int, ClientData]) -> None:
        self.setting, self.data = setting, data
        self.model = FlatModel(copy.deepcopy(setting.template), setting.spec, setting.objective, setting.device)
        self._first, self._coding = setting.enroll().own, setting.coding

    def run(self, job: Job) -> Any:
        """Do a job; whatever goes wrong is an error that names the client."""
        try:
            play = {"train": self.train, "evaluate": self.evaluate, "personalize": self.personalize}[job.kind]
            return play(job)
        except PfedlaError:
            raise
        except Exception as error:
            text = f"{self.setting.called(job.client)} failed in round {job.t}:\n{traceback.format_exc()}"
            raise RunError(text) from error

    def answer(self, job: Job) -> tuple[bool, Any]:
        """Do a job; return True and its result, or False and what went wrong, to be told in another process."""
        try:
            return True, self.run(job)
        except PfedlaError as error:
            return False, str(error)

    def train(self, job: Job) -> tuple[Kept, Payload]:
        """Return what the client will keep once the server has taken its answer, and the answer, packed."""
        own, upload = self.setting.algorithm.train(job.kept.own, self._got(job), self._task(job))
        for key in own.keys() | self._first.keys():
            mine, first = own.get(key), self._first.get(key)
            if mine is None or first is None or (mine.shape, mine.dtype) != (first.shape, first.dtype):
                who = self.setting.called(job.client)
                raise RunError(f"{who} must keep what its method's enroll() returns; {key} differs")
        setting = self.setting
        normal = system_normal if setting.deployed else normal_of(setting.seed, job.t, job.client)
        upload = private(upload, setting.privacy, type(setting.algorithm).__name__, normal)
        due = with_owed(upload, job.kept.owed)
        packed = self._coding.pack(due, "up", [job.client], job.t)
        owed = owed_after(due, self._coding.unpack(packed, "up"), job.kept.owed)
        return Kept(own, job.kept.rounds + 1, owed), packed

    def personalize(self, job: Job) -> Layers:
        """Return the client's personalized model, and nothing that the method keeps beside it."""
        model = self.setting.algorithm.personalize(job.kept.own, self._got(job), self._task(job))
        return {key: model[key] for key in self.setting.spec.slots}

    def evaluate(self, job: Job) -> Evaluation:
        """Score the personalized model, and the one after the client's latest training."""
        train, test = ([part] for part in self.data[job.client])
        scores = [score(self.model, self.personalize(job), test, train)]
        if int(job.kept.rounds):
            scores.append(score(self.model, job.kept.own, test, train))
        else:
            scores.append({metric: values * torch.nan for metric, values in scores[0].items()})
        before, after = ({metric: float(values[0]) for metric, values in found.items()} for found in scores)
        return Evaluation(before, after)

    def _got(self, job: Job) -> Payload:
        return self._coding.unpack(job.sent, "down")

    def _task(self, job: Job) -> Task:
        setting, train = self.setting, self.data[job.client].train
        return Task(self.model, [train], [job.client], setting.training, setting.seed, job.t, setting.called)


@contextmanager
def threads(count: int = 1) -> Iterator[None]:
    """Compute with so many threads. Clients have one each: sums over several end in other last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
