"""How good is the collapse alarm (vcpo/diagnostics.py), and where its levels come from: half of the runs."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view
from scipy.stats import rankdata

from lab.simulator.analysis import collapse_step
from lab.stability.cells import RUN
from lab.stability.inference import share_interval
from lab.stability.tables import Table
from vcpo.diagnostics import AlarmLevels, CollapseAlarm, Sign

VANISHED = "vanished"
"""The column that says at which step the alarm tells Sign.VANISHED_GRADIENT first."""
STEPS = (5, 10, 20)
ESS_LEVELS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
KL_LEVELS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
_AVERAGED, _SOON = 10, 30
"""Steps over which ESS ratio and KL are averaged, and within which a collapse is near."""

Reached = Callable[[np.ndarray], np.ndarray]
"""[windows, steps] of measured values to [windows] whether a window is a sign."""


@dataclass(frozen=True)
class AlarmRun:
    """What the alarm is told of a run, and what became of the run."""

    seed: int
    lag: int
    collapse: int | None
    ess_ratio: np.ndarray
    """[steps], of step 1 on."""
    kl: np.ndarray
    """[steps]"""
    vanished: float
    """The step at which the alarm tells Sign.VANISHED_GRADIENT first; infinity: never."""

    @property
    def warnings(self) -> dict[Sign, float]:
        """Per sign the step at which the alarm tells it first, at the default levels; infinity: never."""
        levels = AlarmLevels()
        return {
            Sign.LOW_ESS_RATIO: first_step(self.ess_ratio, levels.ess_steps, low(levels.ess_ratio)),
            Sign.VANISHED_GRADIENT: self.vanished,
            Sign.KL_GROWTH: first_step(self.kl, levels.kl_steps, high(levels.kl)),
        }


@dataclass(frozen=True)
class AlarmScore:
    """Over runs. A warning is right where the run collapses, and in time where it comes no later than the collapse."""

    runs: int
    collapsed: int
    warned: int
    right: int
    """Warned runs that collapsed."""
    in_time: int
    """Collapsed runs that were warned of no later than at the first evaluation of the collapse."""
    lead: float
    """Median steps from the first warning to the collapse, over the runs warned of in time."""

    @property
    def precision(self) -> float:
        return self.right / self.warned if self.warned else math.nan

    @property
    def recall(self) -> float:
        return self.in_time / self.collapsed if self.collapsed else math.nan

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; 0 where nothing was told in time."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if self.in_time else 0.0


def alarm_runs(curves: pd.DataFrame) -> list[AlarmRun]:
    """Those runs of published curves of which every step is kept."""
    runs = []
    for (_, lag, _, seed), curve in curves.groupby(RUN, sort=False):
        steps, told = curve[curve["step"] > 0], curve.loc[curve[VANISHED] == True, "step"]  # noqa: E712  # or missing
        if steps["ess_ratio"].isna().all():
            continue
        ess, kl = (steps[name].to_numpy(dtype=float) for name in ("ess_ratio", "kl"))
        first = float(told.iloc[0]) if len(told) else math.inf
        runs.append(AlarmRun(int(seed), int(lag), collapse_step(curve), ess, kl, first))
    return runs


def vanished(curves: pd.DataFrame) -> "pd.Series[bool]":
    """Whether the alarm tells Sign.VANISHED_GRADIENT at a step first."""
    told = pd.Series(False, curves.index)
    for _, curve in curves.groupby(RUN, sort=False):
        alarm = CollapseAlarm()
        for at, norm in curve.loc[curve["step"] > 0, "grad_norm"].items():
            if Sign.VANISHED_GRADIENT in alarm.update(1.0, float(norm), 0.0):
                told[at] = True
                break
    return told


def score(runs: Sequence[AlarmRun], told: Iterable[float]) -> AlarmScore:
    """Of warnings that come at the steps `told`, one for each run; infinity: never."""
    pairs = [(run.collapse, first) for run, first in zip(runs, told, strict=True)]
    leads = [collapse - first for collapse, first in pairs if collapse is not None and first <= collapse]
    return AlarmScore(
        runs=len(pairs),
        collapsed=sum(collapse is not None for collapse, _ in pairs),
        warned=sum(math.isfinite(first) for _, first in pairs),
        right=sum(math.isfinite(first) and collapse is not None for collapse, first in pairs),
        in_time=len(leads),
        lead=statistics.median(leads) if leads else math.nan,
    )


def score_alarm(runs: Sequence[AlarmRun], signs: Sequence[Sign] = tuple(Sign)) -> AlarmScore:
    """Of the alarm at its default levels; of some of its signs alone."""
    return score(runs, (min(run.warnings[sign] for sign in signs) for run in runs))


def scores_table(halves: Mapping[str, Sequence[AlarmRun]]) -> Table:
    """A line per sign, and one for all of them, for each of these sets of runs."""
    signs = {**{str(sign): (sign,) for sign in Sign}, "any of them": tuple(Sign)}
    lines = []
    for name, runs in halves.items():
        for sign, of in signs.items():
            found = score_alarm(runs, of)
            lines.append(
                [
                    name,
                    sign,
                    str(found.warned),
                    _share(found.right, found.warned),
                    _share(found.in_time, found.collapsed),
                    "-" if math.isnan(found.lead) else f"{found.lead:.0f}",
                ]
            )
    columns = ["runs", "sign", "warned of", "precision: of these collapsed", "recall: collapses told in time"]
    return Table("The alarm at its default levels", [*columns, "steps ahead, median"], lines)


def _share(hits: int, runs: int) -> str:
    if not runs:
        return "-"
    low, high = share_interval(hits, runs, "wilson")
    return f"{hits} of {runs}, {100 * hits / runs:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


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
    vanished = [run.vanished for run in runs]
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


def ranking_table(of_tasks: Mapping[str, Sequence[AlarmRun]]) -> Table:
    """How well ESS ratio and KL, means of ten steps, tell a run that collapses within 30 steps from one that does not.

    By the area under the curve (AUC): the chance that the sign is stronger in the first than in the second.
    """
    runs = [run for of in of_tasks.values() for run in of if run.lag]
    some = {"all": runs} | {task: [run for run in of if run.lag] for task, of in of_tasks.items()}
    some |= {f"k = {lag}": [run for run in runs if run.lag == lag] for lag in sorted({run.lag for run in runs})}
    lines = []
    for name, of in some.items():
        rows = np.array([row for run in of for row in _moments(run)])
        soon = rows[:, 2] > 0
        areas = [f"{_auc(strength, soon):.2f}" for strength in (-rows[:, 0], rows[:, 1])]
        lines.append([name, f"{len(rows)}, {soon.sum()}", *areas])
    return Table("Which sign ranks better", ["runs", "moments, before a collapse", "low ESS ratio", "high KL"], lines)


def _moments(run: AlarmRun) -> list[tuple[float, float, bool]]:
    """(ESS ratio, KL, whether the run collapses within 30 steps), every ten steps until the run collapses."""
    collapse, end = run.collapse, len(run.ess_ratio) - _SOON + 1
    found = []
    for at in range(2 * _AVERAGED, end if collapse is None else collapse, _AVERAGED):
        ess, kl = (values[at - _AVERAGED : at].mean() for values in (run.ess_ratio, run.kl))
        found.append((ess, kl, collapse is not None and collapse <= at + _SOON))
    return found


def _auc(strength: np.ndarray, positive: np.ndarray) -> float:
    hits = int(positive.sum())
    if not 0 < hits < len(positive):
        return math.nan
    return float((rankdata(strength)[positive].sum() - hits * (hits + 1) / 2) / (hits * (len(positive) - hits)))
