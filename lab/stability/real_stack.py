"""Does the real stack do what the simulator says? `python -m lab.stability.real_stack [--json] [--figures DIR]`.

The same preset, first policy, lag and learning rate through Ray, vLLM and Megatron on CPU and through the lag
simulator: a method that collapses and one that does not, three seeds each. Runs are kept in --out: the same command
goes on where it was stopped. Problems and samples differ, so compare what becomes of a run, not its digits. 24
minutes on 2 cores.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from lab.simulator.analysis import outcome
from lab.simulator.grid import Folder, GridRun, run_all
from lab.stability.inference import welch
from lab.stability.preset import METHODS as ALL_METHODS
from lab.stability.preset import TASKS, prepare
from lab.stability.report import show_tables
from lab.stability.tables import Table, percent, points, share, with_interval
from recipe.command_line import OneLineParser, run_command, whole_number
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
            dict(zip(names, name, strict=True))
            | vars(outcome(curve, steps, lag))
            | {"mean_ess_ratio": curve["ess_ratio"].mean()}
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


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=ALL_METHODS,
        default=METHODS,
        metavar="NAME",
        help="default: none vcpo_ess",
    )
    parser.add_argument("--seeds", nargs="+", type=whole_number(0), default=SEEDS, metavar="N", help="default: 1 2 3")
    parser.add_argument("--lag", type=whole_number(0), default=LAG, metavar="K", help="default: %(default)s")
    parser.add_argument("--steps", type=whole_number(1), default=STEPS, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("outputs/stability-real"), help="default: %(default)s")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw the curves there")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, last")
    arguments = parser.parse_args()
    if arguments.lag >= arguments.steps:
        parser.error(f"--steps {arguments.steps}: there is no evaluation after step --lag {arguments.lag}; give more")
    try:
        prepare(TASK)
        curves = compare(arguments.out, arguments.methods, arguments.seeds, arguments.lag, arguments.steps)
    except (RuntimeError, ValueError) as error:
        print(f"stability.real_stack: {error}", file=sys.stderr)
        return 2
    runs = outcomes(curves, arguments.steps, arguments.lag)
    show_tables([table(runs, arguments.lag)])
    if arguments.figures:
        from lab.stability.figures import beside

        print(f"Figure: {beside(curves, arguments.figures / 'real_stack.png')}")
    if arguments.json:
        rows = json.loads(runs.to_json(orient="records"))  # null where a run has not collapsed
        print(json.dumps({"lag": arguments.lag, "steps": arguments.steps, "rows": rows}))
    return 0


if __name__ == "__main__":
    run_command(main)
