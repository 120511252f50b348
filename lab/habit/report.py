"""The runs as tables: what each method reaches, and paired tests, corrected for all tests."""

import math

import pandas as pd

from lab.stability.contrasts import visible
from lab.stability.inference import holm, paired, pairs_by_seed
from lab.stability.tables import Table
from lab.stability.tuning import CELL, at_better_rate

METHODS = ("none", "topr", "tis_seq", "vcpo_ess", "vcpo_minibatch", "vcpo", "vcpo_published", "vcpo_half_mean")
REFERENCE = "vcpo_ess"
"""The method that the others are compared with."""
LAGS, RATES, SEEDS, STEPS = (8, 64), (1e-4, 3e-4), (31, 32, 33), 300


def tables(runs: pd.DataFrame) -> list[Table]:
    """Return the accuracies, what each method reaches at its better rate, and the tests with their power."""
    best = at_better_rate(runs)
    return [_overview(best), _accuracies(best, runs), _tests(best)]


def _overview(best: pd.DataFrame) -> Table:
    """Return a row for each task and lag, and a column for each method."""
    methods = [method for method in METHODS if method in set(best["method"])]
    rows = []
    for (task, lag), of in best.groupby(["task", "lag"], sort=False):
        means = of.groupby("method")["accuracy"].mean()
        shown = [f"{100 * means[method]:.1f}" if method in means else "" for method in methods]
        rows.append([f"`{task}`", str(lag), str(of["seed"].nunique()), *shown])
    return Table("Accuracy after step k, %", ["task", "lag", "seeds", *(f"`{name}`" for name in methods)], rows)


def _accuracies(best: pd.DataFrame, runs: pd.DataFrame) -> Table:
    rows = []
    for (task, lag, method), of in best.groupby(CELL, sort=False):
        every = runs[(runs["task"] == task) & (runs["lag"] == lag) & (runs["method"] == method)]
        collapsed = f"{every['collapse_step'].notna().sum()} of {len(every)}"
        shown = [f"{100 * of[name].mean():.1f}" for name in ("accuracy", "end", "last_greedy", "last_pass")]
        above = f"{(of['end'] > of['first_greedy']).sum()} of {len(of)}"
        level = f"{of['level'].mean():+.2f}" if of["level"].notna().all() else "-"
        spread = f"{of['spread'].mean():.1f}" if "spread" in of and of["spread"].notna().all() else "-"
        shown += [above, level, spread, collapsed]
        rows.append([f"`{task}`", str(lag), f"`{method}`", f"{of['lr'].iloc[0]:g}", *shown])
    columns = ["task", "lag", "method", "rate", "accuracy", "last tenth", "greedy", "one of 8 right"]
    columns += ["above first greedy", "level", "spread of log-weights", "collapsed, all rates"]
    first = (
        runs.drop_duplicates(["task", "seed"]).groupby("task", sort=False)[["first_greedy", "first_accuracy"]].mean()
    )
    before = ", ".join(f"{task} {100 * row.iloc[0]:.1f} and {100 * row.iloc[1]:.1f}" for task, row in first.iterrows())
    return Table(f"At the better rate, %; first policies, greedy and drawn: {before}", columns, rows)


def _tests(best: pd.DataFrame) -> Table:
    found = []
    for (task, lag), of in best.groupby(["task", "lag"], sort=False):
        by_method = {
            method: rows.set_index("seed")["accuracy"].to_dict() for method, rows in of.groupby("method", sort=False)
        }
        if REFERENCE not in by_method:
            continue
        for method, accuracy in by_method.items():
            pair = pairs_by_seed(accuracy, by_method[REFERENCE])
            if method != REFERENCE and len(pair[0]) > 1:
                found.append((task, lag, method, len(pair[0]), paired(*pair), visible(*pair)))
    corrected = holm([test.p for *_, test, _ in found])
    rows = [
        [f"`{task}`", str(lag), f"`{method}`", str(pairs)]
        + ["-" if math.isnan(value) else f"{100 * value:+.1f}" for value in (test.mean, test.low, test.high)]
        + ["-" if math.isnan(value) else f"{value:.2g}" for value in (test.p, p)]
        + ["-" if math.isnan(seen) else f"{100 * seen:.1f}"]
        for (task, lag, method, pairs, test, seen), p in zip(found, corrected, strict=True)
    ]
    columns = ["task", "lag", "method", "pairs", "points", "from", "to", "p", "p (Holm)"]
    columns.append("points seen with a power of 80 %")
    return Table(f"Accuracy less that of {REFERENCE}, paired by seed, which has its own first policy", columns, rows)
