"""Which method stays stable at which lag? `python -m lab.stability [--quick] [--json]`.

Methods x lags x learning rates x seeds on the lag simulator (lab/simulator): accuracy after step k, collapses,
ESS ratio. A method's learning rate at a lag is the smallest that is, but for chance, as good as its best there. All
methods, lags, rates and seeds take hours; --quick (3 methods, 2 lags, 1 rate, 2 seeds, shorter runs) minutes. Runs are
kept in --out: the same command goes on where it was stopped. lab.stability.report shows published runs.
"""

import argparse
import os
import sys
from pathlib import Path

import pandas as pd

from lab.simulator.grid import Folder, GridRun, config_of, make_all
from lab.stability.preset import METHODS, TASKS, prepare
from lab.stability.published import adopt, publish
from lab.stability.report import make_report, numbers, of_tasks, show_tables
from recipe.command_line import OneLineParser, positive_number, run_command, whole_number
from recipe.fully_async_policy.main import add_config_dir
from recipe.fully_async_policy.settings.errors import SettingError, paths_that_fail
from recipe.fully_async_policy.settings.own_files import check_folder

LAGS, SEEDS = (0, 8, 32, 64, 128), (1, 2, 3, 4, 5)
LEARNING_RATES = (3e-5, 1e-4, 3e-4)
QUICK_METHODS, QUICK_LAGS, QUICK_SEEDS, QUICK_LEARNING_RATE = ("none", "tis_seq", "vcpo"), (0, 32), (1, 2), 3e-4
STEPS, QUICK_STEPS = 300, 200


def make(runs: list[GridRun], folder: Folder, workers: int) -> pd.DataFrame:
    """The curves of these runs, made where they are missing, under a progress bar."""
    make_all([(run, folder) for run in runs], workers)
    return folder.curves(runs)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m lab.stability", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 methods, 2 lags, 2 seeds, one learning rate for all")
    parser.add_argument(
        "--task", default="countdown", metavar="NAME", help=f"{', '.join(TASKS)}, or your own (default: %(default)s)"
    )
    parser.add_argument("--methods", nargs="+", metavar="NAME", help=f"or your own (default: {', '.join(METHODS)})")
    add_config_dir(parser)
    parser.add_argument("--lags", nargs="+", type=whole_number(0), metavar="K", help=f"default: {LAGS}")
    parser.add_argument("--seeds", nargs="+", type=whole_number(0), metavar="N", help=f"default: {SEEDS}")
    parser.add_argument("--lr", nargs="+", type=positive_number, metavar="X", help=f"default: {LEARNING_RATES}")
    parser.add_argument(
        "--steps",
        type=whole_number(1),
        metavar="N",
        help=f"make this number of steps in a run (default {STEPS}, with --quick {QUICK_STEPS})",
    )
    parser.add_argument(
        "--workers", type=whole_number(1), default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    parser.add_argument("--out", type=Path, help="default: outputs/stability, of another task outputs/stability-TASK")
    parser.add_argument(
        "--known",
        nargs="+",
        type=Path,
        default=(),
        metavar="FILE",
        help="finished runs, not made again: curves.parquet of an --out, or published",
    )
    parser.add_argument("--so-far", action="store_true", help="report on the runs that are there; make none")
    parser.add_argument("--prepare", action="store_true", help="make the data, put the first policy in place, and stop")
    parser.add_argument(
        "--new-policy",
        action="store_true",
        help="train a first policy (a minute of a core) instead of the published one",
    )
    parser.add_argument("--json", action="store_true", help="print what tables.csv has as one JSON line, last")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        with paths_that_fail():
            check_folder(arguments.config_dir)
    except SettingError as error:
        parser.error(str(error))
    quick = arguments.quick
    methods = tuple(arguments.methods or (QUICK_METHODS if quick else METHODS))
    lags = tuple(arguments.lags or (QUICK_LAGS if quick else LAGS))
    seeds = tuple(arguments.seeds or (QUICK_SEEDS if quick else SEEDS))
    rates = tuple(arguments.lr or ((QUICK_LEARNING_RATE,) if quick else LEARNING_RATES))
    steps = arguments.steps or (QUICK_STEPS if quick else STEPS)
    if arguments.out is None:
        arguments.out = Path(
            "outputs/stability" if arguments.task == "countdown" else f"outputs/stability-{arguments.task}"
        )
    for option, given, ours in (("task", [arguments.task], TASKS), ("method", methods, METHODS)):
        known = [*ours, *_own(option, arguments.config_dir)]
        if unknown := set(given) - {*known}:
            own = "" if arguments.config_dir else "; --config-dir has your own"
            parser.error(f"no {option} {' '.join(sorted(unknown))}: choose from {', '.join(known)}{own}")
    if arguments.task not in TASKS and (arguments.prepare or arguments.new_policy):
        parser.error(f"--prepare, --new-policy: have no rows and no lesson for --task {arguments.task}; leave them out")
    if max(lags) >= steps:
        parser.error(f"--lags {max(lags)}: a run of {steps} steps has no evaluation after that step; give more --steps")

    try:
        if arguments.task in TASKS:
            prepare(TASKS[arguments.task], arguments.new_policy)
        if arguments.prepare:
            return 0
        folder = _opened(arguments, methods, steps)
    except (OSError, ValueError) as error:
        print(f"stability: {error}", file=sys.stderr)
        return 2
    runs = [GridRun(m, lag, seed, lr) for lag in lags for m in methods for lr in rates for seed in seeds]
    return run_and_report(folder, runs, arguments, steps)


def _own(kind: str, config_dir: Path | None) -> list[str]:
    """The names of the user's own tasks or methods."""
    return sorted(file.stem for file in (config_dir / kind).glob("*.yaml")) if config_dir else []


def _opened(arguments: argparse.Namespace, methods: tuple[str, ...], steps: int) -> Folder:
    """The folder of the runs, with those that are known. Raises ValueError for what no run could be made of."""
    task, config_dir = TASKS.get(arguments.task), arguments.config_dir
    of_all = (f"trainer.total_training_steps={steps}",)
    folder = Folder(arguments.out, task.preset if task else arguments.task, of_all, config_dir=config_dir)
    tried = [name for name in methods if task is None or name in _own("method", config_dir)]
    models = [Path(config_of(GridRun(m, 0, 1, 1e-4), folder).actor_rollout_ref.model.path) for m in tried]
    folder.open(task.model if task else models[0])
    for file in arguments.known:
        adopt(folder, file)
    return folder


def run_and_report(folder: Folder, runs: list[GridRun], arguments: argparse.Namespace, steps: int) -> int:
    """Run, print, write; the exit code."""
    if arguments.so_far and not (runs := [run for run in runs if folder.has(run)]):
        print(f"stability: --so-far: {folder.path} has no finished run; leave it out", file=sys.stderr)
        return 2
    curves = make(runs, folder, arguments.workers)
    publish({folder.task: curves}, arguments.out / "curves.parquet")
    reports = {folder.task: make_report(curves, steps)}
    show_tables(of_tasks(reports))
    if arguments.json:
        print(numbers(reports).to_json(orient="records"))
    return 0


if __name__ == "__main__":
    run_command(main)
