"""A run that Ctrl-C or kill -9 ends leaves nothing behind. tests/e2e/test_resume.py shows it of SIGTERM, every day."""

import os
import signal
import time
from pathlib import Path

import pytest

from recipe.fully_async_policy.processes import processes_of
from scripts.bench.reliability.faults import left_over
from testkit.small_run import TrainerRun, abandoned_memory

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=str)
def test_a_signal_while_training(assets: Path, tmp_path: Path, signum: int, exit_code: int) -> None:
    before = abandoned_memory()
    run = TrainerRun(assets, tmp_path / "run", "async.lag=2", "trainer.total_training_steps=1000")
    run.wait_for_step(1)
    time.sleep(12)  # what would clean up after a killed launcher has looked around
    assert processes_of(run.run_id)
    if signum == signal.SIGINT:
        os.killpg(run.process.pid, signum)  # as a terminal does
    else:
        run.process.send_signal(signum)
    assert run.wait() == exit_code
    if signum == signal.SIGINT:
        assert not processes_of(run.run_id)
    assert left_over(run.run_id, before) == []
