"""Does a method unlearn a wrong habit? `python -m lab.habit`, on the lag simulator.

On other tasks of the lab greedy answers of the first policy are better than any trained policy's drawn answers: what
training gains there is sharpening. Here the most likely answer is wrong (lab/habit/tasks.py), with three first policies
for each task. A first policy takes a minute or two of a core, a run about 20 seconds. Runs are kept in --out: the same
command goes on where it was stopped. --out gets

habit.csv    a line for each run

--report shows the published runs, or those of a file, and makes none. lab/habit/predictions.md says what was expected.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import pandas as pd

from lab.habit.report import LAGS, METHODS, RATES, SEEDS, STEPS, tables
from lab.habit.tasks import POLICIES, TASKS, HabitTask
from lab.simulator.analysis import outcome
from lab.simulator.grid import Folder, GridRun, make_all
from lab.stability.report import show_tables
from recipe.command_line import OneLineParser, run_command, whole_number
from recipe.warm_start.train import RECORD
from verl_vcpo.common.whole_file import write_whole

PUBLISHED = Path("docs/measurements/habit.csv")


def folder_of(task: HabitTask, policy: int, out: Path) -> Folder:
    """Return the folder of all runs of a task that begin with one first policy, in the sizes of Countdown."""
    overrides = (
        f"trainer.total_training_steps={STEPS}",
        f"data.train_files={task.data}/train.parquet",
        f"data.val_files={task.data}/val.parquet",
        "data.max_prompt_length=48",
        f"data.max_response_length={task.response}",
        "actor_rollout_ref.rollout.max_model_len=96",
        f"actor_rollout_ref.model.path={task.model(policy)}",
        "reward.custom_reward_function.path=pkg://lab.habit.tasks",
    )
    return Folder(out / f"{task.name}-{policy}", "countdown_lag", overrides)


def make(arguments: argparse.Namespace) -> None:
    """Make the runs that are missing, under a progress bar: all of one seed, then the next."""
    folders = {}
    for name in arguments.tasks:
        TASKS[name].prepare()
        for policy in POLICIES:
            folders[name, policy] = folder_of(TASKS[name], policy, arguments.out)
            folders[name, policy].open(TASKS[name].model(policy))
    cells = [(method, lag, lr) for lag in arguments.lags for lr in arguments.lr for method in arguments.methods]
    runs = [
        (GridRun(method, lag, seed, lr), folder)
        for seed in arguments.seeds
        for folder in folders.values()
        for method, lag, lr in cells
    ]
    make_all(runs, arguments.workers)


def collected(out: Path) -> pd.DataFrame:
    """Return a row for each finished run."""
    rows = []
    for name, task in TASKS.items():
        for policy in POLICIES:
            files = sorted((folder_of(task, policy, out).path / "runs").glob("*.parquet"))
            first = json.loads((task.model(policy) / RECORD).read_text()) if files else {}
            for file in files:
                curve = pd.read_parquet(file)
                found = outcome(curve, STEPS, int(curve["lag"].iloc[0]))
                rows.append(
                    {"task": name, "policy": policy}
                    | curve[["method", "lag", "lr", "seed"]].iloc[0].to_dict()
                    | {
                        "greedy_before": first["accuracy"],
                        "start": curve["val_accuracy"].iloc[0],
                        "accuracy": found.accuracy,
                    }
                    | {"end": found.final_accuracy, "collapse_step": found.collapse_step, **found.last}
                    | {"level": curve["level"].mean()}
                )
    if not rows:
        raise ValueError("--so-far: no run is finished; leave it out")
    return pd.DataFrame(rows).round(4)


def main(argv: list[str] | None = None) -> int:
    """Make, show and write. Return the exit code: 2 where a folder or a file cannot be used."""
    parser = OneLineParser(prog="python -m lab.habit", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=tuple(TASKS), help="all")
    parser.add_argument("--methods", nargs="+", metavar="NAME", default=METHODS, help="%(default)s")
    parser.add_argument("--lags", nargs="+", type=whole_number(0), metavar="K", default=LAGS, help="%(default)s")
    parser.add_argument("--lr", nargs="+", type=float, metavar="X", default=RATES, help="%(default)s")
    parser.add_argument("--seeds", nargs="+", type=whole_number(0), metavar="N", default=SEEDS, help="%(default)s")
    parser.add_argument("--workers", type=whole_number(1), default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--out", type=Path, default=Path("outputs/habit"), help="default: %(default)s")
    parser.add_argument("--so-far", action="store_true", help="show the runs that are there; make none")
    parser.add_argument("--report", type=Path, nargs="?", const=PUBLISHED, help="a habit.csv; make no run")
    arguments = parser.parse_args(argv)
    try:
        if not (arguments.report or arguments.so_far):
            make(arguments)
        runs = pd.read_csv(arguments.report) if arguments.report else collected(arguments.out)
    except (OSError, ValueError) as error:
        print(f"habit: {error}", file=sys.stderr)
        return 2
    show_tables(tables(runs))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.out / "habit.csv", runs.to_csv(index=False, lineterminator="\n"))
    return 0


if __name__ == "__main__":
    run_command(main)
