"""How good is the collapse alarm (vcpo/diagnostics.py)? Precision and recall over many runs, at the default levels."""

import math
import statistics
from dataclasses import dataclass

import pandas as pd

from recipe.lag_simulator.analysis import collapse_step
from vcpo.diagnostics import CollapseAlarm, Sign


@dataclass(frozen=True)
class AlarmScore:
    """Over runs. An alarm is right where the run collapses, and in time where it comes no later than the collapse."""

    runs: int
    collapsed: int
    warned: int
    right: int
    """Warned runs that collapsed."""
    in_time: int
    """Collapsed runs that were warned of no later than at the first evaluation of the collapse."""
    lead: float
    """Median steps from the first warning to the collapse, over the runs warned of in time."""
    ess_lead: float
    """The same for the ESS ratio's sign alone."""
    by_sign: dict[str, tuple[int, int]]
    """Per sign: runs in which it was told, and how many of these collapsed."""

    @property
    def precision(self) -> float:
        return self.right / self.warned if self.warned else math.nan

    @property
    def recall(self) -> float:
        return self.in_time / self.collapsed if self.collapsed else math.nan

    def line(self) -> str:
        """For the console."""
        return (
            f"alarm over {self.runs} runs, {self.collapsed} of them collapsed: precision {self.precision:.0%} "
            f"({self.right} of {self.warned}), recall {self.recall:.0%}, median lead {self.lead:.0f} steps; ESS ratio "
            f"alone {self.ess_lead:.0f} steps; by sign (told, collapsed): {self.by_sign}"
        )


def first_warnings(curve: pd.DataFrame) -> dict[Sign, int]:
    """Per sign the step at which it was told first."""
    alarm, first = CollapseAlarm(), dict[Sign, int]()
    steps = curve[curve["step"] > 0]
    for row in steps.itertuples():
        for sign in alarm.update(row.ess_ratio, row.grad_norm, row.kl):
            first.setdefault(sign, int(row.step))
    return first


def score_alarm(curves: pd.DataFrame) -> AlarmScore:
    """Replay every run through the alarm."""
    collapsed = warned = right = in_time = 0
    leads, ess_leads = [], []
    by_sign = {str(sign): [0, 0] for sign in Sign}
    groups = list(curves.groupby(["method", "lag", "seed", "lr"]))
    for _, curve in groups:
        first, collapse = first_warnings(curve), collapse_step(curve)
        collapsed += collapse is not None
        warned += bool(first)
        right += bool(first) and collapse is not None
        for sign in first:
            by_sign[str(sign)][0] += 1
            by_sign[str(sign)][1] += collapse is not None
        if collapse is not None and first and min(first.values()) <= collapse:
            in_time += 1
            leads.append(collapse - min(first.values()))
        if collapse is not None and first.get(Sign.LOW_ESS_RATIO, math.inf) <= collapse:
            ess_leads.append(collapse - first[Sign.LOW_ESS_RATIO])
    return AlarmScore(
        runs=len(groups),
        collapsed=collapsed,
        warned=warned,
        right=right,
        in_time=in_time,
        lead=statistics.median(leads) if leads else math.nan,
        ess_lead=statistics.median(ess_leads) if ess_leads else math.nan,
        by_sign={sign: (told, fell) for sign, (told, fell) in by_sign.items()},
    )
