"""Counts that trajectories carry, summed over a batch."""

from verl_vcpo.report.trajectory_metrics import over_limit, tool_counts


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
