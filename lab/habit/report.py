"""The runs as tables: what each method reaches, and paired tests, corrected for all tests."""

import math

import pandas as pd

from lab.stability.contrasts import visible
from lab.stability.inference import holm, paired
from lab.stability.tables import Table

METHODS = ("none", "topr", "tis_seq", "vcpo_ess", "vcpo_minibatch", "vcpo", "vcpo_published", "half_mean")
REFERENCE = "vcpo_ess"
"""The method that the others are compared with."""
LAGS, RATES, SEEDS, STEPS = (8, 64), (1e-4, 3e-4), (31,), 300
_RUN = ["policy", "seed"]
"""Runs that share both are a pair: they begin with the same policy, and see the same prompts."""


def tables(runs: pd.DataFrame) -> list[Table]:
    """Return the tables of a task's methods at their better rate, and that of the tests with their power."""
    best = _at_best_rate(runs)
    return [_accuracies(best), _tests(best)]


def _at_best_rate(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of each task, lag and method at the rate with the highest mean accuracy."""
    cell = ["task", "lag", "method"]
    means = runs.groupby([*cell, "lr"], sort=False)["accuracy"].mean().reset_index()
    chosen = means.loc[means.groupby(cell, sort=False)["accuracy"].idxmax(), [*cell, "lr"]]
    return runs.merge(chosen, on=[*cell, "lr"])


def _accuracies(best: pd.DataFrame) -> Table:
    rows = []
    for (task, lag, method), of in best.groupby(["task", "lag", "method"], sort=False):
        row = [f"`{task}`", str(lag), f"`{method}`", f"{of['lr'].iloc[0]:g}", str(len(of))]
        row += [f"{100 * of[name].mean():.1f}" for name in ("start", "accuracy", "end", "last_greedy", "last_pass")]
        row += [f"{of['level'].mean():+.2f}" if of["level"].notna().all() else "-"]
        rows.append([*row, f"{of['collapse_step'].notna().sum()}"])
    columns = ["task", "lag", "method", "rate", "runs", "first policy", "accuracy", "last tenth", "greedy"]
    return Table("At the better rate, %", [*columns, "one of 8 right", "level", "collapsed"], rows)


def _tests(best: pd.DataFrame) -> Table:
    found = []
    for (task, lag), of in best.groupby(["task", "lag"], sort=False):
        by_method = {method: rows.set_index(_RUN)["accuracy"] for method, rows in of.groupby("method", sort=False)}
        if REFERENCE not in by_method:
            continue
        for method, accuracy in by_method.items():
            both = accuracy.index.intersection(by_method[REFERENCE].index)
            if method != REFERENCE and len(both) > 1:
                pair = [list(values.loc[both]) for values in (accuracy, by_method[REFERENCE])]
                found.append((task, lag, method, len(both), paired(*pair), visible(*pair)))
    corrected = holm([test.p for *_, test, _ in found])
    rows = [
        [
            *(f"`{task}`", str(lag), f"`{method}`", str(pairs)),
            *(f"{100 * value:+.1f}" for value in (test.mean, test.low, test.high)),
            "-" if math.isnan(p) else f"{p:.2g}",
            f"{100 * seen:.1f}",
        ]
        for (task, lag, method, pairs, test, seen), p in zip(found, corrected, strict=True)
    ]
    columns = ["task", "lag", "method", "pairs", "points", "from", "to", "p (Holm)", "points seen with a power of 80 %"]
    return Table(f"Accuracy less that of {REFERENCE}, paired by first policy and seed", columns, rows)
