"""The server's gate: sites reach what sites need of the SuperLink, and nobody outside reaches the rest.

A SuperLink answers sites and operators at one port, and asks operators for no credentials: whoever reaches that port
may register keys and have code run. So it listens to its own machine alone, and this gate stands before it. It passes
on requests for the fleet, which Flower checks against the registered keys, and refuses all others.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from pfedla.errors import ConfigError

__all__ = ["Prompt", "gate", "keep_gate"]

FLEET = "/v1/fleet/"
HOP = {"connection", "host", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
CLAIMS = (
    "forwarded",
    "x-forwarded-",
    "x-real-ip",
)  # whom a request is said to come from: the SuperLink would believe it
OURS = HOP | {"date", "server"}  # headers of an answer that the gate writes itself
PATIENCE = 120.0  # seconds that the SuperLink may take to answer
STALL = 30.0  # seconds between two pieces of a request, or without one
MOST = 1000  # connections at a time
LONGEST = 2**25  # bytes of a request, which the SuperLink reads before it asks who sent it; Flower's pieces have 5 MiB

log = logging.getLogger("pfedla")


def gate(
    superlink: str, verify: ssl.SSLContext | bool = True, transport: httpx.AsyncBaseTransport | None = None
) -> Starlette:
    """Return the app that passes on a site's requests to the SuperLink at this address, and no others."""
    inside = httpx.AsyncClient(
        base_url=superlink,
        verify=verify,
        timeout=PATIENCE,
        limits=httpx.Limits(max_connections=None),
        transport=transport,
        trust_env=False,
    )

    async def pass_on(request: Request) -> Response:
        told = request.headers.get("content-length", "0")
        if not told.isdecimal() or int(told[:20]) > LONGEST:
            return PlainTextResponse("the request is too long", 413)
        action = request.path_params["action"]
        if not (action.isascii() and action.replace("-", "").isalpha()):
            return await refuse(request)
        named = [(name.decode("latin-1").lower(), value) for name, value in request.headers.raw]
        headers = [(name.encode(), value) for name, value in named if name not in HOP and not name.startswith(CLAIMS)]
        asked = inside.build_request("POST", FLEET + action, headers=headers, content=_pieces(request))
        try:
            answer = await inside.send(asked, stream=True)
        except httpx.HTTPError as error:
            log.warning("the SuperLink does not answer: %s %s", type(error).__name__, error)
            return PlainTextResponse("the SuperLink does not answer", 502)
        except _TooLongError:
            return PlainTextResponse("the request is too long", 413)
        except (ClientDisconnect, TimeoutError):  # Flower tries again after a 503, and not after a 408
            return PlainTextResponse("the request was not finished", 503)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in OURS}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept, background=BackgroundTask(answer.aclose))

    async def refuse(request: Request) -> Response:
        who = request.client.host if request.client else "somebody"
        log.warning("%s asked for %r: refused", who, request.url.path[:80])
        return PlainTextResponse("this gate is for sites", 403)

    @asynccontextmanager
    async def open_inside(_: Starlette) -> AsyncIterator[None]:
        async with inside:
            yield

    async def strange(request: Request, _: Exception) -> Response:
        return await refuse(request)

    routes = [Route(FLEET + "{action}", pass_on, methods=["POST"])]
    return Starlette(routes=routes, lifespan=open_inside, exception_handlers={404: strange, 405: strange})


class _TooLongError(Exception):
    """A request has more bytes than any site sends."""


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield a request's body as it comes, as long as it comes and is not too long."""
    stream, length = request.stream(), 0
    while True:
        try:
            piece = await asyncio.wait_for(anext(stream), STALL)
        except StopAsyncIteration:
            return
        length += len(piece)
        if length > LONGEST:
            raise _TooLongError
        yield piece


class Prompt(H11Protocol):
    """A connection that is closed if nobody asks for anything, or a request's head stays unfinished, for `STALL`."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take a piece of a request; wait for the rest of its head."""
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        super().connection_lost(exc)
        if self._late is not None:
            self._late.cancel()

    def _wait(self) -> None:
        cycle: Any = self.cycle  # None before the first request
        idle = cycle is None or cycle.response_complete
        if not idle and self._late is not None:
            self._late.cancel()
            self._late = None
        elif idle and self._late is None:
            self._late = self.loop.call_later(STALL, self.transport.close)


def keep_gate(host: str, port: int, superlink: str, certificate: Path, key: Path, authority: Path) -> None:
    """Keep the gate until it is stopped. The SuperLink must prove itself to it, as to a site, by the authority."""
    if "/" in superlink:
        raise ConfigError(f"the SuperLink's address is a name or number and a port, 127.0.0.1:8001, not {superlink!r}")
    for path in (certificate, key, authority):
        if not path.is_file():
            raise ConfigError(f"there is no file {path}: give the command in the deployment's server/ folder")
    try:
        trusted = ssl.create_default_context(cafile=str(authority))
        app = gate(f"https://{superlink}", trusted)
        config = uvicorn.Config(
            app,
            host,
            port,
            http=Prompt,
            ws="none",
            log_level="warning",
            ssl_certfile=str(certificate),
            ssl_keyfile=str(key),
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST,
            timeout_graceful_shutdown=5,
        )
        config.load()
    except (ssl.SSLError, httpx.InvalidURL) as error:
        raise ConfigError(f"the gate cannot be opened: {error}") from error
    uvicorn.Server(config).run()
