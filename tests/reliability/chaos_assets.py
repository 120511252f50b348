"""The task of an hour of chaos: numbered rows in the order of their file, and a model that runs a program each time."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.kit import ROOT

ROWS = 20_000
"""More rows than an hour trains on: a row that is trained on twice is a mistake, and never a second epoch."""
TASK = "chaos"
_LESSONS, _LESSON_STEPS = 200, 120
_CONVERSATION = "```python\nprint(6)\n```\nCode execution result: 6\n<answer>6</answer>"


def make_chaos_assets(folder: Path) -> Path:
    """Make `data/{train,val}.parquet` and `model/` in `folder`, by the project's commands."""
    folder.mkdir(parents=True)
    rows = [{"question": f"Number {number:05d}.", "answer": "6"} for number in range(ROWS + 16)]
    _write(folder / "rows.jsonl", rows)
    lessons = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": _CONVERSATION} for row in rows]
    _write(folder / "lessons.jsonl", lessons[:: ROWS // _LESSONS])
    of_rows = ["rows", "--from", f"{folder}/rows.jsonl", "--question", "question", "--answer", "answer"]
    of_model = ["--data", f"{folder}/lessons.jsonl", "--answers", "answer", "--out", f"{folder}/model"]
    of_model += f"--samples 0 --correct-fraction 1 --steps {_LESSON_STEPS} --batch-size 16".split()
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # on a busy machine several threads wait for each other
    for command in (
        ["scripts.prepare_data", *of_rows, "--name", TASK, "--val-fraction", "0.0008", "--out", f"{folder}/data"],
        ["recipe.warm_start.train", *of_model],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, env=one_thread, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-1000:]}")
    return folder


def _write(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def small_disk(folder: Path, megabytes: int) -> bool:
    """Mount a file system at `folder`, which a fault can fill. Return False if this user may not mount one."""
    folder.mkdir()
    size = f"size={megabytes}m"
    return not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True
    ).returncode


def keep_disk(folder: Path) -> None:
    """Copy the files of `small_disk` into an ordinary folder of the same name, and free the memory."""
    if os.path.ismount(folder):
        copy = folder.with_name(f"{folder.name}.kept")
        shutil.copytree(folder, copy, symlinks=True)
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()
        copy.rename(folder)
