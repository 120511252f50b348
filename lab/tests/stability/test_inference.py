"""Intervals, tests and power against cases worked by hand, textbook values, and scipy by another way."""

import math

import pytest
from scipy import stats

from lab.stability.inference import (
    holm,
    interval,
    paired,
    power,
    share_interval,
    visible_difference,
    welch,
)


def test_the_interval_of_a_mean_is_students() -> None:
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776445 * math.sqrt(2.5 / 5))
    assert math.isnan(interval([1.0]))


def test_the_difference_is_welchs() -> None:
    """By hand: means 2 and 5, squared standard errors 1/3 and 4/3, degrees of freedom (5/3)^2 / (1/18 + 16/18)."""
    found = welch([1.0, 2.0, 3.0], [3.0, 5.0, 7.0])
    error, freedom = math.sqrt(5 / 3), (25 / 9) / (17 / 18)
    assert found.mean == -3
    assert found.p == pytest.approx(2 * stats.t.sf(3 / error, freedom))
    half = stats.t.ppf(0.975, freedom) * error
    assert (found.low, found.high) == pytest.approx((-3 - half, -3 + half))
    assert math.isnan(welch([1.0], [3.0, 5.0]).p) and welch([1.0], [3.0, 5.0]).mean == -3


def test_the_difference_of_pairs_is_students() -> None:
    found = paired([3.0, 5.0, 7.0], [1.0, 2.0, 3.0])
    error = 1 / math.sqrt(3)  # differences 2, 3 and 4
    assert found.mean == 3 and found.p == pytest.approx(2 * stats.t.sf(3 / error, 2))
    half = stats.t.ppf(0.975, 2) * error
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half))
    assert math.isnan(paired([3.0], [1.0]).p) and math.isnan(paired([3.0, 4.0], [1.0, 2.0]).p), "no spread"


def test_holms_correction() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02]), "Holm 1979, by hand"
    assert holm([0.6, 0.9]) == [1.0, 1.0], "at most 1"
    some = holm([0.01, math.nan, 0.04])
    assert some[0] == 0.02 and math.isnan(some[1]) and some[2] == 0.04, "what was not tested does not count"


def test_the_interval_of_a_share() -> None:
    low, high = share_interval(0, 3, "exact")
    assert low == 0 and high == pytest.approx(1 - 0.025 ** (1 / 3)), "nothing of three says little"
    low, high = share_interval(9, 10, "exact")
    assert low == pytest.approx(stats.beta.ppf(0.025, 9, 2)) and high == pytest.approx(stats.beta.ppf(0.975, 10, 1))
    z = stats.norm.ppf(0.975)  # Wilson by hand, 8 of 10
    center, half = (0.8 + z**2 / 20) / (1 + z**2 / 10), z * math.sqrt(0.016 + z**2 / 400) / (1 + z**2 / 10)
    assert share_interval(8, 10, "wilson") == pytest.approx((center - half, center + half))
    assert share_interval(0, 0, "wilson") == (0.0, 1.0)


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_the_seeds_that_a_difference_needs(effect: float, seeds: int) -> None:
    """G*Power's tables for pairs: two-sided 5 %, power 80 %."""
    assert power(10 * effect, 10.0, seeds) >= 0.8 > power(effect, 1.0, seeds - 1)


def test_power() -> None:
    freedom, shift = 4, 2 * math.sqrt(5)
    limit = stats.t.ppf(0.975, freedom)
    assert power(2.0, 1.0, 5) == pytest.approx(stats.nct.sf(limit, freedom, shift), abs=1e-6)
    assert power(0.0, 1.0, 5) == pytest.approx(0.05), "equal methods differ significantly as often as the level says"
    assert power(visible_difference(1.5, 5), 1.5, 5) == pytest.approx(0.8)
    assert visible_difference(1.0, 10) < 1.0 < visible_difference(1.0, 9)
    assert visible_difference(1.0, 5, level=0.05 / 26) > visible_difference(1.0, 5), "corrected for 26 tests"
