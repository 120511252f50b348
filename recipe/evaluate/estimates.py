"""Scored answers, and estimates of pass@k, with an interval, from samples of each problem."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959963984540054  # two-sided 95 %


@dataclass(frozen=True)
class Answer:
    """One response to one problem."""

    problem: int
    data_source: str
    response: str
    score: float
    correct: float
    """The reward's `acc`; the score if the reward has no `acc`."""


@dataclass(frozen=True)
class Interval:
    """A share of problems, and the 95 % interval around it."""

    estimate: float
    low: float
    high: float


def pass_at(k: int, samples: int, correct: int) -> float:
    """Return the probability that one of k of the samples, drawn without replacement, is correct.

    The unbiased estimator of pass@k for a problem (arXiv 2107.03374): 1 - C(n-c, k) / C(n, k).

    Raises:
        ValueError: k is larger than the number of samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs {k} samples of each problem, not {samples}")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def interval(shares: Sequence[float], samples: int = 1) -> Interval:
    """Return the mean of a share per problem, with a Wilson interval at the effective number of trials.

    Samples of one problem resemble each other, so N problems with n samples each are fewer than N n trials. The number
    of trials is p (1 - p) / (s^2 / N), with s^2 the variance between problems (Kish's effective sample size), at least
    N and at most N n. The interval is inside [0, 1], and has a width also where no problem, or each, is solved.

    Args:
        shares: one value in [0, 1] for each of N problems.
        samples: n, the number of samples in a problem's value.

    Raises:
        ValueError: there is no problem.
    """
    count = len(shares)
    if not count:
        raise ValueError("an interval needs at least one problem")
    mean = sum(shares) / count
    variance = sum((share - mean) ** 2 for share in shares) / max(1, count - 1)
    trials = float(count * samples)
    if variance > 0:
        trials = min(trials, max(float(count), mean * (1 - mean) * count / variance))
    elif mean in (0.0, 1.0):
        trials = float(count)
    middle = (mean + _Z**2 / (2 * trials)) / (1 + _Z**2 / trials)
    half = _Z / (1 + _Z**2 / trials) * math.sqrt(mean * (1 - mean) / trials + _Z**2 / (4 * trials**2))
    return Interval(mean, min(mean, max(0.0, middle - half)), max(mean, min(1.0, middle + half)))


def powers_of_two(samples: int) -> list[int]:
    """Return the k for which pass@k is reported: 1, 2, 4, ... up to `samples`, and `samples`."""
    return sorted({2**i for i in range(samples.bit_length())} | {samples})
