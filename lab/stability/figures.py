"""The figures of `python -m lab.stability`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lab.stability.cells import Cell, by_method, summarise
from lab.stability.contrasts import REFERENCES
from lab.stability.inference import Difference, paired
from lab.stability.tables import SHIFTED, short
from verl_vcpo.common.whole_file import whole_file

PANELS = (
    ("val_accuracy", "Accuracy (held out)", False),
    ("ess_ratio", "Effective sample size / batch size", False),
    ("kl", "KL(rollout || policy) per token, nats", True),
    ("grad_norm", "Gradient norm", True),
)
_SMOOTHED = 5
"""Steps over which what is measured at every step is averaged."""


class _Line(NamedTuple):
    method: str
    label: str
    color: str


LINES = (
    _Line("tis_seq", "truncated weights (TIS)", "C0"),
    _Line("vcpo", "VCPO", "C1"),
    _Line("vcpo_minibatch", "VCPO, mini-batch baseline", "C5"),
    _Line("topr", "TOPR", "C6"),
)
"""The methods that the figures show, where they were run."""


def draw_all(curves: Mapping[str, pd.DataFrame], shifts: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw what the curves have data for; the files written.

    Args:
        curves: by task, steps of runs at one learning rate per method and lag, one below the other.
        shifts: of `tables.shifts`.
        folder: where to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = next(iter(curves.values()))
    files = [save(predictors(first), folder / "predictors.png")] if "ess_ratio" in first else []
    if all(len(_lags(of)) > 1 for of in curves.values()):
        files.append(save(by_lag(curves), folder / "lags.png"))
    if len(shifts):
        files.append(save(by_shift(shifts), folder / "shift.png"))
    return files


def _lags(curves: pd.DataFrame) -> list[int]:
    """The lags above 0 that the reference was run at."""
    return sorted({int(lag) for lag in curves.loc[curves["method"] == REFERENCES[0], "lag"]} - {0})


def by_lag(curves: Mapping[str, pd.DataFrame]) -> Any:
    """A panel per task: how many points each method is ahead of the reference at each lag, with 95 % intervals."""
    figure, axes = new_figure(1, len(curves), figsize=(5.5 * len(curves), 4.2))
    for axis, (task, of) in zip(axes[0], curves.items(), strict=True):
        _by_lag(axis, of)
        axis.set_title(short(task), loc="left")
    axes[0, 0].set_ylabel("points ahead of VCPO's step size alone")
    figure.suptitle("Held-out problems solved after step k, at lag k", x=0.01, ha="left")
    return figure


def _by_lag(axis: Any, curves: pd.DataFrame) -> None:
    lags = _lags(curves)
    cells = by_method(summarise(curves, int(curves["step"].max())))
    ends: list[tuple[float, _Line]] = [(0.0, _Line(REFERENCES[0], "VCPO, step size only", "0.4"))]
    axis.axhline(0, color="0.4", linewidth=1)
    compared = {method for method, at in cells.items() if set(at) & set(lags)} - {"none", REFERENCES[0]}
    shown = [line for line in LINES if line.method in compared]
    for number, line in enumerate(shown):
        at = [lag for lag in lags if lag in cells[line.method]]
        found = [_ahead(cells[line.method][lag], cells[REFERENCES[0]][lag]) for lag in at]
        places = [lags.index(lag) + 0.08 * (number - (len(shown) - 1) / 2) for lag in at]
        means = [100 * difference.mean for difference in found]
        reach = [100 * (difference.high - difference.mean) for difference in found]
        axis.errorbar(places, means, reach, color=line.color, marker="o", linewidth=1.5, elinewidth=0.8)
        ends.append((means[-1], line))
    axis.set(xlabel="lag k, in policy updates", xlim=(-0.4, len(lags) - 0.6))
    axis.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    _name_lines(axis, ends, len(lags) - 0.6)


def _ahead(cell: Cell, reference: Cell) -> Difference:
    seeds = sorted(set(cell.runs) & set(reference.runs))
    return paired(*([of.runs[seed].accuracy for seed in seeds] for of in (cell, reference)))


def by_shift(shifts: pd.DataFrame) -> Any:
    """A point per cell: OPOB's baseline less the mean reward, and points ahead of VCPO's step size alone."""
    figure, axes = new_figure(1, 2, figsize=(12, 4.6))
    for axis, (high, title) in zip(axes[0], ((False, "learning rates 3e-5 and 1e-4"), (True, "3e-4")), strict=True):
        for line, marker in zip((line for line in LINES if line.method in SHIFTED), "o^", strict=True):
            for color, (task, of) in enumerate(shifts[shifts["method"] == line.method].groupby("task", sort=False)):
                at = of[(of["lr"] > 2e-4) == high]
                label = f"{task}, {line.label}"
                axis.plot(at["shift"], at["gain"], marker, color=f"C{color}", alpha=0.75, label=label)
        axis.axhline(0, color="0.4", linewidth=1)
        axis.axvline(0, color="0.4", linewidth=1)
        axis.set_title(title, loc="left")
        axis.set_xlabel("OPOB's baseline less the mean reward")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0, 0].set_ylabel("points ahead of VCPO's step size alone")
    axes[0, 0].legend(frameon=False, fontsize="small", loc="lower left")
    return figure


def _name_lines(axis: Any, ends: Sequence[tuple[float, _Line]], right: float) -> None:
    """Each line's label beside its end, instead of a legend.

    Args:
        axis: with its limits set.
        ends: the height at which each line ends.
        right: where the axis ends.
    """
    low, high = axis.get_ylim()
    heights = _apart([end for end, _ in sorted(ends)], 0.06 * (high - low))
    for (_, line), height in zip(sorted(ends), heights, strict=True):
        axis.annotate(f" {line.label}", (right, height), color=line.color, va="center", annotation_clip=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Rising heights, moved up and down so that neighbours are `least` apart."""
    moved = list(heights)
    for _ in range(100):
        for i in range(1, len(moved)):
            if (gap := least - (moved[i] - moved[i - 1])) > 0:
                moved[i - 1], moved[i] = moved[i - 1] - gap / 2, moved[i] + gap / 2
    return moved


