"""A headless Chromium, driven through chromedriver with nothing but the standard library.

The few W3C WebDriver commands the tests need. The browser's console and every request it makes
are kept in logs, so that a page can be shown to be quiet and to stay at home.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key the W3C standard chose
KEYS = {"left": "\ue012", "right": "\ue014", "tab": "\ue004", "enter": "\ue007", "home": "\ue011"}


class BrowserError(Exception):
    """What chromedriver answered."""


class Browser:
    """One window of its own."""

    def __init__(self, folder: Path) -> None:
        self.downloads = folder / "downloads"
        self.downloads.mkdir(parents=True)
        # Port 0: chromedriver takes a free one and says which.
        self._process = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in self._process.stdout:
            if "started successfully on port" in line:
                self._base = f"http://127.0.0.1:{line.split()[-1].rstrip('.')}"
                break
        options = {
            "binary": CHROMIUM,
            "args": [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--no-first-run",
                f"--user-data-dir={folder / 'user'}",
            ],
            "prefs": {"download.default_directory": str(self.downloads)},
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        try:
            made = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._end()
            raise
        self._base += f"/session/{made['sessionId']}"
        self.open("about:blank")  # the browser's own first page makes requests of its own
        self.requests()

    def close(self) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self._end()

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._process.stdout.close()

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise BrowserError(json.load(error)["value"]["message"]) from None

    def open(self, url: str) -> None:
        self._send("POST", "/url", {"url": url})

    def reload(self) -> None:
        self._send("POST", "/refresh", {})

    def run(self, script: str, *words: Any) -> Any:
        """The value a function body returns in the page."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(words)})

    def wait(self, script: str, *words: Any, seconds: float = 60) -> Any:
        """The first true value a function body returns."""
        end = time.monotonic() + seconds
        while not (value := self.run(script, *words)):
            if time.monotonic() > end:
                raise BrowserError(f"never true: {script}")
            time.sleep(0.05)
        return value

    def text(self, css: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", css)

    def _find(self, css: str) -> str:
        found = self._send("POST", "/element", {"using": "css selector", "value": css})
        return found[_ELEMENT]

    def click(self, css: str) -> None:
        self._send("POST", f"/element/{self._find(css)}/click", {})

    def press(self, css: str, *keys: str) -> None:
        """Type keys into an element, as a person without a mouse does."""
        text = "".join(KEYS[key] for key in keys)
        self._send("POST", f"/element/{self._find(css)}/value", {"text": text})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def theme(self, scheme: str, medium: str = "") -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        # An empty medium is the screen.
        self.devtools("Emulation.setEmulatedMedia", media=medium, features=[feature])

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self._send("POST", "/print", {"background": True}))

    def console(self) -> list[str]:
        """What the console said since it was last asked."""
        return [row["message"] for row in self._send("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """The addresses asked for since this was last asked."""
        rows = self._send("POST", "/se/log", {"type": "performance"})
        events = [json.loads(row["message"])["message"] for row in rows]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """One browser for all tests."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium and chromedriver are not installed")
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture
def browser(chromium):
    """The browser, with nothing left of the last test."""
    chromium.open("about:blank")
    chromium.size(1200, 900)
    chromium.theme("light")
    for file in chromium.downloads.iterdir():
        file.unlink()
    chromium.console()
    chromium.requests()
    return chromium


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder, with a space in its name, that holds text.txt and model/."""
    from tests import tiny

    folder = tmp_path_factory.mktemp("tiny model")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return tiny.write_llama(folder, characters=3000, **heads)
