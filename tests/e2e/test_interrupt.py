"""However a run ends, it leaves no process and no shared-memory file behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipe.fully_async_policy.processes import processes_of
from testkit import ROOT
from testkit.small_run import abandoned_memory, run_id_of, small_task

pytestmark = pytest.mark.e2e

STARTED = "The samplers serve the trainer's weights."
LONG = ["async.lag=2", "trainer.total_training_steps=1000"]


def wait_for_line(process: subprocess.Popen, text: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
        if time.monotonic() > deadline:
            break
    raise AssertionError(f"no {text!r} in:\n{''.join(seen[-30:])}")


def wait_until(condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.2)


@pytest.mark.parametrize(
    "signum, exit_code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=lambda x: str(x)
)
def test_a_signal_while_training(assets: Path, tmp_path: Path, signum: int, exit_code: int) -> None:
    before = abandoned_memory()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "recipe.fully_async_policy.main", *small_task(assets, tmp_path), *LONG],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal gives it
        # a shell's background job, which these tests may be, ignores Ctrl-C, and so would all that it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for_line(process, STARTED, 180)
        time.sleep(12)  # it trains, and what would clean up after a killed driver has looked around
        run_id = run_id_of(psutil.Process(process.pid))
        assert processes_of(run_id)
        if signum == signal.SIGINT:
            os.killpg(process.pid, signum)  # as a terminal does
        else:
            process.send_signal(signum)
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    wait_until(lambda: not processes_of(run_id) and abandoned_memory() <= before, 30 if signum == signal.SIGKILL else 0)
    assert not processes_of(run_id)
    assert abandoned_memory() <= before
    assert process.returncode == exit_code
