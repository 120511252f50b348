"""Are published runs made again, number by number? `python -m lab.stability.again [--task NAME] [--json]`.

Draws runs from the published table and makes them anew from the published first policy. Rounding differs between
processors and versions: a stable run keeps its numbers; where small differences grow, the run is another sample of its
cell. A minute of two cores per 7 runs; `python -m lab.stability --prepare` comes first.
"""

import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from lab.simulator.analysis import accuracy_after, collapse_step
from lab.simulator.grid import Folder, GridRun, difference
from lab.stability.__main__ import STEPS, make
from lab.stability.cells import RUN, pooled_deviation, summarise
from lab.stability.preset import TASKS
from lab.stability.published import PUBLISHED, read_curves, settings
from recipe.command_line import OneLineParser, run_command, whole_number


@dataclass(frozen=True)
class Remade:
    """A published run, made again."""

    method: str
    lag: int
    lr: float
    seed: int
    evaluations: int
    same: int
    """Evaluations with the published accuracy, to the last digit."""
    apart: int | None
    """The step of the first evaluation with another accuracy."""
    published: float
    """Mean accuracy after step `lag`."""
    again: float
    collapsed: tuple[bool, bool]
    """The published one, and the one made again."""


def compare(run: GridRun, published: pd.DataFrame, again: pd.DataFrame) -> Remade:
    """The curves of one run, one row per step."""
    both = published.merge(again, on="step", how="outer", suffixes=("", "_again")).sort_values("step")
    evaluated = both.dropna(subset=["val_accuracy", "val_accuracy_again"], how="all")
    different = evaluated["val_accuracy"].astype("float32") != evaluated["val_accuracy_again"].astype("float32")
    apart = evaluated.loc[different, "step"]
    return Remade(
        run.method,
        run.lag,
        run.lr,
        run.seed,
        evaluations=len(evaluated),
        same=int((~different).sum()),
        apart=int(apart.iloc[0]) if len(apart) else None,
        published=accuracy_after(published, run.lag, STEPS),
        again=accuracy_after(again, run.lag, STEPS),
        collapsed=(collapse_step(published) is not None, collapse_step(again) is not None),
    )


def draw(published: pd.DataFrame, runs: int) -> list[GridRun]:
    """So many runs of those with a lag, the same ones each time."""
    known = published.loc[published["lag"] > 0, RUN].drop_duplicates().itertuples(index=False)
    every = [GridRun(row.method, int(row.lag), int(row.seed), float(row.lr)) for row in known]
    return random.Random(0).sample(every, min(runs, len(every)))


def of_run(curves: pd.DataFrame, run: GridRun) -> pd.DataFrame:
    """One run's steps."""
    mine = (curves["method"] == run.method) & (curves["lag"] == run.lag)
    return curves[mine & (curves["lr"] == run.lr) & (curves["seed"] == run.seed)]


def summary(remade: Iterable[Remade], published: pd.DataFrame) -> dict[str, float]:
    """How many runs kept every accuracy; of the others, how far apart they are, beside seeds of one cell."""
    all_runs = list(remade)
    differences = [run.again - run.published for run in all_runs if run.same < run.evaluations]
    cells = summarise(published[published["lag"] > 0], STEPS)
    return {
        "runs": len(all_runs),
        "same": sum(run.same == run.evaluations for run in all_runs),
        "mean_difference": statistics.mean(differences) if differences else math.nan,
        "sd_difference": statistics.stdev(differences) if len(differences) > 1 else math.nan,
        "sd_of_seeds": pooled_deviation(cell.accuracies for cell in cells),
        "collapsed_as_published": sum(run.collapsed[0] == run.collapsed[1] for run in all_runs),
    }


def show(task: str, remade: Iterable[Remade], totals: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ["method", "lag", "rate", "seed", "same evaluations", "apart from step", "accuracy, %", "again, %"]
    table = Table(*columns, title=f"Published runs of {task}, made again")
    for run in sorted(remade, key=lambda run: (run.lr, run.lag, run.method)):
        apart = "-" if run.apart is None else str(run.apart)
        name = (run.method, str(run.lag), f"{run.lr:g}", str(run.seed))
        table.add_row(
            *name, f"{run.same} of {run.evaluations}", apart, f"{100 * run.published:.1f}", f"{100 * run.again:.1f}"
        )
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{totals['same']} of {totals['runs']} runs have every accuracy; the others differ by "
        f"{100 * totals['mean_difference']:+.1f} points, sd {100 * totals['sd_difference']:.1f} "
        f"(seeds of one cell: sd {100 * totals['sd_of_seeds']:.1f}). "
        f"Whether it collapses is as published in {totals['collapsed_as_published']} of {totals['runs']}."
    )


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m lab.stability.again", description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="countdown", help="default: %(default)s")
    parser.add_argument("--runs", type=whole_number(1), default=16, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument(
        "--workers", type=whole_number(1), default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    parser.add_argument("--json", action="store_true", help="print the runs as one JSON line, last")
    arguments = parser.parse_args(argv)
    task = TASKS[arguments.task]
    if not task.model.is_dir():
        parser.error(f"{task.model}: no such folder; run lab.stability --prepare first")
    published = read_curves([PUBLISHED / "stability.parquet"])[task.preset]
    runs = draw(published, arguments.runs)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Folder(Path(scratch), task.preset, (f"trainer.total_training_steps={STEPS}",))
        try:
            folder.open(task.model)
        except ValueError as error:
            print(f"stability.again: {error}", file=sys.stderr)
            return 2
        if different := difference(settings(published), folder.settings()):
            print(f"stability.again: {task.model}: the published runs are of {different}", file=sys.stderr)
            return 2
        again = make(runs, folder, arguments.workers)
    remade = [compare(run, of_run(published, run), of_run(again, run)) for run in runs]
    totals = summary(remade, published)
    show(arguments.task, remade, totals)
    if arguments.json:
        print(json.dumps({"task": arguments.task, **totals, "remade": [asdict(run) for run in remade]}))
    return 0


if __name__ == "__main__":
    run_command(main)
