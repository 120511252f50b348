"""Methods against `vcpo_ess`, and some against each other: paired by seed, p corrected for the number of contrasts."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy import stats

from lab.stability.cells import Cell, by_method, over
from lab.stability.inference import LEVEL, Difference, holm, paired, pairs_by_seed, visible_difference

LARGE_LAG = 64
"""Lags are compared in two groups: those from here on, and the smaller ones."""
REFERENCES = ("vcpo_ess", "vcpo")
"""What methods are compared with: the first one that was run."""
PAIRS = (("vcpo_minibatch", "vcpo"), ("topr", "vcpo_minibatch"))
"""Methods that are compared with each other, too."""
SAME = "not significantly different"
BEST, RATES, COLLAPSED = "accuracy at the best rate", "accuracy over the rates with new seeds", "collapsed runs"


@dataclass(frozen=True)
class Standing:
    """A method at a group of lags, at the rate chosen for each."""

    method: str
    by_seed: dict[int, float]
    """Accuracy, a mean over the lags."""
    runs: int
    collapsed: int

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.by_seed.values())


@dataclass(frozen=True)
class Contrast:
    """A method less another."""

    compared: str
    """`BEST`, `RATES` or `COLLAPSED`."""
    lags: Sequence[int]
    method: str
    against: str
    seeds: int
    """Those that both were run with."""
    difference: Difference
    visible: float
    """The difference that one test on so many seeds sees with a power of 80 %; NaN where there is no power to state."""
    corrected: float = math.nan
    """p after Holm's correction over all contrasts of a report; NaN where there was no test."""

    @property
    def verdict(self) -> str:
        if math.isnan(self.corrected):
            return "-"
        if self.corrected >= 1 - LEVEL:
            return SAME
        return "better" if (self.difference.mean > 0) != (self.compared == COLLAPSED) else "worse"


def reference(cells: Sequence[Cell]) -> str | None:
    """The reference among the methods of these cells."""
    methods = {cell.method for cell in cells}
    return next((name for name in REFERENCES if name in methods), None)


def lag_groups(cells: Sequence[Cell]) -> list[list[int]]:
    """The reference's lags from `LARGE_LAG` on, and its smaller ones above 0; each group only where it has a lag."""
    lags = sorted({cell.lag for cell in cells if cell.method == reference(cells) and cell.lag})
    groups = [lag for lag in lags if lag >= LARGE_LAG], [lag for lag in lags if lag < LARGE_LAG]
    return [group for group in groups if group]


def standings(chosen: Sequence[Cell], lags: Sequence[int]) -> list[Standing]:
    """The methods that were run at all of these lags, the best first; `chosen` is one cell per method and lag."""
    found = []
    for method, at in by_method(chosen).items():
        cells = [at[lag] for lag in lags if lag in at]
        if len(cells) == len(lags) and (accuracies := over(cells)):
            collapsed = sum(len(cell.collapse_steps) for cell in cells)
            found.append(Standing(method, accuracies, sum(len(cell.runs) for cell in cells), collapsed))
    return sorted(found, key=lambda row: row.accuracy, reverse=True)


def contrasts(cells: Sequence[Cell], chosen: Sequence[Cell]) -> list[Contrast]:
    """Each pair of one task at each group of lags: at the best rates, and over the rates that have more seeds.

    Args:
        cells: at all rates.
        chosen: one cell per method and lag.
    """
    found = []
    for lags in lag_groups(chosen):
        best = {row.method: row.by_seed for row in standings(chosen, lags)}
        for compared, samples in ((BEST, best), (RATES, over_rates(cells, lags))):
            for method, against in pairs(samples):
                of = pairs_by_seed(samples[method], samples[against])
                if seeds := len(of[0]):
                    found.append(Contrast(compared, lags, method, against, seeds, paired(*of), visible(*of)))
    return found


def over_rates(cells: Sequence[Cell], lags: Sequence[int]) -> dict[str, dict[int, float]]:
    """The mean over the cells with more seeds than others, by method and seed, of methods that have all those seeds."""
    of: dict[str, dict[tuple[int, float], Cell]] = {}
    for cell in cells:
        if cell.lag in lags:
            of.setdefault(cell.method, {})[cell.lag, cell.lr] = cell
    at_all = of.get(reference(cells) or "", {})
    most = max((len(cell.runs) for cell in at_all.values()), default=0)
    places = {place for place, cell in at_all.items() if len(cell.runs) == most}
    if len(places) == len(at_all):
        return {}
    found = {method: over(at[place] for place in places) for method, at in of.items() if places <= set(at)}
    return {method: accuracies for method, accuracies in found.items() if len(accuracies) == most}


def collapses(of_tasks: Sequence[Sequence[Cell]]) -> list[Contrast]:
    """The shares of collapsed runs over all lags above 0 and rates, of methods run on all tasks: Fisher's test."""
    everywhere = set[str].intersection(*({cell.method for cell in cells if cell.lag} for cells in of_tasks))
    cells = [cell for cells in of_tasks for cell in cells if cell.lag and cell.method in everywhere]
    counts: dict[str, tuple[int, int]] = {}
    for cell in cells:
        collapsed, runs = counts.get(cell.method, (0, 0))
        counts[cell.method] = collapsed + len(cell.collapse_steps), runs + len(cell.runs)
    lags, found = sorted({cell.lag for cell in cells}), []
    for method, against in pairs(counts):
        (hits, runs), (other, others) = counts[method], counts[against]
        p = float(stats.fisher_exact([[hits, runs - hits], [other, others - other]]).pvalue)
        difference = Difference(hits / runs - other / others, math.nan, math.nan, p)
        found.append(Contrast(COLLAPSED, lags, method, against, 0, difference, math.nan))
    return found


def pairs(methods: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the pairs (method, against) that are compared among these methods."""
    against = next((name for name in REFERENCES if name in methods), None)
    with_reference = [(method, against) for method in methods if against and method != against]
    return with_reference + [(a, b) for a, b in PAIRS if b != against and {a, b} <= set(methods)]


def corrected(found: Sequence[Contrast]) -> list[Contrast]:
    """The same with Holm's correction for their number."""
    return [replace(one, corrected=p) for one, p in zip(found, holm([c.difference.p for c in found]), strict=True)]


def visible(sample: Sequence[float], against: Sequence[float]) -> float:
    """The difference of pairs that one test sees with a power of 80 %; NaN where all differ alike, or there is one."""
    differences = [value - other for value, other in zip(sample, against, strict=True)]
    if len(differences) < 2 or not (deviation := statistics.stdev(differences)):
        return math.nan
    return visible_difference(deviation, len(differences))
