"""The file of a run's metrics, for what reads it: without torch, which the writer (run_log.py) imports."""

from pathlib import Path
from typing import Any

from verl_vcpo.common.step_lines import read_lines

METRICS_FILE = "metrics.jsonl"
SAVE_S = "timing_s/save_checkpoint"
"""The metric with the seconds of a checkpoint: in the line of a step that wrote one, and in no other."""


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` that can be read, oldest first."""
    return list(read_lines(Path(run_dir) / METRICS_FILE))
