"""`async.lag=auto` and fixed lags on the real stack: what becomes of a run, and how long its trainer waits."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pandas as pd
from tqdm import tqdm

from recipe.lag_simulator.analysis import accuracy_after, collapse_step
from scripts.bench.stability.real_stack import REAL, curve_of
from scripts.bench.stability.tables import Table, percent
from verl_vcpo.trainer.ppo.v1.lag_setting import AUTO

METHOD, MAX_LAG, LAGS, LEARNING_RATE, STEPS = "none", 32, ("0", AUTO, "32"), 3e-4, 80
"""Without a correction: on the simulator every run collapses at this rate from lag 8 on."""
WARM_UP = 5
"""Steps that are left out of the times: the first ones fill caches."""


@dataclass(frozen=True)
class RealRow:
    """One run."""

    lag: str
    accuracy: float
    """Of the evaluations in the second half of the steps."""
    collapsed: bool
    mean_lag: float
    largest_lag: int
    step_s: float
    trainer_idle_share: float
    """Of the trainer's time, waiting for rollouts."""
    sampler_idle_share: float


def settings(lag: str) -> list[str]:
    """Of a run at this lag."""
    largest = [f"async.max_lag={MAX_LAG}"] if lag == AUTO else []
    rate = f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}"
    steps = f"trainer.total_training_steps={STEPS}"
    return [f"method={METHOD}", f"async.lag={lag}", *largest, "async.exact_lag=false", rate, steps]


def row(lag: str, curve: pd.DataFrame) -> RealRow:
    """Sums one run up; times are weighted by the steps' durations."""
    steps = curve[curve["step"] > 0]
    timed = steps[steps["step"] > WARM_UP]

    def idle(name: str) -> float:
        return float((timed[name] * timed["step_s"]).sum() / timed["step_s"].sum())

    return RealRow(
        lag=f"{AUTO} (max {MAX_LAG})" if lag == AUTO else lag,
        accuracy=accuracy_after(curve, STEPS // 2, STEPS),
        collapsed=collapse_step(curve) is not None,
        mean_lag=mean(steps["lag_mean"]),
        largest_lag=int(steps["lag_max"].max()),
        step_s=mean(timed["step_s"]),
        trainer_idle_share=idle("trainer_idle_share"),
        sampler_idle_share=idle("sampler_idle_share"),
    )


def measure(out: Path) -> list[RealRow]:
    """One run at each lag; with those that `out` has from before.

    Raises:
        RuntimeError: a run failed.
    """
    return [
        row(lag, curve_of(settings(lag), out / f"real-{METHOD}-{lag}"))
        for lag in tqdm(LAGS, desc=REAL, file=sys.stderr)
    ]


def table(rows: Sequence[RealRow]) -> Table:
    """The table of docs/measurements/lag-auto.md."""
    columns = ["`async.lag`", f"accuracy after step {STEPS // 2}", "collapsed", "mean lag", "largest lag"]
    columns += ["seconds a step", "trainer waits", "samplers wait"]
    lines = [
        [
            of.lag,
            percent(of.accuracy),
            "yes" if of.collapsed else "no",
            f"{of.mean_lag:.1f}",
            str(of.largest_lag),
            f"{of.step_s:.2f}",
            f"{of.trainer_idle_share:.0%}",
            f"{of.sampler_idle_share:.0%}",
        ]
        for of in rows
    ]
    return Table(f"The real stack, {METHOD}", columns, lines)
