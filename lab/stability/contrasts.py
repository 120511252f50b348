"""Each method against one reference, `vcpo_ess`: one planned difference per method, corrected for their number."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lab.stability.cells import Cell, by_method, over
from lab.stability.inference import LEVEL, Difference, holm, welch

LARGE_LAG = 64
"""There are two planned contrasts: one over the lags from here on, one over the smaller ones."""
REFERENCES = ("vcpo_ess", "vcpo")
"""What methods are compared with: the first one that was run."""
SAME = "cannot be told apart"


@dataclass(frozen=True)
class Contrast:
    """A method against the reference."""

    method: str
    by_seed: dict[int, float]
    """Accuracy, a mean over the cells that are compared."""
    runs: int
    collapsed: int
    """Of the runs in these cells."""
    difference: Difference
    """To the reference; 0 for the reference itself."""
    corrected: float
    """p after Holm's correction; NaN where there was no test."""

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.by_seed.values())

    @property
    def verdict(self) -> str:
        if math.isnan(self.corrected):
            return "-"
        if self.corrected >= 1 - LEVEL:
            return SAME
        return "better" if self.difference.mean > 0 else "worse"


@dataclass(frozen=True)
class Comparison:
    """All methods at one group of lags."""

    lags: Sequence[int]
    contrasts: list[Contrast]
    """Each method at the rate chosen for its lag."""
    robustness: list[Contrast]
    """The mean over the rates; nothing where there is one."""


def reference(cells: Sequence[Cell]) -> str | None:
    """The reference among the methods of these cells."""
    methods = {cell.method for cell in cells}
    return next((name for name in REFERENCES if name in methods), None)


def lag_groups(cells: Sequence[Cell]) -> list[list[int]]:
    """The reference's lags from `LARGE_LAG` on, and its smaller ones above 0; each group only where it has a lag."""
    lags = sorted({cell.lag for cell in cells if cell.method == reference(cells) and cell.lag})
    groups = [lag for lag in lags if lag >= LARGE_LAG], [lag for lag in lags if lag < LARGE_LAG]
    return [group for group in groups if group]


def comparisons(cells: Sequence[Cell], chosen: Sequence[Cell]) -> list[Comparison]:
    """The large lags first.

    Args:
        cells: at all rates.
        chosen: one cell per method and lag.
    """
    return [Comparison(lags, planned(chosen, lags), over_rates(cells, lags)) for lags in lag_groups(chosen)]


def planned(chosen: Sequence[Cell], lags: Sequence[int]) -> list[Contrast]:
    """The planned contrasts: a run's accuracy at the method's rate for its lag, per seed the mean over these lags.

    Args:
        chosen: one cell per method and lag.
        lags: a group of `lag_groups`.
    """
    compared = {
        method: [at[lag] for lag in lags] for method, at in by_method(chosen).items() if all(lag in at for lag in lags)
    }
    return _contrasts(compared, reference(chosen))


def over_rates(cells: Sequence[Cell], lags: Sequence[int]) -> list[Contrast]:
    """Robustness to the learning rate: per seed the mean over all rates, at those lags where the reference has several.

    Methods that were not run in all of the reference's cells are left out.
    """
    of: dict[str, dict[tuple[int, float], Cell]] = {}
    for cell in cells:
        if cell.lag in lags:
            of.setdefault(cell.method, {})[cell.lag, cell.lr] = cell
    against = reference(cells)
    each = [lag for lag, _ in of.get(against or "", {})]
    places = [place for place in of.get(against or "", {}) if each.count(place[0]) > 1]
    compared = {
        method: [at[place] for place in places] for method, at in of.items() if all(place in at for place in places)
    }
    return _contrasts(compared, against) if places else []


def _contrasts(compared: dict[str, list[Cell]], against: str | None) -> list[Contrast]:
    """The best first."""
    samples = {method: found for method, cells in compared.items() if (found := over(cells))}
    if against not in samples:
        return []
    yardstick = list(samples[against].values())
    differences = {
        method: welch(list(sample.values()), yardstick) for method, sample in samples.items() if method != against
    }
    corrected = dict(zip(differences, holm([found.p for found in differences.values()]), strict=True))
    nothing = Difference(0.0, math.nan, math.nan, math.nan)
    rows = [
        Contrast(
            method=method,
            by_seed=sample,
            runs=sum(len(cell.runs) for cell in compared[method]),
            collapsed=sum(len(cell.collapse_steps) for cell in compared[method]),
            difference=differences.get(method, nothing),
            corrected=corrected.get(method, math.nan),
        )
        for method, sample in samples.items()
    ]
    return sorted(rows, key=lambda row: row.accuracy, reverse=True)
