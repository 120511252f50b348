"""Of the files in shared memory only those go that a run has made and nobody has, also nobody in another container."""

import mmap
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_vcpo.common import shared_memory
from verl_vcpo.common.shared_memory import SharedMemory, mapped_by, remove_unused


@pytest.fixture
def file() -> Iterator[SharedMemory]:
    path = Path(f"{shared_memory.FOLDER}vcpo-test-{uuid.uuid4().hex}")
    path.write_bytes(bytes(4096))
    yield SharedMemory(str(path), path.stat().st_ino)
    path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "access", [mmap.ACCESS_READ, mmap.ACCESS_COPY, mmap.ACCESS_WRITE], ids=["read", "copy", "write"]
)
def test_what_a_process_maps_to_read_it_has_not_made(file: SharedMemory, access: int) -> None:
    with open(file.path, "r+b") as opened, mmap.mmap(opened.fileno(), 4096, access=access):
        assert file in mapped_by([psutil.Process()])
        assert (file in mapped_by([psutil.Process()], to_write=True)) == (access == mmap.ACCESS_WRITE)


CODE = """
import multiprocessing, psutil, torch
from multiprocessing import shared_memory
from verl_vcpo.common.shared_memory import FOLDER, made_by
torch.multiprocessing.set_sharing_strategy("file_system")
made = [
    shared_memory.SharedMemory(create=True, size=1),
    multiprocessing.get_context("spawn").Semaphore(),
    torch.ones(9).share_memory_(),
]
print(*sorted(file.path.removeprefix(FOLDER) for file in made_by([psutil.Process()])))
"""


def test_what_packages_make_is_known_by_its_name() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"psm_\w+ sem\.mp-\w+ torch_\d+_\d+_\d+\n", done.stdout), done


@pytest.mark.parametrize("has", ["opened", "mapped", "nothing"])
def test_who_has_it_need_not_be_in_proc(file: SharedMemory, has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process of another container, which may have the same /dev/shm."""
    had = {
        "opened": "f = open(sys.argv[1], 'rb')",
        "mapped": "with open(sys.argv[1], 'r+b') as f: m = mmap.mmap(f.fileno(), 0)",
    }
    code = f"import mmap, sys\n{had.get(has, '')}\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, file.path], stdin=-1, stdout=-1) as other:
        assert other.stdin and other.stdout and other.stdout.readline()
        monkeypatch.setattr(psutil, "process_iter", lambda: iter(()))
        remove_unused({file}, wait_s=0.0)
        assert os.path.exists(file.path) == (has != "nothing")
        other.stdin.close()


def test_a_file_goes_once_the_kernel_has_ended_who_had_it(file: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a killed process that /proc no longer shows, and whose memory the kernel is still taking away."""
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(()))
    with open(file.path, "rb") as had:
        ending = threading.Timer(0.5, had.close)
        ending.start()
        remove_unused({file})
        assert had.closed and not os.path.exists(file.path)


def test_another_file_of_the_same_name_stays(file: SharedMemory) -> None:
    remove_unused({file._replace(inode=file.inode + 1), SharedMemory(f"{file.path}-gone", 1)})
    assert os.path.exists(file.path)
