"""Does the real stack do what the simulator says? `python -m scripts.bench.stability_real [--json] [--figures DIR]`.

The same preset, first policy, lag and learning rate through Ray, vLLM and Megatron on CPU and through the lag
simulator: a method that collapses and one that does not. Runs are kept in --out: the same command goes on where it was
stopped. Problems and samples differ, so compare what becomes of a run, not its digits. About a quarter of an hour.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd

from recipe.lag_simulator.analysis import outcome
from recipe.lag_simulator.grid import TASK, Folder, Run, run_all
from scripts.bench.stability import MODEL, prepare
from verl_vcpo.trainer.ppo.v1.run_log import METRICS_FILE, read_metrics

METHODS = ("none", "vcpo")
LAG, STEPS, LEARNING_RATE, SEED = 32, 100, 3e-4, 1
REAL, SIMULATOR = "real stack", "simulator"


def run_real(run: Run, steps: int, run_dir: Path) -> pd.DataFrame:
    """The curve of one run of the real stack, made where it is missing.

    Raises:
        RuntimeError: the run failed.
    """
    if not (run_dir / "summary.json").is_file():
        settings = [f"+task={TASK}", f"stabilizer={run.method}", f"async.lag={run.lag}", f"data.seed={run.seed}"]
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
    folder = Folder(out / "simulator", (f"trainer.total_training_steps={steps}",))
    folder.open(MODEL)
    runs = [Run(method, lag, SEED, LEARNING_RATE) for method in methods]
    list(run_all(runs, folder, workers=len(runs)))
    simulated = folder.curves(runs).assign(stack=SIMULATOR)
    real = [run_real(run, steps, out / run.name).assign(method=run.method, stack=REAL) for run in runs]
    shared = [name for name in simulated.columns if all(name in curve.columns for curve in real)]
    return pd.concat([simulated[shared], *(curve[shared] for curve in real)], ignore_index=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="NAME", help="default: none vcpo")
    parser.add_argument("--lag", type=int, default=LAG, metavar="K", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("outputs/stability-real"), help="default: %(default)s")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw the curves there")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, last")
    arguments = parser.parse_args()
    prepare()
    try:
        curves = compare(arguments.out, arguments.methods, arguments.lag, arguments.steps)
    except (RuntimeError, ValueError) as error:
        print(f"stability_real: {error}", file=sys.stderr)
        return 2
    rows = []
    for (method, stack), curve in curves.groupby(["method", "stack"], sort=False):
        result = outcome(curve, arguments.steps)
        rows.append({"method": method, "stack": stack, **vars(result)})
    print(pd.DataFrame(rows).to_string(index=False))
    if arguments.figures:
        from scripts.bench.stability_figures import beside

        print(f"Figure: {beside(curves, arguments.figures / 'real_stack.png')}")
    if arguments.json:
        print(json.dumps({"lag": arguments.lag, "steps": arguments.steps, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
