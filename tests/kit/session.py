"""The end of all processes of a test run with the run, however the run ends: Ctrl-C, SIGTERM or kill -9.

`python -m tests.kit.session COMMAND ...` does the same for any command.

The processes of a test run inherit a variable that marks them. A watching process, whose standard input closes when the
test run ends, then ends those that are left.
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
# The cleaner after a killed launcher, which removes the run's shared memory and then ends by itself.
_CLEANERS = "recipe.fully_async_policy.launch.processes"


def begin() -> subprocess.Popen[bytes]:
    """Mark this process's descendants, and start the process that ends them once its standard input is closed."""
    session = os.environ[VARIABLE] = uuid.uuid4().hex
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kit.session", "--end", session],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
        stdin=subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C does not end it
    )


def processes_of(session: str) -> list[psutil.Process]:
    """Return the processes that were started in this test run and have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # a process that has ended since, or another user's
            if process.environ().get(VARIABLE) == session and _CLEANERS not in process.cmdline():
                found.append(process)
    return found


def end_all(session: str) -> None:
    """Send SIGTERM, on which a launcher cleans up after its run; then, after a grace period, SIGKILL."""
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        left = processes_of(session)
        for process in left:
            with contextlib.suppress(psutil.Error):
                ask(process)
        psutil.wait_procs(left, timeout=_GRACE_S)
    for left_by_the_killed in Path("/dev/shm").glob(f"vcpo-fake-nccl-{session}-*"):  # tests/kit/fake_cuda/nccl.c
        left_by_the_killed.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    """Run a command, and end its remaining processes. `--end SESSION`: end these once standard input is closed."""
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
