"""The same runs through the real stack and through the lag simulator."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from lab.simulator.analysis import outcome
from lab.simulator.grid import Folder, GridRun, run_all
from lab.stability.inference import welch
from lab.stability.preset import TASKS
from lab.stability.tables import Table, percent, points, share, with_interval
from verl_vcpo.report.run_log import METRICS_FILE, read_metrics

METHODS, SEEDS = ("none", "vcpo_ess"), (1, 2, 3)
TASK = TASKS["countdown"]
LAG, STEPS, LEARNING_RATE = 32, 100, 3e-4
REAL, SIMULATOR = "real stack", "simulator"


def curve_of(settings: Sequence[str], run_dir: Path) -> pd.DataFrame:
    """The steps of one run of the real stack on `TASK`, which is made where it is missing.

    Raises:
        RuntimeError: the run failed.
    """
    if not (run_dir / "summary.json").is_file():
        command = [sys.executable, "-m", "recipe.fully_async_policy.main", f"+task={TASK.preset}", *settings]
        if code := subprocess.run([*command, f"run_dir={run_dir}"], stdout=sys.stderr).returncode:
            raise RuntimeError(f"{' '.join(command)} run_dir={run_dir}: exit code {code}")
    return pd.DataFrame(read_metrics(run_dir)).assign(finite=1.0)  # the trainer stops at a parameter that is not


def run_real(run: GridRun, steps: int, run_dir: Path) -> pd.DataFrame:
    """The curve of one run at an exact lag.

    Raises:
        RuntimeError: the run failed, or a batch was of another lag.
    """
    settings = [f"method={run.method}", f"async.lag={run.lag}", f"data.seed={run.seed}"]
    settings += [f"actor_rollout_ref.actor.optim.lr={run.lr}", f"trainer.total_training_steps={steps}"]
    curve = curve_of(settings, run_dir)
    wrong = set(curve.loc[curve["step"] > run.lag, "lag_max"]) - {run.lag}
    if wrong:
        raise RuntimeError(
            f"{run_dir / METRICS_FILE}: lags {sorted(wrong)} after step {run.lag}, not exactly {run.lag}"
        )
    return curve


def compare(out: Path, methods: Sequence[str], seeds: Sequence[int], lag: int, steps: int) -> pd.DataFrame:
    """All curves, one below the other; the column `stack` says whose."""
    folder = Folder(out / "simulator", TASK.preset, (f"trainer.total_training_steps={steps}",))
    folder.open(TASK.model)
    runs = [GridRun(method, lag, seed, LEARNING_RATE) for method in methods for seed in seeds]
    list(run_all(runs, folder, workers=len(methods)))
    simulated = folder.curves(runs).assign(stack=SIMULATOR)
    real = [
        run_real(run, steps, out / run.name).assign(method=run.method, seed=run.seed, stack=REAL)
        for run in tqdm(runs, desc=REAL, unit="run", file=sys.stderr)
    ]
    shared = [name for name in simulated.columns if all(name in curve.columns for curve in real)]
    return pd.concat([simulated[shared], *(curve[shared] for curve in real)], ignore_index=True)


def outcomes(curves: pd.DataFrame, steps: int, lag: int) -> pd.DataFrame:
    """One row for each run of `compare`: its method, stack and seed, and what became of it."""
    names = ["method", "stack", "seed"]
    return pd.DataFrame(
        [
            dict(zip(names, name, strict=True)) | vars(outcome(curve, steps, lag))
            for name, curve in curves.groupby(names, sort=False)
        ]
    )


def table(runs: pd.DataFrame, lag: int) -> Table:
    """A line per method and stack: means over the seeds, and how far the real stack is from the simulator.

    Args:
        runs: of `outcomes`.
        lag: of all runs.
    """
    lines = []
    for (method, stack), of in runs.groupby(["method", "stack"]):
        simulated = runs[(runs["method"] == method) & (runs["stack"] == SIMULATOR)]
        difference = welch(list(of["accuracy"]), list(simulated["accuracy"]))
        lines.append(
            [
                f"`{method}`",
                str(stack),
                ", ".join(map(percent, of["accuracy"])),
                with_interval(list(of["accuracy"])),
                "-" if stack == SIMULATOR else points(difference),
                with_interval(list(of["final_accuracy"])),
                share(int(of["collapse_step"].notna().sum()), len(of)),
                f"{of['mean_ess_ratio'].mean():.3f}",
            ]
        )
    columns = ["method", "", "after step k, each seed", "mean", "less the simulator", "last tenth", "collapsed"]
    return Table(f"Lag {lag}", [*columns, "ESS ratio"], lines)
