"""From runs to tables and figures: what scripts.bench.stability and scripts.bench.stability_report print."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.bench.stability import alarm, alarm_levels, tables
from scripts.bench.stability.cells import Cell, summarise
from scripts.bench.stability.contrasts import Contrast, over_rates, planned
from scripts.bench.stability.tables import Table
from scripts.bench.stability.tuning import chosen_cells
from vcpo.diagnostics import AlarmLevels
from verl_vcpo.whole_file import write_whole

TABLES_FILE = "tables.md"


@dataclass(frozen=True)
class Report:
    """What runs say."""

    steps: int
    cells: list[Cell]
    chosen: list[Cell]
    """One per method and lag: of the learning rate chosen there."""
    contrasts: list[Contrast]
    robustness: list[Contrast]
    alarm: dict[str, list[alarm.AlarmRun]]
    """The runs that levels are chosen on, and those that they are told about."""
    levels: AlarmLevels
    """What would be chosen on the first of these."""
    tables: list[Table]


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
    return Report(steps, cells, chosen, contrasts, robustness, sets, levels, found)


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


def write(report: Report, curves: pd.DataFrame, folder: Path) -> list[Path]:
    """The figures, and all tables on one page."""
    from scripts.bench.stability.figures import draw_all

    files = draw_all(curves, report.chosen, folder)
    page = folder / TABLES_FILE
    write_whole(page, markdown(report))
    return [*files, page]


def markdown(report: Report) -> str:
    """All tables as a page."""
    sections = [f"## {table.title}\n\n{table.markdown()}" for table in report.tables]
    heading = "# All numbers of `python -m scripts.bench.stability_report`"
    return "\n\n".join([heading, *sections, chosen_levels(report)]) + "\n"


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


def read_curves(files: Iterable[Path]) -> pd.DataFrame:
    """The runs of published tables, one below the other.

    Raises:
        ValueError: a file is not there or has no runs of the simulator, or two of them have the same run.
    """
    curves = pd.concat([_read(file) for file in files], ignore_index=True)
    names = ["method", "lag", "lr", "seed", "step"]
    if curves.duplicated(names).any():
        raise ValueError("the files have the same run twice: name each once")
    return curves


def _read(file: Path) -> pd.DataFrame:
    try:
        curves = pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error}); scripts.bench.stability writes such files") from None
    lacking = {"method", "lag", "lr", "seed", "step", "val_accuracy", "finite"} - set(curves.columns)
    if lacking:
        raise ValueError(f"{file}: no column {', '.join(sorted(lacking))}; scripts.bench.stability writes such files")
    return curves
