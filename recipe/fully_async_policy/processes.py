"""A run leaves nothing behind: no process, no shared-memory file, however it ends."""

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

RUN_ID_VARIABLE = "VCPO_RUN_ID"
_SHARED_MEMORY = "/dev/shm/"
_GRACE_S = 5.0


def new_run_id() -> str:
    """Mark this process, and all that it starts from now on, as one run."""
    os.environ[RUN_ID_VARIABLE] = uuid.uuid4().hex[:12]
    return os.environ[RUN_ID_VARIABLE]


def processes_of(run_id: str) -> list[psutil.Process]:
    """The run's processes on this machine, this one left out: every process that inherited the run's id."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended while we looked, or is another user's
            if process.pid != os.getpid() and process.environ().get(RUN_ID_VARIABLE) == run_id:
                found.append(process)
    return found


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """The shared-memory files that the processes have mapped."""
    files = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            files |= {Path(m.path) for m in process.memory_maps(grouped=True) if m.path.startswith(_SHARED_MEMORY)}
    return files


class Run:
    """What a run has on this machine. `observe` while it is up, so that `clean_up` knows it after a crash."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._shared_memory: set[Path] = set()

    def observe(self) -> None:
        """Note the shared-memory files of the processes that are up now."""
        self._shared_memory |= shared_memory_of(processes_of(self.run_id))

    def clean_up(self) -> None:
        """End every process of the run, then remove its shared memory."""
        self.observe()
        processes = processes_of(self.run_id)
        for ask in (psutil.Process.terminate, psutil.Process.kill):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    ask(process)
            _, processes = psutil.wait_procs(processes, timeout=_GRACE_S)
        for file in self._shared_memory | set(Path(_SHARED_MEMORY).glob(f"vcpo-{self.run_id}-*")):
            file.unlink(missing_ok=True)


def _terminate(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


@contextlib.contextmanager
def cleaned_up(run_id: str) -> Iterator[Run]:
    """Clean up after the block whether it returns, raises, is interrupted (Ctrl-C) or terminated (SIGTERM)."""
    run = Run(run_id)
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield run
    finally:
        # A second Ctrl-C must not interrupt the cleaning; it takes seconds.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        run.clean_up()
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, previous)
