"""A run leaves nothing behind, however it ends: no process, shared memory, semaphore, socket or session of Ray's."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from recipe.command_line import signals_handled_by
from verl_vcpo.common import shared_memory
from verl_vcpo.common.run_id import RUN_ID_VARIABLE
from verl_vcpo.common.shared_memory import SharedMemory

_GRACE_S = 5.0


def new_run_id() -> str:
    """Mark this process, and all that it starts from now on, as one run."""
    os.environ[RUN_ID_VARIABLE] = uuid.uuid4().hex[:12]
    return os.environ[RUN_ID_VARIABLE]


def processes_of(run_id: str) -> list[psutil.Process]:
    """The run's processes on this machine, this one left out: every process that inherited the run's id."""
    psutil.process_iter.cache_clear()  # an id that another process has by now would be taken for the earlier process
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # a process that has ended since, or another user's
            if process.pid != os.getpid() and process.environ().get(RUN_ID_VARIABLE) == run_id:
                found.append(process)
    return found


class RunOnMachine:
    """What a run has on this machine. `observe` while it is up, so that `clean_up` knows it after a crash.

    Args:
        folders: of this run alone, which go with it: its sockets, and the session of a Ray of its own.
    """

    def __init__(self, run_id: str, *folders: Path) -> None:
        self.run_id = run_id
        self.keep_logs_in: Path | None = None
        """Where the logs of a Ray of the run's own go when they are cleaned up; None: nowhere."""
        self._folders = folders
        self._made: set[SharedMemory] = set()
        self._others = shared_memory.files() - shared_memory.made_by(processes_of(run_id))
        """Files that were there before; also of another program that a reward or a tool of the run attaches to."""

    def observe(self) -> list[psutil.Process]:
        """Note the shared-memory files of the processes that are up now; those processes.

        A process maps what it has made to write. Another program's file it may map to write too: see `made_by`.
        """
        processes = processes_of(self.run_id)
        self._made |= shared_memory.made_by(processes)
        return processes

    def clean_up(self) -> None:
        """End every process of the run, then remove its folders and the shared memory that nobody else has."""
        processes = self.observe()
        for ask in (psutil.Process.terminate, psutil.Process.kill):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    ask(process)
            _, processes = psutil.wait_procs(processes, timeout=_GRACE_S)
        shared_memory.remove_unused(self._made - self._others)
        for file in Path(shared_memory.FOLDER).glob(f"vcpo-{self.run_id}-*"):
            file.unlink(missing_ok=True)
        for folder in self._folders:
            if self.keep_logs_in:
                _keep_logs(folder, self.keep_logs_in)
            shutil.rmtree(folder, ignore_errors=True)


def _keep_logs(folder: Path, place: Path) -> None:
    """Move the logs of the Ray that had its session in `folder`, if any had. Ray lets everyone write to its own."""
    for logs in folder.glob("session_[0-9]*/logs"):
        try:
            shutil.move(logs, place)
            place.chmod(0o700)
        except OSError as error:
            print(f"{place}: the logs of Ray's processes could not be kept: {error}", file=sys.stderr)


_OBSERVE_OFTEN_S, _OBSERVE_S, _START_UP_S = 10.0, 60.0, 180.0
_DONE, _DETACHED = "done", "--detached"
_LAST_WORDS = "VCPO_LAST_WORDS"  # a variable of the reaper's environment


def reap(run_id: str, *folders: Path) -> None:
    """Clean up after a process that was killed: in a process of its own, whose standard input is the other's end.

    The other says "done" when it has cleaned up itself; the input ending without that means that it was killed.
    """
    run, start = RunOnMachine(run_id, *folders), time.monotonic()
    while True:
        young = time.monotonic() - start < _START_UP_S  # shared memory is made while the processes start
        readable, _, _ = select.select([sys.stdin], [], [], _OBSERVE_OFTEN_S if young else _OBSERVE_S)
        if readable:
            break
        run.observe()
    if sys.stdin.read() != _DONE:
        run.clean_up()
        if words := os.environ[_LAST_WORDS]:
            print(words, file=sys.stderr)


