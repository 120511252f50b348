"""The paper's figure: accuracy and the three predictors of collapse over the steps; accuracy over the lag."""

from pathlib import Path
from typing import TYPE_CHECKING

from scripts.report.runs import ReportedRun
from verl_vcpo.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# (metric, title, logarithmic) in reading order. Accuracy is drawn by itself.
PANELS = (
    ("ess_ratio", "Effective sample size / batch size", False),
    ("grad_norm", "Gradient norm", True),
    ("kl", "KL(rollout || policy) per token, nats", True),
)


def draw(runs: list[ReportedRun], path: Path) -> Path:
    """Write the figure; with several lags, one panel shows the accuracy over the lag."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sweep = len({run.lag for run in runs}) > 1
    figure = plt.figure(figsize=(16 if sweep else 11, 7), layout="constrained")
    panels = figure.subplots(2, 3 if sweep else 2)
    curves = panels[:, :2]
    colours = plt.colormaps["viridis" if len(runs) > 10 else "tab10"]
    palette = [colours(i / max(1, len(runs) - 1)) if len(runs) > 10 else colours(i) for i in range(len(runs))]
    _accuracy(curves[0, 0], runs, palette)
    for axis, (name, title, logarithmic) in zip(curves.flat[1:], PANELS, strict=True):
        _panel(axis, runs, palette, name, logarithmic)
        axis.set_title(title)
    for axis in curves[1]:
        axis.set_xlabel("optimizer step")
    if sweep:
        _sweep(panels[0, 2], runs, palette)
        handles, labels = curves[0, 0].get_legend_handles_labels()
        panels[1, 2].axis("off")
        panels[1, 2].legend(handles, labels, loc="center", frameon=False)
    else:
        curves[0, 0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3, frameon=False)
    figure.suptitle(_title(runs))
    with whole_file(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
    plt.close(figure)
    return path


def _title(runs: list[ReportedRun]) -> str:
    if len(runs) > 1:
        return ", ".join(dict.fromkeys(run.task for run in runs))
    (run,) = runs
    realised = [value for value in run.series("lag_max")[1] if value == value]
    largest = f" (largest realised: {max(realised):g})" if realised else ""
    return f"{run.method}, policy lag bounded by k = {run.lag:g}{largest}"


def _accuracy(axis: "Axes", runs: list[ReportedRun], palette: list) -> None:
    from matplotlib.ticker import PercentFormatter

    for run, colour in zip(runs, palette, strict=True):
        alone = len(runs) == 1
        if alone:
            axis.plot(*run.series("reward"), color="0.75", linewidth=1, label="training, sampled")
        steps, accuracies = [step for step, _ in run.accuracies], [accuracy for _, accuracy in run.accuracies]
        label = "held out" if alone else run.label + ("" if run.finished else " (unfinished)")
        axis.plot(steps, accuracies, marker="o", markersize=4, color=colour, label=label)
        if alone and run.base_accuracy is not None:
            axis.axhline(run.base_accuracy, color=colour, linestyle=":", linewidth=1, label="before RL")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_title("Accuracy")
    axis.grid(alpha=0.3)


def _panel(axis: "Axes", runs: list[ReportedRun], palette: list, name: str, logarithmic: bool) -> None:
    positive = False
    for run, colour in zip(runs, palette, strict=True):
        steps, values = run.series(name)
        axis.plot(steps, values, color=colour if len(runs) > 1 else "tab:orange", linewidth=1)
        positive = positive or any(value > 0 for value in values)
    if not logarithmic:
        axis.set_ylim(0, 1.02)
    elif positive:
        axis.set_yscale("log")
    axis.grid(alpha=0.3)


def _sweep(axis: "Axes", runs: list[ReportedRun], palette: list) -> None:
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
    axis.grid(alpha=0.3)
