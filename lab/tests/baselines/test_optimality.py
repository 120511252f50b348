"""OPOB is the constant baseline of least variance: measured by Monte Carlo, fewer draws than the committed script."""

import pytest

from lab.baselines.variance import SETTINGS, measure


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[0])
def test_the_measured_variance_is_least_at_opob(setting: tuple[str, float, float | None]) -> None:
    minimum, rows = measure(*setting, groups=4000)
    assert minimum.agrees, minimum
    assert minimum.exact == pytest.approx(minimum.opob, rel=2e-3)
    constant = {row.baseline: row.variance for row in rows if row.constant is not None}
    assert all(constant["opob"] <= variance for variance in constant.values())
    computed = {row.baseline: row.variance for row in rows if row.constant is None}
    assert all(computed["opob"] < computed[other] for other in ("none", "mean", "leave_one_out"))
    if setting[1]:  # on policy w is 1, however often it is counted
        assert constant["opob"] < min(constant["none"], constant["mean"], constant["opob, w counted twice"])
        assert computed["opob"] < computed["opob, w counted twice"]
