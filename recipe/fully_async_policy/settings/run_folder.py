"""The run's folders: that they can be made, and that one run at a time writes into each."""

import contextlib
import os
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout
from omegaconf import DictConfig

from recipe.fully_async_policy.settings.errors import SettingError, first_line, wrong
from verl_vcpo.loop.checkpoint import damage
from verl_vcpo.report.run_log import last_step

LOCK = ".lock"


def check_folders(config: DictConfig) -> None:
    """Refuse folders that the run could not write. Makes nothing."""
    check_folder("run_dir", config.run_dir)
    for name in ("default_local_dir", "validation_data_dir", "rollout_data_dir"):
        if config.trainer[name]:
            check_folder(f"trainer.{name}", config.trainer[name])


def check_folder(setting: str, path: str) -> None:
    """Refuse a folder that cannot be made. Makes nothing."""
    folder = Path(path).absolute()
    there = next(above for above in (folder, *folder.parents) if above.exists())
    if path.startswith("~"):
        raise SettingError(f"{setting}={path}: ~ is not replaced here; give {Path(path).expanduser()}")
    if not there.is_dir():
        raise SettingError(f"{setting}={path}: {there} is a file; give another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SettingError(f"{setting}={path}: {there} may not be written; give another folder")


def check_nothing_replaced(config: DictConfig) -> None:
    """Refuse to evaluate alone in the folder of a run that has trained."""
    if config.trainer.val_only and (step := last_step(config.run_dir)):
        words = f"has the metrics of a run of {step} steps, which trainer.val_only=true would replace"
        raise wrong(config, "run_dir", f"{words}; give the evaluation a folder of its own")


def check_checkpoint(config: DictConfig) -> None:
    """Refuse a checkpoint that is not there, or whose files have other sizes, where the run is to go on from it."""
    given = config.trainer.resume_from_path if config.trainer.resume_mode == "resume_path" else None
    if given and (why := damage(Path(given), contents=False)):
        fix = "give a whole checkpoint, or let trainer.resume_mode=auto find the newest"
        raise wrong(config, "trainer.resume_from_path", f"{why}; {fix}")


def held(config: DictConfig) -> contextlib.ExitStack:
    """Hold the run's folder, and the folder of checkpoints as far as the run changes that: a context manager.

    Refuses folders that another run holds, or that cannot be made.
    """
    trainer, saved = config.trainer, Path(config.trainer.default_local_dir)
    changed = not trainer.val_only and (trainer.save_freq > 0 or saved.is_dir())
    with contextlib.ExitStack() as both:
        both.enter_context(taken("run_dir", config.run_dir))
        if changed and saved.resolve() != Path(config.run_dir).resolve():
            both.enter_context(taken("trainer.default_local_dir", str(saved)))
        return both.pop_all()


def taken(setting: str, path: str) -> "AcquireReturnProxy[Any]":
    """Make the folder, and hold it: a context manager. The kernel lets go of it when this process ends in any way."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        return FileLock(Path(path) / LOCK).acquire(timeout=0)
    except Timeout:
        raise SettingError(f"{setting}={path}: another run writes there; give each run a folder of its own") from None
    except OSError as error:
        raise SettingError(f"{setting}={path}: cannot be made ({first_line(error)}); give another folder") from None
