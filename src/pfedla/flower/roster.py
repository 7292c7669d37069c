"""Who is who: which node of Flower plays which site, found by asking every node for its name and its model."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Sequence
from typing import Any

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from torch import nn

from pfedla.errors import RunError, nearest, plain
from pfedla.flower.messages import CALL, field, patiently, pulled
from pfedla.layers import LayerSpec, tensors_of
from pfedla.tensorfile import checksum
from pfedla.version import __version__

__all__ = ["Roster", "difference", "digest", "first_values", "identity", "outline"]

PAUSE = 1.0  # seconds between two looks for nodes
AGAIN = 30.0  # seconds after which a node that is refused or cannot take part is asked again

log = logging.getLogger("pfedla")


def outline(spec: LayerSpec, template: nn.Module) -> str:
    """Return a model's layers and all its tensors' names, shapes and types: what all sites must agree in."""
    slots = {key: [[slot.name, list(slot.shape)] for slot in found] for key, found in spec.slots.items()}
    tensors = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors_of(template).items()}
    return json.dumps({"names": list(spec.names), "slots": slots, "tensors": tensors}, sort_keys=True)


def digest(outline: str) -> int:
    """Return a checksum of an outline."""
    return zlib.crc32(outline.encode())


def identity(node: NodeInfo) -> int:
    """Return what a node is known by when it comes back, 64 bits for a checkpoint: its key, else its number."""
    known = node.public_key or node.node_id.to_bytes(8, "big")
    return int.from_bytes(hashlib.sha256(known).digest()[:8], "big", signed=True)


def first_values(template: nn.Module) -> int:
    """Return a checksum of a model's first values, frozen parameters among them."""
    tensors = sorted(tensors_of(template).items())
    return zlib.crc32(json.dumps([checksum(tensor.detach().cpu()) for _, tensor in tensors]).encode())


