"""Counts that trajectories carry, summed over a batch."""

from verl_vcpo.report.trajectory_metrics import (
    RAW_REWARD,
    FewFields,
    of_truncated,
    over_limit,
    tool_counts,
    trajectory_metrics,
)


def test_tools() -> None:
    count = {"turns": 3, "calls": 2, "void_trajectories": 1}
    assert tool_counts([count, None, count | {"calls": 4}]) == {
        "tool_use/turns": 6,
        "tool_use/calls": 6,
        "tool_use/void_trajectories": 2,
        "tool_use/calls/mean": 3.0,
        "tool_use/void_turns/share": 1 / 3,
    }
    assert tool_counts([None]) == {}
    assert tool_counts([{"calls": 1}, {"turns": 2, "calls": 2}])["tool_use/turns"] == 2
    assert tool_counts([{"calls": 3}]) == {"tool_use/calls": 3, "tool_use/calls/mean": 3.0}


def test_rewards_over_their_limit() -> None:
    assert over_limit([{"score": 0.0, "over_limit": 1.0}, {"score": 1.0, "over_limit": 0.0}]) == {
        "reward/over_limit": 1
    }
    assert over_limit([{"score": 0.5}, None]) == {}


def test_truncated_and_finished_responses() -> None:
    assert of_truncated([True, False, False, False], [-1.0, 1.0, None, 0.0]) == {
        "vcpo/truncated/share": 0.25,
        "vcpo/truncated/reward": -1.0,
        "vcpo/finished/reward": 0.5,
    }
    assert of_truncated([False], [1.0]) == {"vcpo/truncated/share": 0.0, "vcpo/finished/reward": 1.0}


def test_dropped_responses_are_no_signal() -> None:
    rewards = {"a": [(1.0, False), (0.0, True)], "b": [(1.0, False), (0.0, False)], "c": [(0.0, True), (1.0, True)]}
    extra = [{RAW_REWARD: reward, "truncated": mark} for of in rewards.values() for reward, mark in of]
    stored = FewFields(list(range(6)), [2] * 6, extra, [prompt for prompt in rewards for _ in range(2)])
    shares = {how: trajectory_metrics(stored, how)["reward/equal_groups"] for how in ("train", "mask", "drop")}
    assert shares == {"train": 0.0, "mask": 0.0, "drop": 0.5}
