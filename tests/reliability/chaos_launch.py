"""One launch of the trainer in an hour of chaos, with its sandbox and the limits of its waits."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.kit import ROOT
from tests.kit.sandbox_server import free_port
from tests.reliability.chaos_faults import KINDS_OF_PROCESSES, NotPossible
from tests.reliability.chaos_watch import MARK, processes_with, title

_POLL_S = 0.3
_RUN_ID = "VCPO_RUN_ID"
_RESUMED = re.compile(r"Resumed from \S+, after step (\d+)\.")


class TooLate(RuntimeError):
    """The error of a wait beyond its limit: the awaited event, and the end of the launcher's output."""


class Sandbox:
    """A server of the code sandbox on a port of its own, which can be killed and started again."""

    def __init__(self, log: Path) -> None:
        self._port, self._log = free_port(), log
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = ["--port", str(self._port), "--allow-unbounded-memory", "--concurrency", "8"]
        with open(self._log, "a") as log:
            self.process = psutil.Popen(
                [sys.executable, "-m", "code_sandbox", *options], cwd=ROOT, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/v1/ping", timeout=5).close()
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the sandbox does not start: {self._log.read_text()[-500:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(45)
        except psutil.TimeoutExpired:
            self.kill()


class Launch:
    """The trainer's launcher and its processes: a target of faults.

    Args:
        folder: the hour's folder.
        number: the launch's number.
        mark: the value of `MARK` for this hour.
        settings: the run's settings.
        disk: the small file system that the run's folder is on, or None.
        temporary: the folder of temporary files, also Ray's.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        mark: str,
        settings: list[str],
        disk: Path | None,
        temporary: Path,
        sandbox: Sandbox,
    ) -> None:
        self.run_dir, self.disk, self.sandbox = folder / "run", disk, sandbox
        self.marks, self.clock = folder / "marks", folder / "clock"
        self._mark, self._output = mark, folder / f"launch-{number}.log"
        environment = os.environ | {
            MARK: mark,
            "RAY_worker_niceness": "0",  # Ray's own, 15, starves the workers beside other work
            "TMPDIR": str(temporary),
            "RAY_TMPDIR": str(temporary),
            "PYTHONPATH": str(Path(__file__).with_name("chaos_clock")),
            "VCPO_CHAOS_CLOCK": str(self.clock),
        }
        with open(self._output, "w") as output:
            self.driver = psutil.Popen(
                [sys.executable, "-u", "-m", "recipe.fully_async_policy.main", *settings],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # a shell's background job ignores Ctrl-C, and so would all that it starts
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def resumed_from(self) -> int | None:
        """The step after which the launcher says that it goes on, or None."""
        found = _RESUMED.search(self.output)
        return int(found[1]) if found else None

    def alive(self) -> bool:
        return self.driver.poll() is None

    def find(self, kind: str, rng: random.Random) -> psutil.Process:
        pattern = re.compile(KINDS_OF_PROCESSES[kind])
        found = [process for process in processes_with(self._mark) if pattern.search(title(process))]
        if not found:
            raise NotPossible(f"no {kind} is up")
        return rng.choice(sorted(found, key=lambda process: process.pid))

    def run_id(self) -> str:
        for process in processes_with(self._mark):
            with contextlib.suppress(psutil.Error):
                if found := process.environ().get(_RUN_ID):
                    return found
        raise NotPossible("no process has the run's id")

    def wait(self, there: Callable[[], bool], limit_s: float, what: str) -> bool:
        """Wait until `there` is true or the launcher has ended; return whether `there` is true.

        Raises:
            TooLate: after `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        while not there():
            if not self.alive():
                return there()
            if time.monotonic() > deadline:
                raise TooLate(f"{what} took longer than {limit_s:.0f} s: {self.tail()}")
            time.sleep(_POLL_S)
        return True

    def end(self, limit_s: float) -> int:
        """Wait for the end, and return the exit code. Raises TooLate."""
        try:
            return int(self.driver.wait(limit_s))
        except psutil.TimeoutExpired:
            raise TooLate(f"the end of the run took longer than {limit_s:.0f} s: {self.tail()}") from None

    def kill(self) -> int:
        """Kill the launcher alone, and let stopped processes go on, so that the run's cleaner has to do its work."""
        for process in processes_with(self._mark):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
        self.driver.kill()
        return int(self.driver.wait())

    def tail(self) -> str:
        """Return the end of the output, and the states of the run's processes."""
        states = []
        for process in processes_with(self._mark):
            with contextlib.suppress(psutil.Error):
                states.append(f"{process.pid} {title(process)[:40]} {process.status()}")
        return f"{self.output[-600:]!r}; processes: {'; '.join(states)}"