def predictors(curves: pd.DataFrame) -> Any:
    """Synchronous training against TIS and VCPO at the largest lag: mean over the seeds, and their range."""
    lag = int(curves["lag"].max())
    lines = [("none", 0, "synchronous"), ("tis_seq", lag, f"TIS, lag {lag}"), ("vcpo", lag, f"VCPO, lag {lag}")]
    figure, axes = new_figure(2, 2, sharex=True, figsize=(12, 7.5))
    for axis, (name, title, logarithmic) in zip(axes.flat, PANELS, strict=True):
        for method, k, label in lines:
            _draw_line(axis, curves[(curves["method"] == method) & (curves["lag"] == k)], name, label)
        axis.set_title(title)
        if logarithmic:  # without what is far below the usual: on policy KL is 0 but for rounding
            axis.set_yscale("log")
            axis.set_ylim(bottom=curves[name].quantile(0.9) / 1000)
    axes[0, 0].legend(frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("optimizer step")
    return figure


def new_figure(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def _draw_line(axis: Any, runs: pd.DataFrame, name: str, label: str) -> None:
    """Mean over the seeds, and between the lowest and the highest a shade; nothing where there is no such run."""
    measured = runs.dropna(subset=name)
    if measured.empty:
        return
    table = measured.pivot_table(index="step", columns="seed", values=name)
    if name != "val_accuracy":
        table = table.rolling(_SMOOTHED, min_periods=1).mean()
    (line,) = axis.plot(table.index, table.mean(axis=1), label=label, linewidth=1.5)
    axis.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=line.get_color(), alpha=0.15)


def save(figure: Any, file: Path) -> Path:
    import matplotlib.pyplot as plt

    with whole_file(file) as partial:
        figure.savefig(partial, dpi=110)
    plt.close(figure)
    return file
