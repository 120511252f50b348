"""Tables and figures from runs that are there: `python -m lab.stability.report FILE... [--out DIR]`.

Makes no run. Without files: the published ones, docs/measurements/runs/stability.parquet. Runs of several tasks are
compared task by task. --out gets

methods.png      accuracy over the steps at the largest lag, a panel per task
lags.png         points ahead of `vcpo_ess` by lag, a panel per task
predictors.png   accuracy, ESS ratio, KL and gradient norm of the first task: synchronous, TIS and VCPO at the largest
                 lag (the paper's)
tables.csv       every cell: accuracies and share of collapsed runs in %, each with its 95 % interval
"""

import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from lab.stability import alarm, tables
from lab.stability.cells import Cell, summarise
from lab.stability.contrasts import Comparison, comparisons
from lab.stability.inference import interval, share_interval
from lab.stability.published import PUBLISHED, publish, read_curves
from lab.stability.tables import Table
from lab.stability.tuning import chosen_cells
from recipe.command_line import OneLineParser, run_command, whole_number
from verl_vcpo.common.whole_file import write_whole

TABLES_FILE = "tables.csv"


@dataclass(frozen=True)
class Report:
    """What the runs of one task say."""

    cells: list[Cell]
    chosen: list[Cell]
    """One per method and lag: of the learning rate chosen there."""
    comparisons: list[Comparison]
    """By group of lags, the large ones first."""
    curves: pd.DataFrame
    """Steps of all runs, one below the other."""
    table: Table
    """Accuracy after step k, and the contrasts."""

    @property
    def of_chosen_rates(self) -> pd.DataFrame:
        """The steps of the runs at the learning rate chosen for their method and lag."""
        names = ["method", "lag", "lr"]
        rates = pd.DataFrame([(cell.method, cell.lag, cell.lr) for cell in self.chosen], columns=names)
        return self.curves.merge(rates, on=names)


def make_report(curves: pd.DataFrame, steps: int) -> Report:
    """Of the runs of these curves.

    Args:
        curves: steps of runs, one below the other.
        steps: what each run was meant to make.
    """
    cells = summarise(curves, steps)
    chosen = chosen_cells(cells)
    compared = comparisons(cells, chosen)
    table = tables.headline(chosen, compared, tables.synchronous_accuracy(curves, chosen, steps))
    return Report(cells, chosen, compared, curves, table)


def of_all_tasks(reports: Mapping[str, Report]) -> list[Table]:
    """By group of lags planned contrasts, the same over the rates and power; nothing for one task."""
    if len(reports) < 2:
        return []
    groups: dict[str, dict[str, Comparison]] = {}
    for task, report in reports.items():
        for of in report.comparisons:
            groups.setdefault(tables.at_lags(of.lags), {})[task] = of
    found = [tables.overview(groups)]
    for at, by_task in groups.items():
        planned = {task: of.contrasts for task, of in by_task.items()}
        robust = {task: of.robustness for task, of in by_task.items() if of.robustness}
        found.append(tables.across(f"The planned contrast at {at}", planned))
        if robust:
            found.append(tables.across(f"The mean over the learning rates at {at}", robust))
        found.append(tables.power_across(f"Power of the planned contrast at {at}, in points of accuracy", planned))
    return found


def of_the_alarm(reports: Mapping[str, Report]) -> list[Table]:
    """What the alarm tells of all runs; nothing where ESS ratio and KL were not kept."""
    if not all(alarm.VANISHED in report.curves for report in reports.values()):
        return []
    choosing, telling = alarm_halves(reports)
    sets = {"all tasks, odd seeds: levels chosen": choosing}
    sets |= {f"{tables.short(task)}, even seeds: levels told": runs for task, runs in telling.items()}
    every = [*choosing, *(run for runs in telling.values() for run in runs)]
    found = alarm.choose_levels(choosing)
    ess, kl = f"{found.ess_ratio:g} for {found.ess_steps} steps", f"{found.kl:g} for {found.kl_steps} steps"
    scores = alarm.scores_table(sets)
    chosen = f"{scores.title} (of the largest F1 on the odd seeds: ESS ratio below {ess}, KL above {kl})"
    others = (alarm.definitions_table(every), alarm.before_collapse_table(every))
    return [replace(scores, title=chosen), *others]


