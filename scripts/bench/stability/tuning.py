"""The learning rate of each method, from runs at several rates."""

import math
import statistics

import pandas as pd

from recipe.lag_simulator.analysis import outcome
from scripts.bench.stability.tables import Finals


def tuning_results(curves: pd.DataFrame, steps: int) -> Finals:
    finals: Finals = {}
    for (method, lr, _), curve in curves.groupby(["method", "lr", "seed"], sort=False):
        at = finals.setdefault(str(method), {}).setdefault(float(lr), [])
        at.append(outcome(curve, steps).final_accuracy)
    return finals


def choose(finals: Finals) -> dict[str, float]:
    """Per method the smallest learning rate that is not worse than the best one beyond chance.

    Beyond chance: by more than the standard error of the difference of the two means (the one-standard-error rule of L.
    Breiman et al., "Classification and Regression Trees", 1984), from the variance between the seeds at each rate,
    pooled over the methods, because two seeds alone say little about it.
    """
    variance = {
        lr: statistics.mean(
            statistics.variance(of[lr]) / len(of[lr]) if len(of[lr]) > 1 else 0 for of in finals.values()
        )
        for lr in next(iter(finals.values()))
    }
    chosen = {}
    for method, of in finals.items():
        means = {lr: statistics.mean(values) for lr, values in of.items()}
        best = max(means, key=means.__getitem__)
        chosen[method] = min(
            lr for lr in means if means[best] - means[lr] <= math.sqrt(variance[best] + variance[lr]) or lr == best
        )
    return chosen
