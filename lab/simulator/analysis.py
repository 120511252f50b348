"""What a run's curve says: how well it learned from stale data, where it ended, whether and when it collapsed."""

import math
from dataclasses import dataclass

import pandas as pd

COLLAPSE_STEPS = 20
LAST = ("last_accuracy", "last_greedy", "last_pass", "last_entropy")
"""The columns of a run's last row, which are about its last policy."""
LAST_SAMPLES = 8
"""Responses per held-out problem, for the accuracy of a run's last policy."""


@dataclass(frozen=True)
class RunOutcome:
    """One run."""

    accuracy: float
    """Mean of all evaluations after step `lag`: what methods are compared by."""
    final_accuracy: float
    """Mean of the evaluations in the last tenth of the steps."""
    last: dict[str, float]
    """Those of `LAST` that were measured, with `LAST_SAMPLES` responses per problem."""
    shift: float
    """The baseline less the mean reward, a mean over the steps; NaN where they were not recorded."""
    collapse_step: int | None
    """The first step of the collapse, None where there was none."""


def outcome(curve: pd.DataFrame, total_steps: int, lag: int) -> RunOutcome:
    """Of one run.

    Args:
        curve: one row per step, step 0 being the start; ends early where a parameter was not finite.
        total_steps: what the run was meant to make.
        lag: the run's.

    Raises:
        ValueError: no step is after `lag`.
    """
    return RunOutcome(
        accuracy=accuracy_after(curve, lag, total_steps),
        final_accuracy=accuracy_after(curve, int(0.9 * total_steps), total_steps),
        last={name: float(curve[name].max()) for name in LAST if name in curve and curve[name].notna().any()},
        shift=float(curve["shift"].max()) if "shift" in curve else float(shift(curve).mean()),
        collapse_step=collapse_step(curve),
    )


def accuracy_after(curve: pd.DataFrame, step: int, total_steps: int) -> float:
    """Mean of the evaluations after `step`; those that a run did not live to see count as 0.

    Raises:
        ValueError: the run was not meant to make more steps than `step`.
    """
    if step >= total_steps:
        raise ValueError(f"{total_steps} steps: there is no evaluation after step {step}")
    evaluated = curve.dropna(subset="val_accuracy")
    seen = evaluated.loc[evaluated["step"] > step, "val_accuracy"]
    last = int(curve["step"].max())
    if last == total_steps:
        return float(seen.mean())
    first = evaluated["step"].iloc[1]  # evaluations are equally spaced, so the first step is their interval
    missed = (total_steps - 1) // first - max(last, step) // first + 1  # the run's last step is always evaluated
    return float(seen.sum() / (len(seen) + missed))


def shift(curve: pd.DataFrame) -> "pd.Series[float]":
    """The baseline less the mean reward at each step."""
    known = {"baseline", "reward"} <= set(curve.columns)
    return curve["baseline"] - curve["reward"] if known else pd.Series(math.nan, curve.index)


def collapse_step(curve: pd.DataFrame) -> int | None:
    """The first evaluation of a collapse, or the step that left a parameter that is not finite.

    Collapsed: accuracy stays below half of the start for `COLLAPSE_STEPS` steps, or from there to the run's end.
    """
    broken = curve.loc[curve["finite"] == 0, "step"]
    evaluated = curve.dropna(subset="val_accuracy")
    half = evaluated["val_accuracy"].iloc[0] / 2
    start: int | None = None
    for step, accuracy in zip(evaluated["step"], evaluated["val_accuracy"], strict=True):
        if accuracy >= half:
            start = None
            continue
        start = int(step) if start is None else start
        if step - start >= COLLAPSE_STEPS:
            return start
    return int(broken.iloc[0]) if len(broken) else start
