"""The file of a run's metrics, for its readers: without torch, which the writer (run_log.py) imports."""

from pathlib import Path
from typing import Any

from verl_vcpo.common.step_lines import read_lines

METRICS_FILE = "metrics.jsonl"
SAVE_S = "timing_s/save_checkpoint"
"""The metric with the seconds of a checkpoint, which only lines of steps with a checkpoint have."""


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` that can be read, oldest first."""
    return list(read_lines(Path(run_dir) / METRICS_FILE))
