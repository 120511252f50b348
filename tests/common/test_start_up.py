"""What a process of a run does first."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.kit import ROOT
from verl_vcpo.common import run_folder, start_up
from verl_vcpo.common.run_id import RUN_ID_VARIABLE

PROGRAM = """
import multiprocessing.util, os, tempfile
from verl_vcpo.common import run_folder, start_up

def place(queue):
    queue.put(multiprocessing.util.get_temp_dir())

if __name__ == "__main__":
    start_up.set_up_worker()
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    context.Process(target=place, args=(queue,)).start()
    here = str(run_folder.socket_folder())
    for place in (multiprocessing.util.get_temp_dir(), queue.get(), tempfile.mkdtemp()):
        assert os.path.dirname(place) == here, (place, here)
"""


def test_temporary_files_and_sockets_of_multiprocessing_are_in_the_folder_of_the_run(tmp_path: Path) -> None:
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


def test_the_launcher_has_its_own_places_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_ID_VARIABLE, "0123456789ab")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    names = ("TMPDIR", "RAY_TMPDIR")
    before = {name: os.environ.get(name) for name in names}
    with start_up.temporary_files_in_run_folder():
        here = Path(tempfile.gettempdir())
        assert here.parent == tmp_path / f"vcpo-{os.getuid()}" and run_folder.socket_folder() == here
    assert {name: os.environ.get(name) for name in names} == before
    assert tempfile.gettempdir() == str(tmp_path)
