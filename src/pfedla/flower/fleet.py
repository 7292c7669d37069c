"""A fleet of sites: one message to each, with its own row of the payload and nothing of the others'."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import torch
from flwr.app import Message, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from torch import Tensor

from pfedla.client import Evaluation
from pfedla.errors import RunError, plain
from pfedla.fleet import Answers, Judge
from pfedla.flower.messages import KEPT, KINDS, Order, evaluation, exchange, field, job, payload
from pfedla.flower.roster import Roster
from pfedla.layers import Layers, LayerSpec
from pfedla.objective import Classification, Objective
from pfedla.version import __version__
from pfedla.wire import Payload, decode, encode

__all__ = ["JOINED", "FlowerFleet"]

TIMES, MARGIN = 16, 2**20  # an upload of more than 16 models and a megabyte is not even decoded
JOINED = -1  # the version of a site that joined later: it has nothing, and is sent all that the server knows of it

log = logging.getLogger("pfedla")

T = TypeVar("T")


class FlowerFleet:
    """Sites that are reached through Flower. What they keep lies with them; here stands which version of it counts.

    Parameters
    ----------
    roster
        Who is who.
    spec
        The model's layers.
    run
        The run's id: sites keep what they train under it.
    timeout
        Seconds that a site may take for one message.
    fewest
        Answers without which a round is repeated.
    tries
        How often a round is tried before the run stops.
    models
        Sites send their personalized models at the end; without, they keep them to themselves.
    objective
        What their scores are measured by.
    """

    def __init__(
        self,
        roster: Roster,
        spec: LayerSpec,
        run: str,
        *,
        timeout: float = 600.0,
        fewest: int = 1,
        tries: int = 3,
        models: bool = True,
        objective: Objective | None = None,
    ) -> None:
        self._roster, self._spec, self._run = roster, spec, run
        self._timeout, self._fewest, self._tries, self._models = timeout, fewest, tries, models
        self._objective = objective or Classification()
        self._longest = MARGIN + TIMES * sum(rows.nbytes for rows in roster.like.values())
        self.versions = torch.zeros(len(roster.sites), dtype=torch.int64)  # the round of each site's last taken answer
        self.forgot: set[int] = set()  # the sites that do not have that version any more
        self._staged: dict[int, int] = {}

    def train(self, ids: Sequence[int], sent: Payload, t: int, judge: Judge | None = None) -> Answers[Payload]:
        """Have sites train; those without a usable answer are asked again as long as too few have one."""
        answers, missing, asked, fewest = dict[int, Payload](), dict[int, str](), list(ids), min(self._fewest, len(ids))
        known = set(self.forgot)  # what is sent makes up for it
        for attempt in range(1, self._tries + 1):
            found = self._ask("train", asked, sent.rows([ids.index(client) for client in asked]), t, self._upload)
            answers = dict(sorted((answers | found.by_client).items()))
            missing = {client: why for client, why in (missing | found.missing).items() if client not in answers}
            refused = judge(answers) if judge else {}
            usable = len(answers) - len(refused)
            if usable >= fewest:
                self._staged = dict.fromkeys(answers, t)
                return Answers(answers, dict(sorted(missing.items())))
            reasons = "; ".join(f"{self._roster.sites[i]}: {why}" for i, why in sorted({**missing, **refused}.items()))
            text = f"round {t}: only {usable} of {len(ids)} sites answered, deploy.fewest is {fewest} ({reasons})"
            log.warning("%s; try %d of %d", text, attempt, self._tries)
            again = {*missing, *refused} - (self.forgot - known)  # who has just said so cannot use what is sent now
            asked = [client for client in ids if client in again]
            self._roster.wait(asked, self._timeout)
        raise RunError(f"{text}. The run's state is saved: it can be resumed")

    def commit(self, clients: Collection[int] | None = None) -> None:
        """Note whose answers were taken; the sites are told with the next message."""
        for client, t in self._staged.items():
            if clients is None or client in clients:
                self.versions[client] = t
                self.forgot.discard(client)
        self._staged = {}

    def evaluate(self, ids: Sequence[int], sent: Payload, t: int) -> Answers[Evaluation]:
        """Have sites score their models on their test data; a metric is what more than half of them have."""
        found = self._ask("evaluate", ids, sent, t, lambda content: evaluation(content, self._objective))
        counts = Counter(name for scores in found.by_client.values() for name in scores.personalized)
        usual = {name for name, count in counts.items() if 2 * count > len(found.by_client)}

        def known(scores: dict[str, float]) -> dict[str, float]:
            return {name: value for name, value in scores.items() if name in usual}

        return found._replace(by_client={c: Evaluation(*map(known, scores)) for c, scores in found.by_client.items()})

    def personalize(self, ids: Sequence[int], sent: Payload, t: int) -> Answers[Layers]:
        """Return sites' personalized models; each site writes its own to its disk, too.

        It is what everybody worked for: sites that have trained and do not answer are waited for and asked again.
        """
        answers, missing, asked, known = dict[int, Layers](), dict[int, str](), list(ids), set(self.forgot)
        for attempt in range(1, self._tries + 1):
            found = self._ask("personalize", asked, sent.rows([ids.index(client) for client in asked]), t, self._model)
            answers |= found.by_client
            missing = {client: why for client, why in (missing | found.missing).items() if client not in answers}
            asked = [client for client in missing if self.versions[client] > 0 and client not in self.forgot - known]
            if not asked or attempt == self._tries:
                break
            reasons = "; ".join(f"{self._roster.sites[client]}: {missing[client]}" for client in asked)
            log.warning("sites without their personalized models are asked again (%s)", reasons)
            self._roster.wait(asked, self._timeout)
        return Answers(dict(sorted(answers.items())), dict(sorted(missing.items())))

    def snapshot(self) -> dict[str, Tensor]:
        """Return which versions count, and who each site is, 0 where that is not known."""
        return {"versions": self.versions, "nodes": torch.tensor(self._roster.identities, dtype=torch.int64)}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Go back to these versions, and ask the sites whether they still have them.

        If one has newer ones alone, the checkpoint is older than what sites keep; if nobody has its own, everything was
        lost at once. What no server knows would begin anew, so the operator has to accept it.
        """
        self._roster.recognize(snapshot["nodes"].tolist())
        self.versions, self._staged = snapshot["versions"], {}
        self.forgot = set((self.versions == JOINED).nonzero().flatten().tolist())
        here = self._roster.look()
        asked = [c for c, node in self._roster.nodes.items() if node in here and self.versions[c] > 0]
        have, lost, newer = list[int](), list[str](), False
        told = exchange(self._roster.grid, asked, lambda client: self._message(KEPT, client, 0, b""), self._timeout)
        for client, reply in sorted(told.items()):
            if isinstance(reply, Message):
                why = self._read(client, reply, lambda _: None)
                if why is None:
                    have.append(client)
                elif client in self.forgot:
                    lost.append(f"{self._roster.sites[client]}: {why}")
                    newer |= bool(reply.content.config_records["answer"].get("newer"))
        if lost and (newer or not have) and not self._roster.accept:
            raise RunError(
                f"sites do not have what this checkpoint takes them to keep ({'; '.join(lost)}): restore their state, "
                "or resume with --run-config 'resume=true accept=true', and what only sites had begins anew"
            )
        for one in lost:
            log.warning("what a site kept is lost, and begins anew as far as the server does not have it: %s", one)

    def close(self) -> None:
        """Nothing ends: the sites are their owners'."""

    def _ask(self, kind: str, ids: Sequence[int], sent: Payload, t: int, read: Callable[[RecordDict], T]) -> Answers[T]:
        """Send each site its row; return what was read from the replies, and why there is nothing from others."""
        here = self._roster.look()
        missing = {client: self._roster.why(client) for client in ids if self._roster.nodes.get(client) not in here}
        rows = {client: row for row, client in enumerate(ids) if client not in missing}

        def message(client: int) -> Message:
            return self._message(KINDS[kind], client, t, encode(sent.rows([rows[client]])))

        answers: dict[int, T] = {}
        for client, reply in sorted(exchange(self._roster.grid, rows, message, self._timeout).items()):
            found = reply if isinstance(reply, str) else self._read(client, reply, read)
            if isinstance(found, str):
                missing[client] = found
            else:
                answers[client] = found
        return Answers(answers, dict(sorted(missing.items())))

    def _message(self, kind: str, client: int, t: int, message: bytes) -> Message:
        version = 0 if client in self.forgot else int(self.versions[client])
        site, model = self._roster.sites[client], self._roster.model
        content = job(Order(self._run, client, t, version, site, __version__, model), message)
        return Message(content, self._roster.nodes[client], kind, ttl=self._timeout)

    def _read(self, client: int, reply: Message, read: Callable[[RecordDict], T]) -> T | str:
        """Return what a reply holds, or what is wrong with it."""
        try:
            if fault := field(reply.content, "fault", str):
                if field(reply.content, "lost", bool):
                    self.forgot.add(client)
                return plain(fault)
            return read(reply.content)
        except Exception as error:  # whatever a stranger sent
            return f"its answer cannot be read: {plain(str(error))}"

    def _upload(self, content: RecordDict) -> Payload:
        found = payload(content)
        if len(found) > self._longest:
            raise ValueError(f"it has {len(found):,} bytes, and {self._longest:,} would be many")
        return decode(found, self._spec.names)

    def _model(self, content: RecordDict) -> Layers:
        """Return a model, empty if sites keep theirs to themselves; refuse one that is not this one."""
        if not self._models:
            return {}
        try:
            found: Layers = from_safetensors(payload(content))
        except SafetensorError as error:
            raise ValueError(f"it is no model: {error}") from None
        for key, like in self._roster.like.items():
            if key not in found or (found[key].shape, found[key].dtype) != (like.shape, like.dtype):
                raise ValueError(f"{key} is missing or of another shape or type")
            if not torch.isfinite(found[key]).all():
                raise ValueError(f"{key} is not finite")
        return {key: found[key] for key in self._spec.slots}
