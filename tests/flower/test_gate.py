from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pfedla.cli import cli
from pfedla.errors import ConfigError

pytest.importorskip("flwr")
import httpx
import uvicorn
from uvicorn.server import ServerState

from pfedla.flower.gate import Prompt, gate


def knock(
    method: str, path: str, answer: httpx.Response | Exception, **request: Any
) -> tuple[httpx.Response, list[httpx.Request]]:
    """Send a request to a gate before a SuperLink that answers this; return what comes back and what it was asked."""
    seen: list[httpx.Request] = []

    async def superlink(asked: httpx.Request) -> httpx.Response:
        await asked.aread()
        seen.append(asked)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask() -> httpx.Response:
        app = gate("https://127.0.0.1:8001", transport=httpx.MockTransport(superlink))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://outside") as client:
            return await client.request(method, path, **request)

    return asyncio.run(ask()), seen


def test_what_a_site_asks_for_is_passed_on_as_it_is() -> None:
    body, reply = bytes(range(256)) * 1000, bytes(range(255, -1, -1)) * 500
    answer = httpx.Response(401, stream=httpx.ByteStream(reply), headers={"x-flwr": "no"})
    found, (asked,) = knock("POST", "/v1/fleet/pull-messages", answer, content=body, headers={"flwr-signature": "abc"})
    assert str(asked.url) == "https://127.0.0.1:8001/v1/fleet/pull-messages"
    assert (asked.method, asked.content, asked.headers["flwr-signature"]) == ("POST", body, "abc")
    assert asked.headers["host"] == "127.0.0.1:8001"
    assert (found.status_code, found.content, found.headers["x-flwr"]) == (401, reply, "no")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/control/register-node"),
        ("POST", "/v1/runtime/push-messages"),
        ("POST", "/v1/fleet/.%2e/control/start-run"),
        ("TRACE", "/v1/fleet/pull-messages"),
        ("POST", "/v1/fleet/%2e%2e%2fcontrol%2fstart-run"),
        ("POST", "/v1/fleet/..%5ccontrol"),
        ("POST", "/v1/fleet/a?b"),
        ("POST", "/v1/fleet//v1/control/start-run"),
        ("POST", "//v1/control/start-run"),
        ("POST", "/v1/fleet/"),
        ("POST", "/v1/fleet/register.node"),
        ("GET", "/v1/fleet/pull-messages"),
        ("GET", "/docs"),
        ("GET", "/health"),
        ("PUT", "/"),
    ],
)
def test_everything_else_stays_outside(method: str, path: str) -> None:
    found, seen = knock(method, path, httpx.Response(200, stream=httpx.ByteStream(b"")))
    if path == "/v1/fleet/a?b":  # what stands behind the question mark is dropped
        assert [request.url.path for request in seen] == ["/v1/fleet/a"]
        assert not seen[0].url.query
    else:
        assert not seen
        assert found.status_code == 403


def test_nobody_says_for_others_where_a_request_comes_from() -> None:
    claims = {"X-Forwarded-For": "9.9.9.9", "Forwarded": "for=9.9.9.9", "X-Real-IP": "9.9.9.9", "connection": "close"}
    _, (asked,) = knock(
        "POST", "/v1/fleet/pull-messages", httpx.Response(200, stream=httpx.ByteStream(b"")), headers=claims
    )
    assert not any("9.9.9.9" in value for value in asked.headers.values())


def test_a_request_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.flower.gate.STALL", 0.05)

    async def body() -> AsyncIterator[bytes]:
        yield b"half"
        await asyncio.sleep(1)
        yield b"more"

    answer = httpx.Response(200, stream=httpx.ByteStream(b""))
    found, seen = knock("POST", "/v1/fleet/push-object", answer, content=body())
    assert (found.status_code, seen) == (503, [])


@pytest.mark.parametrize("said", [b"", b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x"])
def test_who_says_nothing_or_does_not_finish_is_shown_out(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.flower.gate.STALL", 0.2)
    whole = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"

    async def superlink(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.6)  # an answer may take longer
        return httpx.Response(200, content=b"a message")

    async def talk() -> tuple[bytes, bytes]:
        app = gate("https://127.0.0.1:8001", transport=httpx.MockTransport(superlink))
        config = uvicorn.Config(app, http=Prompt, ws="none", lifespan="off", log_level="warning")
        config.load()
        loop, state = asyncio.get_running_loop(), ServerState()
        server = await loop.create_server(lambda: Prompt(config, state, {}), "127.0.0.1", 0)
        async with server:
            found = []
            for words in (said, whole):
                reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                writer.write(words)
                found.append(await asyncio.wait_for(reader.read(200), 10))
                writer.close()
        return found[0], found[1]

    nothing, answer = asyncio.run(talk())
    assert nothing == b""
    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_a_request_that_is_too_long_is_refused_before_it_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.flower.gate.LONGEST", 1000)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 400

    answer = httpx.Response(200, stream=httpx.ByteStream(b""))
    for body in (endless(), b"x" * 1001):
        found, seen = knock("POST", "/v1/fleet/push-object", answer, content=body)
        assert (found.status_code, seen) == (413, [])
    assert knock("POST", "/v1/fleet/push-object", answer, content=b"x" * 1000)[0].status_code == 200


def test_a_superlink_that_is_down_is_no_reason_to_end() -> None:
    assert knock("POST", "/v1/fleet/pull-messages", httpx.ConnectError("refused"))[0].status_code == 502


def test_the_command_wants_the_servers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(cli, ["deploy", "gate", "--port", "8000", "--superlink", "127.0.0.1:8001"])
    assert isinstance(found.exception, ConfigError)
    assert "there is no file server.pem" in str(found.exception)
