"""What lab.stability found, as tables: on the console, and as markdown."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from scipy import stats

from lab.simulator.analysis import accuracy_after
from lab.stability.cells import Cell, by_method
from lab.stability.contrasts import BEST, SAME, Contrast, Standing, lag_groups, reference, standings
from lab.stability.inference import Difference, share_interval, welch

Found = Mapping[str, Sequence[Contrast]]
"""Contrasts by task."""
SYNCHRONOUS = "synchronous, same steps"


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


def headline(chosen: Sequence[Cell], found: Sequence[Contrast], synchronous: dict[int, list[float]]) -> Table:
    """A line per method, the best at the large lags first: accuracy by lag, and the contrasts with the reference.

    Args:
        chosen: one cell per method and lag.
        found: the contrasts of the task.
        synchronous: by lag, the accuracies of synchronous runs over the steps that a run at this lag is judged by.
    """
    groups, against = lag_groups(chosen), reference(chosen)
    alone = {group[0] for group in groups if len(group) == 1}  # the group has their accuracy
    of, lags = by_method(chosen), sorted({cell.lag for cell in chosen} - alone)
    judged = [{row.method: row for row in standings(chosen, group)} for group in groups]
    tested = [of_group(found, group, against) for group in groups]
    lines = []
    if synchronous and groups:
        each = [percent(statistics.mean(synchronous[lag])) for lag in lags]
        rows = (
            _synchronous(group, synchronous, at.get(against or "")) for group, at in zip(groups, judged, strict=True)
        )
        lines.append([SYNCHRONOUS, *each, *(text for row in rows for text in row)])

    def best(method: str) -> list[float]:
        return [rows[method].accuracy if method in rows else -1.0 for rows in judged]

    for method in sorted(of, key=best, reverse=True):
        cells = [percent(of[method][lag].accuracy) if lag in of[method] else "-" for lag in lags]
        both = zip(judged, tested, strict=True)
        rows = (_against(at.get(method), tests.get(method)) for at, tests in both)
        lines.append([f"`{method}`", *cells, *(text for row in rows for text in row)])
    columns = ["method", *(f"k = {lag}" for lag in lags)]
    for group in groups:
        columns += [at_lags(group), f"less `{against}`", "p (Holm)", f"collapsed, {at_lags(group)}"]
    return Table("Accuracy after step k", columns, lines)


def of_group(found: Sequence[Contrast], lags: Sequence[int], against: str | None) -> dict[str, Contrast]:
    """The contrasts at best rates with one method at a group of lags, by method."""
    at = [one for one in found if one.compared == BEST and list(one.lags) == list(lags)]
    return {one.method: one for one in at if one.against == against}


def _synchronous(lags: Sequence[int], synchronous: dict[int, list[float]], against: Standing | None) -> list[str]:
    """The accuracy of synchronous runs over the steps that a group of lags is judged by, and less the reference's."""
    of_seeds = [statistics.mean(at) for at in zip(*(synchronous[lag] for lag in lags), strict=True)]
    ahead = "-"
    if against and len(of_seeds) > 1 < len(against.by_seed):
        ahead = points(welch(of_seeds, list(against.by_seed.values())))
    return [percent(statistics.mean(of_seeds)), ahead, "-", "-"]


def _against(row: Standing | None, test: Contrast | None) -> list[str]:
    if row is None:
        return ["-"] * 4
    tested = ["-", "-"] if test is None else [points(test.difference), p_value(test.corrected)]
    return [percent(row.accuracy), *tested, share(row.collapsed, row.runs)]


def overview(chosen: Mapping[str, Sequence[Cell]], cells: Mapping[str, Sequence[Cell]], found: Found) -> Table:
    """A line per method: points ahead of the reference on each task and group of lags, and all collapses at all rates.

    Args:
        chosen: by task, one cell per method and lag.
        cells: by task, at all rates.
        found: the contrasts by task.
    """
    places = [(task, group) for task, of in chosen.items() for group in reversed(lag_groups(of))]
    against = {task: reference(of) for task, of in chosen.items()}
    tested = [of_group(found[task], group, against[task]) for task, group in places]
    order = dict.fromkeys(row.method for task, group in places for row in standings(chosen[task], group))
    lines = []
    for method in order:
        of_method = [cell for of in cells.values() for cell in of if cell.method == method and cell.lag]
        collapsed = f"{sum(len(c.collapse_steps) for c in of_method)} of {sum(len(c.runs) for c in of_method)}"
        ahead = ("0" if method == against[task] else "-" for task, _ in places)
        line = [_ahead(at[method]) if method in at else none for at, none in zip(tested, ahead, strict=True)]
        lines.append([f"`{method}`", *line, collapsed])
    columns = [f"{short(task)}, {at_lags(group)}" for task, group in places]
    return Table(
        "Points ahead, at the method's best rates (in brackets: not significantly different)",
        ["method", *columns, "collapsed, all rates"],
        lines,
    )


