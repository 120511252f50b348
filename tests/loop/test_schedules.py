"""The whole control loop, simulated: the bound holds, nothing deadlocks; no prompt is lost, trained twice, or trained
although it was skipped."""

import pytest

from tests.reliability.schedules import Schedule, ScheduleOutcome
from tests.reliability.simulated_loop import run
from verl_vcpo.loop.prompts import replay_buffer


def outcome_of(seeds: range) -> ScheduleOutcome:
    total = ScheduleOutcome()
    for seed in seeds:
        outcome = run(Schedule.draw(seed))
        assert outcome.ok, (Schedule.draw(seed), outcome)
        total.add(outcome)
    return total


def test_some_schedules() -> None:
    """The first of the many, also where the others are left out."""
    outcome_of(range(40))


@pytest.mark.slow
def test_many_schedules() -> None:
    """`python -m tests.reliability.schedules --n 100000` runs more; `scripts/test.sh --nightly` does that."""
    total = outcome_of(range(300))
    assert total.schedules == 300 and total.reissued > 30 and total.retried > 30 and total.skipped > 30
    assert total.resumed > 90 and total.withheld > 90


def test_a_rule_that_does_not_keep_the_bound_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_buffer, "deadlines_hold", lambda *_: True)
    assert sum(run(Schedule.draw(seed)).lag_violations for seed in range(60)) > 0
