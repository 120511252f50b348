"""The run's folders: that they can be made, and that one run at a time writes into each."""

import contextlib
import os
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout
from omegaconf import DictConfig

from recipe.fully_async_policy.settings.errors import SettingError, first_line
from verl_vcpo.loop.checkpoint import damage
from verl_vcpo.report.run_log import last_step

LOCK = ".lock"


def check_folders(config: DictConfig) -> None:
    """Refuse folders that the run could not write. Makes nothing.

    Raises:
        SettingError: the first of them.
    """
    check_folder("run_dir", config.run_dir)
    for name in ("default_local_dir", "validation_data_dir", "rollout_data_dir"):
        if config.trainer[name]:
            check_folder(f"trainer.{name}", config.trainer[name])


def check_folder(setting: str, path: str) -> None:
    """Refuse a folder that cannot be made. Makes nothing.

    Raises:
        SettingError: its name begins with ~, or what is above it is no folder or may not be written.
    """
    if path.startswith("~"):
        raise SettingError(f"{setting}={path}: ~ is not replaced here; give {Path(path).expanduser()}")
    folder = Path(path).absolute()
    there = next(above for above in (folder, *folder.parents) if above.exists())
    if not there.is_dir():
        raise SettingError(f"{setting}={path}: {there} is a file; give another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SettingError(f"{setting}={path}: {there} may not be written; give another folder")


def check_nothing_replaced(config: DictConfig) -> None:
    """Refuse to evaluate alone in the folder of a run that has trained.

    Raises:
        SettingError: the folder holds the metrics of steps.
    """
    if config.trainer.val_only and (step := last_step(config.run_dir)):
        raise SettingError(
            f"run_dir={config.run_dir}: has the metrics of a run of {step} steps, which trainer.val_only=true would "
            "replace; give the evaluation a folder of its own"
        )


def check_checkpoint(trainer: DictConfig) -> None:
    """Refuse a checkpoint that is not there, or whose files have other sizes, where the run is to go on from it.

    Args:
        trainer: the settings `trainer`.

    Raises:
        SettingError: what is wrong with it.
    """
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
        wrong = damage(Path(trainer.resume_from_path), contents=False)
        if wrong:
            raise SettingError(
                f"trainer.resume_from_path={trainer.resume_from_path}: {wrong}; give a whole checkpoint, or let "
                "trainer.resume_mode=auto find the newest"
            )


def held(config: DictConfig) -> contextlib.ExitStack:
    """Hold the run's folder, and the folder of checkpoints as far as the run changes that: a context manager.

    Raises:
        SettingError: another run holds one of them, or it cannot be made.
    """
    trainer, saved = config.trainer, Path(config.trainer.default_local_dir)
    changed = not trainer.val_only and (trainer.save_freq > 0 or saved.is_dir())
    with contextlib.ExitStack() as both:
        both.enter_context(taken("run_dir", config.run_dir))
        if changed and saved.resolve() != Path(config.run_dir).resolve():
            both.enter_context(taken("trainer.default_local_dir", str(saved)))
        return both.pop_all()


def taken(setting: str, path: str) -> "AcquireReturnProxy[Any]":
    """Make the folder, and hold it: a context manager. The kernel lets go of it when this process ends in any way.

    Raises:
        SettingError: another run holds it, or it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        return FileLock(Path(path) / LOCK).acquire(timeout=0)
    except Timeout:
        raise SettingError(f"{setting}={path}: another run writes there; give each run a folder of its own") from None
    except OSError as error:
        raise SettingError(f"{setting}={path}: cannot be made ({first_line(error)}); give another folder") from None
