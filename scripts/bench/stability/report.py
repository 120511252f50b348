"""From runs to tables and figures: what scripts.bench.stability and scripts.bench.stability_report print."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from recipe.lag_simulator.grid import difference
from scripts.bench.stability import alarm, alarm_levels, tables
from scripts.bench.stability.cells import RUN, Cell, summarise
from scripts.bench.stability.contrasts import Contrast, over_rates, planned
from scripts.bench.stability.tables import Table
from scripts.bench.stability.tuning import chosen_cells
from vcpo.diagnostics import AlarmLevels
from verl_vcpo.whole_file import write_whole

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
    contrasts: list[Contrast]
    robustness: list[Contrast]
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
    contrasts, robustness = planned(chosen), over_rates(cells)
    runs = alarm.alarm_runs(curves)
    choosing, telling = alarm_levels.halves(runs)
    sets = {"odd seeds: levels chosen": choosing, "even seeds: levels told": telling}
    levels = alarm_levels.choose_levels(choosing)
    synchronous = tables.synchronous_accuracy(curves, chosen, steps)
    found = [tables.headline(chosen, contrasts, synchronous), tables.power(chosen, contrasts)]
    if robustness:
        found.insert(1, tables.robustness(robustness, cells))
    found += [alarm.scores_table(sets), alarm_levels.definitions_table(runs), alarm_levels.before_collapse_table(runs)]
    found.append(tables.all_numbers(cells, chosen))
    return Report(steps, cells, chosen, contrasts, robustness, curves, sets, levels, found)


def show(report: Report) -> None:
    """Print."""
    show_tables(report.tables)
    print(chosen_levels(report))


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
    from scripts.bench.stability.figures import draw_all

    files = draw_all({task: report.of_chosen_rates for task, report in reports.items()}, folder)
    page = folder / TABLES_FILE
    write_whole(page, markdown(reports))
    return [*files, page]


def markdown(reports: Mapping[str, Report]) -> str:
    """All tables as a page."""
    sections = ["# All numbers of `python -m scripts.bench.stability_report`"]
    sections += [f"## {table.title}\n\n{table.markdown()}" for table in of_all_tasks(reports)]
    for task, report in reports.items():
        of = f"`{task}`: " if len(reports) > 1 else ""
        sections += [f"## {of}{table.title}\n\n{table.markdown()}" for table in report.tables]
        sections.append(chosen_levels(report))
    return "\n\n".join(sections) + "\n"


def of_all_tasks(reports: Mapping[str, Report]) -> list[Table]:
    """Planned contrasts, the same over the learning rates, power and the alarm, task by task; nothing for one task."""
    if len(reports) < 2:
        return []
    planned = {task: report.contrasts for task, report in reports.items()}
    robust = {task: report.robustness for task, report in reports.items() if report.robustness}
    found = [tables.across("The planned contrast, on every task", planned)]
    if robust:
        found.append(tables.across("The mean over the learning rates, on every task", robust))
    warned = alarm.scores_table(
        {task.removesuffix("_lag"): [run for half in of.alarm.values() for run in half] for task, of in reports.items()}
    )
    return [*found, tables.power_across(planned), replace(warned, title=f"{warned.title}, on every task")]


def chosen_levels(report: Report) -> str:
    """What the runs with odd seeds say about the alarm's levels."""
    found = report.levels
    ess, kl = f"{found.ess_ratio:g} for {found.ess_steps} steps", f"{found.kl:g} for {found.kl_steps} steps"
    return f"Levels of the largest F1 on the odd seeds: ESS ratio below {ess}, KL above {kl}."


def as_json(report: Report) -> str:
    """The same for programs, in one line."""
    scores = {name: asdict(alarm.score_alarm(runs)) for name, runs in report.alarm.items()}
    parts = ("cells", "contrasts", "robustness")
    rows: dict[str, Any] = {name: [asdict(row) for row in getattr(report, name)] for name in parts}
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


def read_curves(files: Iterable[Path]) -> dict[str, pd.DataFrame]:
    """The runs of published tables by task, one below the other.

    Raises:
        ValueError: a file is not there or has no runs of the simulator, or two of them have the same run, or runs of
            one task with other settings or another first policy.
    """
    of: dict[str, list[tuple[Path, pd.DataFrame]]] = {}
    for file in files:
        curves = _read(file)
        of.setdefault(_settings(curves).get("task", UNKNOWN_TASK), []).append((file, curves))
    return {task: _joined(parts) for task, parts in of.items()}


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
        raise ValueError(f"{file}: cannot be read ({error}); scripts.bench.stability writes such files") from None
    lacking = {"method", "lag", "lr", "seed", "step", "val_accuracy", "finite"} - set(curves.columns)
    if lacking:
        raise ValueError(f"{file}: no column {', '.join(sorted(lacking))}; scripts.bench.stability writes such files")
    return curves
