"""The ids of a run: what its processes have in common, and what its launches have in common."""

import re
from pathlib import Path

RUN_ID_VARIABLE = "VCPO_RUN_ID"
"""The environment variable with the id of a launch: every process of the launch inherits it."""

RUN_ID_FILE = "run_id.txt"
"""In the run's folder: the id of the launch that began the run. Launches that go on with the run keep the file."""


def run_in(run_dir: str | Path) -> str | None:
    """The id of the run in a folder; None where the folder has none, or what is no id."""
    file = Path(run_dir, RUN_ID_FILE)
    text = file.read_text(errors="replace").strip() if file.is_file() else ""
    return text if re.fullmatch("[0-9a-f]{12}", text) else None
