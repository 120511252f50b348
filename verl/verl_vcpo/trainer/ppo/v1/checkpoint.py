"""Checkpoints that are whole or absent: written aside, sealed with a checksum of every file, then renamed.

<root>/.partial/global_step_5/...    while it is written
<root>/global_step_5/manifest.json   size and CRC-32 of every file: whole
<root>/latest_checkpointed_iteration.txt  verl's pointer to the newest, written last
"""

import json
import os
import re
import shutil
import zlib
from pathlib import Path

from verl_vcpo.whole_file import write_whole

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"  # verl/utils/checkpoint/checkpoint_manager.py
_STAGING = ".partial"
_CHUNK = 1 << 24


def staging(root: Path) -> Path:
    """An empty folder for the checkpoint that is being written; what a crash left in it is removed."""
    folder = root / _STAGING
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(root: Path, step: int) -> Path:
    """Seal the staged checkpoint of `step`, move it into place and point verl's tracker to it.

    A crash at any point leaves either no checkpoint of this step or a whole one.
    """
    staged = root / _STAGING / f"global_step_{step}"
    entries = {str(file.relative_to(staged)): [file.stat().st_size, _crc(file)] for file in _files(staged)}
    write_whole(staged / MANIFEST, json.dumps(entries, indent=1))
    final = root / staged.name
    shutil.rmtree(final, ignore_errors=True)  # of an earlier run that this one repeats
    os.replace(staged, final)
    write_whole(root / TRACKER, str(step))
    shutil.rmtree(root / _STAGING, ignore_errors=True)
    return final


def why_not_written(root: Path, step: int, error: Exception) -> str:
    """One line for a checkpoint that could not be written. A full disk has many faces; the space left has one."""
    free_mb = shutil.disk_usage(root).free / 1e6
    reason = (str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__])[-1]
    return (
        f"the checkpoint of step {step} was not written; trainer.default_local_dir={root} has {free_mb:.0f} MB free "
        f"({reason.strip()})"
    )


def prune(root: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints; None keeps all."""
    for folder in checkpoints(root)[keep:] if keep else []:
        shutil.rmtree(folder, ignore_errors=True)


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = [(int(m[1]), path) for path in root.glob("global_step_*") if (m := re.fullmatch(r"\D+(\d+)", path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; None if it is whole. Reads every file."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return f"{MANIFEST} is missing or unreadable"
    for name, (size, crc) in entries.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
        if _crc(file) != crc:
            return f"{name} has changed since it was written"
    return None


def newest_whole(root: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and a line for each newer one that is damaged."""
    complaints: list[str] = []
    for folder in checkpoints(root):
        wrong = damage(folder)
        if wrong is None:
            return folder, complaints
        complaints.append(f"checkpoint {folder} is damaged ({wrong}): trying the one before it")
    return None, complaints


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _crc(file: Path) -> int:
    crc = 0
    with open(file, "rb") as f:
        while chunk := f.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
