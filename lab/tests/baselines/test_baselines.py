"""Identities of OPOB that docs/explanation/algorithm.md tells, and that its constant is the one of least variance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.baselines.variance import SETTINGS, measure
from vcpo import VCPOConfig, estimate
from vcpo.baseline import optimal_off_policy

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
    own = optimal_off_policy(reward, log_a, norm, group)
    rest = [torch.arange(len(rows)) != i for i in range(len(rows))]
    others = torch.stack([optimal_off_policy(reward[r], log_a[r], norm[r], group[r])[0] for r in rest])
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


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[0])
def test_the_measured_variance_is_least_at_opob(setting: tuple[str, float, float | None]) -> None:
    minimum, rows = measure(*setting, groups=4000)
    assert minimum.agrees, minimum
    assert minimum.exact == pytest.approx(minimum.opob, rel=2e-3)
    constant = {row.baseline: row.variance for row in rows if row.constant is not None}
    assert all(constant["opob"] <= variance for variance in constant.values())
    computed = {row.baseline: row.variance for row in rows if row.constant is None}
    assert all(computed["opob"] < computed[other] for other in ("none", "mean"))
    if setting[1]:  # on policy w is 1, however often it is counted
        assert constant["opob"] < min(constant["none"], constant["mean"], constant["opob, w counted twice"])
        assert computed["opob"] < computed["opob, w counted twice"]