def alarm_halves(reports: Mapping[str, Report]) -> tuple[list[alarm.AlarmRun], dict[str, list[alarm.AlarmRun]]]:
    """The runs of all tasks that levels are chosen on, and by task those that they are told about."""
    halves = {task: alarm.halves(alarm.alarm_runs(report.curves)) for task, report in reports.items()}
    return [run for choosing, _ in halves.values() for run in choosing], {task: of[1] for task, of in halves.items()}


def numbers(reports: Mapping[str, Report]) -> pd.DataFrame:
    """A row for each number of each cell, in %, with its 95 % interval."""
    rows = []
    for task, report in reports.items():
        for cell in sorted(report.cells, key=lambda cell: (cell.lag, cell.method, cell.lr)):
            collapsed, runs = len(cell.collapse_steps), len(cell.runs)
            of = {"after step k": cell.accuracies, "last policy": cell.lasts}
            found = {name: _mean(values) for name, values in of.items() if values}
            found["collapsed"] = (collapsed / runs, *share_interval(collapsed, runs, "exact"))
            at = (tables.short(task), cell.method, cell.lag, cell.lr, int(cell in report.chosen), runs)
            rows += [(*at, name, *(round(100 * value, 1) for value in of_one)) for name, of_one in found.items()]
    columns = ["task", "method", "lag", "lr", "chosen", "runs", "number", "value", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def _mean(values: list[float]) -> tuple[float, float, float]:
    mean, half = statistics.mean(values), interval(values)
    return mean, mean - half, mean + half


def show_tables(tables: Iterable[Table]) -> None:
    """Print them on the console."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as ConsoleTable

    console = Console(width=190)
    for table in tables:
        printed = ConsoleTable(*table.columns, title=table.title)
        for row in table.rows:
            printed.add_row(*map(escape, row))
        console.print(printed)


def write(reports: Mapping[str, Report], folder: Path) -> list[Path]:
    """The figures, and every number.

    Args:
        reports: by task.
        folder: where to.
    """
    from lab.stability.figures import draw_all

    files = draw_all({task: report.of_chosen_rates for task, report in reports.items()}, folder)
    write_whole(folder / TABLES_FILE, numbers(reports).to_csv(index=False, lineterminator="\n"))
    return [*files, folder / TABLES_FILE]


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m lab.stability.report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="*.parquet, by lab.stability")
    parser.add_argument("--lags", nargs="+", type=whole_number(0), metavar="K", help="only these (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write figures and tables.csv there")
    parser.add_argument("--join", type=Path, metavar="FILE", help="write the runs of all files into this one")
    parser.add_argument("--accuracies", action="store_true", help="--join without ESS ratio, KL and gradient norm")
    arguments = parser.parse_args(argv)
    files = arguments.files or [PUBLISHED / "stability.parquet"]
    try:
        curves = read_curves(files, arguments.lags)
    except ValueError as error:
        print(f"stability.report: {error}", file=sys.stderr)
        return 2
    reports = {task: make_report(of, int(of["step"].max())) for task, of in curves.items()}
    for task, report in reports.items():
        show_tables([replace(report.table, title=f"{task}: {report.table.title}")])
    show_tables([*of_all_tasks(reports), *of_the_alarm(reports)])
    if arguments.join:
        publish(curves, arguments.join, arguments.accuracies)
    for file in write(reports, arguments.out) if arguments.out else ():
        print(file)
    return 0


if __name__ == "__main__":
    run_command(main)
