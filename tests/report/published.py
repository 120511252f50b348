"""The quickstart's figures and the table on the README: `python -m tests.report.published RUN...`, of several seeds.

docs/quickstart/ then holds what the figures are drawn from, the first run of each method, and a line for each run.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.image import imread
from omegaconf import OmegaConf

from scripts.report import figure
from scripts.report.runs import ReportedRun, read_run
from verl_vcpo.report.run_log import ANSWERS, CONFIG_FILE, HEADLINES, METRICS_FILE, SUMMARY_FILE, read_metrics

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDER, FIGURE, ACCURACY = DOCS / "quickstart", DOCS / "quickstart.png", DOCS / "accuracy.png"
SEEDS = FOLDER / "seeds.csv"
_OF_SUMMARY = ("method", "lag", "steps", "base_accuracy", "final_accuracy", "wall_clock_s")
_SETTINGS = (
    "method",
    "async.lag",
    "vcpo.enable",
    "vcpo.baseline",
    "vcpo.step_size_rule",
    "vcpo.opob_scope",
    "data.val_files",
    "trainer.device",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_training_steps",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.n_gpus_per_node",
    "actor_rollout_ref.rollout.val_kwargs.temperature",
)


def published() -> list[ReportedRun]:
    """The runs of the figure."""
    return [read_run(folder) for folder in sorted(FOLDER.iterdir()) if folder.is_dir()]


def published_seeds() -> list[dict[str, str]]:
    """A row for each run: method, seed, steps, lag, base_accuracy, final_accuracy, wall_clock_s."""
    with open(SEEDS, newline="") as file:
        return list(csv.DictReader(file))


def publish(runs: list[Path]) -> None:
    """Take what the figure and the table need of runs that are over, and draw the figure."""
    rows: list[dict[str, str]] = []
    for run in runs:
        summary = json.loads((run / SUMMARY_FILE).read_text())
        if summary["method"] not in {row["method"] for row in rows}:
            _take(run, FOLDER / summary["method"])
        seed = OmegaConf.load(run / CONFIG_FILE).data.seed
        rows.append({"seed": seed} | {name: summary[name] for name in _OF_SUMMARY})
    with open(SEEDS, "w", newline="") as file:
        table = csv.DictWriter(file, ["seed", *_OF_SUMMARY], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    figure.draw(published(), FIGURE)
    draw_accuracy(ACCURACY)


_LABELS = {"none": "without a correction", "vcpo_capped": "VCPO"}


def draw_accuracy(path: Path) -> Path:
    """Draw the README's figure: the accuracy of the first runs, and the range over all runs at the last step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    for run in published():
        known = [(line["step"], 100 * line["val_accuracy"]) for line in run.lines if line["val_accuracy"] is not None]
        steps, accuracies = zip(*known, strict=True)
        (curve,) = axis.plot(steps, accuracies, marker="o", linewidth=2)
        ends = [100 * float(row["final_accuracy"]) for row in published_seeds() if row["method"] == run.method]
        last = steps[-1] + 2
        axis.vlines(last, min(ends), max(ends), color=curve.get_color(), linewidth=6, alpha=0.4)
        axis.text(last + 1, sum(ends) / len(ends), _LABELS[run.method], color=curve.get_color(), va="center")
    axis.set(title="Rollouts that are 16 updates old", xlabel="optimizer step", ylabel="accuracy on Countdown, %")
    axis.set(xlim=(-1, 103), ylim=(0, 50), xticks=range(0, 81, 20))
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    drawn.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(drawn)
    return path


def _take(run: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("step", "wall_clock_s", "val_accuracy", ANSWERS, *HEADLINES)
    lines = [{name: line[name] for name in names if name in line} for line in read_metrics(run)]
    (folder / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / SUMMARY_FILE).write_text((run / SUMMARY_FILE).read_text())
    given, kept = OmegaConf.load(run / CONFIG_FILE), OmegaConf.create()
    for name in _SETTINGS:
        OmegaConf.update(kept, name, OmegaConf.select(given, name))
    (folder / CONFIG_FILE).write_text(OmegaConf.to_yaml(kept))


def difference(one: Path, other: Path) -> float:
    """The share of pixels in which two pictures differ by more than the rounding of a colour; 1 for unlike sizes."""
    pictures = [imread(path) for path in (one, other)]
    if pictures[0].shape != pictures[1].shape:
        return 1.0
    return float(np.mean(np.abs(pictures[0] - pictures[1]).max(axis=-1) > 0.02))


if __name__ == "__main__":
    publish([Path(folder) for folder in sys.argv[1:]])
