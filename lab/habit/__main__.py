"""Does a method unlearn a wrong habit? `python -m lab.habit`, on the lag simulator.

On other tasks of the lab greedy answers of the first policy are better than any trained policy's drawn answers: what
training gains there is sharpening. Here the most likely answer is wrong (lab/habit/tasks.py), and each seed has a first
policy of its own. A first policy takes a minute or two of a core, a run about 20 seconds. Runs are kept in --out: the
same command goes on where it was stopped. --out gets

habit.csv    a line for each run

--report shows the published runs, or those of a file, and makes none. lab/habit/predictions.md says what was expected.
"""

import argparse
import functools
import itertools
import os
import sys
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from lab.habit.report import LAGS, METHODS, RATES, SEEDS, STEPS, tables
from lab.habit.tasks import MOST_GREEDY, SHORT, TASKS, HabitTask
from lab.simulator.analysis import LAST, outcome
from lab.simulator.grid import Folder, GridRun, config_of, make_all
from lab.simulator.level import BASES
from lab.simulator.simulator import Simulator
from lab.stability import preset
from lab.stability.report import show_and_keep
from recipe.command_line import OneLineParser, run_command, whole_number

PUBLISHED = Path("docs/measurements/habit.csv")


def folder_of(task: HabitTask, seed: int, out: Path) -> Folder:
    """Return the folder of all runs of a task with a seed, in the sizes of Countdown."""
    overrides = (
        f"trainer.total_training_steps={STEPS}",
        f"data.train_files={task.data}/train.parquet",
        f"data.val_files={task.data}/val.parquet",
        "data.max_prompt_length=48",
        f"data.max_response_length={task.response}",
        f"actor_rollout_ref.rollout.max_model_len={task.response + 80}",
        f"actor_rollout_ref.model.path={task.model(seed)}",
        "reward.custom_reward_function.path=pkg://lab.habit.tasks",
    )
    return Folder(out / f"{task.name}-{seed}", "countdown_lag", overrides)


def runs_asked_for(arguments: argparse.Namespace) -> list[tuple[str, int, GridRun]]:
    """Return task, seed and run: all of one seed, then the next."""
    cells = itertools.product(
        arguments.seeds, arguments.tasks, arguments.lags, arguments.lr, dict.fromkeys(arguments.methods)
    )
    return [(name, seed, GridRun(method, lag, seed, lr)) for seed, name, lag, lr, method in cells]


def make(arguments: argparse.Namespace) -> None:
    """Make the runs that are missing, under a progress bar.

    Raises:
        ValueError: a folder holds other runs, or the most likely answers of a first policy are right too often.
    """
    for name in arguments.tasks:
        TASKS[name].prepare(arguments.seeds)
        for seed in arguments.seeds:
            model = TASKS[name].model(seed)
            if (greedy := first_policy(TASKS[name], seed, arguments.out)[LAST[1]]) >= MOST_GREEDY:
                words = f"{100 * greedy:.0f} % of its most likely answers are right; choose another of --seeds"
                raise ValueError(f"{model}: {words}")
            folder_of(TASKS[name], seed, arguments.out).open(model)
    runs = [(run, folder_of(TASKS[name], seed, arguments.out)) for name, seed, run in runs_asked_for(arguments)]
    make_all(runs, arguments.workers)


@functools.cache  # once before the runs, and once with their outcome
def first_policy(task: HabitTask, seed: int, out: Path) -> dict[str, float]:
    """Return what `LAST` names of a first policy, on the held-out problems."""
    return Simulator(config_of(GridRun("vcpo_ess", 0, seed, 1e-4), folder_of(task, seed, out))).last()


def collected(arguments: argparse.Namespace) -> pd.DataFrame:
    """Return a row for each finished run among those that are asked for.

    Raises:
        ValueError: no run is finished, or a folder holds runs with other settings.
    """
    rows, opened = [], set[Path]()
    for name, seed, run in tqdm(runs_asked_for(arguments), desc="reading", unit="run", file=sys.stderr):
        folder = folder_of(TASKS[name], seed, arguments.out)
        if not folder.has(run):
            continue
        if folder.path not in opened:
            folder.open(TASKS[name].model(seed))
            opened.add(folder.path)
        before = first_policy(TASKS[name], seed, arguments.out)
        curve = pd.read_parquet(folder.file(run))
        found = outcome(curve, STEPS, run.lag)
        rows.append(
            {"task": name, "seed": seed, "lag": run.lag, "method": run.method, "lr": run.lr}
            | {f"first_{key.removeprefix('last_')}": value for key, value in before.items()}
            | {"accuracy": found.accuracy, "end": found.final_accuracy, "collapse_step": found.collapse_step}
            | {"level": curve["level"].mean(), "spread": curve["log_weight_std"].mean(), **found.last}
        )
    if not rows:
        raise ValueError(f"--out {arguments.out}: none of these runs is finished; leave --so-far out")
    table = pd.DataFrame(rows)
    return table.round(dict.fromkeys(table.columns.drop("lr"), 4))


def main(argv: list[str] | None = None) -> int:
    """Make, show and write. Return the exit code: 2 where a folder or a file cannot be used."""
    parser = OneLineParser(prog="python -m lab.habit", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=SHORT, help="%(default)s")
    methods = (*preset.METHODS, *BASES)
    parser.add_argument("--methods", nargs="+", choices=methods, metavar="NAME", default=METHODS, help="%(default)s")
    parser.add_argument("--lags", nargs="+", type=whole_number(0), metavar="K", default=LAGS, help="%(default)s")
    parser.add_argument("--lr", nargs="+", type=float, metavar="X", default=RATES, help="%(default)s")
    parser.add_argument("--seeds", nargs="+", type=whole_number(0), metavar="N", default=SEEDS, help="%(default)s")
    parser.add_argument("--workers", type=whole_number(1), default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--out", type=Path, default=Path("outputs/habit"), help="default: %(default)s")
    parser.add_argument("--so-far", action="store_true", help="show the runs that are there; make none")
    parser.add_argument("--report", type=Path, nargs="?", const=PUBLISHED, help="a habit.csv; make and write nothing")
    arguments = parser.parse_args(argv)

    def made() -> pd.DataFrame:
        if not arguments.so_far:
            make(arguments)
        return collected(arguments)

    return show_and_keep("habit", arguments.report, arguments.out, made, tables)


if __name__ == "__main__":
    run_command(main)
