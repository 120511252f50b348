"""The processes of a sampler's engine on its node, and their shared memory, which outlives killed processes."""

import contextlib
from typing import NamedTuple

import psutil

from verl_vcpo.common import shared_memory
from verl_vcpo.common.shared_memory import SharedMemory

_OF_THE_RUN = f"{shared_memory.FOLDER}vcpo-"  # weights that other samplers read as well
_DEATH_S = 10.0


class EngineProcesses(NamedTuple):
    """The processes of one node that serve one engine, and the files of shared memory that these have made."""

    node_id: str
    processes: list[tuple[int, float]]
    """The id of each process and the time of its creation: the system may use an id again."""
    shared_memory: list[SharedMemory]


def engine_processes(node_id: str) -> EngineProcesses:
    """Return the engine that the calling process, on node `node_id`, has started: all children of the process."""
    children = psutil.Process().children(recursive=True)
    files = shared_memory.mapped_by(children, to_write=True)
    own = sorted(file for file in files if not file.path.startswith(_OF_THE_RUN))
    return EngineProcesses(node_id, [(child.pid, child.create_time()) for child in children], own)


def end(engine: EngineProcesses) -> None:
    """Kill the engine's processes on this node, then remove the shared memory that nobody has any more.

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
    shared_memory.remove_unused({*engine.shared_memory} - shared_memory.mapped_by([psutil.Process()]))