def _ahead(test: Contrast) -> str:
    """In brackets where the corrected test finds no difference."""
    points_ahead = f"{100 * test.difference.mean:+.1f}"
    return f"({points_ahead})" if test.verdict in (SAME, "-") else points_ahead


def all_contrasts(found: Found) -> pd.DataFrame:
    """A row for each contrast, in points, with its 95 % interval, p before and after Holm's correction, and power."""
    rows = []
    for task, of_task in found.items():
        for one in of_task:
            values = (one.difference.mean, one.difference.low, one.difference.high, one.visible)
            mean, low, high, visible = (round(100 * value, 2) for value in values)
            at = (short(task), one.compared, " ".join(map(str, one.lags)), one.method, one.against, one.seeds or None)
            tests = (float(f"{p:.2g}") for p in (one.difference.p, one.corrected))
            rows.append((*at, mean, low, high, *tests, visible, one.verdict))
    columns = ["task", "compared", "lags", "method", "less", "seeds", "points", "low", "high", "p", "p_holm"]
    return pd.DataFrame(rows, columns=[*columns, "seen_at_power_80", "verdict"]).astype({"seeds": "Int64"})


SHIFTED = ("vcpo", "vcpo_minibatch")
"""Methods whose baseline is OPOB."""


def shifts(cells: Mapping[str, Sequence[Cell]]) -> pd.DataFrame:
    """A row per task, lag, rate and method with OPOB: baseline less mean reward, and points ahead of `vcpo_ess`."""
    rows = []
    for task, of in cells.items():
        plain = {(cell.lag, cell.lr): cell.runs for cell in of if cell.method == "vcpo_ess" and cell.lag}
        for cell in of:
            if cell.method in SHIFTED and (cell.lag, cell.lr) in plain and not math.isnan(cell.shift):
                other = plain[cell.lag, cell.lr]
                gains = [run.accuracy - other[seed].accuracy for seed, run in cell.runs.items() if seed in other]
                rows.append((short(task), cell.method, cell.lag, cell.lr, cell.shift, 100 * statistics.mean(gains)))
    return pd.DataFrame(rows, columns=["task", "method", "lag", "lr", "shift", "gain"])


def shift_table(points: pd.DataFrame) -> Table:
    """How the level of OPOB goes with its gain, over some of the rows of `shifts`."""
    low, countdown = points["lr"] < 3e-4, points["task"] != "sort_digits"
    some = {"all": points, "rates up to 1e-4": points[low], "those, both Countdowns": points[low & countdown]}
    lines = []
    for name, of in some.items():
        signs = [of.loc[of["shift"] > 0, "gain"], of.loc[of["shift"] <= 0, "gain"]]
        gains = [f"{len(g)}: {g.mean():+.1f}, positive in {(g > 0).sum()}" if len(g) else "0" for g in signs]
        lines.append([name, str(len(of)), f"{stats.spearmanr(of['shift'], of['gain']).statistic:.2f}", *gains])
    columns = ["cells", "number", "Spearman", "baseline above the mean: gain", "at or below it: gain"]
    return Table("OPOB's baseline less the mean reward, and points ahead of `vcpo_ess`", columns, lines)


def synchronous_accuracy(curves: pd.DataFrame, chosen: Sequence[Cell], steps: int) -> dict[int, list[float]]:
    """By lag k, the accuracy after step k of each of GRPO's runs at lag 0; nothing where there are none."""
    at_zero = by_method(chosen).get("none", {}).get(0)
    if at_zero is None:
        return {}
    runs = curves[(curves["method"] == "none") & (curves["lag"] == 0) & (curves["lr"] == at_zero.lr)]
    each = [curve for _, curve in runs.groupby("seed")]
    lags = sorted({cell.lag for cell in chosen})
    return {lag: [accuracy_after(curve, lag, steps) for curve in each] for lag in lags}


def short(task: str) -> str:
    """The name of a preset without what all of them end with."""
    return task.removesuffix("_lag")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def share(hits: int, runs: int) -> str:
    """So many of so many, and the exact 95 % interval."""
    low, high = share_interval(hits, runs, "exact")
    return f"{hits} of {runs} ({100 * low:.0f} to {100 * high:.0f} %)"


def p_value(p: float) -> str:
    return "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def points(found: Difference) -> str:
    """A difference and its 95 % interval, in points."""
    return f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def at_lags(lags: Sequence[int]) -> str:
    return f"k = {', '.join(map(str, lags))}"
