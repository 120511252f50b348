"""A Chromium without a window, driven by the DevTools protocol: it opens pages, clicks, and collects errors."""

import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PROGRAM = shutil.which("chromium")
_TIMEOUT_S = 60.0


class Page:
    """A tab. `errors` has the console's errors and warnings, exceptions, and failed loads."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        for domain in ("Runtime", "Log", "Page"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol, and return the result."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=_TIMEOUT_S))
            self._hear(message.get("method"), message.get("params", {}))
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])

    def _hear(self, event: str | None, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert", "warning"):
            self.errors.append(" ".join(str(argument.get("value")) for argument in about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(about["entry"]["text"]))

    def open(self, url: str, ready: str) -> None:
        """Open `url`, and wait until the JavaScript expression `ready` is true."""
        self.command("Page.navigate", url=url)
        self.wait(ready)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression.

        Raises:
            RuntimeError: the expression throws.
        """
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']['exception']['description']}")
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until the expression is true. It may throw while a page is being loaded."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.run(f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{expression} did not become true; {self.errors}")
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the element; an element on top of it gets the click."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        left, top, width, height = self.run(
            f"(({{x, y, width, height}}) => [x, y, width, height])({element}.getBoundingClientRect())"
        )
        x, y = left + width / 2, top + height / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def colour_scheme(self, name: str) -> None:
        """Have the machine prefer `light` or `dark`."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width: int, height: int) -> None:
        """Set the size of the window in pixels."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )


@contextlib.contextmanager
def page(profile: Path) -> Iterator[Page]:
    """Run a browser with one empty page for the block, without a network.

    Args:
        profile: an empty folder for the browser's files.
    """
    assert PROGRAM, "no chromium"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-port=0"]
    with open(profile / "chromium.log", "w") as log:
        command = [PROGRAM, *options, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with connect(_address(profile, process), max_size=None) as connection:
            yield Page(connection)
    finally:
        process.terminate()
        process.wait(_TIMEOUT_S)


def _address(profile: Path, process: "subprocess.Popen[bytes]") -> str:
    """Return the WebSocket of the empty page."""
    import urllib.request

    port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + _TIMEOUT_S
    while not port_file.is_file() or len(port_file.read_text().splitlines()) < 2:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Chromium did not start: {(profile / 'chromium.log').read_text()[-2000:]}")
        time.sleep(0.05)
    port = port_file.read_text().splitlines()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=_TIMEOUT_S) as answer:
        return str(next(target for target in json.load(answer) if target["type"] == "page")["webSocketDebuggerUrl"])
