"""The model of the waiting, and the summary, of scripts.bench.lag_auto."""

from dataclasses import replace

import pandas as pd
import pytest

from scripts.bench.lag_auto import MAX_LAG, STEPS, markdown, step_time, summary
from scripts.bench.stability import lag_auto_real


@pytest.mark.parametrize("lag, latency", [(0, 8), (1, 8), (3, 8), (8, 8), (32, 8), (32, 64)])
def test_a_fixed_lag_divides_the_latency_until_the_trainer_is_what_limits(lag: int, latency: int) -> None:
    steps = 5000
    lags = [min(step, lag) for step in range(steps)]
    assert step_time(lags, latency) == pytest.approx(max(1, (latency + 1) / (lag + 1)), rel=0.02)


def test_a_larger_lag_never_takes_longer() -> None:
    times = [step_time([min(step, lag) for step in range(300)], 64) for lag in range(0, 129, 8)]
    assert times == sorted(times, reverse=True)


def test_the_summary_of_runs_that_collapse_and_do_not() -> None:
    steps = range(STEPS + 1)
    of_seeds = [
        pd.DataFrame(
            {
                "step": steps,
                "val_accuracy": [start if step == 0 else end for step in steps],
                "lag_max": [None, *(min(step, 2) for step in range(STEPS))],
                "finite": 1.0,
                "seed": seed,
            }
        )
        for seed, (start, end) in enumerate([(0.2, 0.4), (0.2, 0.0)])
    ]
    row = summary("vcpo_ess", "auto", pd.concat(of_seeds))
    assert (row.lag, row.collapsed, row.runs, row.largest_lag) == (f"auto (max {MAX_LAG})", 1, 2, 2)
    assert row.finals == pytest.approx((0.4, 0.0)) and row.accuracy == pytest.approx(0.2)
    fixed = replace(row, lag="6", finals=(0.2, 0.1))
    table = markdown([row, fixed])
    assert "| `vcpo_ess` | auto (max 128) | 20.0% | - | - | 20.0% | 1 of 2 | 2.0 | 2 | " in table
    assert "| `vcpo_ess` | 6 | 15.0% | +5.0 (" in table


def test_a_run_of_the_real_stack_is_summed_up_without_its_first_steps() -> None:
    steps = range(1, lag_auto_real.STEPS + 1)
    start = {"step": 0, "val_accuracy": 0.2}
    rows = [
        {
            "step": step,
            "val_accuracy": 0.4 if step % 10 == 0 else None,
            "lag_mean": 1.0,
            "lag_max": 1 + step % 2,
            "step_s": 9.0 if step <= lag_auto_real.WARM_UP else 1.0 + step % 2,
            "trainer_idle_share": 1.0 if step <= lag_auto_real.WARM_UP else 0.5 * (step % 2),
            "sampler_idle_share": 0.25,
        }
        for step in steps
    ]
    found = lag_auto_real.row("auto", pd.DataFrame([start, *rows]).assign(finite=1.0))
    assert (found.lag, found.collapsed, found.mean_lag, found.largest_lag) == ("auto (max 32)", False, 1.0, 2)
    assert found.accuracy == pytest.approx(0.4) and found.step_s == pytest.approx(1.5, abs=0.01)
    assert found.trainer_idle_share == pytest.approx(1 / 3, abs=0.01), "a long step counts by its length"
    (line,) = lag_auto_real.table([found]).rows
    assert line[:3] == ["auto (max 32)", "40.0 %", "no"] and line[-2:] == ["33%", "25%"]
