"""Checkpoints that are whole or absent: written in a staging folder, sealed with checksums of all files, then renamed.

<root>/.partial/global_step_5/...    while it is written
<root>/global_step_5/manifest.json   size and CRC-32 of every file: whole
<root>/latest_checkpointed_iteration.txt  verl's pointer to the newest, written last
"""

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from verl_vcpo.console import print_line
from verl_vcpo.whole_file import write_whole

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"  # verl/utils/checkpoint/checkpoint_manager.py
_STAGING = ".partial"
_CHUNK = 1 << 24


def choose(trainer: DictConfig) -> None:
    """Make verl load a whole checkpoint, by `trainer.resume_mode` and `trainer.resume_from_path`.

    `resume_mode=auto` takes the newest whole checkpoint, and starts anew where there is none.

    Raises:
        RuntimeError: the checkpoint that `resume_mode=resume_path` names is damaged.
    """
    if trainer.resume_mode == "auto":
        folder, complaints = newest_whole(Path(trainer.default_local_dir))
        for line in complaints:
            print_line(line)
        trainer.resume_mode = "disable" if folder is None else "resume_path"
        trainer.resume_from_path = None if folder is None else str(folder.absolute())
    elif trainer.resume_mode == "resume_path":
        wrong = damage(Path(trainer.resume_from_path))
        if wrong:
            raise RuntimeError(f"trainer.resume_from_path={trainer.resume_from_path}: {wrong}; give a whole checkpoint")


@contextlib.contextmanager
def written_whole(trainer: DictConfig, step: int) -> Iterator[Path]:
    """In the block verl writes the checkpoint of `step` into the staging folder; the end of the block publishes it.

    Yields:
        the checkpoint's folder, as long as it is being written.

    Raises:
        RuntimeError: the checkpoint was not written, and why.
    """
    root, keep = Path(trainer.default_local_dir), trainer.get("max_actor_ckpt_to_keep")
    trainer.default_local_dir, trainer.max_actor_ckpt_to_keep = str(staging(root)), None
    try:
        yield root / _STAGING / f"global_step_{step}"
        publish(root, step)
    except Exception as error:
        raise RuntimeError(why_not_written(root, step, error)) from error
    finally:
        trainer.default_local_dir, trainer.max_actor_ckpt_to_keep = str(root), keep
    prune(root, keep)


def staging(root: Path) -> Path:
    """An empty folder to write a checkpoint into; files that a crash has left there are removed."""
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
    shutil.rmtree(final, ignore_errors=True)  # an earlier run's checkpoint of the same step
    os.replace(staged, final)
    write_whole(root / TRACKER, str(step))
    shutil.rmtree(root / _STAGING, ignore_errors=True)
    return final


def why_not_written(root: Path, step: int, error: Exception) -> str:
    """One line for a checkpoint that could not be written, with the free space: a full disk has many error messages."""
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


def damage(folder: Path, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint, in a few words; None if it is whole.

    Args:
        contents: read every file; otherwise compare sizes, which takes no time.
    """
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
        if contents and _crc(file) != crc:
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
