"""Tables and figures from runs that are there: `python -m lab.stability.report FILE... [--out DIR]`.

Makes no run. Without files: those of docs/measurements/stability.md. --out gets

lags.png         points ahead of `vcpo_ess` by lag, a panel per task
shift.png        OPOB's baseline less the mean reward, and points ahead of `vcpo_ess`: one point per cell
predictors.png   accuracy, ESS ratio, KL and gradient norm of the first task: synchronous, TIS and VCPO at the largest
                 lag (the paper's)
contrasts.csv    every contrast, in points: paired by seed, Holm's correction over all of them, and its power
tables.csv       every cell: accuracies and share of collapsed runs in %, each with its 95 % interval
shift.csv        the points of shift.png
alarm*.csv       the alarm's signs, how well ESS ratio and KL rank runs, and what other levels and rules would have told
"""

import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from lab.simulator.analysis import LAST
from lab.stability import alarm, contrasts, tables
from lab.stability.cells import Cell, summarise
from lab.stability.contrasts import Contrast
from lab.stability.inference import interval, share_interval
from lab.stability.published import PUBLISHED, read_curves
from lab.stability.tables import Table
from lab.stability.tuning import chosen_cells
from recipe.command_line import OneLineParser, run_command, whole_number
from verl_vcpo.common.whole_file import write_whole

ALARM = ("alarm.csv", "alarm_ranking.csv", "alarm_rules.csv")
SHOWN = ("stability.parquet", "new-seeds.parquet")


@dataclass(frozen=True)
class Report:
    """What the runs of one task say."""

    cells: list[Cell]
    chosen: list[Cell]
    """One per method and lag: of the learning rate chosen there."""
    curves: pd.DataFrame
    """Steps of all runs, one below the other."""
    steps: int
    """The steps that each run was meant to make."""

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
    return Report(cells, chosen_cells(cells), curves, steps)


ALL = "all tasks"
_LAST = dict(zip(LAST, ("last policy", "last policy, greedy", "last policy, pass@8", "last policy, nats"), strict=True))


def contrasts_of(reports: Mapping[str, Report]) -> dict[str, list[Contrast]]:
    """The contrasts by task, and those of all tasks together; p is corrected for the number of all."""
    found = {task: contrasts.contrasts(report.cells, report.chosen) for task, report in reports.items()}
    found[ALL] = contrasts.collapses([report.cells for report in reports.values()])
    rest = iter(contrasts.corrected([one for of_task in found.values() for one in of_task]))
    return {task: [next(rest) for _ in of_task] for task, of_task in found.items()}


def of_tasks(reports: Mapping[str, Report]) -> list[Table]:
    """Accuracy after step k and contrasts of each task; an overview of several tasks; what the level of OPOB does."""
    found = contrasts_of(reports)
    shown = []
    for task, report in reports.items():
        synchronous = tables.synchronous_accuracy(report.curves, report.chosen, report.steps)
        table = tables.headline(report.chosen, found[task], synchronous)
        shown.append(replace(table, title=f"{task}: {table.title}"))
    if len(reports) > 1:
        chosen, cells = ({task: getattr(of, name) for task, of in reports.items()} for name in ("chosen", "cells"))
        shown.append(tables.overview(chosen, cells, found))
    if len(of := shifts_of(reports)):
        shown.append(tables.shift_table(of))
    return shown


def shifts_of(reports: Mapping[str, Report]) -> pd.DataFrame:
    """The points of the figure shift.png."""
    return tables.shifts({task: report.cells for task, report in reports.items()})


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
    of_task = {tables.short(task): alarm.alarm_runs(report.curves) for task, report in reports.items()}
    return [replace(scores, title=chosen), alarm.ranking_table(of_task), alarm.definitions_table(every)]


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
            of = {"after step k": cell.accuracies} | {shown: cell.lasts(name) for name, shown in _LAST.items()}
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
    """The figures and, as CSV files, the tables that there is data for.

    Args:
        reports: by task.
        folder: where to.
    """
    from lab.stability.figures import draw_all

    shifts = shifts_of(reports)
    files = draw_all({task: report.of_chosen_rates for task, report in reports.items()}, shifts, folder)
    every = {"contrasts.csv": tables.all_contrasts(contrasts_of(reports)), "tables.csv": numbers(reports)}
    if len(shifts):
        every["shift.csv"] = shifts.round({"shift": 4, "gain": 2})
    for name, printed in zip(ALARM, of_the_alarm(reports), strict=False):
        every[name] = pd.DataFrame(printed.rows, columns=printed.columns)
    for name, table in every.items():
        write_whole(folder / name, table.to_csv(index=False, lineterminator="\n"))
    return [*files, *(folder / name for name in every)]


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m lab.stability.report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="*.parquet, by lab.stability")
    parser.add_argument("--lags", nargs="+", type=whole_number(0), metavar="K", help="only these (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write figures and tables there")
    parser.add_argument("--json", action="store_true", help="print what contrasts.csv has as one JSON line, last")
    arguments = parser.parse_args(argv)
    files = arguments.files or [PUBLISHED / name for name in SHOWN]
    try:
        curves = read_curves(files, arguments.lags)
    except ValueError as error:
        print(f"stability.report: {error}", file=sys.stderr)
        return 2
    reports = {task: make_report(of, int(of["step"].max())) for task, of in curves.items()}
    show_tables([*of_tasks(reports), *of_the_alarm(reports)])
    for file in write(reports, arguments.out) if arguments.out else ():
        print(file)
    if arguments.json:
        print(tables.all_contrasts(contrasts_of(reports)).to_json(orient="records"))
    return 0


if __name__ == "__main__":
    run_command(main)
