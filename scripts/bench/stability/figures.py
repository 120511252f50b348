"""The figures of `python -m scripts.bench.stability`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.bench.stability.tables import by_method, summarise

PANELS = (
    ("val_accuracy", "Accuracy (held out)", False),
    ("ess_ratio", "Effective sample size / batch size", False),
    ("kl", "KL(rollout || policy) per token, nats", True),
    ("grad_norm", "Gradient norm", True),
)
_SMOOTHED = 5
"""Steps over which what is measured at every step is averaged."""


def draw_all(curves: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw what the curves have data for; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Callable[[pd.DataFrame], Any]] = {
        "predictors.png": predictors,
        "lags.png": lags,
        "methods.png": methods,
    }
    return [_save(draw(curves), folder / name) for name, draw in figures.items()]


def predictors(curves: pd.DataFrame) -> Any:
    """Synchronous training against TIS and VCPO at the largest lag: mean over the seeds, and their range."""
    lag = int(curves["lag"].max())
    synchronous = "none" if "none" in set(curves["method"]) else str(curves["method"].iloc[0])
    lines = [(synchronous, 0, "synchronous"), ("tis_seq", lag, f"TIS, lag {lag}"), ("vcpo", lag, f"VCPO, lag {lag}")]
    figure, axes = _figure(2, 2, sharex=True)
    for axis, (name, title, logarithmic) in zip(axes.flat, PANELS, strict=True):
        for method, k, label in lines:
            _draw_line(axis, curves[(curves["method"] == method) & (curves["lag"] == k)], name, label)
        axis.set_title(title)
        if logarithmic:
            _logarithmic(axis, curves[name])
    axes[0, 0].legend(frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("optimizer step")
    return figure


def lags(curves: pd.DataFrame) -> Any:
    """Accuracy over the steps of VCPO (of the only method, where it was not run), a line per lag."""
    method = "vcpo" if "vcpo" in set(curves["method"]) else str(curves["method"].iloc[0])
    figure, axes = _figure(1, 1)
    axis = axes[0, 0]
    for lag, runs in curves[curves["method"] == method].groupby("lag"):
        _draw_line(axis, runs, "val_accuracy", f"k = {lag}")
    axis.set_title(f"{method}: accuracy (held out)")
    axis.set_xlabel("optimizer step")
    axis.legend(frameon=False)
    return figure


def methods(curves: pd.DataFrame) -> Any:
    """Final accuracy, a line per method, the best over the lags on top, and a colour per lag.

    Mean over the seeds and 95 % interval; a cross where runs collapsed; dotted: before training.
    """
    rows = summarise(curves, int(curves["step"].max()))
    lags, order = sorted({row.lag for row in rows}), list(reversed(by_method(rows)))
    figure, axes = _figure(1, 1, figsize=(6.5, 1.5 + 0.26 * len(order)))
    axis = axes[0, 0]
    shades = [f"C{number}" for number in range(len(lags))]
    for row in rows:
        number = lags.index(row.lag)
        y = order.index(row.method) + 0.5 * (0.5 - (number + 0.5) / len(lags))  # a method's lags one below the other
        style = {"color": shades[number], "marker": "x" if row.collapsed else "o", "ms": 5, "elinewidth": 0.8}
        axis.errorbar(row.final_accuracy, y, xerr=row.interval, **style)
    axis.axvline(curves.loc[curves["step"] == 0, "val_accuracy"].mean(), color="0.5", linestyle=":", linewidth=1)
    axis.set_yticks(range(len(order)), order)
    for label in axis.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith("vcpo") else "normal")
    axis.set(xlim=(0, None), ylim=(-0.6, len(order) - 0.4), title="Final accuracy (held out); x: runs collapsed")
    marks = [
        axis.plot([], [], "o", color=shade, label=f"k = {lag}")[0] for shade, lag in zip(shades, lags, strict=True)
    ]
    axis.legend(handles=marks, frameon=False, loc="upper left")
    return figure


def beside(curves: pd.DataFrame, file: Path) -> Path:
    """The curves of scripts.bench.stability_real: a colour per method, one line style per stack."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = _figure(2, 2, sharex=True)
    stacks, names = list(dict.fromkeys(curves["stack"])), list(dict.fromkeys(curves["method"]))
    for axis, (metric, title, logarithmic) in zip(axes.flat, PANELS, strict=True):
        for (method, stack), run in curves.groupby(["method", "stack"], sort=False):
            measured = run.dropna(subset=metric)
            values = measured[metric] if metric == "val_accuracy" else measured[metric].rolling(_SMOOTHED, 1).mean()
            style = {"color": f"C{names.index(method)}", "linestyle": ("--", "-")[stacks.index(stack)]}
            axis.plot(measured["step"], values, label=f"{method}, {stack}", linewidth=1.5, **style)
        axis.set_title(title)
        if logarithmic:
            _logarithmic(axis, curves[metric])
    axes[0, 0].legend(frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("optimizer step")
    return _save(figure, file)


def _figure(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    options = {"figsize": (5.5 * columns + 1, 3.5 * rows + 0.5)} | options
    figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def _logarithmic(axis: Any, values: "pd.Series[float]") -> None:
    """Without what is far below the usual: on policy KL is 0 but for rounding, and so is a dead gradient."""
    axis.set_yscale("log")
    axis.set_ylim(bottom=values.quantile(0.9) / 1000)


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


def _save(figure: Any, file: Path) -> Path:
    import matplotlib.pyplot as plt

    partial = file.with_name(f"{file.name}.partial.png")
    figure.savefig(partial, dpi=110)
    plt.close(figure)
    os.replace(partial, file)
    return file
