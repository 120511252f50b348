"""What scripts.bench.stability found, as tables: on the console, and as markdown."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from recipe.lag_simulator.analysis import LAST_SAMPLES, accuracy_after
from scripts.bench.stability.cells import Cell, by_method, pooled_deviation
from scripts.bench.stability.contrasts import Contrast, large_lags, reference
from scripts.bench.stability.inference import (
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


def headline(chosen: Sequence[Cell], contrasts: Sequence[Contrast], synchronous: dict[int, list[float]]) -> Table:
    """A line per method, the best at the large lags first: accuracy by lag, and the planned contrast.

    Args:
        chosen: one cell per method and lag.
        contrasts: the planned ones.
        synchronous: by lag, the accuracies of synchronous runs over the steps that a run at this lag is judged by.
    """
    of, lags, large = by_method(chosen), sorted({cell.lag for cell in chosen}), large_lags(chosen)
    judged = {row.method: row for row in contrasts}
    name = _at(large)
    lines = []
    if synchronous and large:
        of_seeds = [statistics.mean(at) for at in zip(*(synchronous[lag] for lag in large), strict=True)]
        ahead = "-"
        if (against := judged.get(reference(chosen) or "")) and len(of_seeds) > 1 < len(against.by_seed):
            ahead = points(welch(of_seeds, list(against.by_seed.values())))
        each = (percent(statistics.mean(synchronous[lag])) for lag in lags)
        lines.append([SYNCHRONOUS, *each, percent(statistics.mean(of_seeds)), ahead, "-", "-", "-"])
    for method in sorted(of, key=lambda method: judged[method].accuracy if method in judged else -1.0, reverse=True):
        cells = (percent(of[method][lag].accuracy) if lag in of[method] else "-" for lag in lags)
        lines.append([f"`{method}`", *cells, *(_contrast(judged[method]) if method in judged else ["-"] * 5)])
    columns = ["method", *(f"k = {lag}" for lag in lags), name, f"less `{reference(chosen)}`", "p (Holm)", "verdict"]
    return Table("Accuracy after step k", [*columns, f"collapsed, {name}"], lines)


def robustness(contrasts: Sequence[Contrast], cells: Sequence[Cell]) -> Table:
    """A line per method: the mean over the learning rates, and each rate by itself."""
    first = contrasts[0].method
    lags = sorted({cell.lag for cell in cells if cell.lag})
    rates = {lag: sorted(cell.lr for cell in cells if cell.lag == lag and cell.method == first) for lag in lags}
    several = [lag for lag in lags if len(rates[lag]) > 1]
    of = {(cell.method, cell.lag, cell.lr): cell for cell in cells}
    places = [(lag, lr) for lag in several for lr in rates[lag]]
    lines = [
        [f"`{row.method}`", *(percent(of[row.method, lag, lr].accuracy) for lag, lr in places), *_contrast(row)]
        for row in contrasts
    ]
    columns = ["method", *(f"k = {lag}, {lr:g}" for lag, lr in places), "mean", f"less `{reference(cells)}`"]
    return Table("Robustness: the mean over the learning rates", [*columns, "p (Holm)", "verdict", "collapsed"], lines)


def power(cells: Sequence[Cell], contrasts: Sequence[Contrast]) -> Table:
    """How many seeds a method needs for a difference to be seen, from the spread of the runs that did not collapse."""
    steady = [cell for cell in cells if len(cell.runs) > 1 and not cell.collapse_steps]
    samples: list[tuple[str, list[list[float]]]] = []
    for lag in sorted({cell.lag for cell in steady}):
        at = [cell for cell in steady if cell.lag == lag]
        samples.append((f"k = {lag}", [cell.accuracies for cell in at]))
        samples.append((f"k = {lag}, last tenth only", [cell.finals for cell in at]))
    name = f"{_at(large_lags(cells))}: the contrast"
    samples.append((name, [list(row.by_seed.values()) for row in contrasts if not row.collapsed]))
    strict = (1 - LEVEL) / max(sum(not math.isnan(row.corrected) for row in contrasts), 1)
    lines = []
    for name, values in samples:
        deviation = 100 * pooled_deviation(values)
        if not deviation > 0:  # one seed each
            continue
        seen = [visible_difference(deviation, 5, level) for level in (1 - LEVEL, strict)]
        needed = [str(seeds_needed(size, deviation)) for size in _POINTS]
        lines.append([name, f"{deviation:.2f}", *needed, *(f"{size:.1f}" for size in seen)])
    columns = ["", "standard deviation of a run", *(f"seeds for {size}" for size in _POINTS), "5 seeds see"]
    return Table("Power, in points of accuracy", [*columns, "5 seeds see, the strictest of Holm's tests"], lines)


def all_numbers(cells: Iterable[Cell], chosen: Iterable[Cell]) -> Table:
    """Every number of every cell; a star at the learning rate that was chosen. Without columns that no cell has."""
    stars = {(cell.method, cell.lag, cell.lr) for cell in chosen}
    ordered = sorted(cells, key=lambda cell: (cell.lag, cell.method, cell.lr))
    lines = [
        {
            "method": cell.method,
            "lag": str(cell.lag),
            "lr": f"{cell.lr:g}{'*' if (cell.method, cell.lag, cell.lr) in stars else ''}",
            "seeds": str(len(cell.runs)),
            "after step k": with_interval(cell.accuracies),
            "last tenth": with_interval(cell.finals),
            f"last policy, {LAST_SAMPLES} samples": with_interval(cell.lasts) if cell.lasts else "-",
            "best": percent(max(run.best_accuracy for run in cell.runs.values())),
            "collapsed": share(len(cell.collapse_steps), len(cell.runs)),
            "at step": f"{statistics.mean(cell.collapse_steps):.0f}" if cell.collapse_steps else "-",
            "ESS ratio": f"{statistics.mean(run.mean_ess_ratio for run in cell.runs.values()):.3f}",
        }
        for cell in ordered
    ]
    columns = [name for name in lines[0] if any(line[name] != "-" for line in lines)]
    return Table("All numbers", columns, [[line[name] for name in columns] for line in lines])


def synchronous_accuracy(curves: pd.DataFrame, chosen: Sequence[Cell], steps: int) -> dict[int, list[float]]:
    """By lag k, the accuracy after step k of each of GRPO's runs at lag 0; nothing where there are none."""
    at_zero = by_method(chosen).get("none", {}).get(0)
    if at_zero is None:
        return {}
    runs = curves[(curves["method"] == "none") & (curves["lag"] == 0) & (curves["lr"] == at_zero.lr)]
    each = [curve for _, curve in runs.groupby("seed")]
    lags = sorted({cell.lag for cell in chosen})
    return {lag: [accuracy_after(curve, lag, steps) for curve in each] for lag in lags}


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


def _at(lags: Sequence[int]) -> str:
    return f"k = {', '.join(map(str, lags))}"
