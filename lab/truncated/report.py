"""The runs as tables and a figure: where each case ends, which collapse, and paired tests, corrected for all tests."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lab.simulator.analysis import accuracy_after, collapse_step
from lab.stability.contrasts import visible
from lab.stability.figures import new_figure, save
from lab.stability.inference import holm, paired, pairs_by_seed
from lab.stability.tables import Table

TIGHT, WIDE = 48, 256
"""Limits of a response in tokens: one that growing responses reach soon, and one that they reach late."""
STEPS, END = 200, 50
"""The steps of a run, and how many of the last ones have the evaluations that are compared."""


@dataclass(frozen=True)
class Case:
    """A limit in tokens, `async.truncated`, a method and a lag."""

    limit: int
    truncated: str
    method: str
    lag: int = 8

    def __str__(self) -> str:
        return f"{self.method}, lag {self.lag}, limit {self.limit}, {self.truncated}"


_NONE, _VCPO = (Case(TIGHT, "train", method) for method in ("none", "vcpo"))
_FRESH, _TIS = Case(TIGHT, "train", "none", lag=0), Case(TIGHT, "train", "tis_seq")
_TREATED = [Case(TIGHT, how, method) for method in ("none", "vcpo") for how in ("mask", "drop", "penalty")]
_WIDE = Case(WIDE, "train", "none")
CASES = [_FRESH, _NONE, _TIS, _VCPO, *_TREATED, _WIDE]
CONTRASTS = [
    (_FRESH, _NONE),
    (_WIDE, _NONE),
    (_TIS, _NONE),
    (_VCPO, _NONE),
    *((case, _NONE if case.method == "none" else _VCPO) for case in _TREATED),
]
"""A case, and the case that it is compared with."""
DRAWN = {_FRESH: "none, lag 0", _NONE: "none, lag 8", _WIDE: f"none, lag 8, limit {WIDE}", _VCPO: "vcpo, lag 8"}


def tables(runs: pd.DataFrame) -> list[Table]:
    """Return the table of cases, and the table of paired tests with their power."""
    of = {case: _curves(runs, case) for case in CASES}
    there = [case for case in CASES if of[case]]
    ends = {case: {seed: _end(curve) for seed, curve in of[case].items()} for case in there}
    rows = []
    for case in there:
        curves = list(of[case].values())
        lost = sum(collapse_step(curve) is not None for curve in curves)
        last = [curve[curve["step"] > STEPS - END] for curve in curves]
        rows.append(
            [
                *(f"`{case.method}`", str(case.lag), str(case.limit), f"`{case.truncated}`"),
                f"{100 * statistics.mean(ends[case].values()):.1f}",
                f"{lost} of {len(curves)}",
                f"{statistics.mean(rows['response_length'].mean() for rows in last):.0f}",
                f"{100 * statistics.mean(curve['truncated_share'].max() for curve in curves):.0f}",
            ]
        )
    columns = ["method", "lag", "limit", "`async.truncated`", "accuracy, %", "collapsed", "tokens", "most truncated, %"]
    return [Table(f"Accuracy and length over the last {END} steps", columns, rows), _tests(ends)]


def _curves(runs: pd.DataFrame, case: Case) -> dict[int, pd.DataFrame]:
    """Return the evaluations of each run of a case, by seed."""
    wanted = (
        (runs["limit"] == case.limit)
        & (runs["truncated"] == case.truncated)
        & (runs["method"] == case.method)
        & (runs["lag"] == case.lag)
    )
    return {int(str(seed)): curve for seed, curve in runs[wanted].groupby("seed")}


def _end(curve: pd.DataFrame) -> float:
    return accuracy_after(curve, STEPS - END, STEPS)


def _tests(ends: dict[Case, dict[int, float]]) -> Table:
    found = []
    for case, reference in CONTRASTS:
        if case in ends and reference in ends:
            pair = pairs_by_seed(ends[case], ends[reference])
            found.append((case, reference, paired(*pair), visible(*pair)))
    corrected = holm([test.p for _, _, test, _ in found])
    rows = [
        [
            str(case),
            str(reference),
            *(f"{100 * value:+.1f}" for value in (test.mean, test.low, test.high)),
            "-" if math.isnan(p) else f"{p:.2g}",
            f"{100 * seen:.1f}",
        ]
        for (case, reference, test, seen), p in zip(found, corrected, strict=True)
    ]
    columns = ["case", "less", "points", "from", "to", "p (Holm)", "points seen with a power of 80 %"]
    return Table("Paired differences of the accuracy", columns, rows)


def draw(runs: pd.DataFrame, file: Path) -> Path:
    """Draw accuracy, length and truncated share over the steps: the mean of the seeds, and a thin line for each."""
    names = {
        "val_accuracy": "held-out accuracy",
        "response_length": "mean length, tokens",
        "truncated_share": "share of truncated responses",
    }
    figure, axes = new_figure(1, len(names), figsize=(13.5, 4.2))
    for number, (case, label) in enumerate(DRAWN.items()):
        if not (curves := _curves(runs, case)):
            continue
        for axis, column in zip(axes[0], names, strict=True):
            of_seed = pd.concat([curve.set_index("step")[column] for curve in curves.values()], axis=1)
            axis.plot(of_seed.index, of_seed, color=f"C{number}", linewidth=0.5, alpha=0.4)
            axis.plot(of_seed.index, of_seed.mean(axis=1), color=f"C{number}", linewidth=2, label=label)
    for axis, title in zip(axes[0], names.values(), strict=True):
        axis.set_title(title, loc="left")
        axis.set_xlabel("step")
    axes[0, 0].legend(frameon=False, fontsize="small")
    return save(figure, file)
