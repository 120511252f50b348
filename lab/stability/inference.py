"""Means, differences and shares of a few runs: intervals, tests, and how many runs a test needs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats
from scipy.optimize import brentq

LEVEL = 0.95
POWER = 0.8


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean (Student's t); NaN for a single value."""
    if len(values) < 2:
        return math.nan
    quantile = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)
    return float(quantile * statistics.stdev(values) / math.sqrt(len(values)))


def share_interval(hits: int, runs: int, method: Literal["exact", "wilson"]) -> tuple[float, float]:
    """95 % interval of a share, two-sided: `exact` (Clopper and Pearson, 1934) or `wilson` (Wilson, 1927).

    (0, 1) without a run.
    """
    if not runs:
        return 0.0, 1.0
    found = stats.binomtest(hits, runs).proportion_ci(LEVEL, method)
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class Difference:
    """The mean of one sample less the mean of another."""

    mean: float
    low: float
    high: float
    """95 % interval."""
    p: float
    """Two-sided; NaN where a sample has fewer than two values."""


def welch(sample: Sequence[float], reference: Sequence[float]) -> Difference:
    """Welch's t-test (1947): two samples of unlike variance."""
    mean = statistics.mean(sample) - statistics.mean(reference)
    if min(len(sample), len(reference)) < 2:
        return Difference(mean, math.nan, math.nan, math.nan)
    result = stats.ttest_ind(sample, reference, equal_var=False)
    low, high = result.confidence_interval(LEVEL)
    return Difference(mean, float(low), float(high), float(result.pvalue))


def paired(sample: Sequence[float], reference: Sequence[float]) -> Difference:
    """Student's t-test of the differences of pairs: runs that share a seed share prompts and first answers."""
    differences = [value - other for value, other in zip(sample, reference, strict=True)]
    mean = statistics.mean(differences)
    if len(differences) < 2 or not statistics.stdev(differences):
        return Difference(mean, math.nan, math.nan, math.nan)
    half = interval(differences)
    return Difference(mean, mean - half, mean + half, float(stats.ttest_1samp(differences, 0.0).pvalue))


def pairs_by_seed(sample: Mapping[int, float], reference: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """The values of both samples at the seeds that both have, in the order of the seeds: what `paired` takes."""
    seeds = sorted(sample.keys() & reference.keys())
    return [sample[seed] for seed in seeds], [reference[seed] for seed in seeds]


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm, 1979): below 0.05, the family's chance of one false finding is at most
    5 %. NaN, where there was no test, stays and does not count."""
    tested = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        corrected[i] = largest
    return corrected


def power(difference: float, deviation: float, seeds: int, level: float = 1 - LEVEL) -> float:
    """The chance that a two-sided paired t-test on `seeds` seeds tells methods apart whose means differ so.

    Args:
        difference: of the means.
        deviation: standard deviation of the differences of pairs.
        seeds: at least 2.
        level: the chance of telling equal methods apart.
    """
    freedom, shift = seeds - 1, difference / deviation * math.sqrt(seeds)
    limit = stats.f.ppf(1 - level, 1, freedom)  # t squared is F
    return 1 - float(stats.ncf.cdf(limit, 1, freedom, shift**2))


def visible_difference(deviation: float, seeds: int, level: float = 1 - LEVEL) -> float:
    """The difference that `seeds` seeds tell with a power of 80 %; arguments as of `power`."""
    lacking, enough = 0.0, deviation
    while power(enough, deviation, seeds, level) < POWER:
        lacking, enough = enough, 2 * enough
    return float(brentq(lambda found: power(found, deviation, seeds, level) - POWER, lacking, enough))
