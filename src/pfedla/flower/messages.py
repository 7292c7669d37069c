"""Messages as records of Flower: arrays and scalars, and nothing else.

A payload travels as the very bytes that `pfedla.wire.encode` makes of it, in one array. What comes from the other side
is taken apart here, and whatever is wrong with it is a `ValueError`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from pfedla.client import Evaluation
from pfedla.errors import RunError, plain
from pfedla.objective import Objective

__all__ = [
    "CALL",
    "KEPT",
    "KINDS",
    "Order",
    "answer",
    "evaluation",
    "exchange",
    "field",
    "job",
    "metrics",
    "order",
    "packed",
    "patiently",
    "payload",
    "pulled",
]

KINDS = {"train": "train", "evaluate": "evaluate", "personalize": "query.personalize"}  # job -> type of its message
CALL = "query.call"  # asks a site who it is
KEPT = "query.kept"  # asks it whether it still has the version that the server names
JOB, PAYLOAD, ANSWER = "job", "payload", "answer"
POLL = 0.5  # seconds between two looks for replies
PAUSES = (0.5, 1, 2, 4, 8, 16)  # seconds between tries to reach the SuperLink
MOST_METRICS, LONGEST_METRIC = 100, 60

log = logging.getLogger("pfedla")
T = TypeVar("T", bool, int, str)
Found = TypeVar("Found")


class Order(NamedTuple):
    """What the server tells a site beside the payload."""

    run: str  # the run's id
    client: int  # the site's row
    t: int
    version: int  # the round whose training the server takes the site to keep; 0 if there is none
    site: str  # whom the server takes the receiver for
    software: str  # the server's version of pfedla
    model: int  # a checksum of its model's outline


def job(order: Order, message: bytes) -> RecordDict:
    """Return a job for one site."""
    return RecordDict({JOB: ConfigRecord(order._asdict()), **packed(message)})


def order(content: RecordDict) -> Order:
    """Return what a job says."""
    client, t, version, model = (field(content, name, int, JOB) for name in ("client", "t", "version", "model"))
    run, site, software = (field(content, name, str, JOB) for name in ("run", "site", "software"))
    return Order(run, client, t, version, site, software, model)


def packed(message: bytes) -> dict[str, ArrayRecord]:
    """Return bytes as a record: one array."""
    return {PAYLOAD: ArrayRecord({PAYLOAD: Array("uint8", (len(message),), "safetensors", message)})}


def payload(content: RecordDict) -> bytes:
    """Return the bytes of a message's array."""
    record = content.get(PAYLOAD)
    if not isinstance(record, ArrayRecord) or PAYLOAD not in record:
        raise ValueError("the message holds no payload")
    data: bytes = record[PAYLOAD].data
    return data


def answer(records: Mapping[str, Any] | None = None, **fields: bool | int | str) -> RecordDict:
    """Return a site's answer; a `fault` among its fields says why it is none."""
    return RecordDict({ANSWER: ConfigRecord({"fault": "", **fields}), **(records or {})})


def field(content: RecordDict, name: str, kind: type[T], record: str = ANSWER) -> T:
    """Return a field of a record."""
    found = content.get(record)
    value = found.get(name) if isinstance(found, ConfigRecord) else None
    if not isinstance(value, kind):
        raise ValueError(f"the message's {name} is missing or no {kind.__name__}")
    return value


def metrics(found: Evaluation) -> dict[str, MetricRecord]:
    """Return a site's scores as records."""
    return {name: MetricRecord(dict(values)) for name, values in found._asdict().items()}


def evaluation(content: RecordDict, objective: Objective) -> Evaluation:
    """Return the scores of an answer; refuse what cannot be scores."""
    parts: list[dict[str, float]] = []
    for name in Evaluation._fields:
        record = content.get(name)
        if not isinstance(record, MetricRecord):
            raise ValueError(f"the message holds no {name} scores")
        values = {str(metric): value for metric, value in record.items()}
        numbers = {metric: float(x) if isinstance(x, int | float) else math.nan for metric, x in values.items()}
        scores = {metric: x if math.isfinite(x) else math.nan for metric, x in numbers.items()}
        if len(scores) > MOST_METRICS or any(not x.isprintable() or len(x) > LONGEST_METRIC for x in scores):
            raise ValueError(f"its {name} scores have names that no metrics have")
        headline = scores.get(objective.headline, math.nan)
        if objective.percent and not math.isnan(headline) and not 0 <= headline <= 1:
            raise ValueError(f"its {name} {objective.headline} is impossible: {headline:g}")
        parts.append(scores)
    return Evaluation(*parts)


def exchange(
    grid: Grid, keys: Iterable[int], make: Callable[[int], Message], timeout: float
) -> dict[int, Message | str]:
    """Send messages and wait for the replies; for who does not reply in time, or cannot, return why.

    Each is made when it is its turn, for its life begins then. They go one at a time: together they may exceed what
    one request can carry.
    """
    replies: dict[int, Message | str] = {}
    waiting: dict[str, int] = {}
    nodes: dict[int, int] = {}
    for key in keys:
        message = make(key)
        nodes[key] = message.metadata.dst_node_id
        (sent,) = patiently(grid.push_messages, [message]) or [None]
        if sent:
            waiting[sent] = key
        else:
            replies[key] = "the message could not be sent"
    end = time.monotonic() + timeout
    while waiting:
        for sent, reply in pulled(grid, waiting):
            key = waiting.pop(sent)
            if isinstance(reply, str):
                replies[key] = reply
            elif reply.has_error():
                replies[key] = f"Flower says: {plain(reply.error.reason or str(reply.error.code))}"
            elif reply.metadata.src_node_id != nodes[key]:
                replies[key] = "somebody else answered"
            else:
                replies[key] = reply
        if time.monotonic() >= end:
            break
        if waiting:
            time.sleep(POLL)
    return replies | dict.fromkeys(waiting.values(), f"no answer within {timeout:g} seconds")


def pulled(grid: Grid, messages: Iterable[str]) -> Iterator[tuple[str, Message | str]]:
    """Yield the replies that are there, each with the message it answers; what cannot be read as why it cannot.

    They are asked for one by one: an answer that Flower itself cannot unpack is its own site's fault alone.
    """
    for sent in list(messages):
        try:
            found = list(patiently(grid.pull_messages, [sent]))
        except RunError:
            raise
        except Exception as error:  # whatever a stranger sent
            yield sent, f"its answer cannot be read: {type(error).__name__}"
            continue
        for reply in found:
            if reply.metadata.reply_to_message_id == sent:
                yield sent, reply


def patiently(call: Callable[..., Found], *arguments: Any) -> Found:
    """Ask the SuperLink for something; one that is busy or restarts is asked again for half a minute."""
    for pause in PAUSES:
        try:
            return call(*arguments)
        except httpx.HTTPError as error:
            log.warning("the SuperLink does not answer (%s): it is asked again", type(error).__name__)
            time.sleep(pause)
    try:
        return call(*arguments)
    except httpx.HTTPError as error:
        raise RunError(
            f"the SuperLink does not answer: {error}. The run's state is saved: it can be resumed"
        ) from error
