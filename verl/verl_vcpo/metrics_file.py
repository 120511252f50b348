"""The file of a run's metrics, for what reads it: without torch, which the writer (run_log.py) imports."""

import json
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, oldest first, without a last line that a crash has cut off."""
    lines = []
    for line in (Path(run_dir) / METRICS_FILE).read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            lines.append(json.loads(line))
    return lines
