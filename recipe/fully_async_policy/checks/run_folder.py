"""The run's folder: that it can be made, and that one run at a time writes into it."""

import os
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout
from omegaconf import DictConfig

from recipe.fully_async_policy.checks.errors import SettingError, first_line
from verl_vcpo.trainer.ppo.v1.checkpoint import damage

LOCK = ".lock"


def check_run_dir(run_dir: str) -> None:
    """Refuse a folder that cannot be made. Makes nothing.

    Raises:
        SettingError: its name begins with ~, or what is above it is no folder or may not be written.
    """
    if run_dir.startswith("~"):
        raise SettingError(f"run_dir={run_dir}: ~ is not replaced here; give {Path(run_dir).expanduser()}")
    folder = Path(run_dir).absolute()
    there = next(above for above in (folder, *folder.parents) if above.exists())
    if not there.is_dir():
        raise SettingError(f"run_dir={run_dir}: {there} is a file; give another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SettingError(f"run_dir={run_dir}: {there} may not be written; give another folder")


def check_checkpoint(trainer: DictConfig) -> None:
    """Refuse a checkpoint that is not there, or whose files have other sizes, where the run is to go on from it.

    Args:
        trainer: the settings `trainer`.

    Raises:
        SettingError: what is wrong with it.
    """
    if trainer.resume_mode == "resume_path":
        wrong = damage(Path(trainer.resume_from_path), contents=False)
        if wrong:
            raise SettingError(
                f"trainer.resume_from_path={trainer.resume_from_path}: {wrong}; give a whole checkpoint, or let "
                "trainer.resume_mode=auto find the newest"
            )


def taken(run_dir: str) -> AcquireReturnProxy:
    """Make the folder, and hold it: a context manager. The kernel lets go of it when this process ends in any way.

    Raises:
        SettingError: another run holds it, or it cannot be made.
    """
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        return FileLock(Path(run_dir) / LOCK).acquire(timeout=0)
    except Timeout:
        raise SettingError(f"run_dir={run_dir}: another run writes there; give each run a folder of its own") from None
    except OSError as error:
        raise SettingError(f"run_dir={run_dir}: cannot be made ({first_line(error)}); give another folder") from None
