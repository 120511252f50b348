"""Where the collapse alarm's levels come from: half of the runs. And what the ESS ratio shows before a collapse."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from lab.stability.alarm import AlarmRun, score
from lab.stability.tables import Table
from vcpo.diagnostics import AlarmLevels, Sign

STEPS = (5, 10, 20)
ESS_LEVELS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
KL_LEVELS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
_BEFORE = 10
"""Steps over which the ESS ratio and KL are averaged to look at them."""

Reached = Callable[[np.ndarray], np.ndarray]
"""[windows, steps] of measured values to [windows] whether a window is a sign."""


def halves(runs: Sequence[AlarmRun]) -> tuple[list[AlarmRun], list[AlarmRun]]:
    """The runs to choose levels on (odd seeds), and those to tell them about (even seeds).

    By seed, because some methods make the same run from the same seed: at lag 0, where every ratio is 1.
    """
    return [run for run in runs if run.seed % 2], [run for run in runs if run.seed % 2 == 0]


def first_step(values: np.ndarray, steps: int, reached: Reached) -> float:
    """The last step of the first window that is a sign; infinity where none is.

    Args:
        values: [T] measured at steps 1 to T.
        steps: of a window.
        reached: tells which windows are.
    """
    if len(values) < steps:
        return math.inf
    found = reached(sliding_window_view(values, steps))
    return float(found.argmax() + steps) if found.any() else math.inf


def low(level: float) -> Reached:
    """Every step of the window is below the level: the alarm's rule for the ESS ratio."""
    return lambda windows: windows.max(axis=1) < level


def low_on_average(level: float) -> Reached:
    """The window's mean is below the level."""
    return lambda windows: windows.mean(axis=1) < level


def high(level: float) -> Reached:
    """No step of the window is at or below the level: the alarm's rule for KL."""
    return lambda windows: np.nan_to_num(windows, nan=np.inf).min(axis=1) > level


def choose_levels(runs: Sequence[AlarmRun]) -> AlarmLevels:
    """The levels of ESS ratio and KL at which the alarm's precision and recall have the largest harmonic mean (F1)."""
    vanished = [run.warnings.get(Sign.VANISHED_GRADIENT, math.inf) for run in runs]
    by_ess = {
        (steps, level): [first_step(run.ess_ratio, steps, low(level)) for run in runs]
        for steps, level in product(STEPS, ESS_LEVELS)
    }
    by_kl = {
        (steps, level): [first_step(run.kl, steps, high(level)) for run in runs]
        for steps, level in product(STEPS, KL_LEVELS)
    }

    def f1(pair: tuple[tuple[int, float], tuple[int, float]]) -> float:
        ess, kl = pair
        return score(runs, map(min, by_ess[ess], by_kl[kl], vanished)).f1

    (ess_steps, ess_ratio), (kl_steps, kl) = max(product(by_ess, by_kl), key=f1)
    return replace(AlarmLevels(), ess_ratio=ess_ratio, ess_steps=ess_steps, kl=kl, kl_steps=kl_steps)


def definitions_table(runs: Sequence[AlarmRun]) -> Table:
    """What other rules for a low ESS ratio would have told: of how many runs, and how many collapses in time."""
    rules: dict[str, tuple[int, Callable[[float], Reached]]] = {}
    for steps in STEPS[:2]:
        rules[f"{steps} steps in a row"] = steps, low
        rules[f"mean of {steps} steps"] = steps, low_on_average
    lines = []
    for level in ESS_LEVELS[1:6]:
        line = [f"{level:g}"]
        for steps, rule in rules.values():
            found = score(runs, [first_step(run.ess_ratio, steps, rule(level)) for run in runs])
            line.append(f"{found.in_time} in time; {found.right} of {found.warned} right")
        lines.append(line)
    collapsed = sum(run.collapse is not None for run in runs)
    return Table(f"The ESS ratio alone, over {len(runs)} runs of which {collapsed} collapsed", ["below", *rules], lines)


def before_collapse_table(runs: Sequence[AlarmRun]) -> Table:
    """Means of ten steps: ESS ratio and KL before a collapse, the lowest ESS ratio of runs that did not collapse."""
    collapsed = [(run, run.collapse) for run in runs if run.collapse is not None]
    last = [(run, slice(max(0, at - _BEFORE), at)) for run, at in collapsed]
    earlier = [(run, slice(max(0, at - 2 * _BEFORE), at - _BEFORE)) for run, at in collapsed if at > _BEFORE]
    groups = {
        "ESS ratio, 20 to 10 steps before a collapse": [run.ess_ratio[steps].mean() for run, steps in earlier],
        "ESS ratio, the last 10 steps before a collapse": [run.ess_ratio[steps].mean() for run, steps in last],
        "KL per token, nats, the last 10 steps before a collapse": [run.kl[steps].mean() for run, steps in last],
    }
    for lag in sorted({run.lag for run in runs if run.lag}):
        healthy = [run.ess_ratio for run in runs if run.lag == lag and run.collapse is None]
        lowest = [sliding_window_view(ess, _BEFORE).mean(axis=1).min() for ess in healthy if len(ess) >= _BEFORE]
        groups[f"ESS ratio, lowest in a run without a collapse, k = {lag}"] = lowest
    quantiles = [0.05, 0.25, 0.5, 0.75, 0.95]
    lines = [
        [name, str(len(values)), *(f"{value:.2f}" for value in np.quantile(values, quantiles))]
        for name, values in groups.items()
        if values
    ]
    columns = ["a mean of 10 steps", "runs", "5 %", "a quarter", "median", "three quarters", "95 %"]
    return Table("Before a collapse", columns, lines)
