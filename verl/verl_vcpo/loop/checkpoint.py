"""Checkpoints that are whole or absent: written in a staging folder, sealed with checksums of all files, then renamed.

<root>/.partial-RUN-X/global_step_5/...  a checkpoint being written: RUN is the run's id, X differs in each folder
<root>/global_step_5/manifest.json       a whole checkpoint: the run's id, size and CRC-32 of every file
<root>/latest_checkpointed_iteration.txt  verl's pointer to the newest checkpoint, written last
"""

import contextlib
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_vcpo.common import held_folders
from verl_vcpo.common.console import print_line
from verl_vcpo.common.disk import why_not_written
from verl_vcpo.common.whole_file import all_on_disk, free_beside, write_whole
from verl_vcpo.loop.processes.long_work import telling

MANIFEST = "manifest.json"
NAME = re.compile(r"global_step_\d+")
"""The name of a checkpoint's folder."""
TRACKER = "latest_checkpointed_iteration.txt"  # verl/utils/checkpoint/checkpoint_manager.py
_STAGING = ".partial"
_STAGED = re.compile(rf"\{_STAGING}-(None|[0-9a-f]{{12}})-[0-9a-f]{{8}}")
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError)  # what reading a spoilt manifest raises
_CHUNK = 1 << 24


class NoWholeCheckpoint(RuntimeError):
    """The error of `resume_mode=auto` when there are checkpoints and all are damaged."""


def choose(trainer: DictConfig) -> None:
    """Make verl load a whole checkpoint, by `trainer.resume_mode` and `trainer.resume_from_path`.

    `resume_mode=auto` takes the newest whole checkpoint, and starts from the beginning where there is no checkpoint.

    Raises:
        RuntimeError: the checkpoint that `resume_mode=resume_path` names is damaged, or all are (NoWholeCheckpoint).
        FolderMoved: the run's folder was moved or removed while the run started.
    """
    held_folders.checked(trainer.default_local_dir)
    if trainer.resume_mode == "auto":
        root = Path(trainer.default_local_dir)
        folder, damaged = newest_whole(root)
        if folder is None and damaged:
            raise NoWholeCheckpoint(none_whole(root, damaged))
        for path, why in damaged.items():
            print_line(f"checkpoint {path} is damaged ({why}): trying the one before it")
        trainer.resume_mode = "disable" if folder is None else "resume_path"
        trainer.resume_from_path = None if folder is None else str(folder.absolute())
    elif trainer.resume_mode == "resume_path":
        wrong = damage(Path(trainer.resume_from_path))
        trainer.resume_from_path = str(Path(trainer.resume_from_path))  # without a slash at the end, as verl wants it
        if wrong:
            raise RuntimeError(f"trainer.resume_from_path={trainer.resume_from_path}: {wrong}; give a whole checkpoint")


@contextlib.contextmanager
def written_whole(trainer: DictConfig, step: int, run: str | None = None) -> Iterator[Path]:
    """Have verl write the checkpoint of `step` into a staging folder in the block, and publish it at the end.

    Args:
        trainer: the settings `trainer`.
        run: the run's id.

    Yields:
        the checkpoint's folder while it is being written.

    Raises:
        RuntimeError: the checkpoint was not written, and why.
        FolderMoved: the run's folder was moved or removed.
    """
    root, keep = Path(trainer.default_local_dir), trainer.get("max_actor_ckpt_to_keep")
    held_folders.checked(root)
    staging = root / f"{_STAGING}-{run}-{uuid.uuid4().hex[:8]}"  # no other process writes there
    # Absolute: a worker of a cluster that was running before has another working directory.
    trainer.default_local_dir, trainer.max_actor_ckpt_to_keep = str(staging.absolute()), None
    try:
        with telling("Writing the checkpoint"):
            staging.mkdir(parents=True)
            yield staging / f"global_step_{step}"
            held_folders.checked(root)
            _publish(staging / f"global_step_{step}", root, run)
    except Exception as error:
        held_folders.checked(root)  # other processes fail where the folder is moved while they write
        has = why_not_written(root, error)
        raise RuntimeError(
            f"the checkpoint of step {step} was not written; trainer.default_local_dir={root} has {has}"
        ) from error
    finally:
        trainer.default_local_dir, trainer.max_actor_ckpt_to_keep = str(root), keep
        shutil.rmtree(staging, ignore_errors=True)
        held_folders.remove_made_anew(root)
    prune(root, keep, step, run)


