"""Who is who: which node of Flower plays which site, found by asking every node for its name and its model."""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Sequence
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import nn

from pfedla.errors import RunError, nearest
from pfedla.flower.messages import CALL, field, patiently
from pfedla.layers import LayerSpec, tensors_of
from pfedla.tensorfile import checksum

__all__ = ["Roster", "first_values", "outline"]

PAUSE = 1.0  # seconds between two looks for nodes

log = logging.getLogger("pfedla")


def outline(spec: LayerSpec) -> str:
    """Return a model's layers, their tensors' names and shapes, and their type: what all sites must agree in."""
    slots = {key: [[slot.name, list(slot.shape)] for slot in found] for key, found in spec.slots.items()}
    return json.dumps({"dtype": str(spec.dtype), "names": list(spec.names), "slots": slots}, sort_keys=True)


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
    ) -> None:
        self.grid, self.sites = grid, tuple(sites)
        self.nodes: dict[int, int] = {}  # client -> node
        self.examples: dict[int, int] = {}  # client -> training examples, 0 if it does not tell
        self.refused: dict[int, str] = {}  # node -> why it is none of the sites
        self._outline, self._first, self._registered = outline(spec), first_values(template), registered
        self._timeout = timeout
        self._asked: dict[str, tuple[int, float]] = {}  # message without an answer yet -> node, end of patience

    def gather(self, fewest: int, patience: float) -> None:
        """Wait until all sites are there, or after `patience` seconds at least `fewest` of them."""
        end = time.monotonic() + patience
        while True:
            self.look()
            if self.refused:
                raise RunError("; ".join(self.refused.values()))
            absent = [site for client, site in enumerate(self.sites) if client not in self.nodes]
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
        self._asked = {sent: (node, end) for sent, (node, end) in self._asked.items() if now < end}
        known = {*self.nodes.values(), *self.refused, *(node for node, _ in self._asked.values())}
        for node in sorted(here.keys() - known):
            for sent in patiently(self.grid.push_messages, [Message(RecordDict(), node, CALL, ttl=self._timeout)]):
                self._asked[sent] = node, now + self._timeout
        for reply in patiently(self.grid.pull_messages, list(self._asked)) if self._asked else ():
            node, _ = self._asked.pop(reply.metadata.reply_to_message_id, (0, 0.0))
            if node not in here:  # it is asked again when it is back
                continue
            if reply.has_error():
                log.warning("node %d was asked for its name: %s", node, reply.error.reason or reply.error.code)
            elif reply.metadata.src_node_id == node and (why := self._enter(node, here[node].name, reply, set(here))):
                self.refused[node] = why
                log.warning("node %d is refused: %s", node, why)
        return set(here)

    def wait(self, clients: Sequence[int], patience: float) -> None:
        """Wait until these clients are connected, but no longer than `patience` seconds."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            here = self.look()
            if all(self.nodes.get(client) in here for client in clients):
                return
            time.sleep(PAUSE)

    def _enter(self, node: int, registered: str, reply: Message, here: set[int]) -> str | None:
        """Write a node in, or return why it is refused."""
        try:
            name, theirs = field(reply.content, "site", str), field(reply.content, "outline", str)
            first, examples = field(reply.content, "first", int), field(reply.content, "examples", int)
            fault = field(reply.content, "fault", str)
        except ValueError as error:
            return f"a node answered in no way that a site does: {error}"
        if fault and not name:
            return f"a node cannot take part: {fault[:500]}"
        if name not in self.sites:
            return f"an unknown site, {name[:80]!r}, is there: {nearest(name[:80], self.sites)}"
        if fault:
            return f"site {name} cannot take part: {fault[:500]}"
        if self._registered and registered != name:
            what = f"registered as {registered!r}" if registered else "not registered under a name"
            return f"a node calls itself {name}, but its key is {what}: flwr supernode register KEY --name {name}"
        if different := _difference(self._outline, theirs):
            return f"site {name} has another model than the server: {different}"
        client = self.sites.index(name)
        if client in self.nodes:
            if self.nodes[client] in here:
                return f"there are two nodes of the name {name}"
            log.warning("site %s now is another node, with another key, than before", name)
        if first != self._first:
            log.warning("site %s starts from other values than the server: is its random generator another one?", name)
        self.nodes[client], self.examples[client] = node, max(0, examples)
        log.info("site %s is client %d", name, client)
        return None


def _difference(ours: str, theirs: str) -> str | None:
    """Return the first thing in which two outlines differ."""
    if ours == theirs:
        return None
    try:
        mine, other = json.loads(ours), json.loads(theirs)
        for key in [*mine["slots"], *other["slots"]]:
            here, there = mine["slots"].get(key), other["slots"].get(key)
            if here != there:
                return f"{key} has {_words(there)} there and {_words(here)} here"
        return f"its type is {other['dtype']} there and {mine['dtype']} here"
    except (ValueError, LookupError, TypeError, AttributeError):
        return "it cannot be read"


def _words(tensors: Any) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in tensors)[:300] if tensors else "nothing"
