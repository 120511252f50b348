"""A reward that hangs, and one whose process dies: the run says so, samples the prompts again, and goes on."""

from pathlib import Path

import pytest

from recipe.fully_async_policy.processes import processes_of
from testkit.small_run import BATCH, TrainerRun

pytestmark = pytest.mark.e2e

STEPS = 3


def test_a_reward_that_hangs_and_dies(assets: Path, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    run = TrainerRun(
        assets,
        tmp_path / "run",
        "reward.custom_reward_function.name=fails_twice",
        f"+reward.custom_reward_function.reward_kwargs.marks={marks}",
        "async.reward_timeout_s=5",
        "async.lag=1",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=true",
    )
    run.wait_for_step(1)
    assert run.wait() == 0, run.tail()
    assert {mark.name for mark in marks.iterdir()} == {"val-hang", "val-die", "train-hang", "train-die"}
    said = [line for line in run.tail().splitlines() if "sampled again" in line]
    validation, *steps = run.lines()
    (accuracy,) = (value for name, value in validation.items() if "/acc_success_only/mean@" in name)
    assert validation["val_accuracy"] == accuracy > 0, "no answer counts as wrong because its reward failed"
    retried = int(sum(line["vcpo/async/retried_prompts"] for line in steps))
    assert retried in (1, 2), "both calls may be of the same prompt: it says the last reason"
    assert len(said) in (retried + 1, retried + 2), "those of the validation come first"
    for complaint in ("took longer than 5 s", "its process ended with exit code 1")[:retried]:
        named = [line for line in said[-retried:] if complaint in line and ":fails_twice" in line and "on row " in line]
        assert named, run.tail()

    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    rows = [row for line in steps for row in line["trained_rows"]]
    assert len(rows) == len(set(rows)) == STEPS * BATCH, "nothing is lost, nothing trained twice"
    assert all(line["lag_max"] <= 1 for line in steps)
    assert not processes_of(run.run_id)
