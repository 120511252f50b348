"""Which method stays stable at which lag? `python -m scripts.bench.stability [--quick] [--json]`.

Methods x lags x seeds on the lag simulator (recipe/lag_simulator): final accuracy, collapses, ESS ratio, speed. The
learning rate of every method is the smallest of the same grid that, but for chance, ends as well as the best at
--tune-lag, on seeds that are not reported. All methods, lags and seeds take hours; --quick (3 methods, 2 lags, 2 seeds,
shorter runs, no tuning) minutes. Runs are kept in --out: the same command goes on where it was stopped.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from recipe.lag_simulator.grid import Folder, GridRun, run_all
from scripts.bench.stability.alarm import score_alarm
from scripts.bench.stability.preset import METHODS, MODEL, prepare
from scripts.bench.stability.tables import Finals, all_numbers, by_lag, learning_rates, markdown, show, summarise
from scripts.bench.stability.tuning import choose, tuning_results
from verl_vcpo.whole_file import write_whole

LAGS, SEEDS = (0, 8, 32, 64, 128), (1, 2, 3, 4, 5)
LEARNING_RATES, TUNING_SEEDS = (3e-5, 1e-4, 3e-4), (101, 102)
QUICK_METHODS, QUICK_LAGS, QUICK_SEEDS, QUICK_LEARNING_RATE = ("none", "tis_seq", "vcpo"), (0, 32), (1, 2), 3e-4
STEPS, QUICK_STEPS = 300, 200


def make(runs: list[GridRun], folder: Folder, arguments: argparse.Namespace, title: str) -> pd.DataFrame:
    """The curves of these runs, made where they are missing, under a progress bar."""
    if not runs:
        raise SystemExit(f"stability: --so-far: {folder.path} has no finished {title}; leave it out")
    for _ in tqdm(run_all(runs, folder, arguments.workers), total=len(runs), desc=title, unit="run", file=sys.stderr):
        pass
    return folder.curves(runs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.stability",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="3 methods, 2 lags, 2 seeds, one learning rate for all")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help=f"default: {', '.join(METHODS)}")
    parser.add_argument("--lags", nargs="+", type=int, metavar="K", help=f"default: {LAGS}")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help=f"default: {SEEDS}")
    parser.add_argument(
        "--lr", nargs="+", type=float, metavar="X", help=f"tune over these; one: no tuning {LEARNING_RATES}"
    )
    parser.add_argument("--tune-lag", type=int, default=0, metavar="K", help="the lag of the tuning runs (default 0)")
    parser.add_argument("--tune-seeds", nargs="+", type=int, default=TUNING_SEEDS, metavar="N", help="not reported")
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"of a run (default {STEPS}, with --quick {QUICK_STEPS})"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="runs side by side (default: all cores)"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/stability"), help="default: %(default)s")
    parser.add_argument(
        "--known",
        nargs="+",
        type=Path,
        default=(),
        metavar="FILE",
        help="finished runs: {curves,tuning}.parquet of an --out",
    )
    parser.add_argument("--so-far", action="store_true", help="report on the runs that are there; make none")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw the figures there, and write tables.md")
    parser.add_argument("--prepare", action="store_true", help="make the data and the first policy, and stop")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON line, last")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    methods = tuple(arguments.methods or (QUICK_METHODS if quick else METHODS))
    lags = tuple(arguments.lags or (QUICK_LAGS if quick else LAGS))
    seeds = tuple(arguments.seeds or (QUICK_SEEDS if quick else SEEDS))
    rates = tuple(arguments.lr or ((QUICK_LEARNING_RATE,) if quick else LEARNING_RATES))
    steps = arguments.steps or (QUICK_STEPS if quick else STEPS)
    if unknown := set(methods) - set(METHODS):
        parser.error(f"--methods {' '.join(sorted(unknown))}: choose from {', '.join(METHODS)}")
    overlap = set(seeds) & set(arguments.tune_seeds)
    if overlap and len(rates) > 1:
        parser.error(f"--tune-seeds: {sorted(overlap)} are reported seeds too; choose others")

    prepare()
    if arguments.prepare:
        return 0
    return run_and_report(arguments, methods, lags, seeds, rates, steps)


def run_and_report(
    arguments: argparse.Namespace,
    methods: tuple[str, ...],
    lags: tuple[int, ...],
    seeds: tuple[int, ...],
    rates: tuple[float, ...],
    steps: int,
) -> int:
    """Tune, run, print, write; the exit code."""
    folder = Folder(arguments.out, (f"trainer.total_training_steps={steps}",))
    try:
        folder.open(MODEL)
        for file in arguments.known:
            folder.adopt(file)
    except (OSError, ValueError) as error:
        print(f"stability: {error}", file=sys.stderr)
        return 2

    tuned: Finals = {}
    if len(rates) > 1:
        grid = [
            GridRun(m, arguments.tune_lag, seed, lr) for m in methods for seed in arguments.tune_seeds for lr in rates
        ]
        if arguments.so_far:
            begun = {run.method for run in grid if not folder.has(run)}
            grid = [run for run in grid if run.method not in begun]
        tuning_curves = make(grid, folder, arguments, "learning rates")
        folder.publish(tuning_curves, arguments.out / "tuning.parquet")
        tuned = tuning_results(tuning_curves, steps)
    chosen = choose(tuned) if tuned else dict.fromkeys(methods, rates[0])
    runs = [GridRun(m, lag, seed, lr) for lag in lags for m, lr in chosen.items() for seed in seeds]
    if arguments.so_far:
        runs = [run for run in runs if folder.has(run)]
    curves = make(runs, folder, arguments, "methods")
    folder.publish(curves, arguments.out / "curves.parquet")
    rows, alarm = summarise(curves, steps), score_alarm(curves)
    tables = [by_lag(rows), all_numbers(rows)]
    if tuned:
        tables.insert(0, learning_rates(tuned, chosen))
    show(tables, alarm)
    if arguments.figures:
        from scripts.bench.stability.figures import draw_all

        for file in draw_all(curves, arguments.figures):
            print(f"Figure: {file}")
        write_whole(arguments.figures / "tables.md", markdown(tables, alarm))
    rule = f"the smallest that is at lag {arguments.tune_lag} within a standard error of the best"
    tuning = {"grid": rates, "rule": rule, "seeds": list(arguments.tune_seeds) if tuned else []}
    report = {
        "steps": steps,
        "learning_rates": tuning | {"final_accuracy": tuned, "chosen": chosen},
        "rows": [asdict(row) for row in rows],
        "alarm": asdict(alarm),
    }
    text = json.dumps(_plain(report))
    write_whole(arguments.out / "report.json", text + "\n")
    if arguments.json:
        print(text)
    return 0


def _plain(value: object) -> object:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
