"""Runs one untrusted Python program, isolated by the kernel (bubblewrap: namespaces; seccomp; limits)."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from recipe.code_sandbox.cgroups import ControlGroups
from recipe.code_sandbox.environment import Staging, base_packages, package_paths, system_paths
from recipe.code_sandbox.seccomp import filter_program

# Nobody's: systemd keeps 61184 to 65519 for users that exist while a service runs, so no file belongs to it.
_HOST_USER = 61184
_TOOLS = "/usr/bin:/bin:/usr/local/bin:/usr/sbin"
_SPARE_MB = 64
_PROGRAM, _PACKAGES = "/tmp/main.py", Path("/packages")
_INSTALL = "install it: apt-get install bubblewrap (0.8 or newer)"
_ENABLE = "allow user namespaces: sysctl -w user.max_user_namespaces=10000 (in a container: --privileged)"


class IsolationError(RuntimeError):
    """Programs cannot be isolated here. One line: what is missing, and how to get it."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. Raises ValueError naming the one that is out of range."""

    time_s: float = 10.0
    memory_mb: int = 1024
    """Of address space, per process. Where there are control groups, all its processes and files together have it once,
    plus twice `files_mb` and 64 MiB."""
    processes: int = 32
    """Processes and threads."""
    files_mb: int = 64
    """In /tmp, which is in memory; as much again in /dev/shm."""
    output_kb: int = 256
    """On standard output, and as much again on standard error. A program that writes more is ended."""

    def __post_init__(self) -> None:
        for name, least in (("time_s", 0.1), ("memory_mb", 64), ("processes", 1), ("files_mb", 1), ("output_kb", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}={getattr(self, name)} is out of range: use {least} or more")


@dataclass
class Outcome:
    """How a program ended."""

    stdout: str
    stderr: str
    duration_s: float
    return_code: int | None = None
    """None: it was ended at its time limit. 128 + n: signal n ended it."""


class _Pipes:
    """What a program writes, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self.full = asyncio.Event()
        self._limit = limit

    async def follow(self, stream: asyncio.StreamReader, kept: bytearray) -> None:
        """To its end, whatever is kept: `Process.wait` waits for that."""
        while chunk := await stream.read(1 << 16):
            kept += chunk[: self._limit - len(kept)]
            if len(kept) >= self._limit:
                self.full.set()


class Sandbox:
    """A way to run programs. One per process: as root it gives this process a mount namespace of its own.

    Args:
        packages: distributions that programs may import, with all that these require.

    Raises:
        IsolationError: the kernel or the machine's set-up does not allow it.
        ValueError: a package is not installed.
    """

    def __init__(self, packages: tuple[str, ...] = ("numpy", "scipy", "sympy")) -> None:
        self._bwrap = _tool("bwrap")
        if "--disable-userns" not in subprocess.run([self._bwrap, "--help"], capture_output=True, text=True).stdout:
            raise IsolationError(f"{self._bwrap} is too old; {_INSTALL}")
        self._prlimit = _tool("prlimit")
        try:
            self._filter = filter_program()
        except OSError as error:
            raise IsolationError(str(error)) from None
        self._staging, self._as_user, self._groups = None, [], None
        places = {path: path for path in system_paths()}
        places |= {path: _PACKAGES / path.name for path in package_paths(list(packages))}
        sources = {path: path for path in places}
        if os.geteuid() == 0:
            try:
                self._staging = Staging(list(places))
            except OSError as error:
                raise IsolationError(
                    f"root without CAP_SYS_ADMIN ({error}): run as another user, or {_ENABLE}"
                ) from None
            sources = self._staging.source_of
            drop = [f"--reuid={_HOST_USER}", f"--regid={_HOST_USER}", "--clear-groups", "--"]
            self._as_user = [_tool("setpriv"), *drop]
        with contextlib.suppress(OSError):
            self._groups = ControlGroups()
        self._view = _view({sources[path]: place for path, place in places.items()})

    @property
    def limits_whole_programs(self) -> bool:
        """Whether memory and processes are limited for a program as a whole, by control groups."""
        return self._groups is not None

    async def check(self) -> None:
        """Run a program. Raises IsolationError where that fails."""
        try:
            outcome = await self.run("print(6 * 7)", "", Limits())
        except IsolationError as error:
            raise IsolationError(f"{error}; {_ENABLE}") from None
        if outcome.stdout != "42\n":
            raise IsolationError(f"a first program failed in the sandbox: {outcome}")

    def close(self) -> None:
        """Give back what `__init__` took."""
        if self._staging is not None:
            self._staging.close()

    async def run(self, code: str, stdin: str, limits: Limits) -> Outcome:
        """Run `code` as `__main__`, until it ends or a limit ends it. No process of it is left afterwards.

        Raises:
            IsolationError: the program was not started.
        """
        async with self._joined_group(limits) as join:
            with (
                _memory_files(code.encode(errors="replace"), self._filter) as (program, seccomp),
                _status_pipe() as (status, report),
            ):
                command = [
                    *join,
                    *self._as_user,
                    *(self._bwrap, "--seccomp", str(seccomp), "--json-status-fd", str(report)),
                    *(*self._view, *_files(limits.files_mb), "--ro-bind-data", str(program), _PROGRAM),
                    *("--remount-ro", "/", "--", self._prlimit, *_prlimits(limits)),
                    *(os.path.realpath(sys.executable), "-B", _PROGRAM),
                ]
                start = time.perf_counter()
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    pass_fds=(program, seccomp, report),
                    start_new_session=True,
                )
                os.close(report)
                outcome = await _finished(process, stdin.encode(errors="replace"), limits, start)
                if outcome.return_code is not None:
                    outcome.return_code = _exit_code(status, outcome)
                return outcome

    @contextlib.asynccontextmanager
    async def _joined_group(self, limits: Limits) -> AsyncIterator[list[str]]:
        """The start of a command that puts itself under the program's limits."""
        if self._groups is None:
            yield []
            return
        # More than one process may have, so that the first to notice is the program, by a MemoryError.
        total_mb = limits.memory_mb + 2 * limits.files_mb + _SPARE_MB
        async with self._groups.group(total_mb, limits.processes) as files:
            join = " && ".join(f'echo $$ >"${i + 1}"' for i in range(len(files)))
            yield ["/bin/sh", "-c", f'{join} && shift {len(files)} && exec "$@"', "join", *files]


async def _finished(process: asyncio.subprocess.Process, stdin: bytes, limits: Limits, start: float) -> Outcome:
    """Feed and watch the process. Kills its process group whatever happens: bwrap takes all the others along."""
    assert process.stdin and process.stdout and process.stderr
    pipes = _Pipes(limits.output_kb << 10)
    end, full = asyncio.create_task(process.wait()), asyncio.create_task(pipes.full.wait())
    others = [
        asyncio.create_task(pipes.follow(process.stdout, pipes.stdout)),
        asyncio.create_task(pipes.follow(process.stderr, pipes.stderr)),
        asyncio.create_task(_feed(process.stdin, stdin)),
    ]
    try:
        left = start + limits.time_s - time.perf_counter()
        await asyncio.wait({end, full}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        timed_out = not end.done() and not full.done()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.gather(end, *others)
        full.cancel()
    outcome = Outcome(_text(pipes.stdout), _text(pipes.stderr), time.perf_counter() - start)
    if not timed_out:
        outcome.return_code = end.result()
    if pipes.full.is_set():
        outcome.stderr += f"\n[ended: more than {limits.output_kb} KiB of output]"
    return outcome


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read
        stream.write(data)
        await stream.drain()
    stream.close()


def _exit_code(status: int, outcome: Outcome) -> int:
    """The program's own exit code, from bwrap's report; where that is missing, bwrap failed or was killed."""
    lines = [json.loads(line) for line in os.read(status, 1 << 16).decode().splitlines()]
    codes = [line["exit-code"] for line in lines if "exit-code" in line]
    if codes:
        return codes[0]
    if outcome.return_code == -signal.SIGKILL:
        return 128 + signal.SIGKILL  # at a limit
    raise IsolationError(f"bwrap: {outcome.stderr.strip() or outcome.return_code}")


def _view(place_of: dict[Path, Path]) -> list[str]:
    """bwrap's options: namespaces, and what a program sees. `place_of`: a path here -> where it is inside."""
    view = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    view += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--cap-drop", "ALL", "--proc", "/proc"]
    for source, place in place_of.items():
        view += ["--ro-bind", str(source), str(place)]
    for folder in base_packages():
        view += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            view += ["--symlink", f"usr/{name}", f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            view += ["--ro-bind", f"/{name}", f"/{name}"]
    variables = {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONPATH": str(_PACKAGES)}
    variables |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    for name, value in variables.items():
        view += ["--setenv", name, value]
    return [*view, "--dev", "/dev", "--chdir", "/tmp"]


def _files(megabytes: int) -> list[str]:
    size = ["--size", str(megabytes << 20)]
    return [*size, "--tmpfs", "/tmp", *size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]


def _prlimits(limits: Limits) -> list[str]:
    """Set inside the sandbox: processes are counted per user namespace, so other programs' do not count."""
    memory, files = limits.memory_mb << 20, limits.files_mb << 20
    cpu = int(limits.time_s) + 2
    numbers = {"as": memory, "nproc": limits.processes + 2, "fsize": files, "cpu": cpu, "nofile": 256, "core": 0}
    return [f"--{name}={value}:{value}" for name, value in numbers.items()]


@contextlib.contextmanager
def _memory_files(*contents: bytes) -> Iterator[list[int]]:
    """Descriptors to read the contents from."""
    descriptors = [os.memfd_create("sandbox") for _ in contents]
    try:
        for descriptor, content in zip(descriptors, contents, strict=True):
            os.write(descriptor, content)
            os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextlib.contextmanager
def _status_pipe() -> Iterator[tuple[int, int]]:
    """(what bwrap reports is read from here, its end); the block closes the second."""
    ours, theirs = os.pipe()
    try:
        yield ours, theirs
    finally:
        os.close(ours)


def _tool(name: str) -> str:
    path = shutil.which(name, path=_TOOLS)
    if path is None:
        hint = _INSTALL if name == "bwrap" else f"install it: apt-get install util-linux (it has {name})"
        raise IsolationError(f"{name} is not on this machine; {hint}")
    return path


def _text(data: bytearray) -> str:
    return data.decode("utf-8", errors="replace")
