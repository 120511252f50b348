"""The paper's tables beside ours, and the figure of accuracy over time.

**The speed-up** of a run is how many times fewer hours it takes than the synchronous run of the same seed until its
held-out accuracy is that at which the synchronous run ended. Both times are the first ones, on straight lines between
evaluations. A run that never gets there has no speed-up: the cell is empty, the table says so, and nothing is
extrapolated. There is none either where the synchronous run ended no higher than it began. The table has the speed-up
of the mean curves, which a lucky evaluation of one run moves less: of the seeds that both methods have on one device,
and how many of them got there. A task whose runs are of several devices has a table for each.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.paper_tables.rows import MEASURED, Point, curve_of
from lab.paper_tables.tasks import BEFORE, NONE, PAPER, SYNCHRONOUS, TASKS, VCPO, Published
from lab.stability.contrasts import visible
from lab.stability.figures import new_figure, save
from lab.stability.inference import paired, pairs_by_seed
from lab.stability.tables import Table, p_value

CASE = ["method", "lag"]
Cases = Mapping[tuple[str, float], pd.DataFrame]
"""Of one table, by method and lag: a row for each seed."""
_COLOURS = {SYNCHRONOUS: "0.3", VCPO: "C1", NONE: "C0"}


def hours_to(curve: Sequence[Point], accuracy: float) -> float | None:
    """Return the hours until the curve first has the accuracy; None: never. 0 where it begins there."""
    before: Point | None = None
    for point in curve:
        if point.accuracy >= accuracy:
            if before is None:
                return point.hours
            share = (accuracy - before.accuracy) / (point.accuracy - before.accuracy)
            return before.hours + share * (point.hours - before.hours)
        before = point
    return None


def speed_up(curve: Sequence[Point], synchronous: Sequence[Point]) -> float | None:
    """Return how many times fewer hours than `synchronous` a run takes to the accuracy at which that ended.

    None: it never gets there, or the synchronous run learned nothing.
    """
    if not curve or not synchronous or (end := synchronous[-1].accuracy) <= synchronous[0].accuracy:
        return None
    theirs, ours = hours_to(synchronous, end), hours_to(curve, end)
    return theirs / ours if theirs and ours else None


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean hours and accuracy at each step at which all runs were evaluated."""
    at = [{point.step: point for point in curve} for curve in curves]
    steps = sorted(set[int].intersection(*(set(points) for points in at))) if at else []
    of = [[points[step] for points in at] for step in steps]
    return [Point(p[0].step, sum(x.hours for x in p) / len(p), sum(x.accuracy for x in p) / len(p)) for p in of]


def with_speed_ups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the column `speed_up`, by the synchronous run of the same task, device and seed."""
    curves = [curve_of(text) for text in rows["curve"]]
    keys = list(zip(rows["task"], rows["device"], rows["seed"], strict=True))
    named = zip(keys, rows["method"], curves, strict=True)
    synchronous = {key: curve for key, method, curve in named if method == SYNCHRONOUS and not pd.isna(key[-1])}
    found = [speed_up(curve, synchronous.get(key, [])) for key, curve in zip(keys, curves, strict=True)]
    return rows.assign(speed_up=[None if value is None else round(value, 3) for value in found])


def tables(rows: pd.DataFrame) -> list[Table]:
    """Return a table for each task and device, the differences in accuracy, and what the runs did meanwhile."""
    found = {name: dict(list(at.groupby(CASE))) for name, at in _by_table(rows).items()}
    return [*(_task(name, cases) for name, cases in found.items()), _differences(found), _meanwhile(found)]


def _by_table(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By task; where a task's runs are of several devices, by both: hours of two devices are not compared."""
    several = rows.groupby("task")["device"].nunique() > 1
    pairs = rows.groupby(["task", "device"], sort=False)
    return {f"{task}, {device}" if several[task] else str(task): at for (task, device), at in pairs}


def _named(case: tuple[str, float]) -> str:
    return case[0] if case[0] == SYNCHRONOUS else f"{case[0]}, lag {case[1]:g}"


def _task(name: str, cases: Cases) -> Table:
    task = next(iter(cases.values()))["task"].iloc[0]
    ours, paper = TASKS.get(task), PAPER.get(TASKS[task].paper if task in TASKS else task, {})
    curves = {case: of.dropna(subset="seed").set_index("seed")["curve"].map(curve_of) for case, of in cases.items()}
    synchronous = next((of for case, of in curves.items() if case[0] == SYNCHRONOUS), None)
    before = _percent(pd.Series([pd.concat([of["accuracy_before"] for of in cases.values()]).mean()]))
    lines = [[BEFORE, *_published(paper, BEFORE), before, *"0---"]]
    for case, of in sorted(cases.items(), key=lambda item: (item[0][0] != SYNCHRONOUS, item[0][1])):
        beside = SYNCHRONOUS if case[0] == SYNCHRONOUS else VCPO if case[0].startswith("vcpo") else ""
        if ours and case not in ours.cases[:2]:
            beside = ""
        steps = f"{of['steps'].mean():g}{'' if of['finished'].all() else ', unfinished'}"
        shown = [_percent(of["accuracy_after"]), steps, f"{of['hours'].mean():.3f}", "-", "-"]
        if synchronous is not None and case[0] != SYNCHRONOUS:
            shown[3:] = _faster(curves[case].to_dict(), synchronous.to_dict())
        lines.append([_named(case), *_published(paper, beside), *shown])
    columns = ["here", "paper's row", "accuracy", "steps", "GPU h", "speed-up"]
    columns += ["accuracy here, %", "steps here", "hours here", "speed-up here", "seeds of both that got there"]
    return Table(f"{name}, beside the paper's {ours.paper}" if ours and ours.paper else name, columns, lines)