def check_written_by_workers(folder: Path) -> None:
    """Refuse a checkpoint into which only this process, and none of the trainer's, has written.

    Raises:
        FileNotFoundError: naming the cause.
    """
    if not any(path.is_file() for path in (folder / "actor").rglob("*")):
        raise FileNotFoundError("the trainer's processes wrote elsewhere: all nodes have to share this folder")


def _publish(staged: Path, root: Path, run: str | None) -> None:
    """Seal a staged checkpoint, move it into place and point verl's tracker to it.

    A crash or a power cut at any point leaves either no checkpoint of this step or a whole one.
    """
    paths = sorted(path for path in staged.rglob("*") if path.is_file())
    files = {str(path.relative_to(staged)): [path.stat().st_size, _crc(path)] for path in paths}
    write_whole(staged / MANIFEST, json.dumps({"run": run, "files": files}, indent=1))
    all_on_disk(staged)
    final = root / staged.name
    if _is_of(run, final):
        shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
    elif os.path.lexists(final):
        aside = free_beside(final)
        print_line(f"{final} does not say that it is of this run: it is now {aside}")
        os.replace(final, aside)
    os.replace(staged, final)
    write_whole(root / TRACKER, str(step_of(final)))  # flushes `root`, which has the name of the checkpoint too


def remove_unfinished(root: Path) -> None:
    """Remove checkpoints that were unfinished when a process died. No run may be writing into `root`."""
    for folder in root.glob(f"{_STAGING}*"):
        if _STAGED.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def prune(root: Path, keep: int | None, step: int, run: str | None) -> None:
    """Remove all but the newest `keep` checkpoints of the run up to that of `step`; None keeps all."""
    written = [folder for folder in checkpoints(root) if step_of(folder) <= step and _is_of(run, folder)]
    for folder in written[keep:] if keep else []:
        shutil.rmtree(folder, ignore_errors=True)


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first."""
    return sorted((path for path in root.glob("global_step_*") if NAME.fullmatch(path.name)), key=step_of)[::-1]


def step_of(folder: Path) -> int:
    """Return the step after which a checkpoint or weights were written; the name of the folder ends in _N."""
    return int(folder.name.rpartition("_")[2])


def written_by(folder: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint; None where the checkpoint does not say."""
    try:
        run = _manifest(folder)["run"]
    except _UNREADABLE:
        return None
    return run if isinstance(run, str) else None


def _is_of(run: str | None, folder: Path) -> bool:
    """Return True if a checkpoint says that the run `run` wrote it; None is what a run without an id writes."""
    try:
        return bool(_manifest(folder)["run"] == run)
    except _UNREADABLE:
        return False


def none_whole(root: Path, damaged: dict[Path, str]) -> str:
    """Return a line for a folder of damaged checkpoints only; `damaged` has each one's damage, newest first."""
    newest, wrong = next(iter(damaged.items()))
    return (
        f"trainer.default_local_dir={root}: none of {len(damaged)} checkpoint(s) is whole ({newest.name}: {wrong}); "
        "restore one, or begin anew with trainer.resume_mode=disable, which moves all files of this run aside"
    )


def damage(folder: Path, contents: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, in a few words; None if it is whole.

    Without `contents` files are not read, and their sizes alone are compared.
    """
    try:
        entries = [(str(name), int(size), int(crc)) for name, (size, crc) in _manifest(folder)["files"].items()]
    except _UNREADABLE:
        return f"{MANIFEST} is missing or unreadable"
    for name, size, crc in entries:
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
        try:
            if contents and _crc(file) != crc:
                return f"{name} has changed since it was written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def newest_whole(root: Path, contents: bool = True) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest whole checkpoint, and what is wrong with each newer one; `contents`: see `damage`."""
    damaged: dict[Path, str] = {}
    for folder in checkpoints(root):
        wrong = damage(folder, contents)
        if wrong is None:
            return folder, damaged
        damaged[folder] = wrong
    return None, damaged


def _manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest's `run` and `files`."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return manifest


def _crc(file: Path) -> int:
    crc = 0
    with open(file, "rb") as f:
        while chunk := f.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
