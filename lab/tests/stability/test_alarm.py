"""The alarm's score and its levels, on runs made by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from lab.stability.alarm import (
    VANISHED,
    AlarmRun,
    alarm_runs,
    choose_levels,
    first_step,
    high,
    low,
    low_on_average,
    ranking_table,
    score,
    score_alarm,
    vanished,
)
from lab.tests.stability.curves import curve
from vcpo.diagnostics import AlarmLevels, CollapseAlarm, Sign

LEVELS = AlarmLevels()


@pytest.fixture
def runs() -> list[AlarmRun]:
    made = [
        curve([0.2, 0.4, 0.4, 0.0, 0.0, 0.0], low_from=5, seed=1),  # told before it collapses at 30
        curve([0.2, 0.4, 0.4, 0.4, 0.4, 0.4], low_from=5, seed=2),  # told for nothing
        curve([0.2, 0.4, 0.4, 0.0, 0.0, 0.0], seed=3),  # never told
        curve([0.2, 0.0, 0.0, 0.0, 0.0, 0.0], low_from=25, seed=4),  # told too late
        curve([0.2, 0.4, 0.4, 0.4, 0.4, 0.4], seed=5),
    ]
    return alarm_runs(pd.concat(made, ignore_index=True).assign(**{VANISHED: False}))


def test_the_alarms_score(runs: list[AlarmRun]) -> None:
    found = score_alarm(runs)
    assert (found.runs, found.collapsed, found.warned, found.right, found.in_time) == (5, 3, 3, 2, 1)
    assert found.precision == pytest.approx(2 / 3) and found.recall == pytest.approx(1 / 3)
    assert found.f1 == pytest.approx(2 * (2 / 9) / 1)
    assert found.lead == 30 - (4 + LEVELS.ess_steps)
    assert score_alarm(runs, [Sign.KL_GROWTH]).warned == 0
    nothing = score(runs, [math.inf] * 5)
    assert nothing.f1 == 0 and math.isnan(nothing.precision) and nothing.recall == 0


def made(seed: int, ess: float, collapse: int | None) -> AlarmRun:
    return AlarmRun(seed, 32, collapse, np.full(60, ess), np.full(60, 0.01), math.inf)


def test_the_chosen_levels_tell_collapses_from_others() -> None:
    falling = [made(1, 0.22, 40), made(3, 0.23, 40)]
    steady = [made(5, 0.27, None), made(7, 0.6, None)]
    assert choose_levels([*falling, *steady]).ess_ratio == 0.25
    assert choose_levels([*falling, *steady, made(9, 0.37, 40)]).ess_ratio == 0.4


@pytest.mark.parametrize("seed", range(3))
def test_the_search_counts_as_the_alarm_does(seed: int) -> None:
    """Ratios and KL that are around the level for hundreds of steps."""
    rng = np.random.default_rng(seed)
    ess, kl = rng.uniform(0.0, 0.14, 400), rng.uniform(0.1, 0.8, 400)
    kl[rng.integers(0, 400, 20)] = np.nan
    levels = AlarmLevels(ess_ratio=0.1, ess_steps=5, kl=0.2, kl_steps=10)
    alarm, told = CollapseAlarm(levels), dict[Sign, int]()
    for step, measured in enumerate(zip(ess, kl, strict=True), 1):
        for sign in alarm.update(measured[0], 1.0, measured[1]):
            told.setdefault(sign, step)
    assert told[Sign.LOW_ESS_RATIO] == first_step(ess, levels.ess_steps, low(levels.ess_ratio))
    assert told[Sign.KL_GROWTH] == first_step(kl, levels.kl_steps, high(levels.kl))


def test_the_first_step_of_a_sign() -> None:
    values = np.array([0.5, 0.1, 0.1, 0.3, 0.1, 0.1, 0.1])
    assert first_step(values, 3, low(0.2)) == 7 and first_step(values, 3, low_on_average(0.2)) == 4
    assert first_step(values, 3, low(0.05)) == math.inf and first_step(values, 8, low(0.2)) == math.inf


def test_the_ranking_of_signs() -> None:
    """All moments before the collapse have a lower ratio than the others, and the same KL."""
    table = ranking_table({"one": [made(1, 0.2, 40), made(3, 0.3, None)], "other": [made(5, 0.4, None)]})
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["all"] == rows["k = 32"] == ["6, 2", "1.00", "0.50"] and rows["other"] == ["2, 0", "nan", "nan"]


def test_the_step_at_which_the_gradient_has_vanished() -> None:
    steady, dead = curve([0.2, 0.4, 0.4, 0.4], seed=1), curve([0.2, 0.4, 0.4, 0.0], seed=2)
    dead.loc[dead["step"] == 25, "grad_norm"] = 50.0
    dead.loc[dead["step"] > 25, "grad_norm"] = 0.01
    both = pd.concat([steady, dead], ignore_index=True)
    told = vanished(both)
    assert list(both.loc[told, "seed"]) == [2] and list(both.loc[told, "step"]) == [25 + LEVELS.vanish_steps]
    assert [run.vanished for run in alarm_runs(both.assign(**{VANISHED: told}))] == [math.inf, 28]
