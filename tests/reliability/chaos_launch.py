"""One launch of the trainer in an hour of chaos, the sandbox that it uses, and how long either may take."""

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
    """A wait took longer than its limit. Says what was waited for, and the end of the launcher's output."""


class Sandbox:
    """A server of the code sandbox on a port of its own, which can be killed and started again."""

    def __init__(self, log: Path) -> None:
        self._port, self._log = free_port(), log
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Until the server answers."""
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
    """The trainer's launcher and what it starts: a target of faults.

    Args:
        folder: of the hour.
        number: of the launch.
        mark: the value of `MARK` for this hour.
        settings: of the run.
        disk: the small file system that the run's folder is on; None: there is none.
        temporary: for temporary files, Ray's among them.
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
        """The step after which the launcher said that it goes on; None where it said nothing."""
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
        """Until `there`, or the launcher has ended: whether it is there.

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
        """The exit code. Raises TooLate."""
        try:
            return int(self.driver.wait(limit_s))
        except psutil.TimeoutExpired:
            raise TooLate(f"the end of the run took longer than {limit_s:.0f} s: {self.tail()}") from None

    def kill(self) -> int:
        """The launcher alone, and what was stopped goes on: what cleans up after a killed launcher has to do so."""
        for process in processes_with(self._mark):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
        self.driver.kill()
        return int(self.driver.wait())

    def tail(self) -> str:
        """The end of the output, and what the run's processes are doing as far as the kernel says."""
        states = []
        for process in processes_with(self._mark):
            with contextlib.suppress(psutil.Error):
                states.append(f"{process.pid} {title(process)[:40]} {process.status()}")
        return f"{self.output[-600:]!r}; processes: {'; '.join(states)}"