def _faster(curves: Mapping[int, list[Point]], synchronous: Mapping[int, list[Point]]) -> list[str]:
    """The speed-up of the mean curves over the seeds that both have, and how many of these have one of their own."""
    pairs = [(curves[seed], synchronous[seed]) for seed in sorted(curves.keys() & synchronous.keys())]
    ours, theirs = mean_curve([pair[0] for pair in pairs]), mean_curve([pair[1] for pair in pairs])
    if not ours or not theirs:
        return ["-", "-"]
    seeds = f"{sum(speed_up(*pair) is not None for pair in pairs)} of {len(pairs)}"
    if theirs[-1].accuracy <= theirs[0].accuracy:
        return ["nothing learned", seeds]
    if hours_to(ours, theirs[-1].accuracy) is None:
        return ["not reached", seeds]
    faster = speed_up(ours, theirs)
    return ["-" if faster is None else f"{faster:.2f}", seeds]


def _published(paper: Mapping[str, Published], row: str) -> list[str]:
    if row not in paper:
        return ["-"] * 5
    name, accuracy, steps, hours = paper[row]
    if not hours:
        return [name, f"{accuracy:.1f}", "0", "-", "-"]
    return [name, f"{accuracy:.1f}", str(steps), f"{hours:g}", f"{paper[SYNCHRONOUS].hours / hours:.2f}"]


def _percent(values: "pd.Series[float]") -> str:
    """The mean, and in brackets each run's."""
    each = [f"{100 * value:.1f}" for value in values.dropna()]
    more = f" ({', '.join(each)})" if len(each) > 1 else ""
    return f"{100 * values.mean():.1f}{more}" if each else "-"


def _shown(value: float, how: str) -> str:
    return "-" if math.isnan(value) else format(value, how)


def _differences(found: Mapping[str, Cases]) -> Table:
    lines = []
    for task, cases in found.items():
        ends = {case: of.dropna(subset="seed").set_index("seed")["accuracy_after"] * 100 for case, of in cases.items()}
        for case, less in itertools.permutations(ends, 2):
            sample = pairs_by_seed(ends[case].to_dict(), ends[less].to_dict())
            wanted = less[0] == SYNCHRONOUS or (case[0] == VCPO and less == (NONE, case[1]))
            if wanted and sample[0]:
                test = paired(*sample)
                points = [_shown(value, "+.1f") for value in (test.mean, test.low, test.high)]
                tests = [p_value(test.p), _shown(visible(*sample), ".1f")]
                lines.append([task, _named(case), _named(less), str(len(sample[0])), *points, *tests])
    columns = ["task", "method", "less", "seeds", "points", "from", "to", "p", "seen with a power of 80 %"]
    return Table("Accuracy at the end, paired by seed", columns, lines)


def _meanwhile(found: Mapping[str, Cases]) -> Table:
    lines = []
    for task, cases in found.items():
        for case, of in cases.items():
            means = [(3600 * of["hours"] / of["steps"]).mean(), *(of[name].astype(float).mean() for name in MEASURED)]
            lines.append([task, _named(case), *(_shown(value, ".2f") for value in means)])
    of_tools = ["void turns, last tenth of the steps", "calls a response, last tenth of the steps"]
    columns = ["task", "method", "seconds a step", *of_tools, "ESS ratio", "trainer idle", "samplers idle"]
    return Table("Meanwhile, shares and means", columns, lines)


def draw(rows: pd.DataFrame, file: Path) -> Path:
    """Draw accuracy over time, a panel for each table: all runs thin, the mean of each method and lag thick."""
    panels = _by_table(rows)
    figure, axes = new_figure(1, len(panels), figsize=(5.5 * len(panels), 4.2))
    for axis, (name, of) in zip(axes[0], panels.items(), strict=True):
        _panel(axis, of)
        axis.set_title(name, loc="left")
    axes[0, 0].set_ylabel("held-out accuracy, %")
    return save(figure, file)


def _panel(axis: Any, rows: pd.DataFrame) -> None:
    lags = sorted({*rows["lag"]} - {0})
    unit, factor = ("minutes", 60) if rows["hours"].max() < 2 else ("hours", 1)
    for case, of in rows.groupby(CASE):
        style = {"color": _COLOURS.get(case[0], "C2"), "linestyle": "--" if case[1] in lags[1:] else "-"}
        curves = [curve_of(text) for text in of["curve"]]
        for curve, width, label in [*((one, 0.6, None) for one in curves), (mean_curve(curves), 2.2, _named(case))]:
            accuracies = [100 * point.accuracy for point in curve]
            axis.plot([factor * point.hours for point in curve], accuracies, linewidth=width, label=label, **style)
            if label == SYNCHRONOUS and curve:
                axis.axhline(accuracies[-1], linewidth=0.8, **style)
    axis.set_xlabel(f"{unit} of training")
    axis.legend(frameon=False, fontsize="small")
