"""Show a run: its table on the console, its figure in `<run_dir>/figure.png`.

python -m scripts.report outputs/quickstart
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from verl_vcpo.trainer.ppo.v1.run_log import METRICS_FILE, SUMMARY_FILE, read_metrics

RUN_FILES = (METRICS_FILE, SUMMARY_FILE)

# (metric, title, logarithmic) in reading order. Accuracy is drawn by itself.
PANELS = (
    ("ess_ratio", "Effective sample size / batch size", False),
    ("grad_norm", "Gradient norm", True),
    ("kl", "KL(rollout || policy) per token, nats", True),
)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 2 where the folder holds no finished run."""
    parser = argparse.ArgumentParser(prog="python -m scripts.report", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path, help="a run's folder, with metrics.jsonl and summary.json")
    run_dir = parser.parse_args(argv).run_dir
    missing = [name for name in RUN_FILES if not (run_dir / name).is_file()]
    if missing:
        print(f"error: {run_dir}: no {missing[0]}; give the folder (run_dir) of a finished run", file=sys.stderr)
        return 2

    lines = read_metrics(run_dir)
    summary = json.loads((run_dir / SUMMARY_FILE).read_text())
    figure = draw(lines, summary, run_dir / "figure.png")
    print_table(summary)
    print(f"Figure: {figure}\nNumbers: {run_dir / 'summary.json'}, one line per step in {run_dir / 'metrics.jsonl'}")
    return 0


def draw(lines: list[dict[str, Any]], summary: dict[str, Any], path: Path) -> Path:
    """Accuracy and the three collapse predictors over the steps, written to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    accuracy, *rest = axes.flat
    steps = [line for line in lines if line["reward"] is not None]
    x = [line["step"] for line in steps]
    accuracy.plot(x, [line["reward"] for line in steps], color="0.75", linewidth=1, label="training, sampled")
    held_out = [(line["step"], line["val_accuracy"]) for line in lines if line["val_accuracy"] is not None]
    if held_out:
        accuracy.plot(*zip(*held_out, strict=True), marker="o", color="tab:blue", label="held out, greedy")
        accuracy.axhline(held_out[0][1], color="tab:blue", linestyle=":", linewidth=1, label="before RL")
    accuracy.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    accuracy.set_title("Accuracy")
    accuracy.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3, frameon=False)
    for axis, (name, title, logarithmic) in zip(rest, PANELS, strict=True):
        values = [line[name] for line in steps]
        axis.plot(x, values, color="tab:orange", linewidth=1)
        axis.set_title(title)
        if not logarithmic:
            axis.set_ylim(0, 1.02)
        elif any(value > 0 for value in values):
            axis.set_yscale("log")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("optimizer step")
    figure.suptitle(
        f"VCPO, policy lag bounded by k = {summary['lag']} (largest realised: {summary['max_realized_lag']})"
    )
    partial = path.with_name(f"{path.name}.partial.png")
    figure.savefig(partial, dpi=120)
    plt.close(figure)
    os.replace(partial, path)
    return path


def print_table(summary: dict[str, Any]) -> None:
    """Method, accuracy, steps and hours, before and after."""
    from rich.console import Console
    from rich.table import Table

    hours = summary["wall_clock_s"] / 3600 * (os.cpu_count() or 1)
    table = Table("Method", "Countdown accuracy", "Steps", "CPU hours")
    table.add_row("before RL", _percent(summary["base_accuracy"]), "0", "-")
    table.add_row(
        f"VCPO, lag {summary['lag']}", _percent(summary["final_accuracy"]), str(summary["steps"]), f"{hours:.2f}"
    )
    Console().print(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


if __name__ == "__main__":
    sys.exit(main())
