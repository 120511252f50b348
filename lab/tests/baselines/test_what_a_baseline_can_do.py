"""The statements of docs/explanation/algorithm.md, "What a baseline can and cannot do"."""

import math
from functools import lru_cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.baselines.estimates import INTERVAL, RATIOS, Excess, Kept, make_world, measure
from vcpo import VCPOConfig, estimate
from vcpo.baseline import optimal_off_policy
from vcpo.ess import ess_ratio

ROWS = st.lists(st.tuples(st.floats(-4, 4), st.floats(-2, 2), st.floats(0.1, 10)), min_size=2, max_size=8)
NO_STD = VCPOConfig(norm_by_std=False)


def columns(rows: list[tuple[float, float, float]]) -> tuple[torch.Tensor, ...]:
    """(log w, reward, squared norm, group), one group."""
    log_weight, reward, norm = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return log_weight, reward, norm.square(), torch.zeros(len(rows), dtype=torch.int64)


@given(rows=ROWS)
def test_opob_of_a_group_is_that_of_the_others_with_smaller_weights(rows: list[tuple[float, float, float]]) -> None:
    """R_i - b* = (1 - h_i) (R_i - b*_-i)."""
    log_a, reward, norm, group = columns(rows)
    influence = (2 * log_a).exp() * norm
    left = 1 - influence / influence.sum()
    own, others = (optimal_off_policy(reward, log_a, norm, group, leave_out_own=out) for out in (False, True))
    torch.testing.assert_close(reward - own, left * (reward - others), rtol=1e-9, atol=1e-9)


@given(rows=ROWS)
def test_the_update_leaves_the_weighted_log_probability_of_its_own_data_as_it_is(
    rows: list[tuple[float, float, float]],
) -> None:
    """sum_i a_i^2 ||g_i||^2 (R_i - b*) = 0; with orthogonal g, log pi(i) changes by coefficient_i ||g_i||^2 a step."""
    log_weight, reward, norm, group = columns(rows)
    step = estimate(NO_STD, log_weight, reward, group, squared_norm=norm)
    change = step.weight * step.coefficient * norm
    assert abs(change.sum().item()) <= 1e-9 * (1 + change.abs().sum().item())


@pytest.mark.parametrize("ratio", RATIOS)
def test_weights_squared_have_the_fourth_power_of_the_ess_ratio(ratio: float) -> None:
    """Of log-normal weights: rho of w, rho^4 of w^2."""
    sigma, normal = math.sqrt(-math.log(ratio)), torch.linspace(-20, 20, 40001, dtype=torch.float64)
    density = (-normal.square() / 2).softmax(0)

    def moment(power: int) -> float:
        return (density * (power * sigma * normal).exp()).sum().item()

    assert moment(1) ** 2 / moment(2) == pytest.approx(ratio, rel=1e-9)
    assert moment(2) ** 2 / moment(4) == pytest.approx(ratio**4, rel=1e-9)


def test_the_ess_ratio_of_drawn_weights_says_the_same() -> None:
    log_weight = math.sqrt(-math.log(0.8)) * torch.randn(400000, generator=torch.Generator().manual_seed(0)).double()
    assert ess_ratio(log_weight) == pytest.approx(0.8, rel=0.01)
    assert ess_ratio(2 * log_weight) == pytest.approx(0.8**4, rel=0.05)


@lru_cache
def of_kind(slope: float, size: int) -> list[tuple[dict[str, Excess], Kept]]:
    """At every ESS ratio: by baseline, from few groups."""
    measured = [measure(slope, ratio, size, groups=200) for ratio in RATIOS]
    return [({row.baseline: row for row in rows}, kept) for rows, kept in measured]


@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_opob_of_seven_others_is_worse_than_their_mean_where_rewards_hardly_follow_weights(slope: float) -> None:
    for by_name, _ in of_kind(slope, size=8)[1:]:
        row = by_name["leave-one-out OPOB"]
        assert row.above_mean > INTERVAL * row.above_mean_error


def test_opob_of_sixty_three_others_is_better_where_rewards_follow_weights() -> None:
    for by_name, _ in of_kind(1.0, size=64):
        row = by_name["leave-one-out OPOB"]
        assert row.above_mean < -INTERVAL * row.above_mean_error


def test_opob_of_the_group_takes_the_largest_share_from_whom_the_policy_likes_best() -> None:
    kept = [row for _, row in of_kind(0.5, size=8)]
    assert all(row.of_largest < row.signal < 1 for row in kept)
    assert kept == sorted(kept, key=lambda row: -row.of_largest), "less at every smaller ESS ratio"


def test_without_a_slope_the_mean_is_the_best_constant() -> None:
    flat, steep = (make_world(0.45, slope) for slope in (0.0, 1.0))
    assert flat.optimum == pytest.approx(flat.mean_reward) == pytest.approx(0.5)
    assert steep.optimum > steep.policy_reward > steep.mean_reward
