"""The same runs through the real stack and through the lag simulator."""

import subprocess
import sys
from pathlib import Path

import pandas as pd

from recipe.lag_simulator.grid import Folder, GridRun, run_all
from scripts.bench.stability.preset import TASKS
from verl_vcpo.trainer.ppo.v1.run_log import METRICS_FILE, read_metrics

METHODS = ("none", "vcpo")
TASK = TASKS["countdown"]
LAG, STEPS, LEARNING_RATE, SEED = 32, 100, 3e-4, 1
REAL, SIMULATOR = "real stack", "simulator"


def run_real(run: GridRun, steps: int, run_dir: Path) -> pd.DataFrame:
    """The curve of one run of the real stack, made where it is missing.

    Raises:
        RuntimeError: the run failed.
    """
    if not (run_dir / "summary.json").is_file():
        settings = [f"+task={TASK.preset}", f"method={run.method}", f"async.lag={run.lag}", f"data.seed={run.seed}"]
        settings += [f"actor_rollout_ref.actor.optim.lr={run.lr}", f"trainer.total_training_steps={steps}"]
        command = [sys.executable, "-m", "recipe.fully_async_policy.main", *settings, f"run_dir={run_dir}"]
        if code := subprocess.run(command, stdout=sys.stderr).returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {code}")
    curve = pd.DataFrame(read_metrics(run_dir))
    wrong = set(curve.loc[curve["step"] > run.lag, "lag_max"]) - {run.lag}
    if wrong:
        raise RuntimeError(
            f"{run_dir / METRICS_FILE}: lags {sorted(wrong)} after step {run.lag}, not exactly {run.lag}"
        )
    curve["finite"] = 1.0  # the trainer stops at a parameter that is not
    return curve


def compare(out: Path, methods: list[str], lag: int, steps: int) -> pd.DataFrame:
    """All curves, one below the other; the column `stack` says whose."""
    folder = Folder(out / "simulator", TASK.preset, (f"trainer.total_training_steps={steps}",))
    folder.open(TASK.model)
    runs = [GridRun(method, lag, SEED, LEARNING_RATE) for method in methods]
    list(run_all(runs, folder, workers=len(runs)))
    simulated = folder.curves(runs).assign(stack=SIMULATOR)
    real = [run_real(run, steps, out / run.name).assign(method=run.method, stack=REAL) for run in runs]
    shared = [name for name in simulated.columns if all(name in curve.columns for curve in real)]
    return pd.concat([simulated[shared], *(curve[shared] for curve in real)], ignore_index=True)
