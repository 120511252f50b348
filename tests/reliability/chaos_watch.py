"""A watch on the runs of an hour of chaos: their lines of steps, their processes, and the files these have open.

The watch uses JSON, /proc and psutil, and nothing of the product. It copies a step's line before the file is spoilt.
"""

import contextlib
import json
import os
import re
import stat
import threading
import time
from pathlib import Path
from typing import Any

import psutil

MARK = "VCPO_CHAOS"
"""The variable that all processes of the runs inherit; its value marks this hour."""
LEDGER = "ledger.jsonl"
_POLL_S, _LOOK_S = 0.3, 2.0
_PRIVATE = re.compile(r"vcpo-\d+|ray")


def processes_with(mark: str) -> set[psutil.Process]:
    """Return the processes that inherited `mark`, and their children: a title can overwrite an environment."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # a process that has ended since, or another user's
            if process.environ().get(MARK) == mark:
                found |= {process, *process.children(recursive=True)}
    return {process for process in found if _is_up(process)}


def _is_up(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def title(process: psutil.Process) -> str:
    """Return the command line; '' for a process that has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def shared_memory_of(process: psutil.Process) -> set[int]:
    """Return the inodes of a process's files in /dev/shm: a semaphore is mapped under another name."""
    found = set()
    with contextlib.suppress(OSError):  # the process has ended meanwhile
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line:
                found.add(int(line.split(maxsplit=5)[4]))
        for descriptor in os.scandir(f"/proc/{process.pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(descriptor.path).startswith("/dev/shm/"):
                    found.add(os.stat(descriptor.path).st_ino)
    return found


def json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file that are JSON objects with a number `step`; [] without a file."""
    lines = []
    for raw in file.read_bytes().split(b"\n")[:-1] if file.is_file() else []:
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


class Watch:
    """Threads that copy each new line of `metrics` to the ledger, and note processes and shared memory.

    Args:
        folder: the folder of the ledger.
        metrics: the runs' file of metrics.
        mark: the value of `MARK` in the runs' environment.
    """

    def __init__(self, folder: Path, metrics: Path, mark: str) -> None:
        self.last_step = self.last_launch = 0
        """The step, and its launch, of the newest line in the ledger."""
        self.shared_memory: set[int] = set()
        self.processes: set[psutil.Process] = set()
        self._ledger, self._metrics, self._mark = folder / LEDGER, metrics, mark
        self._launch, self._resumed_from = 0, 0
        self._seen: dict[int, str] = {}
        self._saved_by: dict[int, int] = {}
        self._over, self._lock = threading.Event(), threading.Lock()
        for look, pause in ((self.copy_lines, _POLL_S), (self._look_at_processes, _LOOK_S)):
            threading.Thread(target=self._repeat, args=(look, pause), daemon=True).start()

    def begin(self, launch: int, resumed_from: int | None) -> None:
        """Note that a launch begins, which goes on after this step; None: from the first step."""
        with self._lock:
            self._launch, self._resumed_from = launch, resumed_from or 0

    def stop(self) -> None:
        self._over.set()

    def _repeat(self, look: Any, pause: float) -> None:
        while not self._over.wait(pause):
            look()

    def _look_at_processes(self) -> None:
        up = processes_with(self._mark)
        self.processes |= up
        for process in up:
            self.shared_memory |= shared_memory_of(process)

    def forget(self) -> None:
        """Forget the processes and the shared memory of a launch that has ended."""
        self.processes.clear()
        self.shared_memory.clear()

    def copy_lines(self) -> None:
        """Append the new lines of the file of metrics to the ledger.

        A step's line may be written by the launch after the one that saved the step: the line belongs to the latter.
        """
        with self._lock:
            new = []
            for folder in self._metrics.parent.glob("checkpoints/global_step_*"):
                step = int(folder.name.rpartition("_")[2])
                if step > self._resumed_from:
                    self._saved_by[step] = self._launch
            for line in json_lines(self._metrics):
                step = line["step"]
                kept = {
                    "step": step,
                    "rows": line.get("trained_rows"),
                    "lag": line.get("lag_max"),
                    "reward": line.get("reward"),
                    "calls": line.get("tool_use/calls", 0),
                    "filtered": line.get("training/filter_groups/evicted_samples", 0),
                }
                text = json.dumps(kept)
                if self._seen.get(step) != text:
                    self._seen[step] = text
                    launch = self._launch if step > self._resumed_from else self._saved_by.get(step, self._launch)
                    new.append({**kept, "launch": launch, "at": time.monotonic()})
                    self.last_step, self.last_launch = step, launch
            if new:
                with open(self._ledger, "a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in new)


def left_over(watch: Watch, mark: str, temporary: Path, grace_s: float) -> dict[str, list[str]]:
    """Give the processes with `mark`, and those that `watch` saw, `grace_s` to end, and return what they have left.

    Returns:
        processes, shared memory, semaphores, and sockets, folders and files in `temporary`, by these names.
    """
    deadline = time.monotonic() + grace_s
    while (up := processes_with(mark) | set(filter(_is_up, set(watch.processes)))) and time.monotonic() < deadline:
        time.sleep(0.5)
    in_memory = sorted(file.name for file in os.scandir("/dev/shm") if file.inode() in watch.shared_memory)
    sockets, folders, files = [], [], []
    for path in temporary.rglob("*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if stat.S_ISSOCK(path.lstat().st_mode):
                sockets.append(str(path))
            elif path.is_dir() and _is_of_a_run(path, temporary):
                folders.append(str(path))
            elif path.is_file() and path.parent == temporary:
                files.append(str(path))
    return {
        "processes": [f"{process.pid} {title(process)[:100]}" for process in up],
        "shared memory": [name for name in in_memory if not name.startswith("sem.")],
        "semaphores": [name for name in in_memory if name.startswith("sem.")],
        "sockets": sorted(sockets),
        "folders": sorted(folders),
        "files": sorted(files),
    }


def _is_of_a_run(folder: Path, temporary: Path) -> bool:
    """Return True unless runs share the folder: the private vcpo-UID, Ray's in there, a link, or a cache of torch."""
    shared = folder.is_symlink() or folder.name == "ray" or folder.name.startswith(("vcpo-", "torchinductor_"))
    return not shared and (folder.parent == temporary or bool(_PRIVATE.fullmatch(folder.parent.name)))