def start_reaper(run_id: str, *folders: Path, last_words: str = "", detached: bool = False) -> subprocess.Popen[str]:
    """Start what cleans up this machine if the calling process is killed.

    Args:
        last_words: printed on standard error after that.
        detached: no child of the calling process.
    """
    environment = {name: value for name, value in os.environ.items() if name != RUN_ID_VARIABLE}
    environment[_LAST_WORDS] = last_words
    return subprocess.Popen(
        [sys.executable, "-m", __spec__.name, run_id, *map(str, folders), *([_DETACHED] if detached else [])],
        cwd=Path(__file__).resolve().parents[3],
        env=environment,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is not for it
    )


def dismiss(reaper: subprocess.Popen[str]) -> None:
    """Tell a reaper that there is nothing left to clean up."""
    reaper.communicate(_DONE)


# Not told by what is raised: where Ray waits, it makes a plain KeyboardInterrupt of whatever a handler raises.
_terminated = threading.Event()


def _terminate(signum: int, frame: Any) -> None:
    _terminated.set()
    raise KeyboardInterrupt


def catch_sigterm() -> None:
    """SIGTERM ends a run as Ctrl-C does; call it again after `ray.init`, whose own handler aborts the process."""
    signal.signal(signal.SIGTERM, _terminate)


def code_of_interruption(error: BaseException | None) -> int | None:
    """The exit code, as a shell gives it, where Ctrl-C or SIGTERM is behind an exception; None where neither is.

    The exception may be one that was raised while the run was being ended.
    """
    while error is not None:
        if isinstance(error, SystemExit):  # by Ray's own handler of SIGTERM, in `ray.init`
            return 128 + signal.SIGTERM
        if isinstance(error, KeyboardInterrupt):
            return 128 + (signal.SIGTERM if _terminated.is_set() else signal.SIGINT)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


@contextlib.contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """For the block, SIGTERM raises what Ctrl-C raises: KeyboardInterrupt."""
    previous = signal.getsignal(signal.SIGTERM)
    if previous != _terminate:
        _terminated.clear()
    catch_sigterm()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def interrupted_afterwards() -> Iterator[None]:
    """A first Ctrl-C or SIGTERM in the block takes effect after it, a second one at once.

    For imports: packages catch every exception around some of theirs, KeyboardInterrupt too, and the run would go on.
    """
    came: list[tuple[int, Callable[[int, Any], Any]]] = []

    def note(signum: int, frame: Any, before: Callable[[int, Any], Any]) -> None:
        came.append((signum, before))
        if len(came) > 1:
            before(signum, frame)

    try:
        with signals_handled_by(note):
            yield
    finally:
        if came:
            signum, before = came[0]
            before(signum, None)


@contextlib.contextmanager
def cleaned_up(run_id: str, *folders: Path, last_words: str = "") -> Iterator[RunOnMachine]:
    """Clean up after the block whether it returns, raises, is interrupted (Ctrl-C), terminated or killed.

    Args:
        last_words: printed on standard error where this process is killed, and cannot say anything itself.
    """
    run, reaper = RunOnMachine(run_id, *folders), start_reaper(run_id, *folders, last_words=last_words)
    try:
        with sigterm_is_ctrl_c():
            yield run
    finally:
        # A second signal must not interrupt the cleaning, which takes seconds.
        before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGINT, signal.SIGTERM)}
        run.clean_up()
        dismiss(reaper)
        for signum, handler in before.items():
            signal.signal(signum, handler)


if __name__ == "__main__":
    if _DETACHED in sys.argv and os.fork():
        os._exit(0)
    reap(sys.argv[1], *(Path(folder) for folder in sys.argv[2:] if folder != _DETACHED))
