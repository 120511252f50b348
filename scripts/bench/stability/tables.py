"""What scripts.bench.stability found, in rows: on the console, and as markdown."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from recipe.lag_simulator.analysis import interval, outcome, steps_to
from scripts.bench.stability.alarm import AlarmScore

Finals = dict[str, dict[float, list[float]]]
"""Per method and learning rate, the final accuracy of each tuning run."""


@dataclass(frozen=True)
class MethodAtLag:
    """One method at one lag, over the seeds."""

    method: str
    lag: int
    lr: float
    seeds: int
    by_seed: dict[int, float]
    """Final accuracy of each run."""
    final_accuracy: float
    """Mean over the seeds."""
    interval: float
    """Half of the 95 % confidence interval; NaN for one seed."""
    best_accuracy: float
    collapsed: float
    """Share of the runs."""
    collapse_step: float
    """Mean over the collapsed runs; NaN where there are none."""
    ess_ratio: float
    steps_to_sync: float
    """Mean number of steps to 90 % of the synchronous final accuracy; NaN where a seed never gets there."""


def summarise(curves: pd.DataFrame, steps: int) -> list[MethodAtLag]:
    """One row per method and lag. Synchronous is `none` at lag 0 or, where that was not run, the method itself."""
    rows = []
    synchronous = {
        str(method): statistics.mean(outcome(curve, steps).final_accuracy for _, curve in runs.groupby("seed"))
        for method, runs in curves[curves["lag"] == 0].groupby("method")
    }
    for (method, lag, lr), runs in curves.groupby(["method", "lag", "lr"], sort=False):
        each = {int(seed): curve for seed, curve in runs.groupby("seed")}
        outcomes = [outcome(curve, steps) for curve in each.values()]
        finals = [o.final_accuracy for o in outcomes]
        collapses = [o.collapse_step for o in outcomes if o.collapse_step is not None]
        goal = 0.9 * synchronous.get("none", synchronous.get(str(method), math.nan))
        reached = [steps_to(curve, goal) for curve in each.values()]
        rows.append(
            MethodAtLag(
                method=str(method),
                lag=int(lag),
                lr=float(lr),
                seeds=len(each),
                by_seed=dict(zip(each, finals, strict=True)),
                final_accuracy=statistics.mean(finals),
                interval=interval(finals),
                best_accuracy=max(o.best_accuracy for o in outcomes),
                collapsed=len(collapses) / len(each),
                collapse_step=statistics.mean(collapses) if collapses else math.nan,
                ess_ratio=statistics.mean(o.mean_ess_ratio for o in outcomes),
                steps_to_sync=math.nan if None in reached else statistics.mean(s for s in reached if s is not None),
            )
        )
    return rows


@dataclass(frozen=True)
class Table:
    """Cells as they are shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def learning_rates(tuned: Finals, chosen: dict[str, float]) -> Table:
    """What tuning found: mean final accuracy per method and rate."""
    rates = sorted({lr for finals in tuned.values() for lr in finals})
    rows = [
        [method, *(f"{statistics.mean(finals[lr]):.1%}" for lr in rates), f"{chosen[method]:g}"]
        for method, finals in tuned.items()
    ]
    return Table("Final accuracy on the tuning seeds", ["method", *(f"{lr:g}" for lr in rates), "chosen"], rows)


def by_method(rows: Iterable[MethodAtLag]) -> dict[str, dict[int, MethodAtLag]]:
    """Each method's rows by lag; the method that is best over the lags comes first."""
    of: dict[str, dict[int, MethodAtLag]] = {}
    for row in rows:
        of.setdefault(row.method, {})[row.lag] = row

    def accuracy(method: str) -> float:
        return statistics.mean(over_lags(of[method]) or [-1.0])

    return {method: of[method] for method in sorted(of, key=accuracy, reverse=True)}


def over_lags(cells: dict[int, MethodAtLag]) -> list[float]:
    """Per seed that was run at every lag above 0, the mean final accuracy over these lags."""
    stale = [row.by_seed for lag, row in cells.items() if lag]
    seeds = set[int].intersection(*(set(finals) for finals in stale)) if stale else set()
    return [statistics.mean(finals[seed] for finals in stale) for seed in sorted(seeds)]


def by_lag(rows: Iterable[MethodAtLag]) -> Table:
    """Final accuracies, a line per method, the best over the lags first; in brackets how many runs collapsed."""
    of = by_method(rows)
    lags = sorted({lag for cells in of.values() for lag in cells})

    def cell(row: MethodAtLag | None) -> str:
        if row is None:
            return "-"
        collapses = f" [{row.collapsed * row.seeds:.0f} of {row.seeds}]" if row.collapsed else ""
        return _accuracy(row.final_accuracy, row.interval) + collapses

    def mean(cells: dict[int, MethodAtLag]) -> str:
        finals = over_lags(cells)
        return _accuracy(statistics.mean(finals), interval(finals)) if finals else "-"

    lines = [
        [method, f"{max(row.lr for row in cells.values()):g}", *(cell(cells.get(lag)) for lag in lags), mean(cells)]
        for method, cells in of.items()
    ]
    columns = ["method", "learning rate", *(f"k = {lag}" for lag in lags), "mean of k > 0"]
    return Table("Final accuracy by lag", columns, lines)


def all_numbers(rows: Iterable[MethodAtLag]) -> Table:
    """Every number of every row."""
    columns = ["method", "lag", "lr", "final accuracy", "best", "collapsed", "at step", "ESS ratio"]
    lines = [
        [
            row.method,
            str(row.lag),
            f"{row.lr:g}",
            _accuracy(row.final_accuracy, row.interval),
            f"{row.best_accuracy:.1%}",
            f"{row.collapsed * row.seeds:.0f} of {row.seeds}",
            _number(row.collapse_step, ".0f"),
            f"{row.ess_ratio:.3f}",
            _number(row.steps_to_sync, ".0f"),
        ]
        for row in rows
    ]
    return Table("All numbers", [*columns, "steps to 90 % of sync"], lines)


def show(tables: Iterable[Table], alarm: AlarmScore) -> None:
    """Print."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as ConsoleTable

    console = Console(width=130)
    for table in tables:
        printed = ConsoleTable(*table.columns, title=table.title)
        for row in table.rows:
            printed.add_row(*map(escape, row))
        console.print(printed)
    console.print(alarm.line())


def markdown(tables: Iterable[Table], alarm: AlarmScore) -> str:
    """The same as a page."""
    sections = [f"## {table.title}\n\n{table.markdown()}" for table in tables]
    return "\n\n".join(["# All numbers of `python -m scripts.bench.stability`", *sections, alarm.line()]) + "\n"


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _accuracy(mean: float, half: float) -> str:
    return f"{mean:.1%} ± {_number(100 * half, '.1f')}"
