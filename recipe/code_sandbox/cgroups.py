"""Limits of a whole program, all its processes and its files in memory together: control groups, version 1 or 2."""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids")
# Bookkeeping that the program did not ask for: bwrap's processes, page tables.
_SPARE_PROCESSES = 8
_TEARDOWN_S = 60.0


class ControlGroups:
    """One group per program, below this process's own.

    Raises:
        OSError: this process may not make groups here (only root may, or a user whom systemd delegated them to), or
            the controllers for memory and processes are not there.
    """

    def __init__(self) -> None:
        self._parents = _own_groups()
        self._names = (f"vcpo-sandbox-{os.getpid()}-{i}" for i in itertools.count())
        for parent in self._parents:
            _clear_up(parent)
            (parent / (name := next(self._names))).mkdir()
            (parent / name).rmdir()

    @contextlib.asynccontextmanager
    async def group(self, memory_mb: int, processes: int) -> AsyncIterator[list[str]]:
        """The `cgroup.procs` files that a process joins to be limited. Afterwards no process of the group is left."""
        name = next(self._names)
        folders = [parent / name for parent in self._parents]
        try:
            for folder in folders:
                folder.mkdir()
                _limit(folder, memory_mb << 20, processes + _SPARE_PROCESSES)
            yield [str(folder / "cgroup.procs") for folder in folders]
        finally:
            for folder in folders:
                await _remove(folder)


def _own_groups() -> list[Path]:
    """Where this process's groups for memory and processes are: one folder (version 2) or two (version 1)."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    of_controller = {name: path for _, names, path in lines for name in names.split(",")}
    if all(name in of_controller for name in _CONTROLLERS):
        return [_ROOT / name / of_controller[name].lstrip("/") for name in _CONTROLLERS]
    folder = _ROOT / of_controller.get("", "/").lstrip("/")
    available = (folder / "cgroup.subtree_control").read_text().split()
    if not set(_CONTROLLERS) <= set(available):
        raise OSError(f"{folder}/cgroup.subtree_control does not name memory and pids")
    return [folder]


def _clear_up(parent: Path) -> None:
    """Remove the groups of servers that were killed; their programs died with them."""
    for folder in parent.glob("vcpo-sandbox-*"):
        if not Path(f"/proc/{folder.name.split('-')[2]}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _limit(folder: Path, memory: int, processes: int) -> None:
    for name, value in (
        ("memory.limit_in_bytes", memory),
        ("memory.max", memory),
        ("memory.swap.max", 0),
        ("pids.max", processes),
    ):
        if (folder / name).exists():
            (folder / name).write_text(str(value))


async def _remove(folder: Path) -> None:
    """Kill what is left in the group; the kernel takes its time to tear a large program down."""
    deadline = time.monotonic() + _TEARDOWN_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.01)
        else:
            return
