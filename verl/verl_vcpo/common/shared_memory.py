"""Files in shared memory (/dev/shm): which of them a run's packages have made, and the removal of unused files."""

import contextlib
import errno
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

FOLDER = "/dev/shm/"
_EXIT_S, _POLL_S = 5.0, 0.05
_OF_PACKAGES = re.compile(
    r"vcpo-.+|verl_weights_\w{32}|vllm_(offload|ec)_.+\.mmap"
    r"|psm_\w{8,}|sem\.(mp|loky)-.+|torch_\d+_\d+_\d+"  # Python's multiprocessing, joblib, torch
    r"|plasma\w{6}|sem\.(obj|hdr)\w{8,}"  # Ray
    r"|nccl-\w{6}|cuda\.shm\..+|__KMP_REGISTERED_LIB_\d+_\d+"  # NCCL, CUDA, OpenMP
)
"""The names that the product and its packages give: with a random part, or the id of a process."""


class SharedMemory(NamedTuple):
    """A file, also a semaphore's. Another program may make another file of the same path later."""

    path: str
    inode: int


def files() -> set[SharedMemory]:
    """Return all files that have a name now."""
    return {SharedMemory(file.path, file.inode()) for file in os.scandir(FOLDER)}


def mapped_by(processes: Iterable[psutil.Process], to_write: bool = False) -> set[SharedMemory]:
    """Return the files that the processes have mapped and that still have a name; `to_write`: and may write to.

    The inode identifies a file: a named semaphore is mapped under the name that it had while it was made. The function
    reads /proc/PID/maps, because psutil's memory_maps counts the pages of every mapping.
    """
    found = set()
    for process in processes:
        # the process has ended meanwhile, or is another user's
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if fields[-1].startswith(FOLDER) and (not to_write or {"w", "s"} <= {*fields[1]}):
                    found.add(int(fields[4]))
    return {file for file in files() if file.inode in found}


def made_by(processes: Iterable[psutil.Process]) -> set[SharedMemory]:
    """Return the files that the processes have mapped to write and that have a name which the run's packages give.

    Any other name is left out: a reward may write to a file of another program, which /proc does not tell from its own.
    """
    mapped = mapped_by(processes, to_write=True)
    return {file for file in mapped if _OF_PACKAGES.fullmatch(file.path.removeprefix(FOLDER))}


def remove_unused(candidates: set[SharedMemory], wait_s: float = _EXIT_S) -> None:
    """Remove those of the files that no process but this one has mapped, or opened: in any container of this machine.

    The processes of other containers are not in /proc here, although a container may have the host's /dev/shm. A killed
    process is gone from /proc some time before the kernel takes its memory away: files in use are tried for `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    while candidates := candidates & files():
        others = mapped_by(process for process in psutil.process_iter() if process.pid != os.getpid())
        own = mapped_by([psutil.Process()])
        for file in candidates - others:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                _remove(file, ask_the_kernel=file not in own)
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def _remove(file: SharedMemory, ask_the_kernel: bool) -> None:
    if os.lstat(file.path).st_ino != file.inode:
        return
    descriptor = os.open(file.path, os.O_RDONLY)
    try:
        if not (ask_the_kernel and _is_open_elsewhere(descriptor)):
            os.unlink(file.path)
    finally:
        os.close(descriptor)


def _is_open_elsewhere(descriptor: int) -> bool:
    """Return True if the kernel refuses a lease of the file, which the descriptor then has: it is open elsewhere."""
    # Whoever opens the file meanwhile waits for the end of the lease. The usual signal of that would end this process.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return error.errno != errno.EINVAL  # a kernel without leases: what /proc shows is all that is known
    return False
