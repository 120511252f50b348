"""The moments at which a fault hits a run of the real stack: each function returns when the run gets there."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.kit.small_run import TrainerRun, run_id_of

FAULT_AFTER = 3
MARKS = "marks"
_TIMEOUT_S = 900.0


def between_steps(run: TrainerRun) -> None:
    """Wait until a step has ended."""
    run.wait_for_step(FAULT_AFTER)


def inside_a_step(run: TrainerRun) -> None:
    """Wait until the middle of a step, by the time that the last step took."""
    run.wait_for_step(FAULT_AFTER)
    time.sleep(run.lines()[-1]["step_s"] / 2)


def inside_a_weight_update(run: TrainerRun) -> None:
    """Wait until the trainer's weights are there, and the samplers are about to read them."""
    run.wait_for_step(FAULT_AFTER)
    file = Path(f"/dev/shm/vcpo-{run.run_id}-weights-v{FAULT_AFTER + 1}")
    _wait(run, file.exists, f"the weights of step {FAULT_AFTER + 1}")


def while_saving(run: TrainerRun) -> None:
    """Wait until the second checkpoint is being written."""
    run.wait_for_step(FAULT_AFTER)
    staged, root = f".partial*/global_step_{FAULT_AFTER + 1}", run.run_dir / "checkpoints"
    _wait(run, lambda: any(root.glob(staged)), f"the checkpoint of step {FAULT_AFTER + 1}")


def while_validating(run: TrainerRun) -> None:
    """Wait until the validation before step 1 computes its first reward."""
    _wait(run, (marks(run.run_dir) / "validating").exists, "the validation")
    run.run_id = run_id_of(run.process)


def marks(run_dir: Path) -> Path:
    """Return the folder of the marks that rewards of tests/kit/digits_reward.py leave."""
    return run_dir.with_name(f"{run_dir.name}-{MARKS}")


def after_the_text(run: TrainerRun, text: str) -> None:
    """Wait until the run has printed `text`."""
    _wait(run, lambda: text in run.tail(), f"the line {text!r}")


def _wait(run: TrainerRun, there: Callable[[], bool], what: str) -> None:
    """Wait until `there` is true. Raises RuntimeError if the run ends before, or does not get there."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not there():
        if time.monotonic() > deadline or run.process.poll() is not None:
            raise RuntimeError(f"{what} did not come:\n{run.tail()}")
        time.sleep(0.002)