class Roster:
    """The sites by row, and the nodes that play them.

    Parameters
    ----------
    grid
        Flower's way to the nodes.
    sites
        The sites' names; the first is client 0.
    spec, template
        The model.
    registered
        Take nobody's word for a name: the operator has registered each node's key under it. Without, only for trials.
    timeout
        Seconds after which a node that does not say who it is is asked again.
    accept
        Take in a site that comes back with another key.
    """

    def __init__(
        self,
        grid: Grid,
        sites: Sequence[str],
        spec: LayerSpec,
        template: nn.Module,
        *,
        registered: bool = True,
        timeout: float = 600.0,
        accept: bool = False,
    ) -> None:
        self.grid, self.sites, self.like, self.accept = grid, tuple(sites), spec.read(template), accept
        self.nodes: dict[int, int] = {}  # client -> node
        self.examples: dict[int, int] = {}  # client -> training examples, 0 if it does not tell
        self.identities = [0] * len(self.sites)  # by client, 0 where none is known
        self.refused: dict[int, tuple[str, float]] = {}  # node -> why it is none of the sites, until when
        self._faulty: dict[int, tuple[int, str, float]] = {}  # node -> client, why it cannot take part, until when
        self._told: dict[int, str] = {}  # node -> the refusal that is in the log already
        self._outline, self._first = outline(spec, template), first_values(template)
        self.model = digest(self._outline)
        self._registered, self._timeout = registered, timeout
        self._asked: dict[str, tuple[int, float]] = {}  # message without an answer yet -> node, end of patience

    def gather(self, fewest: int, patience: float) -> None:
        """Wait until all sites are there, or after `patience` seconds at least `fewest` of them."""
        end = time.monotonic() + patience
        while True:
            self.look()
            if self.refused:
                raise RunError("; ".join(why for why, _ in self.refused.values()))
            absent = [self._absent(client) for client in range(len(self.sites)) if client not in self.nodes]
            if not absent:
                return
            if time.monotonic() >= end:
                break
            time.sleep(PAUSE)
        if len(self.nodes) < fewest:
            raise RunError(
                f"only {len(self.nodes)} of {len(self.sites)} sites came within {patience:g} seconds, and "
                f"deploy.fewest is {fewest}; absent: {', '.join(absent)}"
            )
        log.warning("the run starts without %s; whoever comes later takes part from then on", ", ".join(absent))

    def look(self) -> set[int]:
        """Ask new nodes who they are, take in those that have answered by now; return all nodes that are there."""
        here: dict[int, Any] = {node.node_id: node for node in patiently(self.grid.get_nodes)}
        now = time.monotonic()
        self._told = {node: why for node, why in self._told.items() if node in here}
        self.refused = {node: found for node, found in self.refused.items() if node in here and now < found[1]}
        self._faulty = {node: found for node, found in self._faulty.items() if node in here and now < found[2]}
        self._asked = {sent: (node, end) for sent, (node, end) in self._asked.items() if now < end}
        known = {*self.nodes.values(), *self.refused, *self._faulty, *(node for node, _ in self._asked.values())}
        for node in sorted(here.keys() - known):
            for sent in patiently(self.grid.push_messages, [Message(RecordDict(), node, CALL, ttl=self._timeout)]):
                self._asked[sent] = node, now + self._timeout
        for sent, reply in pulled(self.grid, self._asked):
            node, _ = self._asked.pop(sent)
            if node not in here:  # it is asked again when it is back
                continue
            if isinstance(reply, str):
                log.warning("node %d was asked for its name: %s", node, reply)
            elif reply.has_error():
                log.warning("node %d was asked: %s", node, plain(reply.error.reason or str(reply.error.code)))
            elif reply.metadata.src_node_id == node and (why := self._enter(here[node], reply, set(here))):
                self.refused[node] = why, time.monotonic() + AGAIN
                if self._told.get(node) != why:
                    self._told[node] = why
                    log.warning("node %d is refused: %s", node, why)
        return set(here)

    def why(self, client: int) -> str:
        """Say why a site is not there."""
        faults = [fault for found, fault, _ in self._faulty.values() if found == client]
        return faults[0] if faults else "it is not connected, or has not said yet who it is"

    def recognize(self, identities: Sequence[int]) -> None:
        """Refuse sites that are not, by client, who they were, now and when they come; 0 where nobody is known."""
        for client, known in enumerate(identities):
            if client not in self.nodes:
                self.identities[client] = known
            elif self._registered and known and known != self.identities[client]:
                self._replaced(client)

    def wait(self, clients: Sequence[int], patience: float) -> None:
        """Wait until these clients are connected, but no longer than `patience` seconds."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            here = self.look()
            if all(self.nodes.get(client) in here for client in clients):
                return
            time.sleep(PAUSE)

    def _enter(self, info: NodeInfo, reply: Message, here: set[int]) -> str | None:
        """Write a node in, or return why it is refused."""
        node, registered = info.node_id, info.name
        try:
            name, theirs = field(reply.content, "site", str), field(reply.content, "outline", str)
            first, examples = field(reply.content, "first", int), field(reply.content, "examples", int)
            fault, version = plain(field(reply.content, "fault", str)), field(reply.content, "version", str)
        except ValueError as error:
            return f"a node answered in no way that a site does: {error}"
        if fault and not name:
            return f"a node cannot take part: {fault}"
        if name not in self.sites:
            return f"an unknown site, {name[:80]!r}, is there: {nearest(name[:80], self.sites)}"
        client = self.sites.index(name)
        if self._registered and registered != name:
            what = f"registered as {registered!r}" if registered else "not registered under a name"
            return f"a node calls itself {name}, but its key is {what}: flwr supernode register KEY --name {name}"
        if version != __version__:
            return f"site {name} has version {version[:40]!r} of pfedla, and the server {__version__}"
        if fault:  # which may pass
            self._faulty[node] = client, f"it cannot take part: {fault}", time.monotonic() + AGAIN
            log.warning("site %s cannot take part: %s", name, fault)
            return None
        if different := difference(self._outline, theirs):
            return f"site {name} has another model than the server: {plain(different)}"
        if self.nodes.get(client) in here:
            return f"there are two nodes of the name {name}"
        if self._registered and self.identities[client] not in (0, identity(info)):
            try:
                self._replaced(client)
            except RunError as error:
                return str(error)
        if first != self._first:
            log.warning("site %s starts from other values than the server: is its random generator another one?", name)
        self.nodes[client], self.identities[client] = node, identity(info)
        self.examples[client] = max(0, examples)
        log.info("site %s is client %d", name, client)
        return None

    def _replaced(self, client: int) -> None:
        """Refuse a site that has another key than before, unless the operator knows of it."""
        what = f"site {self.sites[client]} has another key than before"
        if not self.accept:
            raise RunError(f"{what}: if you know why, resume with --run-config 'resume=true accept=true'")
        log.warning("%s, which is accepted", what)

    def _absent(self, client: int) -> str:
        faults = [f" ({fault})" for found, fault, _ in self._faulty.values() if found == client]
        return self.sites[client] + "".join(faults[:1])


def difference(ours: str, theirs: str) -> str | None:
    """Return the first thing in which two outlines differ."""
    if ours == theirs:
        return None
    try:
        mine, other = json.loads(ours), json.loads(theirs)
        for key in [*mine["slots"], *other["slots"]]:
            here, there = mine["slots"].get(key), other["slots"].get(key)
            if here != there:
                return f"{key} has {_words(there)} there and {_words(here)} here"
        for name in [*mine["tensors"], *other["tensors"]]:
            here, there = mine["tensors"].get(name), other["tensors"].get(name)
            if here != there:
                return f"{str(name)[:80]} is {str(there)[:80]} there and {str(here)[:80]} here"
        return "its layers have another order there"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "it cannot be read"


def _words(tensors: Any) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in tensors)[:300] if tensors else "nothing"
