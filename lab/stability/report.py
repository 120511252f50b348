"""From runs to tables and figures: what lab.stability and lab.stability_report print."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from lab.simulator.grid import difference
from lab.stability import alarm, alarm_levels, tables
from lab.stability.cells import RUN, Cell, summarise
from lab.stability.contrasts import Comparison, comparisons
from lab.stability.tables import Table
from lab.stability.tuning import chosen_cells
from vcpo.diagnostics import AlarmLevels
from verl_vcpo.common.whole_file import write_whole

TABLES_FILE = "tables.md"
UNKNOWN_TASK = "an unknown task"
"""Of curves that do not say what they are of."""


@dataclass(frozen=True)
class Report:
    """What runs say."""

    steps: int
    cells: list[Cell]
    chosen: list[Cell]
    """One per method and lag: of the learning rate chosen there."""
    comparisons: list[Comparison]
    """By group of lags, the large ones first."""
    curves: pd.DataFrame
    """Steps of all runs, one below the other."""
    alarm: dict[str, list[alarm.AlarmRun]]
    """The runs that levels are chosen on, and those that they are told about."""
    levels: AlarmLevels
    """What would be chosen on the first of these."""
    tables: list[Table]

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
    runs = alarm.alarm_runs(curves)
    choosing, telling = alarm_levels.halves(runs)
    sets = {"odd seeds: levels chosen": choosing, "even seeds: levels told": telling}
    levels = alarm_levels.choose_levels(choosing)
    synchronous = tables.synchronous_accuracy(curves, chosen, steps)
    found = [tables.headline(chosen, compared, synchronous)]
    found += [tables.robustness(of, cells) for of in compared if of.robustness]
    found.append(tables.power(chosen, compared))
    found += [alarm.scores_table(sets), alarm_levels.definitions_table(runs), alarm_levels.before_collapse_table(runs)]
    found.append(tables.all_numbers(cells, chosen))
    return Report(steps, cells, chosen, compared, curves, sets, levels, found)


def show(report: Report) -> None:
    """Print."""
    show_tables(report.tables)
    print(chosen_levels(report.levels))


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
    """The figures, and all tables on one page.

    Args:
        reports: by task.
        folder: where to.
    """
    from lab.stability.figures import draw_all

    files = draw_all({task: report.of_chosen_rates for task, report in reports.items()}, folder)
    page = folder / TABLES_FILE
    write_whole(page, markdown(reports))
    return [*files, page]


def markdown(reports: Mapping[str, Report]) -> str:
    """All tables as a page."""
    sections = ["# All numbers of `python -m lab.stability_report`"]
    sections += [f"## {table.title}\n\n{table.markdown()}" for table in of_all_tasks(reports)]
    if len(reports) > 1:
        sections.append(f"On every task. {chosen_levels(alarm_levels.choose_levels(alarm_halves(reports)[0]))}")
    for task, report in reports.items():
        of = f"`{task}`: " if len(reports) > 1 else ""
        sections += [f"## {of}{table.title}\n\n{table.markdown()}" for table in report.tables]
        sections.append(chosen_levels(report.levels))
    return "\n\n".join(sections) + "\n"


def of_all_tasks(reports: Mapping[str, Report]) -> list[Table]:
    """By group of lags planned contrasts, the same over the rates and power, then the alarm; nothing for one task."""
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
        found.append(tables.across(f"The planned contrast at {at}, on every task", planned))
        if robust:
            found.append(tables.across(f"The mean over the learning rates at {at}, on every task", robust))
        found.append(tables.power_across(f"Power of the planned contrast at {at}, in points of accuracy", planned))
    choosing, telling = alarm_halves(reports)
    sets = {"all tasks, odd seeds: levels chosen": choosing}
    sets |= {f"{task.removesuffix('_lag')}, even seeds: levels told": runs for task, runs in telling.items()}
    every = [*choosing, *(run for runs in telling.values() for run in runs)]
    shown = (alarm.scores_table(sets), alarm_levels.definitions_table(every), alarm_levels.before_collapse_table(every))
    return [*found, *(replace(table, title=f"{table.title}, on every task") for table in shown)]


def alarm_halves(reports: Mapping[str, Report]) -> tuple[list[alarm.AlarmRun], dict[str, list[alarm.AlarmRun]]]:
    """The runs of all tasks that levels are chosen on, and by task those that they are told about."""
    halves = {task: tuple(report.alarm.values()) for task, report in reports.items()}
    return [run for choosing, _ in halves.values() for run in choosing], {task: of[1] for task, of in halves.items()}


def chosen_levels(found: AlarmLevels) -> str:
    """What the runs with odd seeds say about the alarm's levels."""
    ess, kl = f"{found.ess_ratio:g} for {found.ess_steps} steps", f"{found.kl:g} for {found.kl_steps} steps"
    return f"Levels of the largest F1 on the odd seeds: ESS ratio below {ess}, KL above {kl}."


