"""Accuracy after step k and collapse of a run, on curves made by hand."""

import pytest

from lab.simulator.analysis import accuracy_after, collapse_step, outcome
from lab.tests.stability.curves import curve


def test_a_collapse_lasts_twenty_steps_or_to_the_end() -> None:
    assert collapse_step(curve([0.2, 0.3, 0.05, 0.05, 0.05, 0.3])) == 20
    assert collapse_step(curve([0.2, 0.3, 0.05, 0.05, 0.3, 0.3])) is None, "ten steps are none"
    assert collapse_step(curve([0.2, 0.3, 0.3, 0.3, 0.05])) == 40, "the run ends before it could come back"
    assert collapse_step(curve([0.2, 0.3, 0.3, 0.05, 0.05])) == 30
    assert collapse_step(curve([0.2, 0.11, 0.12, 0.11, 0.11])) is None, "above half of the start"
    broken = curve([0.2, 0.3, 0.3])
    broken.loc[15, "finite"] = 0.0
    assert collapse_step(broken[:16]) == 15


def test_the_outcome_of_a_run() -> None:
    accuracies = [0.2, 0.3, 0.6, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.3, 0.5]
    result = outcome(curve(accuracies), 100, lag=32)
    assert result.accuracy == pytest.approx(sum(accuracies[4:]) / 7), "steps 40 to 100"
    assert (result.final_accuracy, result.collapse_step) == (0.5, None)
    assert outcome(curve(accuracies), 100, lag=0).accuracy == pytest.approx(sum(accuracies[1:]) / 10), "not the start"
    assert outcome(curve(accuracies), 100, lag=40).accuracy == pytest.approx(sum(accuracies[5:]) / 6), "after step k"
    with pytest.raises(ValueError, match="100 steps: there is no evaluation after step 100"):
        outcome(curve(accuracies), 100, lag=100)


def test_the_last_policy_of_a_run_that_was_evaluated_with_several_samples() -> None:
    known = curve([0.2, 0.3, 0.5])
    assert outcome(known, 20, lag=0).last == {}
    known.loc[known.index[-1], "last_accuracy"] = 0.45
    assert outcome(known, 20, lag=0).last == {"last_accuracy": 0.45}


def test_evaluations_that_a_broken_run_did_not_see_are_zero() -> None:
    broken = curve([0.2, 0.4, 0.4, 0.4])[:24]  # ends in step 23, in which a parameter was not finite any more
    broken.loc[23, ["finite", "val_accuracy"]] = 0.0
    assert accuracy_after(broken, 0, 60) == pytest.approx((0.4 + 0.4 + 0 + 4 * 0) / 7), "23, 30, 40, 50, 60"
    assert accuracy_after(broken, 10, 60) == pytest.approx(0.4 / 6)
    assert accuracy_after(broken, 40, 60) == 0.0
    assert collapse_step(broken) == 23
