"""Is another level of the baseline better? `python -m lab.stability.candidates [--runs DIR... | --report [FILE]]`.

Makes no run: lab/stability/candidates.md has the commands that make them, and says what is decided by them. Prints, for
each task and lag, what each method reaches at its better learning rate, and paired differences to those that are
recommended. --out gets candidates.csv, a line for each run. --report shows the published runs.
"""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.simulator.analysis import outcome
from lab.stability.contrasts import visible
from lab.stability.inference import holm, paired
from lab.stability.interventions import STEPS, TASKS
from lab.stability.report import show_and_keep
from lab.stability.tables import Table, short
from lab.stability.tuning import at_better_rate
from recipe.command_line import OneLineParser, run_command

CANDIDATES = ("vcpo_half_mean", "vcpo_capped", "topr_half", "none_half")
RECOMMENDED = ("vcpo_ess", "vcpo_minibatch", "topr")
LAGS, RATES, SEEDS = (8, 128), (1e-4, 3e-4), (9, 10, 11, 12)
FOLDERS = [Path("outputs") / f"candidates-{name}" for name in ("countdown", "countdown4", "sort_digits")]
PUBLISHED = Path("docs/measurements/stability/candidates.csv")


def collected(
    folders: Sequence[Path],
    methods: Collection[str] = (*CANDIDATES, *RECOMMENDED),
    lags: Collection[int] = LAGS,
    seeds: Collection[int] = SEEDS,
) -> pd.DataFrame:
    """Return a row for each run in the folders of lab.stability, one folder for each task.

    Args:
        folders: in the order of `TASKS`.
        methods, lags, seeds: those of the runs that are read, at the rates in `RATES`.

    Raises:
        ValueError: there is none.
    """
    rows = []
    for task, folder in zip(TASKS, folders, strict=True):
        for file in sorted((folder / "runs").glob("*.parquet")):
            curve = pd.read_parquet(file)
            run = curve.iloc[0]
            if run["method"] in methods and run["lag"] in lags and run["lr"] in RATES and run["seed"] in seeds:
                rows.append(run_row(task, curve))
    if not rows:
        raise ValueError(f"{', '.join(map(str, folders))}: no such run; the page beside this program has the commands")
    return pd.DataFrame(rows).astype({"collapsed": "Int64"})


def run_row(task: str, curve: pd.DataFrame) -> dict[str, Any]:
    """Return what the comparisons read of a run, from its steps; `collapsed` is the step of its collapse, or None."""
    method, lag, lr, seed = curve.iloc[0][["method", "lag", "lr", "seed"]]
    found = outcome(curve, STEPS, int(lag))
    run = {"task": task, "lag": int(lag), "method": method, "lr": lr, "seed": int(seed)}
    return run | {"accuracy": round(found.accuracy, 5), "collapsed": found.collapse_step}


def tables(runs: pd.DataFrame) -> list[Table]:
    """Return the accuracies at the better rate, and the differences of candidates to recommended methods."""
    accuracies, tests = [], []
    for (task, lag), at in at_better_rate(runs).groupby(["task", "lag"], sort=False):
        of = {str(method): 100 * rows.set_index("seed")["accuracy"] for method, rows in at.groupby("method")}
        best = max(value.mean() for value in of.values())
        names = [name for name in (*CANDIDATES, *RECOMMENDED) if name in of]
        accuracies.append([short(str(task)), str(lag), *(f"{of[name].mean():.1f}" for name in names), f"{best:.1f}"])
        for name in (name for name in CANDIDATES if name in of):
            for other in (other for other in RECOMMENDED if other in of):
                pair = list(of[name]), list(of[other].reindex(of[name].index))
                tests.append((short(str(task)), lag, name, other, paired(*pair), visible(*pair)))
    corrected = holm([test.p for *_, test, _ in tests])
    shown = [
        [task, str(lag), f"`{name}`", f"`{other}`"]
        + ["-" if math.isnan(value) else f"{value:+.1f}" for value in (test.mean, test.low, test.high)]
        + ["-" if math.isnan(value) else f"{value:.2g}" for value in (test.p, p, seen)]
        for (task, lag, name, other, test, seen), p in zip(tests, corrected, strict=True)
    ]
    there = [name for name in (*CANDIDATES, *RECOMMENDED) if name in set(runs["method"])]
    return [
        Table(
            "Accuracy after step k at the better rate, %", ["task", "k", *(f"`{n}`" for n in there), "best"], accuracies
        ),
        Table(
            "Paired differences",
            ["task", "k", "candidate", "less", "points", "from", "to", "p", "p (Holm)", "seen with a power of 80 %"],
            shown,
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    """Show and write. Return the exit code: 2 where a folder or a file cannot be used."""
    parser = OneLineParser(prog="python -m lab.stability.candidates", description=__doc__)
    parser.add_argument("--runs", type=Path, nargs=len(TASKS), default=FOLDERS, metavar="DIR", help="%(default)s")
    parser.add_argument("--out", type=Path, default=Path("outputs/candidates"), help="default: %(default)s")
    parser.add_argument("--report", type=Path, nargs="?", const=PUBLISHED, help="a candidates.csv")
    arguments = parser.parse_args(argv)
    return show_and_keep("candidates", arguments.report, arguments.out, lambda: collected(arguments.runs), tables)


if __name__ == "__main__":
    run_command(main)
