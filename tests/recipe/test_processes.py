"""However a launcher ends, it leaves no process, shared memory and folder behind: shown with one that starts a sleeper.

tests/e2e has the same of real runs.
"""

import contextlib
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from recipe.fully_async_policy.launch.processes import processes_of
from tests.kit import ROOT
from verl_vcpo.common.run_id import RUN_ID_VARIABLE

LAUNCHER = """
import subprocess, sys
from pathlib import Path
from recipe.fully_async_policy.launch import processes

run_id = processes.new_run_id()
try:
    with processes.cleaned_up(run_id, Path(sys.argv[3]), last_words="To go on: again"):
        subprocess.Popen([sys.executable, "-c", sys.argv[1], run_id, *sys.argv[2:]], start_new_session=True).wait()
except KeyboardInterrupt as interruption:
    sys.exit(processes.code_of_interruption(interruption))
"""
SLEEPER = """
import mmap, os, signal, socket, sys, time
os.mkdir(sys.argv[3])
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[3] + "/socket")
signal.signal(signal.SIGTERM, {on_sigterm})
with open(sys.argv[2], "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
    print(sys.argv[1], flush=True)
    time.sleep(600)
"""
STUBBORN = SLEEPER.format(on_sigterm="signal.SIG_IGN")
OBEDIENT = SLEEPER.format(on_sigterm="signal.SIG_DFL")


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[Path]:
    path = Path(f"/dev/shm/{getattr(request, 'param', 'vcpo-test')}-{uuid.uuid4().hex}")
    yield path
    path.unlink(missing_ok=True)
    shutil.rmtree(folder_of(path), ignore_errors=True)


def folder_of(memory: Path) -> Path:
    """The folder, with a socket in it, of the run that has `memory`."""
    return Path(tempfile.gettempdir(), memory.name)


def started(sleeper: str, memory: Path) -> tuple[subprocess.Popen[str], str]:
    """A launcher whose sleeper is up and has mapped `memory`, and the id of its run."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, sleeper, str(memory), str(folder_of(memory))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # what starts these tests may ignore Ctrl-C, as a shell's background job does: children would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert launcher.stdout is not None
    run_id = launcher.stdout.readline().strip()
    assert processes_of(run_id), "the sleeper is not found, so its absence proves nothing"
    assert memory.exists() and folder_of(memory).exists()
    return launcher, run_id


def ignores(pid: int, signum: int) -> bool:
    (ignored,) = re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(ignored, 16) >> (signum - 1) & 1)


def nothing_left(run_id: str, memory: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while (processes_of(run_id) or memory.exists() or folder_of(memory).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not (processes_of(run_id) or memory.exists() or folder_of(memory).exists())


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str)
def test_interrupted(memory: Path, signum: int, exit_code: int) -> None:
    launcher, run_id = started(OBEDIENT, memory)
    launcher.send_signal(signum)
    assert launcher.wait(timeout=60) == exit_code
    assert nothing_left(run_id, memory, within_s=0)
    assert launcher.stderr and launcher.stderr.read() == ""


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str)
def test_a_second_signal_does_not_interrupt_the_cleaning(memory: Path, signum: int, exit_code: int) -> None:
    launcher, run_id = started(STUBBORN, memory)
    launcher.send_signal(signum)
    deadline = time.monotonic() + 60
    while not ignores(launcher.pid, signum):  # then it cleans, and waits for the sleeper, which ignores SIGTERM
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    launcher.send_signal(signum)
    assert launcher.wait(timeout=60) == exit_code
    assert nothing_left(run_id, memory, within_s=0)


def test_killed(memory: Path) -> None:
    """What cleans up then, and speaks for the launcher, is a process of its own."""
    launcher, run_id = started(OBEDIENT, memory)
    os.kill(launcher.pid, signal.SIGKILL)
    assert launcher.wait(timeout=60) == -signal.SIGKILL
    assert nothing_left(run_id, memory, within_s=30)
    assert launcher.stderr and launcher.stderr.read() == "To go on: again\n"


def test_a_process_whose_id_an_earlier_one_had_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil keeps what it knows of an id, and refuses to end another process that has the id now."""
    sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_ID_VARIABLE: "c0ffee"})
    earlier = psutil.Process(sleeper.pid)
    deadline = time.monotonic() + 30
    while RUN_ID_VARIABLE not in earlier.environ() and time.monotonic() < deadline:
        time.sleep(0.01)  # some kernels show a new program's variables a moment after it has begun
    earlier._ident = sleeper.pid, 0.0
    monkeypatch.setattr(psutil, "_pmap", {sleeper.pid: earlier})
    (found,) = processes_of("c0ffee")
    found.kill()
    assert sleeper.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("memory", "known_by"),
    [("vcpo-test", "its age"), ("vcpo-test", "who has mapped it"), ("index", "its name")],
    indirect=["memory"],
)
def test_another_program_s_memory_stays(memory: Path, known_by: str) -> None:
    """A reward may write to an index that another program shares, or has left for it."""
    if known_by == "its age":
        memory.write_bytes(bytes(4096))
    launcher, run_id = started(OBEDIENT, memory)
    with contextlib.ExitStack() as other:
        if known_by == "who has mapped it":
            file = other.enter_context(open(memory, "rb"))
            other.enter_context(mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ))
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=60) == 130
    assert memory.exists() and not processes_of(run_id) and not folder_of(memory).exists()


HOLDER = """
import subprocess, sys, time
from pathlib import Path
from recipe.fully_async_policy.launch import processes

run_id = processes.new_run_id()
sleeper = subprocess.Popen([sys.executable, "-c", sys.argv[1], run_id, *sys.argv[2:]], start_new_session=True)
reaper = processes.start_reaper(run_id, Path(sys.argv[3]), detached=True)
reaper.wait()
print("detached", flush=True)
time.sleep(600)
"""


def test_a_detached_reaper_is_no_child_and_cleans_up_too(memory: Path) -> None:
    """As on another node, where Ray kills the children of the process that holds the reaper."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, OBEDIENT, str(memory), str(folder_of(memory))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    (run_id,) = {holder.stdout.readline().strip() for _ in range(2)} - {"detached"}
    assert processes_of(run_id) and memory.exists()
    time.sleep(1)
    for child in psutil.Process(holder.pid).children():
        assert child in processes_of(run_id) or child.status() == psutil.STATUS_ZOMBIE
    assert processes_of(run_id), "the reaper has cleaned up though its holder is up"
    holder.kill()
    holder.wait()
    assert nothing_left(run_id, memory, within_s=30)
