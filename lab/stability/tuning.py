"""The learning rate of each method at each lag, from runs at several rates."""

import math
import statistics
from collections.abc import Iterable

from lab.stability.cells import Cell, pooled_deviation

Accuracies = dict[str, dict[float, list[float]]]
"""Per method and learning rate, the accuracy of each run."""


def choose(of: Accuracies) -> dict[str, float]:
    """Per method the smallest learning rate that is not worse than the best one beyond chance.

    Beyond chance: by more than the standard error of the difference of the two means (the one-standard-error rule of L.
    Breiman et al., "Classification and Regression Trees", 1984), from the variance between the seeds at each rate,
    pooled over the methods, because two seeds alone say little about it.
    """
    rates = {lr for at in of.values() for lr in at}
    deviation = {lr: pooled_deviation(at[lr] for at in of.values() if lr in at) for lr in rates}
    variance = {lr: 0.0 if math.isnan(value) else value**2 for lr, value in deviation.items()}
    chosen = {}
    for method, at in of.items():
        means = {lr: statistics.mean(values) for lr, values in at.items()}
        errors = {lr: variance[lr] / len(values) for lr, values in at.items()}
        best = max(means, key=means.__getitem__)
        chosen[method] = min(
            lr for lr in means if means[best] - means[lr] <= math.sqrt(errors[best] + errors[lr]) or lr == best
        )
    return chosen


def chosen_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Per lag and method the cell of the rate that `choose` takes at this lag."""
    of: dict[int, list[Cell]] = {}
    for cell in cells:
        of.setdefault(cell.lag, []).append(cell)
    found = []
    for at in of.values():
        accuracies: Accuracies = {}
        for cell in at:
            accuracies.setdefault(cell.method, {})[cell.lr] = cell.accuracies
        rates = choose(accuracies)
        found += [cell for cell in at if cell.lr == rates[cell.method]]
    return found
