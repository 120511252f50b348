"""The runs of one method at one lag and one learning rate, summed up."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from lab.simulator.analysis import RunOutcome, outcome

RUN = ["method", "lag", "lr", "seed"]
"""The columns that name a run."""


@dataclass(frozen=True)
class Cell:
    """One method at one lag and one learning rate."""

    method: str
    lag: int
    lr: float
    runs: dict[int, RunOutcome]
    """By seed."""

    @property
    def accuracies(self) -> list[float]:
        """Of each run, the mean of the evaluations after step `lag`."""
        return [run.accuracy for run in self.runs.values()]

    @property
    def accuracy(self) -> float:
        """Mean over the seeds."""
        return statistics.mean(self.accuracies)

    def lasts(self, name: str) -> list[float]:
        """Return what was measured of the last policies under a name of `LAST`."""
        return [run.last[name] for run in self.runs.values() if name in run.last]

    @property
    def shift(self) -> float:
        """OPOB's baseline less the mean reward, over all steps and runs; NaN for a method without such a baseline."""
        return statistics.mean(run.shift for run in self.runs.values())

    @property
    def collapse_steps(self) -> list[int]:
        """Of the runs that collapsed."""
        return [run.collapse_step for run in self.runs.values() if run.collapse_step is not None]


def summarise(curves: pd.DataFrame, steps: int) -> list[Cell]:
    """One cell per method, lag and learning rate.

    Args:
        curves: steps of runs, one below the other.
        steps: what each run was meant to make.
    """
    cells: dict[tuple[str, int, float], dict[int, RunOutcome]] = {}
    for (method, lag, lr, seed), curve in curves.groupby(RUN, sort=False):
        runs = cells.setdefault((str(method), int(lag), float(lr)), {})
        runs[int(seed)] = outcome(curve, steps, int(lag))
    return [Cell(*name, runs) for name, runs in cells.items()]


def by_method(cells: Iterable[Cell]) -> dict[str, dict[int, Cell]]:
    """Cells of one learning rate for each method and lag, by method and lag."""
    of: dict[str, dict[int, Cell]] = {}
    for cell in cells:
        of.setdefault(cell.method, {})[cell.lag] = cell
    return of


def over(cells: Iterable[Cell]) -> dict[int, float]:
    """The mean accuracy over cells of each seed that was run in all of them, by seed; nothing for no cell."""
    of = [{seed: run.accuracy for seed, run in cell.runs.items()} for cell in cells]
    seeds = set[int].intersection(*map(set, of)) if of else set()
    return {seed: statistics.mean(accuracy[seed] for accuracy in of) for seed in sorted(seeds)}


def pooled_deviation(samples: Iterable[list[float]]) -> float:
    """The standard deviation within samples, of those with more than one value; NaN where there is none."""
    known = [values for values in samples if len(values) > 1]
    if not known:
        return math.nan
    squares = sum((len(values) - 1) * statistics.variance(values) for values in known)
    return math.sqrt(squares / sum(len(values) - 1 for values in known))
