"""A sampler's engine that is ended leaves no process and no shared memory of its own on the node."""

import mmap
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_vcpo.samplers.engine_processes import EngineProcesses, end, engine_processes

# Memory as vLLM's processes share it: Python's resource tracker, which would remove it, is a process of the engine.
ENGINE = """
import mmap, sys, time
from multiprocessing import get_context, shared_memory

lock = get_context("spawn").Lock()
memory = shared_memory.SharedMemory(create=True, size=4096)
with open(sys.argv[1], "r+b") as file:
    others = mmap.mmap(file.fileno(), 4096)
print(memory.name, "sem." + lock._semlock.name.removeprefix("/"), flush=True)
time.sleep(600)
"""


@pytest.fixture
def others() -> Iterator[Path]:
    """A file of shared memory that this process has mapped."""
    path = Path(f"/dev/shm/test-{uuid.uuid4().hex}")
    with open(path, "w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            yield path
    path.unlink()


def started(others: Path) -> tuple[subprocess.Popen[str], list[Path]]:
    """An engine that is up and has mapped `others`, and what it has made: shared memory and a named semaphore."""
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(others)], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    return engine, [Path("/dev/shm") / name for name in engine.stdout.readline().split()]


def test_an_ended_engine_leaves_nothing(others: Path) -> None:
    _, files = started(others)
    found = engine_processes("this node")
    assert {str(others), *map(str, files)} <= {file.path for file in found.shared_memory}
    end(found)
    assert not [pid for pid, _ in found.processes if psutil.pid_exists(pid)]
    assert not [file for file in files if file.exists()]
    assert others.exists(), "this process has it mapped"


def test_memory_of_an_engine_that_was_killed_before(others: Path) -> None:
    engine, files = started(others)
    found = engine_processes("this node")
    for pid in sorted((pid for pid, _ in found.processes), key=lambda pid: pid == engine.pid):
        psutil.Process(pid).kill()  # the engine last: its tracker would remove the memory, and end
    engine.wait(timeout=10)
    assert all(file.exists() for file in files), "its resource tracker was not killed, so nothing is shown"
    end(found)
    assert not [file for file in files if file.exists()]


def test_a_process_that_has_the_id_now_lives_on() -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    end(EngineProcesses("this node", [(bystander.pid, psutil.Process(bystander.pid).create_time() - 1)], []))
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
