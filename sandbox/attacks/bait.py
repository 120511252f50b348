"""What the attacks of sandbox/attacks/programs look for, laid out on the host."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from sandbox.attacks import programs as attacks
from tests.kit import ROOT


def _listen(bait: dict[str, Any], stack: contextlib.ExitStack, folder: Path) -> None:
    """Sockets that answer: tcp and udp on one port, a unix socket, an abstract one."""
    bait["unix"] = str(folder / "socket")
    tcp, udp = stack.enter_context(socket.socket()), stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
    tcp.bind(("0.0.0.0", 0))
    bait["port"] = bait["port_6"] = tcp.getsockname()[1]
    udp.bind(("0.0.0.0", bait["port"]))
    with contextlib.suppress(OSError):  # a machine without version 6
        six = stack.enter_context(socket.socket(socket.AF_INET6))
        six.bind(("::1", 0))
        six.listen(64)
        bait["port_6"] = six.getsockname()[1]
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
def laid_out(server_port: int, secret: str, user: int | None = None) -> Iterator[dict[str, Any]]:
    """What programs get to know as `BAIT`, and "untold", a secret that they do not. Nothing of it is left afterwards.

    Args:
        user: whose the files and the process are, if not this process's user's.
    """
    mark, untold = f"sandbox-bait-{secrets.token_hex(4)}", secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="sandbox-bait-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o777)
        home, shared = Path.home() / f".{mark}", Path("/dev/shm") / mark
        for file in (folder / "secret", home, shared):
            file.write_text(f"1 / 0  # {secret} {untold}\n")
            stack.callback(file.unlink, missing_ok=True)
            if user is not None:
                os.chown(file, user, user)
        victim = subprocess.Popen(["sleep", "3600"], user=user)
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        here = {str(ROOT), sys.prefix, sys.base_prefix, str(Path.home()), str(Path(sys.executable).resolve().parent)}
        bait: dict[str, Any] = {
            "mark": mark,
            "secret": secret,
            "untold": untold,
            "file": str(folder / "secret"),
            "home_file": str(home),
            "project": str(ROOT),
            "places": [str(folder)],
            "host_paths": sorted(path for path in here if len(Path(path).parts) > 2 and not path.startswith("/usr")),
            "server_port": server_port,
            "host": socket.gethostname(),
            "victim": victim.pid,
            "victim_user": os.getuid() if user is None else user,
            "core_pattern": Path("/proc/sys/kernel/core_pattern").read_text(),
            "memory_mb": attacks.LIMIT_MB,
            "too_much_mb": attacks.TOO_MUCH_MB,
            "files_mb": attacks.FILES_MB,
            "processes": attacks.PROCESSES,
        }
        _listen(bait, stack, folder)
        yield bait


# None of them names a package: a program that does gets a warm interpreter.
_INSIDE = [
    "/",
    "/usr",
    "/usr/lib",
    "/usr/bin",
    "/packages",
    "/python",
    "/python/lib",
    "/dev",
    "/etc",
    "/var",
    "/proc",
    "/sys",
]


def program(code: str, bait: dict[str, Any], inside: bool) -> str:
    """An attack's or a neighbour's whole program."""
    known = {name: value for name, value in bait.items() if name != "untold"} | {"inside": inside}
    if inside:
        known["places"] = bait["places"] + _INSIDE
    return attacks.program(code, known)


def run_unsandboxed(code: str, environment: dict[str, str], time_s: float = 60.0, stdin: str = "") -> str:
    """What the program prints as an ordinary process, its children included; it is killed after `time_s`."""
    spare = os.open("/dev/null", os.O_RDONLY)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            env={**os.environ, **environment},
            pass_fds=(spare,),  # a descriptor to inherit
            start_new_session=True,
            text=True,
            errors="replace",
        )
        try:
            return process.communicate(stdin, timeout=time_s)[0]
        except subprocess.TimeoutExpired as error:
            return (error.stdout or b"").decode(errors="replace")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        os.close(spare)


def kill_marked(mark: str) -> None:
    """End the daemons that carry the mark."""
    for process in psutil.process_iter(["cmdline"]):
        if any(argument.startswith(mark) for argument in process.info["cmdline"] or []):
            process.kill()
