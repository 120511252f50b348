"""docs/tutorial/vcpo_in_one_file.py, with a fiftieth of its steps."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs/tutorial/vcpo_in_one_file.py"


def test_the_tutorial_runs(tmp_path: Path) -> None:
    """It compares its update with vcpo.estimate at every step."""
    environment = {**os.environ, "SCALE": "0.02", "PYTHONPATH": os.pathsep.join([str(ROOT / "verl"), str(ROOT)])}
    command = [sys.executable, str(TUTORIAL)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if ": accuracy " in line]
    assert len(lines) == 4 and lines[-1].startswith("VCPO, lag 32")
    assert (tmp_path / "outputs/tutorial/vcpo.png").stat().st_size > 10_000
