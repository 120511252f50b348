"""Collapse, final accuracy and the alarm's score, on curves made by hand."""

import math
from pathlib import Path

import pandas as pd
import pytest

from recipe.lag_simulator.analysis import collapse_step, interval, outcome, steps_to
from scripts.bench.stability.alarm import score_alarm
from scripts.bench.stability.figures import beside, draw_all
from scripts.bench.stability.tables import all_numbers, by_lag, learning_rates, markdown, over_lags, summarise
from scripts.bench.stability.tuning import choose, tuning_results


def curve(accuracies: list[float], ess: float = 0.8, low_from: int | None = None, **run: object) -> pd.DataFrame:
    """A run evaluated every ten steps; its ESS ratio is 0.01 from step `low_from` on."""
    steps = 10 * (len(accuracies) - 1)
    rows = [{"step": 0, "val_accuracy": accuracies[0]}]
    for step in range(1, steps + 1):
        low = low_from is not None and step >= low_from
        row = {"step": step, "ess_ratio": 0.01 if low else ess, "grad_norm": 1.0, "kl": 0.001, "finite": 1.0}
        rows.append(row | ({"val_accuracy": accuracies[step // 10]} if step % 10 == 0 else {}))
    return pd.DataFrame(rows).assign(**({"method": "tis_seq", "lag": 32, "seed": 1, "lr": 1e-3} | run))


def test_a_collapse_lasts_twenty_steps() -> None:
    assert collapse_step(curve([0.2, 0.3, 0.05, 0.05, 0.05, 0.05])) == 20
    assert collapse_step(curve([0.2, 0.3, 0.05, 0.05, 0.3, 0.05])) is None, (
        "ten steps are none, nor are they at the end"
    )
    assert collapse_step(curve([0.2, 0.11, 0.12, 0.11, 0.11])) is None, "above half of the start"
    broken = curve([0.2, 0.3, 0.3])
    broken.loc[15, "finite"] = 0.0
    assert collapse_step(broken[:16]) == 15


def test_the_outcome_of_a_run() -> None:
    result = outcome(curve([0.2, 0.3, 0.6, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.5]), 100)
    assert (result.final_accuracy, result.best_accuracy, result.collapse_step) == (0.5, 0.6, None)
    assert result.mean_ess_ratio == pytest.approx(0.8)
    assert steps_to(curve([0.2, 0.3, 0.6]), 0.5) == 20 and steps_to(curve([0.2, 0.3]), 0.5) is None


def test_the_interval_is_students() -> None:
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert math.isnan(interval([1.0]))


def test_the_table_and_the_figures(tmp_path: Path) -> None:
    runs = [curve([0.2, 0.4, 0.5, 0.5], method="none", lag=0, seed=seed, low_from=None) for seed in (1, 2)] + [
        curve([0.2, 0.4, 0.5 * end, 0.5 * end, 0.5 * end], method=method, seed=seed, low_from=5 if not end else None)
        for seed in (1, 2)
        for method, end in (("tis_seq", 0), ("vcpo", 1))
    ]
    curves = pd.concat(runs, ignore_index=True)
    listed = summarise(curves, 30)
    rows = {(row.method, row.lag): row for row in listed}
    assert rows["tis_seq", 32].collapsed == 1 and rows["tis_seq", 32].collapse_step == 20
    assert rows["vcpo", 32].collapsed == 0 and rows["vcpo", 32].steps_to_sync == 20
    text = markdown([by_lag(listed), all_numbers(listed)], score_alarm(curves))
    assert "| vcpo | 0.001 | - | 50.0% ± 0.0 | 50.0% ± 0.0 |\n" in text
    assert "| tis_seq | 0.001 | - | 0.0% ± 0.0 [2 of 2] | 0.0% ± 0.0 |\n" in text
    assert text.index("| vcpo |") < text.index("| tis_seq |"), "the best over the lags first"
    assert "| vcpo | 32 | 0.001 | 50.0% ± 0.0 | 50.0% | 0 of 2 | - | 0.800 | 20 |\n" in text
    tuned = learning_rates({"vcpo": {1e-3: [0.2, 0.4], 1e-4: [0.5, 0.6]}}, {"vcpo": 1e-4})
    assert tuned.markdown().splitlines()[-1] == "| vcpo | 55.0% | 30.0% | 0.0001 |"
    assert {file.name for file in draw_all(curves, tmp_path)} == {"predictors.png", "lags.png", "methods.png"}
    stacks = pd.concat([curve([0.2, 0.3], stack=stack) for stack in ("simulator", "real stack")], ignore_index=True)
    assert beside(stacks, tmp_path / "real_stack.png") == tmp_path / "real_stack.png"
    assert all(file.stat().st_size > 10_000 for file in tmp_path.iterdir())


def test_the_mean_over_the_lags_is_of_whole_seeds() -> None:
    ends = {(0, 1): 0.9, (8, 1): 0.5, (32, 1): 0.3, (8, 2): 0.7, (32, 2): 0.4, (8, 3): 0.1}
    rows = summarise(pd.concat([curve([0.2, end, end], lag=lag, seed=seed) for (lag, seed), end in ends.items()]), 20)
    assert over_lags({row.lag: row for row in rows}) == pytest.approx([0.4, 0.55]), "seed 3 was not run at lag 32"


def test_the_alarms_score() -> None:
    runs = [
        curve([0.2, 0.4, 0.0, 0.0, 0.0], low_from=5, seed=1),  # told at step 9, collapses at 20
        curve([0.2, 0.4, 0.4, 0.4, 0.4], low_from=5, seed=2),  # told for nothing
        curve([0.2, 0.4, 0.0, 0.0, 0.0], seed=3),  # never told
        curve([0.2, 0.0, 0.0, 0.0, 0.0], low_from=25, seed=4),  # told too late
        curve([0.2, 0.4, 0.4, 0.4, 0.4], seed=5),
    ]
    score = score_alarm(pd.concat(runs, ignore_index=True))
    assert (score.runs, score.collapsed, score.warned, score.right, score.in_time) == (5, 3, 3, 2, 1)
    assert score.precision == pytest.approx(2 / 3) and score.recall == pytest.approx(1 / 3)
    assert score.lead == score.ess_lead == 11 and score.by_sign["low_ess_ratio"] == (3, 2)


def test_the_chosen_rate_is_the_smallest_as_good_as_the_best_but_for_chance() -> None:
    noisy = {1e-4: [0.50, 0.52], 3e-4: [0.47, 0.57], 1e-3: [0.0, 0.1]}  # 3e-4: 0.01 better, by chance
    clear = {1e-4: [0.30, 0.32], 3e-4: [0.48, 0.52], 1e-3: [0.0, 0.1]}
    assert choose({"noisy": noisy, "clear": clear}) == {"noisy": 1e-4, "clear": 3e-4}
    runs = [curve([0.2, end], seed=seed, lr=lr) for lr, ends in clear.items() for seed, end in enumerate(ends)]
    assert tuning_results(pd.concat(runs), 10) == {"tis_seq": clear}
    assert choose({"one seed": {1e-4: [0.5], 3e-4: [0.51]}}) == {"one seed": 3e-4}
    assert choose({"equal": {1e-4: [0.5], 3e-4: [0.5]}}) == {"equal": 1e-4}
