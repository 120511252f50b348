"""What a run's curve says: where it ended, whether and when it collapsed."""

import math
import statistics
from dataclasses import dataclass

import pandas as pd

COLLAPSE_STEPS = 20
# 97.5 % quantiles of Student's t for 1 to 9 degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class RunOutcome:
    """One run."""

    final_accuracy: float
    """Mean of the evaluations in the last tenth of the steps."""
    best_accuracy: float
    collapse_step: int | None
    """The first step of the collapse, None where there was none."""
    mean_ess_ratio: float


def outcome(curve: pd.DataFrame, total_steps: int) -> RunOutcome:
    """Of one run.

    Args:
        curve: one row per step, step 0 being the start; ends early where a parameter was not finite.
        total_steps: what the run was meant to make.
    """
    evaluated = curve.dropna(subset="val_accuracy")
    last = evaluated[evaluated["step"] > 0.9 * total_steps]["val_accuracy"]
    return RunOutcome(
        final_accuracy=float(last.mean()) if len(last) else float(evaluated["val_accuracy"].iloc[-1]),
        best_accuracy=float(evaluated["val_accuracy"].max()),
        collapse_step=collapse_step(curve),
        mean_ess_ratio=float(curve["ess_ratio"].mean()),
    )


def collapse_step(curve: pd.DataFrame) -> int | None:
    """The first evaluation from which accuracy stays below half of the start for `COLLAPSE_STEPS` steps, or the step
    that left a parameter that is not finite."""
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
    return int(broken.iloc[0]) if len(broken) else None


def steps_to(curve: pd.DataFrame, accuracy: float) -> int | None:
    """The first step whose evaluation reaches `accuracy`; None where none does."""
    reached = curve.loc[curve["val_accuracy"] >= accuracy, "step"]
    return int(reached.iloc[0]) if len(reached) else None


def interval(values: list[float]) -> float:
    """Half of the 95 % confidence interval of the mean (Student's t); NaN for a single value.

    Raises:
        ValueError: more than ten values.
    """
    if len(values) < 2:
        return math.nan
    if len(values) > len(_T) + 1:
        raise ValueError(f"{len(values)} seeds: at most {len(_T) + 1}")
    return _T[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
