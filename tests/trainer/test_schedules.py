"""The whole control loop, simulated: the bound holds, nothing deadlocks, no prompt is lost or trained twice."""

import pytest

from scripts.bench.reliability.schedules import Outcome, Schedule, run
from verl_vcpo.trainer.ppo.v1 import replay_buffer


def outcome_of(seeds: range) -> Outcome:
    total = Outcome()
    for seed in seeds:
        outcome = run(Schedule.draw(seed))
        assert outcome.ok, (Schedule.draw(seed), outcome)
        total.add(outcome)
    return total


def test_five_thousand_schedules() -> None:
    total = outcome_of(range(5000))
    assert total.schedules == 5000 and total.reissued > 500 and total.retried > 500


def test_a_rule_that_does_not_keep_the_bound_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_buffer, "deadlines_hold", lambda *_: True)
    assert sum(run(Schedule.draw(seed)).lag_violations for seed in range(200)) > 0
