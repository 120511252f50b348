"""Published runs made again: what is the same, from where on they are apart, and how far."""

import math

import pandas as pd
import pytest

from lab.simulator.grid import GridRun
from lab.stability.again import compare, draw, of_run, summary

STEPS = 300
RUN = GridRun("vcpo", 8, 1, 1e-4)


def curve(run: GridRun = RUN, apart: int = STEPS + 1, end: int = STEPS) -> pd.DataFrame:
    """Accuracy 0.4 at every tenth step, 0.5 from step `apart` on."""
    steps = range(end + 1)
    return pd.DataFrame(
        {
            "method": run.method,
            "lag": run.lag,
            "seed": run.seed,
            "lr": run.lr,
            "step": steps,
            "val_accuracy": [(0.5 if step >= apart else 0.4) if step % 10 == 0 else math.nan for step in steps],
            "finite": [float(step < end or end == STEPS) for step in steps],
        }
    )


def test_a_run_with_the_same_numbers() -> None:
    remade = compare(RUN, curve(), curve())
    assert (remade.same, remade.evaluations, remade.apart) == (31, 31, None)
    assert remade.published == remade.again == pytest.approx(0.4) and remade.collapsed == (False, False)


def test_a_run_that_goes_apart() -> None:
    remade = compare(RUN, curve(), curve(apart=155))
    assert (remade.same, remade.evaluations, remade.apart) == (16, 31, 160)
    assert remade.again - remade.published == pytest.approx(0.1 * 15 / 30)


def test_a_run_that_breaks_earlier() -> None:
    """Steps that one of both did not make are apart, and their evaluations are not the same."""
    remade = compare(RUN, curve(), curve(end=200))
    assert (remade.same, remade.evaluations, remade.apart) == (21, 31, 210)
    assert remade.collapsed == (False, True) and remade.again < remade.published


def test_the_same_runs_are_drawn_each_time() -> None:
    runs = [GridRun(method, lag, 1, 1e-4) for method in ("vcpo", "none") for lag in (0, 8, 32)]
    published = pd.concat([curve(run) for run in runs])
    drawn = draw(published, 3)
    assert len(drawn) == 3 and drawn == draw(published, 3)
    assert set(draw(published, 10)) == {run for run in runs if run.lag}, "at lag 0 nothing is stale"
    assert all(len(of_run(published, run)) == STEPS + 1 for run in drawn)


def test_the_summary_is_of_the_runs_that_differ() -> None:
    seeds = [GridRun("vcpo", 8, seed, 1e-4) for seed in (1, 2)]
    published = pd.concat([curve(seeds[0]), curve(seeds[1], apart=5)])  # 0.4 and 0.5
    again = {run: curve(run, apart=155) for run in seeds}
    remade = [compare(run, of_run(published, run), again[run]) for run in seeds]
    totals = summary([*remade, compare(RUN, curve(), curve())], published)
    assert (totals["runs"], totals["same"], totals["collapsed_as_published"]) == (3, 1, 3)
    assert totals["mean_difference"] == pytest.approx((0.05 - 0.05) / 2, abs=1e-9)
    assert totals["sd_of_seeds"] == pytest.approx(0.1 / math.sqrt(2))
