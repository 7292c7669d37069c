"""A real Chromium for tests, spoken to in the DevTools protocol; tests that need it are skipped where there is none."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--remote-debugging-port=0"),
)


class Browser:
    """One page in a Chromium of its own; what the page complains about is collected in `complaints`."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._number = connection, 0
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command of the protocol, and return its answer."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("id") == self._number:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, what = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(what["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(what["args"]))
        elif method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")

    def show(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the window's width and the theme."""
        mobile = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Go to an address, and wait until the page has drawn something."""
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && document.querySelectorAll('.main-svg').length > 0")

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 120) -> float:
        """Wait until an expression is true; return how long that took."""
        begun = time.monotonic()
        while not self.ask(expression):
            assert time.monotonic() < begun + seconds, f"never became true: {expression}; {self.complaints}"
            time.sleep(0.05)
        return time.monotonic() - begun

    def press(self, key: str, code: int) -> None:
        """Press a key and let it go."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path, *, whole: bool = True, **clip: float) -> None:
        """Take a picture of the page, or of a part of it."""
        part = {"clip": {"scale": 1, **clip}} if clip else {}
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **part)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Start a Chromium that keeps its profile in a folder; skip the test if there is none."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine (Debian's package: chromium)")
    client = pytest.importorskip("websockets.sync.client")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = _wait_for(folder / "DevToolsActivePort", process)
        with client.connect(f"ws://127.0.0.1:{port[0]}{port[1]}", max_size=None) as whole:
            whole.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
            targets = json.loads(whole.recv(timeout=30))["result"]["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        with client.connect(
            f"ws://127.0.0.1:{port[0]}/devtools/page/{page}", max_size=None, max_queue=None
        ) as connection:
            yield Browser(connection)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _wait_for(file: Path, process: subprocess.Popen[bytes]) -> list[str]:
    for _ in range(600):
        if file.exists() and len(lines := file.read_text().split()) == 2:
            return lines
        assert process.poll() is None, "Chromium ended at once"
        time.sleep(0.1)
    raise AssertionError("Chromium did not start within a minute")