def as_json(report: Report) -> str:
    """The same for programs, in one line."""
    scores = {name: asdict(alarm.score_alarm(runs)) for name, runs in report.alarm.items()}
    rows: dict[str, Any] = {name: [asdict(row) for row in getattr(report, name)] for name in ("cells", "comparisons")}
    chosen: dict[str, dict[int, float]] = {}
    for cell in report.chosen:
        chosen.setdefault(cell.method, {})[cell.lag] = cell.lr
    return json.dumps(_plain({"steps": report.steps, "learning_rates": chosen, **rows, "alarm": scores}))


def _plain(value: object) -> object:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_curves(files: Iterable[Path], lags: Sequence[int] | None = None) -> dict[str, pd.DataFrame]:
    """The runs of published tables by task, one below the other.

    Args:
        files: by lab.stability.
        lags: leaves out the runs at others.

    Raises:
        ValueError: a file is not there or has no runs of the simulator, or two of them have the same run, or runs of
            one task with other settings or another first policy, or no run at one of `lags`.
    """
    of: dict[str, list[tuple[Path, pd.DataFrame]]] = {}
    for file in files:
        curves = _read(file)
        of.setdefault(_settings(curves).get("task", UNKNOWN_TASK), []).append((file, curves))
    joined = {task: _joined(parts) for task, parts in of.items()}
    return joined if lags is None else {task: _at_lags(curves, lags) for task, curves in joined.items()}


def _at_lags(curves: pd.DataFrame, lags: Sequence[int]) -> pd.DataFrame:
    if lacking := set(lags) - (known := set(curves["lag"])):
        raise ValueError(f"--lags {min(lacking)}: the files have runs at {', '.join(map(str, sorted(known)))} only")
    return curves[curves["lag"].isin(lags)]


def _joined(parts: Sequence[tuple[Path, pd.DataFrame]]) -> pd.DataFrame:
    first_file, first = parts[0]
    for file, curves in parts[1:]:
        if different := difference(_settings(curves), _settings(first)):
            raise ValueError(f"{file}: holds runs of {different}; {first_file} is another comparison: name one of them")
    curves = pd.concat([curves for _, curves in parts], ignore_index=True)
    if curves.duplicated([*RUN, "step"]).any():
        raise ValueError("the files have the same run twice: name each once")
    return curves


def _settings(curves: pd.DataFrame) -> dict[str, Any]:
    """What the runs of a published table have in common."""
    return curves.attrs.get("settings", {})


def _read(file: Path) -> pd.DataFrame:
    try:
        curves = pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error}); lab.stability writes such files") from None
    lacking = {"method", "lag", "lr", "seed", "step", "val_accuracy", "finite"} - set(curves.columns)
    if lacking:
        raise ValueError(f"{file}: no column {', '.join(sorted(lacking))}; lab.stability writes such files")
    return curves
