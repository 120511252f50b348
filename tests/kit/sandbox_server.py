"""A server of the code sandbox in a process of its own, for tests and benchmarks."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.kit import ROOT

_START_S = 60


@dataclass(frozen=True)
class Mode:
    """One way to start the sandbox's server.

    name, prefix: the name of the mode, and the words before the server's command.
    bounded: whether control groups limit the memory of a program as a whole; None: as on this machine.
    user: the server's user id, if it is not this process's.
    first: whether the server is the first process of a namespace.
    """

    name: str
    prefix: tuple[str, ...] = ()
    bounded: bool | None = None
    user: int | None = None
    first: bool = False


OWN = Mode("as this user")
"""The plain start of the server, as this process's user."""


class NotStarted(RuntimeError):
    """The error of a server that did not start: it ended with `code`, and wrote `text`."""

    def __init__(self, code: int | None, text: str) -> None:
        super().__init__(f"the sandbox did not start (exit code {code}):\n{text}")
        self.code, self.text = code, text


def free_port() -> int:
    """Return a port on which nothing listens, below the system's range for outgoing connections."""
    given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", given_out - 1 - secrets.randbelow(given_out // 4)))
            return s.getsockname()[1]


@contextlib.contextmanager
def served(
    *options: str, environment: dict[str, str] | None = None, mode: Mode = OWN, bounded: bool = False
) -> Iterator[tuple[str, int]]:
    """Run a sandbox server in a process of its own; yield (URL, process id).

    Args:
        options: the server's options.
        environment: the server's variables in addition to this process's.
        mode: the way to start the server.
        bounded: the server must not start where it cannot limit a program's memory.

    Raises:
        NotStarted: saying why.
    """
    port = free_port()
    allow = [] if bounded else ["--allow-unbounded-memory"]
    command = [*mode.prefix, sys.executable, "-m", "code_sandbox", "--port", str(port), *allow, *options]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log, env={**os.environ, **(environment or {})})
        try:
            _wait(process, url, log)
            server = psutil.Process(process.pid)
            if mode.first:
                server = server.children()[0]
            yield url, server.pid
        finally:
            _stop(process, mode)


def _stop(process: subprocess.Popen[bytes], mode: Mode) -> None:
    """End the server in order: in a process namespace of its own the server is the started process's child."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        server = psutil.Process(process.pid).children()[0] if mode.first else psutil.Process(process.pid)
        server.terminate()
    try:
        process.wait(45)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def _wait(process: subprocess.Popen[bytes], url: str, log: Any) -> None:
    """Wait until the server answers. Raises NotStarted."""
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/v1/ping", timeout=5).close()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise NotStarted(process.poll(), log.read())
        time.sleep(0.1)
