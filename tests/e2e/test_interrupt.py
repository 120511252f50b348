"""Ctrl-C leaves no process and no shared-memory file behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipe.fully_async_policy.processes import RUN_ID_VARIABLE, processes_of
from tests.e2e.conftest import ROOT, overrides

pytestmark = pytest.mark.e2e

STARTED = "The samplers serve the trainer's weights."


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


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


def test_ctrl_c_while_training(assets: Path, tmp_path: Path) -> None:
    before = shared_memory()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "recipe.fully_async_policy.main", *overrides(assets, tmp_path), "async.lag=2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal gives it
    )
    try:
        wait_for_line(process, STARTED, 180)
        run_id = next(
            p.environ()[RUN_ID_VARIABLE] for p in psutil.Process(process.pid).children(recursive=True) if p.is_running()
        )
        assert processes_of(run_id)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode != 0
    assert not processes_of(run_id)
    assert shared_memory() <= before
