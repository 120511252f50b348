"""How good is the collapse alarm (vcpo/diagnostics.py)? Precision and recall over many runs."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from lab.simulator.analysis import collapse_step
from lab.stability.cells import RUN
from lab.stability.inference import share_interval
from lab.stability.tables import Table
from vcpo.diagnostics import AlarmLevels, CollapseAlarm, Sign


@dataclass(frozen=True)
class AlarmRun:
    """What the alarm is told of a run, step by step, and what became of the run."""

    seed: int
    lag: int
    collapse: int | None
    ess_ratio: np.ndarray
    """[steps], of step 1 on, as the others."""
    grad_norm: np.ndarray
    kl: np.ndarray

    @cached_property
    def warnings(self) -> dict[Sign, int]:
        """Per sign the step at which the alarm tells it first, at the default levels."""
        return first_warnings(self)


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
    """The runs of these curves."""
    runs = []
    for (_, lag, _, seed), curve in curves.groupby(RUN, sort=False):
        steps = curve[curve["step"] > 0]
        measured = (steps[name].to_numpy() for name in ("ess_ratio", "grad_norm", "kl"))
        runs.append(AlarmRun(int(seed), int(lag), collapse_step(curve), *measured))
    return runs


def first_warnings(run: AlarmRun, levels: AlarmLevels | None = None) -> dict[Sign, int]:
    """Per sign the step at which the alarm tells it first."""
    alarm, first = CollapseAlarm(levels), dict[Sign, int]()
    for step, (ess_ratio, grad_norm, kl) in enumerate(zip(run.ess_ratio, run.grad_norm, run.kl, strict=True), 1):
        for sign in alarm.update(float(ess_ratio), float(grad_norm), float(kl)):
            first.setdefault(sign, step)
    return first


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
    return score(runs, (min((run.warnings.get(sign, math.inf) for sign in signs), default=math.inf) for run in runs))


def scores_table(halves: Mapping[str, Sequence[AlarmRun]]) -> Table:
    """A line per sign, and one for all of them, for each of these sets of runs."""
    signs = {**{f"`{sign}`": (sign,) for sign in Sign}, "any of them": tuple(Sign)}
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
