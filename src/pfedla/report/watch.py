"""The page of `pfedla report`, live: a small server for a folder of runs.

It listens on this machine's loopback address alone, answers only requests that name it as their host (so that no page
from elsewhere can read through it), and only reads. Runs are asked for by a word that the server made of their folders;
no request holds a path.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfedla.errors import ConfigError, RunError
from pfedla.report.page import MISSING, POLICY, asset, detail_of, encoded, overview_of, plotly, template
from pfedla.report.runs import find_runs
from pfedla.version import __version__

__all__ = ["HOST", "PLAIN", "Watched", "application", "serve"]

HOST = "127.0.0.1"
PLAIN: dict[str, Any] = {"loop": "asyncio", "http": "h11", "ws": "none"}  # whatever else is installed
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; script-src 'self'; connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass
class Watched:
    """A folder of runs; what has not changed since the last look is not read again."""

    folder: Path
    _known: dict[str, tuple[object, dict[str, Any]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def overview(self) -> list[dict[str, Any]]:
        """Return how all runs stand."""
        with self._lock:
            listed, known = [], {}
            for run in find_runs([self.folder]):
                try:
                    stamp: object = (run.name, run.record.state, run.record.changed())
                except (RunError, OSError):  # gone meanwhile
                    continue
                old = self._known.get(run.id)
                known[run.id] = old if old is not None and old[0] == stamp else (stamp, overview_of(run))
                listed.append(known[run.id][1])
            self._known = known
            return listed

    def detail(self, word: str) -> dict[str, Any] | None:
        """Return everything about a run, None if there is no such run."""
        return next((detail_of(run) for run in find_runs([self.folder]) if run.id == word), None)


def application(folder: Path, hosts: Collection[str]) -> Any:
    """Return the server of a folder, as ASGI has it; requests to other `hosts` than these are refused."""
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse, Response
        from starlette.routing import Route
    except ImportError:
        raise ConfigError(MISSING) from None

    watched = Watched(folder)
    page = template(
        policy=HEADERS["Content-Security-Policy"].partition("; frame-ancestors")[0],  # that is for headers alone
        style='<link rel="stylesheet" href="/page.css">',
        scripts='<script src="/plotly.js"></script>\n<script type="module" src="/page.js"></script>',
    )
    fixed = {
        "/": (page, "text/html"),
        "/page.css": (asset("page.css"), "text/css"),
        "/page.js": (asset("page.js"), "text/javascript"),
        "/plotly.js": (plotly(), "text/javascript"),
    }

    def answer(request: Request, text: str, kind: str) -> Response:
        tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
        same = request.headers.get("if-none-match") == tag
        return Response("" if same else text, 304 if same else 200, {"ETag": tag}, kind)

    def show(request: Request) -> Response:
        return answer(request, *fixed[request.url.path])

    def runs(request: Request) -> Response:
        return answer(request, encoded({"runs": watched.overview(), "version": __version__}), "application/json")

    def run(request: Request) -> Response:
        found = watched.detail(request.path_params["word"])
        if found is None:
            return PlainTextResponse("there is no such run\n", 404)
        return answer(request, encoded(found), "application/json")

    places = {**dict.fromkeys(fixed, show), "/runs": runs, "/runs/{word}": run}
    app = Starlette(routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in places.items()])

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        """Refuse who names another host, and send the headers with whatever is answered."""

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        named = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        if scope["type"] == "http" and (len(named) != 1 or named[0] not in hosts):
            refusal = PlainTextResponse("this server answers to its own address alone\n", 421)
            await refusal(scope, receive, with_headers)
        else:
            await app(scope, receive, with_headers)

    return guarded


def serve(folder: Path, port: int = 0, *, opens: bool = False, tell: Callable[[str], None] = lambda _: None) -> None:
    """Serve a folder until Ctrl-C; port 0 takes a free one."""
    try:
        import uvicorn
    except ImportError:
        raise ConfigError(MISSING) from None
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder that holds runs")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise ConfigError(f"port {port} cannot be had on {HOST}: {error.strerror}") from None
        number = listener.getsockname()[1]
        app = application(folder, {f"{HOST}:{number}", f"localhost:{number}"})
        listener.listen(64)  # a browser that is opened now waits until the server is up
        tell(f"watching {folder} at http://{HOST}:{number}/ (Ctrl-C ends it)")
        if opens:
            webbrowser.open(f"http://{HOST}:{number}/")
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, **PLAIN)
        server = uvicorn.Server(config)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
