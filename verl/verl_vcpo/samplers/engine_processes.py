"""The processes of a sampler's engine on its node, and their shared memory, which outlives killed processes."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

_SHARED_MEMORY = "/dev/shm/"
_OF_THE_RUN = f"{_SHARED_MEMORY}vcpo-"  # weights that other samplers read as well
_DEATH_S = 10.0


class EngineProcesses(NamedTuple):
    """The processes of one node that serve one engine, and the files of shared memory that these have mapped."""

    node_id: str
    processes: list[tuple[int, float]]
    """The id of each process and the time of its creation: the system may use an id again."""
    shared_memory: list[str]


def engine_processes(node_id: str) -> EngineProcesses:
    """Return the engine that the calling process, on node `node_id`, has started: all children of the process."""
    children = psutil.Process().children(recursive=True)
    files = [file for file in shared_memory_of(children) if not file.startswith(_OF_THE_RUN)]
    return EngineProcesses(node_id, [(child.pid, child.create_time()) for child in children], sorted(files))


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the shared-memory files, also semaphores, that the processes have mapped and that still have a name.

    The inode identifies a file: a named semaphore is mapped under the name that it had while it was made. The function
    reads /proc/PID/maps, because psutil's memory_maps counts the pages of every mapping.
    """
    names = {file.inode(): file.path for file in os.scandir(_SHARED_MEMORY)}
    found = set()
    for process in processes:
        # the process has ended meanwhile, or is another user's
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if fields[-1].startswith(_SHARED_MEMORY):
                    found.add(int(fields[4]))
    return {names[inode] for inode in found & names.keys()}


def end(engine: EngineProcesses) -> None:
    """Kill the engine's processes on this node, then remove the shared memory that nobody has mapped any more.

    vLLM's processes share memory that their resource tracker would remove; the tracker is killed with the processes.
    """
    found = []
    for pid, created in engine.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()
                found.append(process)
    psutil.wait_procs(found, timeout=_DEATH_S)
    for file in set(engine.shared_memory) - shared_memory_of(psutil.process_iter()):
        Path(file).unlink(missing_ok=True)
