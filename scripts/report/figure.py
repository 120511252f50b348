"""The paper's figure: accuracy and the three predictors of collapse over the steps; accuracy over the lag."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scripts.report.runs import ReportedRun
from vcpo.diagnostics import AlarmLevels
from verl_vcpo.common.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ALARM = AlarmLevels()
_DECADES = 4
"""Of a logarithmic axis, at most. While rollouts are of the current policy, KL is rounding error, 1e-13."""


class _Panel(NamedTuple):
    metric: str
    title: str
    logarithmic: bool
    level: float | None = None
    """Of the collapse alarm."""


# In reading order. Accuracy is drawn by itself.
PANELS = (
    _Panel("ess_ratio", "Effective sample size / batch size", False, _ALARM.ess_ratio),
    _Panel("grad_norm", "Gradient norm", True),
    _Panel("kl", "KL(rollout || policy) per token, nats", True, _ALARM.kl),
)


def draw(runs: list[ReportedRun], path: Path) -> Path:
    """Write the figure; with several lags, one panel shows the accuracy over the lag."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sweep = len({run.lag for run in runs}) > 1
    legend_rows = math.ceil(len(runs) / _LEGEND_COLUMNS)
    size = (16 if sweep else 11, 7 + 0.25 * legend_rows)
    with matplotlib.rc_context(_STYLE):
        figure = plt.figure(figsize=size, layout="constrained")
        panels = figure.subplots(2, 3 if sweep else 2)
        curves = panels[:, :2]
        palette = _palette(len(runs))
        _accuracy(curves[0, 0], runs, palette)
        for axis, panel in zip(curves.flat[1:], PANELS, strict=True):
            _draw_panel(axis, runs, palette, panel)
        last = max(run.steps for run in runs) or 1
        for axis in curves.flat:
            axis.set_xlim(-0.01 * last, 1.01 * last)
            axis.set_xlabel("optimizer step")
        if sweep:
            _sweep(panels[0, 2], runs, palette)
            panels[1, 2].axis("off")
        handles, labels = curves[0, 0].get_legend_handles_labels()
        columns = min(_LEGEND_COLUMNS, len(labels))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        figure.suptitle(_title(runs))
        with whole_file(path) as partial:
            figure.savefig(partial, dpi=120, format="png", metadata={"Software": None})
        plt.close(figure)
    return path


_LEGEND_COLUMNS = 4
_BESIDE: dict[str, Any] = {"linestyle": "--", "linewidth": 1.2, "marker": "D", "markersize": 3.5}
_STYLE = {"axes.grid": True, "grid.alpha": 0.3, "axes.formatter.min_exponent": 3}


def _palette(runs: int) -> list[Any]:
    import matplotlib.pyplot as plt

    if runs > 10:
        return [plt.colormaps["viridis"](i / (runs - 1)) for i in range(runs)]
    return [plt.colormaps["tab10"](i) for i in range(runs)]


def _title(runs: list[ReportedRun]) -> str:
    if len(runs) > 1:
        return ", ".join(dict.fromkeys(run.task for run in runs))
    (run,) = runs
    realised = [value for value in run.series("lag_max")[1] if value == value]
    largest = f" (largest realised: {max(realised):g})" if realised else ""
    return f"{run.method}, policy lag bounded by k = {run.lag:g}{largest}"


def _accuracy(axis: "Axes", runs: list[ReportedRun], palette: list[Any]) -> None:
    from matplotlib.ticker import PercentFormatter

    for run, colour in zip(runs, palette, strict=True):
        alone = len(runs) == 1
        if alone:
            axis.plot(*run.series("reward"), color="0.75", linewidth=1, label="reward of the batches, sampled")
        steps, accuracies = [step for step, _ in run.own_accuracies], [accuracy for _, accuracy in run.own_accuracies]
        label = "held out" if alone else run.label + ("" if run.finished else " (unfinished)")
        axis.plot(steps, accuracies, marker="o", markersize=4, color=colour, label=label)
        if beside := run.beside:
            axis.plot(
                *zip(*beside, strict=True),
                **_BESIDE,
                color=colour,
                label="held out, evaluated beside" if alone else None,
            )
        if alone and run.base_accuracy is not None:
            axis.axhline(run.base_accuracy, color=colour, linestyle=":", linewidth=1, label="held out, before RL")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_ylim(bottom=-0.005)
    dashed = len(runs) > 1 and any(run.evaluations for run in runs)
    axis.set_title("Accuracy (dashed: evaluated beside the run)" if dashed else "Accuracy")


def _draw_panel(axis: "Axes", runs: list[ReportedRun], palette: list[Any], panel: _Panel) -> None:
    values: list[float] = []
    for run, colour in zip(runs, palette, strict=True):
        steps, of_run = run.series(panel.metric)
        axis.plot(steps, of_run, color=colour, linewidth=1)
        values += [value for value in of_run if math.isfinite(value)]
    if panel.level is not None:
        axis.axhline(panel.level, color="tab:red", linestyle="--", linewidth=1)
        axis.annotate(
            "alarm", (1, panel.level), xycoords=("axes fraction", "data"), xytext=(-4, 2), textcoords="offset points",
            ha="right", color="tab:red", fontsize=8,
        )  # fmt: skip
    if not panel.logarithmic:
        axis.set_ylim(0, 1.05)
    elif any(value > 0 for value in values):
        axis.set_yscale("log")
        axis.set_ylim(*_limits(values, panel.level))
        _plain_ticks(axis)
    axis.set_title(panel.title)


def _limits(values: list[float], level: float | None) -> tuple[float, float]:
    """(bottom, top) of a logarithmic axis: whole decades, as many below the largest value as mean something."""
    positive = sorted(value for value in values if value > 0)
    top = max(positive[-1], level or 0.0)
    bottom = max(positive[len(positive) // 20], positive[-1] / 10**_DECADES)
    return 10 ** math.floor(math.log10(bottom)), 10 ** math.ceil(math.log10(top * 1.01))


def _plain_ticks(axis: "Axes") -> None:
    """Labels at decades only: 0.1, not 10^-1, where that is short."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _sweep(axis: "Axes", runs: list[ReportedRun], palette: list[Any]) -> None:
    """Accuracy at the end over the lag bound, a line per method and task."""
    from matplotlib.ticker import PercentFormatter

    measured = [run for run in runs if run.accuracy is not None]
    for key in dict.fromkeys((run.task, run.method) for run in measured):
        points = sorted((run.lag, run.accuracy) for run in measured if (run.task, run.method) == key)
        axis.plot(*zip(*points, strict=True), color="0.8", linewidth=1, zorder=0)
    for run, colour in zip(runs, palette, strict=True):
        if run.accuracy is not None:
            axis.scatter([run.lag], [run.accuracy], color=colour)
    axis.set_xscale("symlog", base=2, linthresh=1)
    lags = sorted({run.lag for run in runs})
    axis.set_xticks(lags, [f"{lag:g}" for lag in lags])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_title("Accuracy at the end")
    axis.set_xlabel("lag bound k, policy updates")
