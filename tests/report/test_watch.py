"""The page in a real browser, from a file and live; and the server by itself."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfedla.report.page import report
from pfedla.report.runs import find_runs
from pfedla.report.watch import HOST, PLAIN, application
from tests.browser import Browser, chromium
from tests.report.made import create, line, made

pytest.importorskip("plotly")
uvicorn = pytest.importorskip("uvicorn")
EVIL = "</script><script>document.title='taken'</script>"
IMAGE = "<img src=x onerror=document.title='taken'>"


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Serve a folder from a thread; give the port."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port = listener.getsockname()[1]
        app = application(folder, {f"{HOST}:{port}"})
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, **PLAIN))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.02)
            yield port
        finally:
            server.should_exit = True
            thread.join()


def asked(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def test_the_server_answers_to_its_own_address_alone_and_only_reads(tmp_path: Path) -> None:
    made(tmp_path / "runs" / IMAGE)
    (tmp_path / "secret.txt").write_text("secret")
    with served(tmp_path / "runs") as port:
        status, headers, body = asked(port, "/runs")
        (run,) = json.loads(body)["runs"]
        assert (status, run["name"], run["state"]) == (200, IMAGE, "done")
        assert b"<img" not in body
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert asked(port, "/runs", **{"If-None-Match": headers["etag"]})[0] == 304
        detail = json.loads(asked(port, f"/runs/{run['id']}")[2])
        assert detail["clients"]["of"] == 6
        for host in ("evil.example", f"evil.example:{port}", HOST, "", f"localhost.evil.example:{port}"):
            status, headers, body = asked(port, "/runs", Host=host)
            assert status == 421, host
            assert b"runs" not in body
        ways = ("/../secret.txt", "/runs/../secret.txt", "/runs/%2e%2e%2fsecret.txt", "//etc/passwd", "/runs/..")
        for path in ways:
            status, headers, body = asked(port, path)
            assert status == 404, path
            assert b"secret" not in body
            assert "content-security-policy" in headers
        for method in ("POST", "PUT", "DELETE"):
            assert asked(port, "/runs", method)[0] == 405


@pytest.mark.slow
def test_watch_listens_on_loopback_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    made(tmp_path / "run")
    program = [sys.executable, "-c", "from pfedla.cli import main; main()", "watch", str(tmp_path)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.readline()
    port = int(said.partition(f"http://{HOST}:")[2].partition("/")[0])
    assert asked(port, "/")[0] == 200
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


def change(browser: Browser, control: str, value: Any, event: str = "change") -> None:
    browser.ask(
        f"(() => {{ const it = document.getElementById('{control}'); it.value = {json.dumps(str(value))}; "
        f"it.dispatchEvent(new Event('{event}')); }})()"
    )


def text(browser: Browser, place: str) -> str:
    return str(browser.ask(f"document.getElementById('{place}').textContent"))


def cells(browser: Browser, place: str = "weights") -> list[list[float | None]]:
    """Return the numbers that a heat map shows."""
    return list(browser.ask(f"document.getElementById('{place}').data[0].z"))


@pytest.mark.slow
def test_the_best_is_found_over_the_seeds_that_all_have(tmp_path: Path, browser: Browser) -> None:
    """With a headline that Plotly would read as markup, and sites that do not tell their test samples."""
    headline = "score <b>of</b>"
    scores = {("a", 0): 0.7, ("a", 1): 0.9, ("b", 0): 0.75}  # b is better on seed 0, and a on average
    for (label, seed), score in scores.items():
        record = made(tmp_path / f"{label}-seed{seed}", seed=seed, headline=headline, samples=[[20, 0]] * 6)
        file = record.path / "metrics.jsonl"
        lines = [json.loads(one) for one in file.read_text().splitlines()]
        known = {"_mean": score, "_std": 0.1, "_worst": score - 0.1, "_after_training": score}
        for one in lines:
            one |= {f"{headline}{key}": value for key, value in known.items()}
            one["clients"] = {headline: [score] * 6}
        file.write_text("".join(json.dumps(one) + "\n" for one in lines[: 4 if seed else 6]))
    page = tmp_path / "report.html"
    page.write_text(report(find_runs([tmp_path])))
    browser.show()
    browser.open(page.as_uri())
    assert browser.ask("[...document.querySelectorAll('#table .best')].map((it) => it.textContent)")[0] == "75.00"
    assert "Best mean score <b>of</b>75.00 %b" in text(browser, "cards")
    assert "score &lt;b&gt;of&lt;/b&gt;" in browser.ask("document.getElementById('curves').layout.yaxis.title.text")
    ends = "document.getElementById('curves').data.filter((trace) => trace.name).map((trace) => trace.x.at(-1))"
    assert browser.ask(ends) == [4, 6]  # where the shorter seed ends
    assert "fewer than 10" not in text(browser, "clients-note")
    assert not browser.complaints


@pytest.mark.slow
def test_the_page_works_in_a_browser(tmp_path: Path, browser: Browser) -> None:
    for seed in (0, 1):
        made(tmp_path / f"pfedla-seed{seed}", seed=seed, retained=True, names=[*"abcde", EVIL])
    made(tmp_path / IMAGE, weights=False, algorithm="fedavg")
    page = tmp_path / "report.html"
    page.write_text(report(find_runs([tmp_path])))
    browser.show()
    browser.open(page.as_uri())
    assert browser.ask("document.title") == "pfedla"  # nobody has taken it
    charts = (
        "curves",
        "clients",
        "holdings",
        "weights",
        "similarity",
        "picked",
        "own",
        "agreement",
        "retained",
        "bytes",
    )
    for chart in charts:
        assert browser.ask(f"document.querySelectorAll('#{chart} .main-svg').length"), chart

    alpha = find_runs([tmp_path / "pfedla-seed0"])[0].record.diagnostics()["alpha"]
    change(browser, "layer", 1)
    for frame in (2, 4):  # the slider changes the heat map
        change(browser, "frame", frame, "input")
        assert text(browser, "at-round") == str(frame + 1)
        shown = np.array(cells(browser), dtype=float)
        assert np.isnan(np.diag(shown)).all()
        other = ~np.eye(6, dtype=bool)
        np.testing.assert_allclose(shown[other], alpha[frame, :, 1][other], atol=1e-4)
    change(browser, "layer", 0)
    np.testing.assert_allclose(cells(browser)[0][1] or 0, alpha[4, 0, 0, 1], atol=1e-4)

    change(browser, "client", 3)  # the picker
    assert text(browser, "picked-note").startswith("d after round 5")
    own = browser.ask("document.getElementById('picked').data[0].x")
    np.testing.assert_allclose(own, alpha[4, 3, :, 3], atol=1e-4)
    change(browser, "client", 5)
    assert text(browser, "picked-note").startswith(EVIL)

    browser.ask("document.getElementById('frame').focus()")  # by keyboard alone
    browser.press("ArrowLeft", 37)
    assert text(browser, "at-round") == "4"
    browser.ask("document.getElementById('play').click()")
    browser.wait("document.getElementById('at-round').textContent === '6'")
    browser.wait("document.getElementById('play').textContent === 'Play'")

    lines = "document.getElementById('curves').data.map((trace) => trace.name).filter(Boolean).join(',')"
    assert browser.ask(lines) == "&lt;img src=x onerror=document.title='taken'&gt;,pfedla"
    browser.ask("document.querySelector('#runs input').click()")  # the overlay
    assert browser.ask(lines) == "pfedla"
    before = browser.ask("document.getElementById('curves').data.at(-1).x")
    browser.ask("document.querySelector('#against input[value=seconds]').click()")
    assert browser.ask("document.getElementById('curves').data.at(-1).x") == [1.5 * x for x in before]
    browser.ask("document.getElementById('tick-none').click()")
    assert "Nothing is chosen" in text(browser, "curves-note")
    browser.ask("document.getElementById('tick-all').click()")

    for kind, beginning in (
        ("markdown", "| method | seeds |"),
        ("csv", '"method","seeds"'),
        ("latex", "\\begin{tabular}"),
    ):
        browser.ask(f"document.querySelector('[data-copy={kind}]').click()")
        browser.wait("document.getElementById('copied').textContent !== ''")
        copied = browser.ask("document.getElementById('copy-text').value")
        assert copied.startswith(beginning)
        assert "pfedla" in copied
    mean = np.mean([run.history[-1]["accuracy_mean"] for run in find_runs([tmp_path]) if run.label == "pfedla"])
    browser.ask("document.querySelector('[data-copy=markdown]').click()")
    assert f"{100 * mean:.2f}" in browser.ask("document.getElementById('copy-text').value")

    priors = [run.history[-1]["accuracy_class_prior"] for run in find_runs([tmp_path]) if run.label == "pfedla"]
    assert f"{100 * np.mean(priors):.2f}" in browser.ask("document.getElementById('copy-text').value")
    assert "told how often each class occurs" in text(browser, "prior-note")

    for width, dark in ((390, False), (390, True), (1280, True)):
        browser.show(width=width, dark=dark)
        browser.wait(f"document.documentElement.clientWidth === {width}")
        browser.wait(f"document.documentElement.scrollWidth <= {width}")  # nothing sticks out, once it is drawn anew
    assert browser.ask("document.title") == "pfedla"
    assert browser.complaints == []


@pytest.mark.slow
def test_the_live_page_follows_a_run_round_by_round(tmp_path: Path, browser: Browser) -> None:
    made(tmp_path / "done", weights=False)
    record, rng = create(tmp_path / IMAGE, names=[EVIL, "b"], rounds=9), np.random.default_rng(0)
    record.append(line(rng, 1, 2, 100))
    with served(tmp_path) as port:
        browser.show()
        browser.open(f"http://{HOST}:{port}/")
        rows = "[...document.querySelectorAll('#runs tbody tr')]"
        row = f"{rows}.find((row) => row.textContent.includes('<img')).textContent"
        browser.wait(f"{row}.includes('running') && {row}.includes('1 / 9')")
        record.append(line(rng, 2, 2, 100))
        took = browser.wait(f"{row}.includes('2 / 9')")
        assert took < 2 + 8 * _slowness(), took
        record.fail(ValueError("<b>bad luck</b>"))
        browser.wait(f"{row}.includes('failed') && {row}.includes('<b>bad luck')")
        made(tmp_path / "new", weights=False)
        browser.wait("document.getElementById('about').textContent.startsWith('3 runs')")
        assert browser.ask("document.querySelectorAll('#runs b, #runs img').length") == 0
        assert browser.ask("document.title") == "pfedla"
        assert browser.complaints == []


def _slowness() -> float:
    """Return by how much this machine is busier than one that has time for us."""
    begun, used = time.monotonic(), time.process_time()
    sum(i * i for i in range(2_000_000))
    return max(0.0, (time.monotonic() - begun) / (time.process_time() - used) - 1)
