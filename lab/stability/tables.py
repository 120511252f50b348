"""What lab.stability found, as tables: on the console, and as markdown."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from lab.simulator.analysis import accuracy_after
from lab.stability.cells import Cell, by_method, pooled_deviation
from lab.stability.contrasts import SAME, Comparison, Contrast, reference
from lab.stability.inference import (
    LEVEL,
    Difference,
    interval,
    seeds_needed,
    share_interval,
    visible_difference,
    welch,
)

SYNCHRONOUS = "synchronous, same steps"
_POINTS = (1, 2, 4)
"""Differences, in points of accuracy, that the table of power is about."""


@dataclass(frozen=True)
class Table:
    """Cells as they are shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As mdformat would write it."""
        lines = [self.columns, ["--"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("*", r"\*")


def headline(chosen: Sequence[Cell], compared: Sequence[Comparison], synchronous: dict[int, list[float]]) -> Table:
    """A line per method, the best at the large lags first: accuracy by lag, and the planned contrasts.

    Args:
        chosen: one cell per method and lag.
        compared: by group of lags, the large ones first.
        synchronous: by lag, the accuracies of synchronous runs over the steps that a run at this lag is judged by.
    """
    by_themselves = {group.lags[0] for group in compared if len(group.lags) == 1}  # the contrast has their accuracy
    of, lags = by_method(chosen), sorted({cell.lag for cell in chosen} - by_themselves)
    judged = [{row.method: row for row in group.contrasts} for group in compared]
    lines = []
    if synchronous and compared:
        each = [percent(statistics.mean(synchronous[lag])) for lag in lags]
        groups = (_synchronous(group, synchronous, reference(chosen)) for group in compared)
        lines.append([SYNCHRONOUS, *each, *(text for group in groups for text in group)])

    def best(method: str) -> list[float]:
        return [rows[method].accuracy if method in rows else -1.0 for rows in judged]

    for method in sorted(of, key=best, reverse=True):
        cells = [percent(of[method][lag].accuracy) if lag in of[method] else "-" for lag in lags]
        found = (_contrast(rows[method]) if method in rows else ["-"] * 5 for rows in judged)
        lines.append([f"`{method}`", *cells, *(text for group in found for text in group)])
    columns = ["method", *(f"k = {lag}" for lag in lags)]
    for group in compared:
        name = at_lags(group.lags)
        columns += [name, f"less `{reference(chosen)}`", "p (Holm)", "verdict", f"collapsed, {name}"]
    return Table("Accuracy after step k", columns, lines)


def _synchronous(group: Comparison, synchronous: dict[int, list[float]], against: str | None) -> list[str]:
    """The accuracy of synchronous runs over the steps that a group of lags is judged by, and less the reference's."""
    of_seeds = [statistics.mean(at) for at in zip(*(synchronous[lag] for lag in group.lags), strict=True)]
    ahead = "-"
    found = next((row for row in group.contrasts if row.method == against), None)
    if found and len(of_seeds) > 1 < len(found.by_seed):
        ahead = points(welch(of_seeds, list(found.by_seed.values())))
    return [percent(statistics.mean(of_seeds)), ahead, "-", "-", "-"]


def across(title: str, contrasts: Mapping[str, Sequence[Contrast]]) -> Table:
    """A line per method, in the order of the first task: its accuracy and contrast on each task, and all collapses.

    Args:
        title: what the contrasts are over.
        contrasts: by task.
    """
    of = {task: {row.method: row for row in rows} for task, rows in contrasts.items()}
    order = dict.fromkeys(row.method for rows in contrasts.values() for row in rows)
    against = next((row.method for rows in contrasts.values() for row in rows if math.isnan(row.corrected)), "")
    lines = []
    for method in order:
        found = [rows[method] for rows in of.values() if method in rows]
        cells = [_on_a_task(rows.get(method)) for rows in of.values()]
        collapsed = share(sum(row.collapsed for row in found), sum(row.runs for row in found))
        lines.append([f"`{method}`", *(text for cell in cells for text in cell), collapsed])
    columns = [text for task in of for text in (short(task), f"less `{against}`", "p (Holm)")]
    return Table(title, ["method", *columns, "collapsed"], lines)


