"""What a test run has started ends with it, however it ends: Ctrl-C, SIGTERM or kill -9.

`python -m tests.kit.session COMMAND ...` does the same for any command.

Processes of a test run are known by a variable that they inherit. A process of its own, whose standard input is the
test run's end, ends those that are left.
"""

import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from tests.kit import ROOT

VARIABLE = "VCPO_TEST_SESSION"
_GRACE_S = 20.0
# What cleans up after a killed launcher: it ends by itself, and removes the run's shared memory before.
_CLEANERS = "recipe.fully_async_policy.launch.processes"


def begin() -> subprocess.Popen[bytes]:
    """Mark this process's descendants, and start what ends them: once its standard input is closed."""
    session = os.environ[VARIABLE] = uuid.uuid4().hex
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kit.session", "--end", session],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is not for it
    )


def processes_of(session: str) -> list[psutil.Process]:
    """The processes that were started in this test run, and are still there."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # a process that has ended since, or another user's
            if process.environ().get(VARIABLE) == session and _CLEANERS not in process.cmdline():
                found.append(process)
    return found


def end_all(session: str) -> None:
    """SIGTERM, on which a launcher cleans up after its run; then, after a grace period, SIGKILL."""
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        left = processes_of(session)
        for process in left:
            with contextlib.suppress(psutil.Error):
                ask(process)
        psutil.wait_procs(left, timeout=_GRACE_S)
    for left_by_the_killed in Path("/dev/shm").glob(f"vcpo-fake-nccl-{session}-*"):  # tests/kit/fake_cuda/nccl.c
        left_by_the_killed.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    """Run a command, and end what it leaves. `--end SESSION`: end all of that, once standard input is closed."""
    if arguments[0] == "--end":
        sys.stdin.read()
        end_all(arguments[1])
        return 0
    reaper = begin()
    code = subprocess.run(arguments).returncode
    reaper.communicate()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
