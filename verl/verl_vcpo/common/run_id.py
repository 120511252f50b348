"""The ids of a run: one id that all processes of a launch share, and one that all launches of a run share."""

import re
from pathlib import Path

RUN_ID_VARIABLE = "VCPO_RUN_ID"
"""The environment variable with the id of a launch: every process of the launch inherits it."""

RUN_ID_FILE = "run_id.txt"
"""The file in the run's folder with the id of the launch that began the run; later launches of the run keep it."""


def run_in(run_dir: str | Path) -> str | None:
    """Return the id of the run in a folder; None where the folder has no valid id."""
    file = Path(run_dir, RUN_ID_FILE)
    text = file.read_text(errors="replace").strip() if file.is_file() else ""
    return text if re.fullmatch("[0-9a-f]{12}", text) else None