def overview(groups: Mapping[str, Mapping[str, Comparison]]) -> Table:
    """A line per method: points ahead of the reference on each task and group of lags, and all collapses at all rates.

    Args:
        groups: by the lags in words and by task.
    """
    tasks = list(dict.fromkeys(task for by_task in groups.values() for task in by_task))
    places = [(task, at) for task in tasks for at in reversed(list(groups)) if task in groups[at]]
    of = {(task, at): {row.method: row for row in groups[at][task].contrasts} for task, at in places}
    tried = [row for by_task in groups.values() for compared in by_task.values() for row in compared.robustness]
    lines = []
    for method in dict.fromkeys(method for rows in of.values() for method in rows):
        every = [row for row in tried if row.method == method]
        runs = sum(row.runs for row in every)
        collapsed = f"{sum(row.collapsed for row in every)} of {runs}" if runs else "-"
        lines.append([f"`{method}`", *(_ahead(of[place].get(method)) for place in places), collapsed])
    columns = [f"{short(task)}, {at}" for task, at in places]
    return Table(
        "Points ahead, at the method's best rates (in brackets: cannot be told apart)",
        ["method", *columns, "collapsed, all rates"],
        lines,
    )


def _ahead(row: Contrast | None) -> str:
    """In brackets where the corrected test finds no difference."""
    if row is None or math.isnan(row.corrected):
        return "-" if row is None else "0"
    points_ahead = f"{100 * row.difference.mean:+.1f}"
    return f"({points_ahead})" if row.verdict == SAME else points_ahead


def _on_a_task(row: Contrast | None) -> list[str]:
    if row is None:
        return ["-"] * 3
    accuracy, difference, p, *_ = _contrast(row)
    return [accuracy, difference, p]


def power_across(title: str, contrasts: Mapping[str, Sequence[Contrast]]) -> Table:
    """The power of the planned contrast: a line per task. All tasks have as many seeds as the first."""
    lines = [[short(task), *(_power(_of_the_contrast(rows), rows) or ["-"])] for task, rows in contrasts.items()]
    columns = _power_columns("task", next(iter(contrasts.values())))
    return Table(title, columns, lines)


def _of_the_contrast(contrasts: Sequence[Contrast]) -> list[list[float]]:
    return [list(row.by_seed.values()) for row in contrasts if not row.collapsed]


def _power_columns(first: str, contrasts: Sequence[Contrast]) -> list[str]:
    seen = f"{_seeds(contrasts)} seeds see"
    needed = (f"seeds for {size}" for size in _POINTS)
    return [first, "standard deviation of a run", *needed, seen, f"{seen}, the strictest of Holm's tests"]


def _seeds(contrasts: Sequence[Contrast]) -> int:
    """Of a method."""
    return max(len(row.by_seed) for row in contrasts)


def _power(samples: Iterable[list[float]], contrasts: Sequence[Contrast]) -> list[str]:
    """What the spread within the samples lets the contrasts see; nothing where there is one seed each."""
    deviation = 100 * pooled_deviation(samples)
    if not deviation > 0:
        return []
    strict = (1 - LEVEL) / max(sum(not math.isnan(row.corrected) for row in contrasts), 1)
    seen = [visible_difference(deviation, _seeds(contrasts), level) for level in (1 - LEVEL, strict)]
    needed = [str(seeds_needed(size, deviation)) for size in _POINTS]
    return [f"{deviation:.2f}", *needed, *(f"{size:.1f}" for size in seen)]


def synchronous_accuracy(curves: pd.DataFrame, chosen: Sequence[Cell], steps: int) -> dict[int, list[float]]:
    """By lag k, the accuracy after step k of each of GRPO's runs at lag 0; nothing where there are none."""
    at_zero = by_method(chosen).get("none", {}).get(0)
    if at_zero is None:
        return {}
    runs = curves[(curves["method"] == "none") & (curves["lag"] == 0) & (curves["lr"] == at_zero.lr)]
    each = [curve for _, curve in runs.groupby("seed")]
    lags = sorted({cell.lag for cell in chosen})
    return {lag: [accuracy_after(curve, lag, steps) for curve in each] for lag in lags}


def short(task: str) -> str:
    """The name of a preset without what all of them end with."""
    return task.removesuffix("_lag")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def with_interval(values: Sequence[float]) -> str:
    """Mean and half of its 95 % interval, in %."""
    half = interval(values)
    return percent(statistics.mean(values)) + ("" if math.isnan(half) else f" ± {100 * half:.1f}")


def share(hits: int, runs: int) -> str:
    """So many of so many, and the exact 95 % interval."""
    low, high = share_interval(hits, runs, "exact")
    return f"{hits} of {runs} ({100 * low:.0f} to {100 * high:.0f} %)"


def _contrast(row: Contrast) -> list[str]:
    if math.isnan(row.corrected):
        return [percent(row.accuracy), "-", "-", "-", share(row.collapsed, row.runs)]
    p = "< 0.001" if row.corrected < 0.001 else f"{row.corrected:.3f}"
    return [percent(row.accuracy), points(row.difference), p, row.verdict, share(row.collapsed, row.runs)]


def points(found: Difference) -> str:
    """A difference and its 95 % interval, in points."""
    return f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def at_lags(lags: Sequence[int]) -> str:
    return f"k = {', '.join(map(str, lags))}"
