"""What a process of a run does first."""

import os
import subprocess
import sys
from pathlib import Path

from tests.kit import ROOT
from verl_vcpo.common.run_id import RUN_ID_VARIABLE

PROGRAM = """
import multiprocessing.util
from verl_vcpo.common import run_folder, start_up

def place(queue):
    queue.put(multiprocessing.util.get_temp_dir())

if __name__ == "__main__":
    start_up.set_up_worker()
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    context.Process(target=place, args=(queue,)).start()
    here = str(run_folder.socket_folder())
    assert multiprocessing.util.get_temp_dir() == here == queue.get(), here
"""


def test_sockets_of_multiprocessing_are_in_the_folder_of_the_run(tmp_path: Path) -> None:
    """A process that is killed removes no folder of its own making."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path), RUN_ID_VARIABLE: "0123456789ab"}
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_command_that_starts_no_run_leaves_no_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "recipe.fully_async_policy.main", "hardware=cpu", "--print-config"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=120)
    assert not list(tmp_path.rglob("*"))
