"""A site's side: it takes a job apart, plays the one client that it is, keeps what is its own, and answers.

Every message may come to a new process: whatever must last lies on the site's disk.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from safetensors.torch import save as to_safetensors

from pfedla.client import Evaluation, Job, Kept, Runtime, Setting, threads
from pfedla.errors import ConfigError, DataError, ModelError, PfedlaError, RunError, unknown_name
from pfedla.flower.deployment import Deployment, SiteCode
from pfedla.flower.messages import CALL, KEPT, KINDS, Order, answer, metrics, order, packed, payload
from pfedla.flower.roster import digest, first_values, outline
from pfedla.flower.vault import Vault, durably
from pfedla.layers import Layers
from pfedla.models import check_model
from pfedla.tensorfile import checksum
from pfedla.training import ClientData
from pfedla.version import __version__
from pfedla.wire import EXAMPLES, decode, encode

__all__ = ["LostError", "Site", "fault"]

MODEL = "model.safetensors"
STATE = "pfedla-state"
TOLD = ("site", "state", "code", "device", "threads")  # what a SuperNode's --node-config may say

log = logging.getLogger("pfedla")


def fault(why: str, site: str = "") -> RecordDict:
    """Return an answer to any message that says in one line why there is no other."""
    line = why.partition("\n")[0]
    return answer(fault=line, lost=False, site=site, outline="", first=0, examples=0, version=__version__)


class LostError(PfedlaError):
    """The site does not have what the server takes it to keep; it may have what is `newer`."""

    newer = False


@dataclass(frozen=True)
class Site:
    """One site of a deployment."""

    deployment: Deployment
    name: str
    state: Path  # where it keeps what is its own
    own_code: str | None = None  # a file or module of its own, in place of the deployment's
    device: str | None = None
    threads: int = 1  # with one, as simulated clients have, the result is theirs to the bit

    @classmethod
    def of(cls, deployment: Deployment, context: Context) -> Site:
        """Return the site that a SuperNode's --node-config describes."""
        for key in sorted(context.node_config.keys() - {*TOLD}):
            raise unknown_name("setting in --node-config", key, TOLD)
        found = {name: context.node_config.get(name) for name in TOLD[:-1]}
        texts = {name: None if value is None else str(value) for name, value in found.items()}
        name = texts["site"]
        if not name:
            raise ConfigError("the SuperNode does not say which site it is: --node-config 'site=\"NAME\"'")
        state, count = Path(texts["state"] or Path(STATE) / name), context.node_config.get("threads", 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"--node-config: threads = {count!r} must be a whole number, at least 1")
        return cls(deployment, name, state, texts["code"], texts["device"], count)

    def handle(self, message: Message) -> RecordDict:
        """Answer a message; what goes wrong is told in a line that tells nothing of the data."""
        kind = message.metadata.message_type
        try:
            if kind == CALL:
                return self._call()
            asked = order(message.content)
            if asked.site != self.name:
                raise RunError(f"its SuperNode is now {self.name}'s, and was {asked.site}'s before")
            if asked.software != __version__:
                raise RunError(f"it has version {__version__} of pfedla by now, and the server {asked.software[:40]}")
            if asked.model != digest(outline(self.setting.spec, self.setting.template)):
                raise RunError("its model is not the server's any more")
            if kind == KEPT:
                self._kept(asked)
                return answer()
            done = {word: job for job, word in KINDS.items()}[kind]
            return self._play(done, asked, payload(message.content))
        except LostError as error:
            log.warning("%s", error)
            return answer(fault=str(error), lost=True, newer=error.newer)
        except (ConfigError, DataError, ModelError) as error:  # words of the site's own code may be among it
            log.error("%s", error)
            return fault("its code, data or model cannot be used; its own log says why", self.name)
        except PfedlaError as error:
            log.error("%s", error)
            return fault(str(error), self.name)
        except Exception as error:
            log.exception("a message of the server could not be answered")
            return fault(f"{type(error).__name__}; its own log says more", self.name)

    @cached_property
    def _code(self) -> SiteCode:
        return self.deployment.code(self.own_code)

    @cached_property
    def setting(self) -> Setting:
        """The model, the method and how it trains here."""
        return self.deployment.setting(self._code, self.device)

    @cached_property
    def data(self) -> ClientData:
        """The site's samples, found to fit the model."""
        data = self.deployment.data(self._code, self.name).data
        check_model(self.setting.template, self.setting.objective, data, [self.name])
        return data[0]

    def _call(self) -> RecordDict:
        """Say who this is, and what its model looks like."""
        told = self.deployment.deploy.examples and self.setting.privacy.clip is None
        setting, examples = self.setting, len(self.data.train) if told else 0
        first, layers = first_values(setting.template), outline(setting.spec, setting.template)
        return answer(site=self.name, outline=layers, first=first, examples=examples, version=__version__)

    def _kept(self, asked: Order) -> Kept:
        """Return what the site keeps, as the server counts."""
        first = self.setting.enroll()
        if not asked.version:
            return first
        vault = Vault(self.state, asked.run, self.name)
        found = vault.read(asked.version, first)
        if found is None:
            error = LostError(f"it does not have what it kept after round {asked.version} any more")
            error.newer = any(version > asked.version for version in vault.versions())
            raise error
        return found

    def _play(self, kind: str, asked: Order, sent: bytes) -> RecordDict:
        """Do a job with the one-client runtime."""
        targets = self.data.test.targets  # inputs may be augmented anew each time they are read
        Vault(self.state, asked.run, self.name).hold_to(f"{len(targets)} targets, {checksum(targets):08x}")
        kept = self._kept(asked)
        runtime = Runtime(self.setting, {asked.client: self.data})
        job = Job(kind, asked.client, asked.t, kept, decode(sent, self.setting.spec.names))  # type: ignore[arg-type]
        with threads(self.threads):
            found = runtime.run(job)
        if kind == "evaluate":
            told = ", ".join(f"{name} {value:.4f}" for name, value in found.personalized.items())
            log.info("after round %d, on this site's test data: %s", asked.t, told)
            return answer(metrics(found if self.deployment.deploy.scores else Evaluation({}, {})))
        if kind == "personalize":
            self._hold(found, asked)
            return answer(packed(to_safetensors(found if self.deployment.deploy.models else {})))
        kept, upload = found
        Vault(self.state, asked.run, self.name).write(asked.t, kept, asked.version)
        if not self.deployment.deploy.examples and EXAMPLES in upload.values:
            ones = torch.ones_like(upload.values[EXAMPLES])
            upload = upload._replace(values={**upload.values, EXAMPLES: ones})
        return answer(packed(encode(upload)))

    def _hold(self, model: Layers, asked: Order) -> None:
        """Write the personalized model where its owner finds it, and beside what it keeps of this run."""
        module = self.setting.spec.build(self.setting.template, model)
        tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
        path, vault = self.state / MODEL, Vault(self.state, asked.run, self.name)
        vault.claim()
        content = to_safetensors(tensors, {"site": self.name, "run": asked.run, "round": str(asked.t)})
        for place in (vault.folder / MODEL, path):
            place.parent.mkdir(parents=True, exist_ok=True)
            with durably(place) as file:
                file.write(content)
        log.info("the personalized model is in %s: model.load_state_dict(safetensors.torch.load_file(...))", path)
