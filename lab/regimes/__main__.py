"""Where does VCPO help? `python -m lab.regimes`: lag x length x arithmetic, on the lag simulator.

Responses of sort_digits stand for long ones: to the logarithm of each weight is added what sampler and trainer differ
by at so many tokens (lab/simulator/arithmetic.py). In each regime, which of GRPO without a correction, truncated
weights, VCPO with `vcpo.ess_part=whole` (`vcpo`), and with `lag` keeps up? lab/regimes/predictions.md says what was
expected. A run takes about 10 seconds of a core. Runs are kept in --out: the same command goes on where it was stopped,
and makes all regimes with one seed before it begins with the next. --out gets

regimes.csv      a line for each run
regimes.png      accuracy in each regime

--report shows the published runs, or those of a file, and makes none.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from lab.regimes.chart import chart, draw
from lab.simulator.analysis import outcome
from lab.simulator.arithmetic import KINDS, Arithmetic
from lab.simulator.grid import LAG_PART, Folder, GridRun, make_all
from lab.stability.preset import TASKS, prepare
from lab.stability.report import show_tables
from recipe.command_line import OneLineParser, positive_number, run_command, whole_number
from verl_vcpo.common.whole_file import write_whole

TASK, LR, STEPS = "sort_digits", 1e-4, 200
METHODS = ("none", "tis_seq", "vcpo", LAG_PART)
LAGS, SEEDS, RMS, TOKENS = (0, 8, 32), (1, 2, 3, 4), (0.03,), (32, 512, 2048, 8192)
UNLIKE = tuple(Arithmetic(0.03, 2048, kind) for kind in KINDS[1:])
"""What `vcpo.ess_part=lag` does not assume; run at the lags above 0."""
SMALL = 0.08
"""The variance of log-weights up to which arithmetic is left out: the ESS ratio of fresh responses is 0.92 or more."""
FILE, PUBLISHED = "regimes", Path("docs/measurements")


def regimes(rms: Sequence[float], tokens: Sequence[int]) -> list[Arithmetic | None]:
    """None first, for all that hardly differ from exact arithmetic."""
    given = [Arithmetic(one, length) for one in rms for length in tokens]
    return [None, *sorted((each for each in given if each.variance > SMALL), key=lambda each: each.variance)]


def methods_of(arithmetic: Arithmetic | None) -> tuple[str, ...]:
    """The methods whose runs are made: `none` has no weights, and without arithmetic the lag's part is the whole."""
    return tuple(name for name in METHODS if name not in (("none",) if arithmetic else (LAG_PART,)))


def make(folders: dict[Arithmetic | None, Folder], lags: Sequence[int], seeds: Sequence[int], workers: int) -> None:
    """Make the runs that are missing, under a progress bar: all regimes with one seed, then the next."""
    runs = [
        (GridRun(method, lag, seed, LR), folder)
        for seed in seeds
        for each, folder in folders.items()
        for lag in lags
        if lag or each not in UNLIKE
        for method in methods_of(each)
    ]
    make_all(runs, workers)


def collected(folders: dict[Arithmetic | None, Folder]) -> pd.DataFrame:
    """A row for each run that the folders have."""
    rows = []
    for each, folder in folders.items():
        for file in sorted((folder.path / "runs").glob("*.parquet")):
            curve = pd.read_parquet(file)
            run = curve.iloc[0]
            found = outcome(curve, STEPS, int(run["lag"]))
            steps = curve.iloc[1:]
            rows.append(
                {
                    "rms": each.rms if each else 0.0,
                    "tokens": each.tokens if each else 0,
                    "kind": each.kind if each else "normal",
                    "lag": int(run["lag"]),
                    "method": run["method"],
                    "seed": int(run["seed"]),
                    "accuracy": round(found.accuracy, 5),
                    "final": round(found.final_accuracy, 5),
                    "collapsed": found.collapse_step,
                    "ess_ratio": round(steps["ess_ratio"].mean(), 4),
                    "lr_multiplier": round(steps["lr_multiplier"].mean(), 4),
                    "right": round(steps["right_multiplier"].mean(), 4) if "right_multiplier" in steps else math.nan,
                }
            )
    if not rows:
        raise ValueError("--so-far: no run is finished; leave it out")
    order = ["rms", "tokens", "kind", "lag", "method", "seed"]
    return pd.DataFrame(rows).astype({"collapsed": "Int64"}).sort_values(order, ignore_index=True)


def main(argv: list[str] | None = None) -> int:
    """Make, show and write. Returns the exit code, 2 where a folder or a file cannot be used."""
    parser = OneLineParser(prog="python -m lab.regimes", description=__doc__)
    parser.add_argument("--lags", nargs="+", type=whole_number(0), metavar="K", default=LAGS, help="%(default)s")
    parser.add_argument("--seeds", nargs="+", type=whole_number(0), metavar="N", default=SEEDS, help="%(default)s")
    parser.add_argument("--rms", nargs="+", type=positive_number, metavar="X", default=RMS, help="%(default)s")
    parser.add_argument("--tokens", nargs="+", type=whole_number(1), metavar="N", default=TOKENS, help="%(default)s")
    parser.add_argument("--workers", type=whole_number(1), default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--out", type=Path, default=Path("outputs/regimes"), help="default: %(default)s")
    parser.add_argument("--so-far", action="store_true", help="show the runs that are there; make none")
    parser.add_argument(
        "--report", type=Path, nargs="?", const=PUBLISHED / f"{FILE}.csv", help="a regimes.csv; make no run"
    )
    arguments = parser.parse_args(argv)
    if max(arguments.lags) >= STEPS:
        parser.error(f"--lags {max(arguments.lags)}: a run has {STEPS} steps; give smaller ones")
    try:
        if arguments.report:
            runs = pd.read_csv(arguments.report).astype({"collapsed": "Int64"})
        else:
            runs = _made(arguments.out, [*regimes(arguments.rms, arguments.tokens), *UNLIKE], arguments)
    except (OSError, ValueError) as error:
        print(f"regimes: {error}", file=sys.stderr)
        return 2
    show_tables(chart(runs))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.out / f"{FILE}.csv", runs.to_csv(index=False, lineterminator="\n"))
    print(draw(runs, arguments.out / f"{FILE}.png"))
    return 0


def _made(out: Path, wanted: list[Arithmetic | None], arguments: argparse.Namespace) -> pd.DataFrame:
    task = TASKS[TASK]
    prepare(task)
    overrides = (f"trainer.total_training_steps={STEPS}",)
    folders = {}
    for each in wanted:
        name = f"rms{each.rms:g}-tokens{each.tokens}-{each.kind}" if each else "exact"
        folders[each] = Folder(out / name, task.preset, overrides, each)
        folders[each].open(task.model)
    if not arguments.so_far:
        make(folders, arguments.lags, arguments.seeds, arguments.workers)
    return collected(folders)


if __name__ == "__main__":
    run_command(main)
