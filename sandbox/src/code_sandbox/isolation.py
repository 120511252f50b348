"""A sandbox for untrusted programs, isolated by the kernel (bubblewrap: namespaces; seccomp; limits)."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from code_sandbox import interpreter
from code_sandbox.cgroups import ControlGroup, ControlGroups
from code_sandbox.environment import (
    PACKAGES,
    PYTHON,
    Staging,
    interpreter_places,
    links_of_the_root,
    package_paths,
    packages_of_the_system,
)
from code_sandbox.limits import IsolationError, Limits, ProgramOutcome
from code_sandbox.sandboxed import SandboxedInterpreter
from code_sandbox.seccomp import filter_program
from code_sandbox.user_ids import HOST_USERS, UserIds

_TOOLS = "/usr/bin:/bin:/usr/local/bin:/usr/sbin"
_SPARE_MB = 64
_IMPORTED_MB = 256
# Open descriptors of a process. All pipes of a user share 64 MiB: one of several programs with a user id must not take
# all pipes.
_DESCRIPTORS, _DESCRIPTORS_OF_ONE_USER = 256, 64
_INTERPRETER = Path("/interpreter.py")
_INSTALL = "install it: apt-get install bubblewrap (0.8 or newer)"
_ENABLE = "allow user namespaces: sysctl -w user.max_user_namespaces=10000 (in a container: --privileged)"
_PR_SET_CHILD_SUBREAPER = 36
# The process is the first to go when the machine runs out of memory, and slow when the machine runs out of cores (a
# session is a group for the scheduler, with a priority of its own; the kernel lets a user set ten in a second). Then
# the process enters the control groups, whose files are the next arguments.
_ENTER = """echo 1000 >/proc/self/oom_score_adj || exit 125
{ echo 5 >/proc/self/autogroup; } 2>/dev/null
while [ "$1" != -- ]; do echo $$ >"$1" || exit 125; shift; done
shift; exec "$@"
"""


class Sandbox:
    """A way to run programs. There is one in a process: it makes the process the reaper of the programs' processes and,
    as root, gives the process a mount namespace of its own.

    Args:
        packages: distributions that programs may import, with all that these require.

    Raises:
        IsolationError: the kernel or the machine's set-up does not allow isolation.
        ValueError: a package is not installed.
    """

    users = len(HOST_USERS)
    """The most programs at a time: as root each program has a user id of its own."""

    def __init__(self, packages: tuple[str, ...] = ("numpy", "scipy", "sympy")) -> None:
        self._bwrap = _tool("bwrap")
        if "--disable-userns" not in subprocess.run([self._bwrap, "--help"], capture_output=True, text=True).stdout:
            raise IsolationError(f"{self._bwrap} is too old; {_INSTALL}")
        try:
            self._filter = filter_program()
        except OSError as error:
            raise IsolationError(str(error)) from None
        self._staging, self._groups, self._setpriv = None, None, ""
        places, self._python = interpreter_places()
        places |= {path: PACKAGES / path.name for path in package_paths(list(packages))}
        places[Path(interpreter.__file__)] = _INTERPRETER
        sources = {path: path for path in places}
        if os.geteuid() == 0:
            self._setpriv = _tool("setpriv")
            try:
                self._staging = Staging(list(places))
            except OSError as error:
                raise IsolationError(
                    f"root without CAP_SYS_ADMIN ({error}): run as another user, or {_ENABLE}"
                ) from None
            sources = self._staging.source_of
        self.no_groups = ""
        """The reason why there are no control groups; empty if there are."""
        try:
            self._groups = ControlGroups()
        except OSError as error:
            self.no_groups = str(error)
        self._users = UserIds()
        self._view = _view({sources[path]: place for path, place in places.items()}, packages_of_the_system(places))
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @property
    def limits_whole_programs(self) -> bool:
        """True if control groups limit the memory and processes of a program as a whole."""
        return self._groups is not None

    @property
    def isolation(self) -> str:
        """The user ids of programs and the limits of their memory, in words."""
        user = "a user id for each program" if self._staging else "one user id for all programs"
        if self._groups is None:
            return f"{user}, no control groups ({self.no_groups})"
        return f"{user}, control groups of version {self._groups.version}"

    async def check(self) -> None:
        """Run a program. Raises IsolationError where that fails."""
        try:
            outcome = await self.run("print(6 * 7)", "", Limits())
        except IsolationError as error:
            raise IsolationError(f"{error}; {_ENABLE}") from None
        if outcome.stdout != "42\n":
            raise IsolationError(f"a first program failed in the sandbox: {outcome}")

    def close(self) -> None:
        """Give back user ids, control groups and mounts, once no interpreter is left."""
        self._users.close()
        if self._groups is not None:
            self._groups.close()
        if self._staging is not None:
            self._staging.close()

    async def run(self, code: str, stdin: str, limits: Limits) -> ProgramOutcome:
        """Run `code` as `__main__` in a new interpreter, until it ends or a limit ends it, with all its processes.

        Raises:
            IsolationError: the program was not started.
        """
        return await (await self.start(limits)).run(code, stdin, limits)

    async def start(self, limits: Limits, modules: tuple[str, ...] = ()) -> SandboxedInterpreter:
        """Start an interpreter, and return it ready for its program, with the modules imported.

        Raises:
            IsolationError: the interpreter does not start.
        """
        starting = asyncio.create_task(self._start(limits, modules))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A start that is broken off could leave processes that nobody knows: a complete start can be ended.
            with contextlib.suppress(IsolationError):
                await (await starting).end()
            raise

    async def _start(self, limits: Limits, modules: tuple[str, ...]) -> SandboxedInterpreter:
        enter, release = self._admitted(limits, bool(modules))
        try:
            started = await self._spawn([*enter, self._bwrap], limits, modules, release)
        except BaseException:
            await release()
            raise
        try:
            await started.ready()
        except BaseException:
            await started.end()
            raise
        return started

    def _admitted(self, limits: Limits, imports: bool) -> tuple[list[str], Callable[[], Awaitable[None]]]:
        """Return (the start of a command, with its own user and control group; the function that gives both back)."""
        # More than one process may have, so that the program notices first, by a MemoryError.
        total_mb = limits.memory_mb + 2 * limits.files_mb + _SPARE_MB + (_IMPORTED_MB if imports else 0)
        user = self._users.take() if self._staging else None
        group: ControlGroup | None = None
        if self._groups is not None:
            try:
                group = self._groups.group(total_mb, limits.processes)
            except OSError as error:
                if user is not None:
                    self._users.give_back(user)
                raise IsolationError(f"no control group for a program: {error}") from None
        drop = [self._setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"] if user else []

        async def release() -> None:
            if group is not None:
                await group.remove()
            if user is not None:
                self._users.give_back(user)

        return ["/bin/sh", "-c", _ENTER, "enter", *(group.files if group else []), "--", *drop], release

    async def _spawn(
        self, enter: list[str], limits: Limits, modules: tuple[str, ...], release: Callable[[], Awaitable[None]]
    ) -> SandboxedInterpreter:
        options = "\0".join([*self._view, *_files(limits.files_mb), "--remount-ro", "/"]).encode()
        ours, theirs = os.pipe()
        status = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(status), os.fdopen(ours, "rb", 0)
        )
        try:
            with _memory_files(options, self._filter) as (arguments, seccomp):
                # The options say where things are on this machine: a program could see them on the command line.
                bwrap = ["--args", str(arguments), "--seccomp", str(seccomp), "--json-status-fd", str(theirs), "--"]
                process = await asyncio.create_subprocess_exec(
                    *(*enter, *bwrap, str(self._python), "-B", str(_INTERPRETER), *modules),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    pass_fds=(arguments, seccomp, theirs),
                    start_new_session=True,
                )
        finally:
            os.close(theirs)
        descriptors = _DESCRIPTORS if self._staging else _DESCRIPTORS_OF_ONE_USER
        return SandboxedInterpreter(process, status, limits, descriptors, release)


def _view(place_of: dict[Path, Path], hidden: list[Path]) -> list[str]:
    """Return bwrap's options for namespaces and for a program's view. `place_of`: path here -> path inside.

    There is no /proc: /proc would show the machine, and by /proc/1/mem a program could change the process it ends with.
    """
    view = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--hostname", "sandbox"]
    view += ["--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    for source, place in place_of.items():
        view += ["--ro-bind", str(source), str(place)]
    for folder in hidden:
        view += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    for name, target in links_of_the_root().items():
        view += ["--symlink", target, f"/{name}"]
    view += ["--tmpfs", "/dev"]
    for name in ("null", "zero", "full", "random", "urandom"):
        view += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    variables = {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONPATH": str(PACKAGES)}
    variables["LD_LIBRARY_PATH"] = str(PYTHON / "lib")  # libpython's place inside is not where it was linked for
    variables |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    variables["PYTHONUNBUFFERED"] = "1"  # a killed program, or its killed child, has written all that it printed
    variables["MALLOC_ARENA_MAX"] = "1"  # every further one takes 64 MiB of address space
    for name, value in variables.items():
        view += ["--setenv", name, value]
    return view


def _files(megabytes: int) -> list[str]:
    size = ["--size", str(megabytes << 20)]
    return [*size, "--tmpfs", "/tmp", *size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--chdir", "/tmp"]


@contextlib.contextmanager
def _memory_files(*contents: bytes) -> Iterator[list[int]]:
    """Open descriptors from which the contents can be read, for the block."""
    descriptors = [os.memfd_create("sandbox") for _ in contents]
    try:
        for descriptor, content in zip(descriptors, contents, strict=True):
            os.write(descriptor, content)
            os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _tool(name: str) -> str:
    path = shutil.which(name, path=_TOOLS)
    if path is None:
        hint = _INSTALL if name == "bwrap" else f"install it: apt-get install util-linux (it has {name})"
        raise IsolationError(f"{name} is not on this machine; {hint}")
    return path
