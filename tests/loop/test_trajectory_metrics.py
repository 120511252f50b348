"""Counts that trajectories carry, summed over a batch."""

from types import SimpleNamespace
from typing import Any

from verl_vcpo.report.trajectory_metrics import (
    TOOK,
    FewFields,
    histogram,
    over_limit,
    tool_counts,
    trajectory_tables,
)


def test_tools() -> None:
    count = {"calls": 2, "void_trajectories": 1}
    assert tool_counts([count, None, count | {"calls": 4}]) == {
        "tool_use/calls": 6,
        "tool_use/void_trajectories": 2,
        "tool_use/calls/mean": 3.0,
    }
    assert tool_counts([None]) == {}


def test_rewards_over_their_limit() -> None:
    assert over_limit([{"score": 0.0, "over_limit": 1.0}, {"score": 1.0, "over_limit": 0.0}]) == {
        "reward/over_limit": 1
    }
    assert over_limit([{"score": 0.5}, None]) == {}


def test_values_are_counted_by_their_first_two_digits() -> None:
    counts = histogram([137, 140, 141, 7, 99, 1000, 1001, 0.0123, 0.012, 0, -0.1])
    assert counts == {"0": 2, "0.012": 1, "0.013": 1, "7": 1, "99": 1, "140": 2, "150": 1, "1000": 1, "1100": 1}


def test_lengths_and_times_of_a_steps_trajectories() -> None:
    batch: Any = SimpleNamespace(tags=[{"response_len": 137}, {"response_len": 5}, {"response_len": 1}])
    took = {TOOK: {"outside_s": 1.26, "reward_s": 0.0004}}
    stored = FewFields([0, 1], [2, 2], [took, took], ["a", "b"])
    assert trajectory_tables(batch, stored) == {
        "response_lengths": {"5": 1, "140": 1},
        "outside_s": {"1.3": 2},
        "reward_s": {"0": 2},
    }
    assert trajectory_tables(batch, stored._replace(extra_fields=[{}, {}])) == {"response_lengths": {"5": 1, "140": 1}}
