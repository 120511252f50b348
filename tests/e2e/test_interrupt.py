"""A run that Ctrl-C, SIGTERM or kill -9 ends leaves nothing behind, and says how it goes on, at any moment.

tests/e2e/test_resume.py shows it of SIGTERM in a step, every day.
"""

import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from recipe.fully_async_policy.launch.processes import processes_of
from tests.kit import ROOT
from tests.kit.small_run import TrainerRun, abandoned
from tests.reliability.faults import left_over
from verl_vcpo.report.run_log import MODEL_FOLDER, read_metrics

pytestmark = pytest.mark.e2e

DEBRIS = re.compile(r"Traceback|never retrieved|was destroyed|Exception ignored|Error in|\^C")
BEFORE = ("compose", "check", "Loading the packages", "Starting Ray")
WITH_STACK = (
    ("Starting the trainer", "4"),
    ("Waiting for the samplers", "1"),
    ("Measuring the held-out accuracy", "0.2"),
    ("step_done", "0.3"),
    ("Writing a checkpoint", "0.05"),
    ("Writing the trained model", "0.02"),
    ("ending", "0.2"),
)
SIGNALS = ("SIGINT", "SIGTERM")
DAILY = [("compose", "SIGINT"), ("Loading the packages", "SIGINT"), ("Starting Ray", "SIGTERM")]


def interrupted(assets: Path, folder: Path, when: str, signum: str, delay: str) -> tuple[TrainerRun, str]:
    """A run that has ended so, after the checks that hold at any moment, and what it printed."""
    before = abandoned()
    run = TrainerRun(
        assets,
        folder / "my run",
        *("async.lag=1", "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.val_before_train=true"),
        *(f"@{when}", f"@{signum}", f"@{delay}"),
        module="tests.e2e.interrupted_at",
    )
    code = run.wait()
    said = run.tail()
    assert code == 128 + signal.Signals[signum], said
    assert not DEBRIS.search(said), said
    log = run.run_dir / "verl.log"
    if log.is_file():
        run.run_id = re.findall(r"^run (\w+)$", log.read_text(), re.MULTILINE)[0]
        assert not processes_of(run.run_id)
        assert left_over(run.run_id, before) == []
    return run, said


def command_in(said: str) -> list[str]:
    """The arguments of the command that a run's last words give."""
    (line,) = re.findall(r"^  (python -m recipe\.fully_async_policy\.main .*)$", said, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize(
    ("when", "signum"),
    [
        pytest.param(when, signum, marks=() if (when, signum) in DAILY else pytest.mark.nightly)
        for when in BEFORE
        for signum in SIGNALS
    ],
)
def test_before_the_stack_is_up(assets: Path, tmp_path: Path, when: str, signum: str) -> None:
    run, said = interrupted(assets, tmp_path, when, signum, "0.2")
    again = command_in(said)
    assert f"run_dir={run.run_dir}" in again and "trainer.resume_mode=auto" not in again
    assert ("To start it:" if when in ("compose", "check") else "no checkpoint yet") in said


@pytest.mark.nightly
@pytest.mark.parametrize("signum", SIGNALS)
@pytest.mark.parametrize(("when", "delay"), WITH_STACK)
def test_with_the_stack(assets: Path, tmp_path: Path, when: str, signum: str, delay: str) -> None:
    run, said = interrupted(assets, tmp_path, when, signum, delay)
    if "after the run's end" in said:
        assert when == "ending" and (run.run_dir / MODEL_FOLDER).is_dir()
        return
    again = command_in(said)
    assert ("trainer.resume_mode=auto" in again) == ("To go on from global_step_" in said)
    assert when not in ("step_done", "Writing the trained model") or "To go on from" in said
    assert f"run_dir={run.run_dir}" in again
    if when == "Writing the trained model":  # what is left to do has no step
        subprocess.run(again, cwd=ROOT, check=True)
        assert (run.run_dir / MODEL_FOLDER).is_dir()
        assert [line["step"] for line in read_metrics(run.run_dir) if line["step"]] == [1, 2]


@pytest.mark.nightly
def test_kill_9_while_training(assets: Path, tmp_path: Path) -> None:
    before = abandoned()
    run = TrainerRun(assets, tmp_path / "run", "async.lag=2", "trainer.total_training_steps=1000")
    run.wait_for_step(1)
    time.sleep(12)  # what would clean up after a killed launcher has looked around
    assert processes_of(run.run_id)
    run.process.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert left_over(run.run_id, before) == []
