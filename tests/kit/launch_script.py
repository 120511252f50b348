"""The commands that a launch script would start."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


def arguments(script: Path, folder: Path, *settings: str, **environment: str) -> list[list[str]]:
    """Return the arguments of every `python` that the script starts; none of these programs runs.

    Args:
        script: a script below shell/vcpo.
        folder: an empty folder, for stand-ins of the programs.
        settings: the script's arguments.
        environment: the script's variables in addition to this process's.
    """
    recorder = folder / "python"
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    recorder.write_text(
        f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]), file=open('{calls}', 'a'))\n"
    )
    recorder.chmod(0o755)
    (folder / "curl").symlink_to(shutil.which("true") or "/bin/true")  # as if a sandbox were up
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, **environment, "PATH": path}
    subprocess.run(["bash", str(script), *settings], check=True, env=variables, timeout=60)
    return [json.loads(line) for line in calls.read_text().splitlines()]
