"""What the attacks of scripts/bench/sandbox_attacks.py look for, laid out on the host; and a server to attack."""

import contextlib
import ctypes
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipe.code_sandbox.seccomp import DENIED
from scripts.bench import sandbox_attacks
from scripts.bench.small_run import ROOT

_START_S = 60


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def served(*options: str, environment: dict[str, str] | None = None) -> Iterator[tuple[str, int]]:
    """A sandbox server in a process of its own: (its URL, its process id).

    Raises:
        RuntimeError: it did not start; says why.
    """
    port = _free_port()
    command = [sys.executable, "-m", "recipe.code_sandbox", "--port", str(port), *options]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, cwd=ROOT, stderr=log, env={**os.environ, **(environment or {})})
        try:
            deadline = time.monotonic() + _START_S
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/v1/ping", timeout=5).close()
                    break
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"the sandbox did not start:\n{log.read()}")
                time.sleep(0.1)
            yield url, server.pid
        finally:
            server.terminate()
            server.wait(30)


def _listen(bait: dict[str, Any], stack: contextlib.ExitStack, folder: Path) -> None:
    """Sockets that answer: tcp and udp on one port, a unix socket, an abstract one."""
    bait["unix"] = str(folder / "socket")
    tcp, udp = stack.enter_context(socket.socket()), stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
    tcp.bind(("0.0.0.0", 0))
    bait["port"] = tcp.getsockname()[1]
    udp.bind(("0.0.0.0", bait["port"]))
    for address in (bait["unix"], "\0" + bait["mark"]):
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(address)
        unix.listen(16)
    os.chmod(bait["unix"], 0o777)
    tcp.listen(64)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                udp.sendto(b"!", udp.recvfrom(9)[1])

    threading.Thread(target=answer, daemon=True).start()
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: which address would be used
            bait["address"] = probe.getsockname()[0]
        except OSError:
            bait["address"] = "127.0.0.1"


@contextlib.contextmanager
def laid_out(server_port: int, secret: str) -> Iterator[dict[str, Any]]:
    """What programs get to know as `BAIT`. Nothing of it is left afterwards."""
    mark = f"vcpo-bait-{secrets.token_hex(4)}"
    libc = ctypes.CDLL(None)
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="vcpo-bait-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o777)
        home, shared = Path.home() / f".{mark}", Path("/dev/shm") / mark
        for file in (folder / "secret", home, shared):
            file.write_text(secret)
            stack.callback(file.unlink)
        key = secrets.randbelow(1 << 30) + 1
        segment = libc.shmget(key, 16, 0o1666)
        stack.callback(libc.shmctl, segment, 0, None)
        victim = subprocess.Popen(["sleep", "600"])
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        column = 0 if platform.machine() == "x86_64" else 1
        bait: dict[str, Any] = {
            "mark": mark,
            "secret": secret,
            "file": str(folder / "secret"),
            "home_file": str(home),
            "project": str(ROOT),
            "places": [str(folder)],
            "server_port": server_port,
            "host": socket.gethostname(),
            "victim": victim.pid,
            "shm_key": key,
            "calls": {"clone": (56, 220)[column], "clone3": 435, **{name: n[column] for name, n in DENIED.items()}},
            "memory_mb": sandbox_attacks.LIMIT_MB,
            "files_mb": sandbox_attacks.FILES_MB,
            "processes": sandbox_attacks.PROCESSES,
        }
        _listen(bait, stack, folder)
        yield bait


_INSIDE = ["/", "/usr", "/usr/lib", "/usr/bin", "/packages", "/packages/numpy", "/dev", "/etc", "/var", "/proc", "/sys"]


def program(code: str, bait: dict[str, Any], inside: bool) -> str:
    """An attack's or a neighbour's whole program."""
    known = {**bait, "places": bait["places"] + _INSIDE} if inside else bait
    return f"BAIT = {known!r}\n{sandbox_attacks.PRELUDE}\n{code}\n"


def run_unsandboxed(code: str, environment: dict[str, str], time_s: float = 60.0) -> str:
    """What the program prints as an ordinary process, its children included; it is killed after `time_s`."""
    spare = os.open("/dev/null", os.O_RDONLY)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            pass_fds=(spare,),  # a descriptor to inherit
            start_new_session=True,
            text=True,
            errors="replace",
        )
        try:
            return process.communicate(timeout=time_s)[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        os.close(spare)


def kill_marked(mark: str) -> None:
    """End the daemons that carry the mark."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if mark in (process.info["cmdline"] or []):
            process.kill()
