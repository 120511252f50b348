"""Limits of a whole program, its processes and files in memory together, by control groups of version 1 or 2."""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

from code_sandbox.owned_folder import OwnedFolder, abandoned

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids")
# Bookkeeping that the program did not ask for: bwrap's processes, page tables.
_SPARE_PROCESSES = 8
TEARDOWN_S = 60.0
"""The longest wait for the kernel to end the processes of a group."""


class ControlGroups:
    """The groups of a server's programs, one for each program, below a folder of the server's own.

    Raises:
        OSError: this process may not make groups here (only root may, or a user whom systemd delegated them to), or
            the controllers for memory and processes are not there.
    """

    def __init__(self) -> None:
        self._folders: list[OwnedFolder] = []
        self._numbers = itertools.count()
        parents, self.version = _parents()
        for parent in parents:
            _clear_up(parent)
            folder = OwnedFolder(parent)
            self._folders.append(folder)
            if self.version == 2:
                (folder.path / "cgroup.subtree_control").write_text("+memory +pids")

    def group(self, memory_mb: int, processes: int) -> "ControlGroup":
        """Make a group for one program. Raises OSError where the kernel refuses."""
        name = str(next(self._numbers))
        return ControlGroup([f.path / name for f in self._folders], memory_mb << 20, processes + _SPARE_PROCESSES)

    def close(self) -> None:
        """Remove the server's folders; the groups in them have been removed before."""
        for folder in self._folders:
            folder.close()


class ControlGroup:
    """The group of one program: a process is limited once it has written its number to the `files`."""

    def __init__(self, folders: list[Path], memory: int, processes: int) -> None:
        self._folders = folders
        for folder in folders:
            folder.mkdir()
            _limit(folder, memory, processes)
        self.files = [str(folder / "cgroup.procs") for folder in folders]

    def kill(self) -> None:
        """Kill the processes that are in the group now."""
        for folder in self._folders:
            _kill(folder)

    async def remove(self) -> None:
        """Kill the group's processes, and wait until they have ended. Raises OSError after a minute."""
        deadline = time.monotonic() + TEARDOWN_S
        while not all(_removed(folder) for folder in self._folders):
            if time.monotonic() > deadline:
                raise OSError(f"{self._folders[0]}: its processes do not end")
            await asyncio.sleep(0.01)


def _parents() -> tuple[list[Path], int]:
    """Return (the folders for groups of memory and processes, the version): one (version 2) or two (version 1)."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    of_controller = {name: path for _, names, path in lines for name in names.split(",")}
    if all(name in of_controller for name in _CONTROLLERS):
        return [_ROOT / name / of_controller[name].lstrip("/") for name in _CONTROLLERS], 1
    own = _ROOT / of_controller.get("", "/").lstrip("/")
    for folder in (own, *own.parents):
        if _offers(folder):
            return [folder], 2
        if folder == _ROOT:
            break
    _make_room(own)
    return [own], 2


def _offers(folder: Path) -> bool:
    """Return True if groups below `folder` have the controllers and this process may make groups (version 2)."""
    control = folder / "cgroup.subtree_control"
    given = control.exists() and set(_CONTROLLERS) <= set(control.read_text().split())
    return given and os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def _make_room(folder: Path) -> None:
    """Move this process, the only one in `folder`, one group down: controllers are for groups without processes."""
    if (folder / "cgroup.procs").read_text().split() != [str(os.getpid())]:
        raise OSError(f"{folder}/cgroup.subtree_control does not name memory and pids, and other processes are in it")
    inner = folder / "vcpo-server"
    inner.mkdir(exist_ok=True)
    (inner / "cgroup.procs").write_text(str(os.getpid()))
    (folder / "cgroup.subtree_control").write_text("+memory +pids")


def _clear_up(parent: Path) -> None:
    """End and remove the groups that killed servers have left."""
    for folder in abandoned(parent):
        groups = [path for path in folder.iterdir() if path.is_dir()]
        deadline = time.monotonic() + TEARDOWN_S
        while not all(_removed(path) for path in [*groups, folder]) and time.monotonic() < deadline:
            time.sleep(0.01)


def _limit(folder: Path, memory: int, processes: int) -> None:
    for name, value in (
        ("memory.limit_in_bytes", memory),
        ("memory.memsw.limit_in_bytes", memory),  # with swap; there where the kernel accounts for it
        ("memory.max", memory),
        ("memory.swap.max", 0),
        ("memory.oom.group", 1),
        ("pids.max", processes),
    ):
        if (folder / name).exists():
            (folder / name).write_text(str(value))


def _kill(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if (folder / "cgroup.kill").exists():
            (folder / "cgroup.kill").write_text("1")
            return
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # ended; or of a container whose processes have the id 0 here
                _kill_in(folder, int(pid))


def _kill_in(folder: Path, pid: int) -> None:
    """Kill the process of this id if the group has it: another process can have the id since the group was read."""
    process = os.pidfd_open(pid)
    try:
        if str(pid) in (folder / "cgroup.procs").read_text().split():
            signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)


def _removed(folder: Path) -> bool:
    """Return True if the group is gone; kill its processes otherwise."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        _kill(folder)
        return False
    return True
