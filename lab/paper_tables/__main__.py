"""The paper's tables with the real stack on a laptop: `python -m lab.paper_tables [--quick] [--only TASK...]`.

Trains each task synchronously, with VCPO at a lag, and without a correction at that lag; prints accuracy, steps, hours
and speed-up beside the paper's rows. All runs take hours; --quick makes one seed of shorter runs of Countdown and with
tools, in 20 minutes. Finished runs are kept in --out: the same command goes on where it was stopped, and makes again
what failed. A kept run is of the code that made it: give another --out after a change. --out gets

paper_tables.csv    a line for each run
paper_tables.png    accuracy over time

--runs shows runs of the launch scripts instead. lab/paper_tables/predictions.md says what was expected.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.paper_tables import report, rows
from lab.paper_tables.runs import is_finished, make
from lab.paper_tables.tasks import QUICK, TASKS, PlannedRun, planned
from lab.stability.report import show_tables
from recipe.command_line import OneLineParser, run_command, whole_number


def main(argv: list[str] | None = None) -> int:
    """Make, show and write. Return the exit code: 2 where a folder or a file cannot be used, 1 where a run failed."""
    parser = OneLineParser(prog="python -m lab.paper_tables", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument(
        "--quick", action="store_true", help=f"one seed, shorter runs, of {' and '.join(QUICK)}, not of `none`"
    )
    parser.add_argument("--seeds", nargs="+", type=whole_number(0), metavar="N", help="default: each task's own")
    parser.add_argument(
        "--out", type=Path, help="default: outputs/paper-tables, with --quick outputs/paper-tables-quick"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the lines of paper_tables.csv as one JSON line, last"
    )
    parser.add_argument("--so-far", action="store_true", help="show the finished runs; make none")
    parser.add_argument(
        "--known",
        nargs="+",
        type=Path,
        default=(),
        metavar="FILE",
        help="paper_tables.csv with runs not to make again; of the same machine, because hours are compared",
    )
    parser.add_argument(
        "--runs", nargs="+", type=Path, metavar="FOLDER", help="show these run folders, or files of stored runs"
    )
    arguments = parser.parse_args(argv)
    out = arguments.out or Path(f"outputs/paper-tables{'-quick' if arguments.quick else ''}")
    arguments.only = arguments.only or (QUICK if arguments.quick else [*TASKS])
    try:
        found, failures = _rows(arguments, out)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"paper_tables: {error}", file=sys.stderr)
        return 2
    show_tables(report.tables(found))
    out.mkdir(parents=True, exist_ok=True)
    rows.write(found, out / "paper_tables.csv")
    print(report.draw(found, out / "paper_tables.png"))
    for failure in failures:
        print(failure, file=sys.stderr)
    if arguments.json:
        print(found[rows.COLUMNS].to_json(orient="records"))
    return 1 if failures else 0


def _rows(arguments: argparse.Namespace, out: Path) -> tuple[pd.DataFrame, list[str]]:
    """Return all rows there are at the end, and the lines of failed runs."""
    known = [row for file in arguments.known for row in rows.read(file).to_dict("records")]
    made: list[dict[str, Any]] = []
    failures: list[str] = []
    if arguments.runs is not None:
        for place in arguments.runs:
            made += [rows.row_of(place)] if place.is_dir() else rows.rows_of_file(place)
    else:
        plan = planned(arguments.only, arguments.quick, arguments.seeds)
        known = _of_the_plan(known, plan)
        runs = _unknown(plan, known, arguments.so_far)
        failures = [] if arguments.so_far else make(runs, out)
        made = [rows.row_of(out / run.name, run.task.name) for run in runs if is_finished(run, out)]
    if not (found := [*known, *made]):
        raise ValueError(f"{out} has no finished run{': leave out --so-far' if arguments.so_far else ''}")
    every = pd.DataFrame(found).astype({"seed": "Int64"})
    if (twice := every[rows.RUN].dropna()[lambda of: of.duplicated()].astype(str)).size:
        raise ValueError(f"{', '.join(twice.iloc[0])}: this task, method, lag and seed are there twice; name one run")
    for task, steps in every.groupby("task")["steps"] if arguments.runs is None else ():
        if steps.nunique() > 1:
            lengths = " and ".join(map(str, sorted(set(steps))))
            raise ValueError(f"{task}: runs of {lengths} steps cannot be one table; leave out a file of --known")
    return report.with_speed_ups(every), failures


def _of_the_plan(known: Sequence[dict[str, Any]], plan: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """Return the known runs that are of the plan, and say how many are not."""
    names = {(run.task.name, *run.case, run.seed) for run in plan}
    kept = [row for row in known if tuple(row[name] for name in rows.RUN) in names]
    if left_out := len(known) - len(kept):
        print(
            f"--known: {left_out} of {len(known)} runs left out: not of these --only, --quick and --seeds",
            file=sys.stderr,
        )
    return kept


def _unknown(runs: Sequence[PlannedRun], known: Sequence[dict[str, Any]], so_far: bool) -> list[PlannedRun]:
    """Return the runs that are not known. Raises ValueError where runs are to be made beside one of other settings."""
    of = {tuple(row[name] for name in rows.RUN): row["settings"] for row in known}
    left = []
    for run in runs:
        settings = of.get((run.task.name, *run.case, run.seed))
        if settings is None:
            left.append(run)
        elif not so_far and settings != shlex.join(run.settings):
            raise ValueError(f"--known: {run.name} is a run of other settings; leave the file out, or add --so-far")
    return left


if __name__ == "__main__":
    run_command(main)
