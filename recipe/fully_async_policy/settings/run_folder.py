"""The run's folders: that they can be made and have room, and that one run at a time writes into each."""

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.settings.errors import SettingError, first_line, wrong
from recipe.fully_async_policy.settings.model import parameters
from verl_vcpo.common import held_folders
from verl_vcpo.common.disk import disk_of
from verl_vcpo.common.run_id import run_in
from verl_vcpo.common.whole_file import is_free
from verl_vcpo.loop.checkpoint import damage
from verl_vcpo.report.run_log import MODEL_FOLDER, WEIGHTS_FOLDER, last_step

LOCK = ".lock"
_OWN = ("run_dir", "trainer.default_local_dir")
_FOLDERS = (*_OWN, "trainer.validation_data_dir", "trainer.rollout_data_dir")
_LONGEST_NAME, _LONGEST_PATH = 200, 3500  # bytes: the kernel's 255 and 4095, less what the run adds
_CHECKOUT = Path(__file__).parents[3]
_OF_OPTIMIZER = 12
"""Bytes of a parameter in Adam's part of a checkpoint: the parameter and two means, in float32."""
_GB = 1e9


def check_folders(config: DictConfig) -> None:
    """Refuse folders that the run could not write, or whose files it would replace; after `check_paths`."""
    for setting, path in _folders(config):
        check_folder(setting, path)
    check_nothing_replaced(config)


def check_paths(config: DictConfig) -> None:
    """Refuse paths that are no folder's anywhere, and a run's folder that would hold more than the run."""
    for setting, path in _folders(config):
        _check_path(setting, path)
    for setting in _OWN:
        _check_own(setting, OmegaConf.select(config, setting))


def check_folder(setting: str, path: str) -> None:
    """Refuse a folder that cannot be made. Makes nothing."""
    there = disk_of(path)
    if not there.is_dir():
        raise SettingError(f"{setting}={path}: {there} is a file; give another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SettingError(f"{setting}={path}: {there} may not be written; give another folder")


def _folders(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Settings of folders that the run writes, with their paths."""
    for setting in _FOLDERS:
        if path := OmegaConf.select(config, setting):
            yield setting, path


def _check_path(setting: str, path: str) -> None:
    if path.startswith("~"):
        raise SettingError(f"{setting}={path}: ~ is not replaced here; give {os.path.expanduser(path)}")
    if not path.isprintable():
        raise SettingError(f"{setting}={path!r}: has characters that cannot be printed; give another folder")
    folder = Path(path).absolute()
    if len(os.fsencode(folder)) > _LONGEST_PATH or any(len(os.fsencode(name)) > _LONGEST_NAME for name in folder.parts):
        words = f"a name may have {_LONGEST_NAME} bytes, and the whole path {_LONGEST_PATH}; give a shorter one"
        raise SettingError(f"{setting}={path}: {words}")


def _check_own(setting: str, path: str) -> None:
    """Refuse a folder that holds the folder of the command, the checkout or the user's home, and no run."""
    folder = Path(path).resolve()
    if run_in(folder):
        return
    for held_there in (Path.cwd(), _CHECKOUT, Path.home()):
        if held_there.is_relative_to(folder):
            words = f"{held_there} is not of the run alone; give the run a folder of its own, such as outputs/first"
            raise SettingError(f"{setting}={path}: {words}")


def check_nothing_replaced(config: DictConfig) -> None:
    """Refuse to evaluate alone in the folder of a run that has trained, and to write a model over a user's."""
    step = last_step(config.run_dir)
    if config.trainer.val_only:
        if step:
            words = f"has the metrics of a run of {step} steps, which trainer.val_only=true would replace"
            raise wrong(config, "run_dir", f"{words}; give the evaluation a folder of its own")
        return
    folders = {MODEL_FOLDER: config.save_model, WEIGHTS_FOLDER: config.save_weights}
    for folder in (Path(config.run_dir, name).resolve() for name, written in folders.items() if written):
        first = Path(config.actor_rollout_ref.model.path).resolve()
        # what an earlier run has left is moved aside, where the run does not go on
        if first.is_relative_to(folder) or not (step or is_free(folder)):
            raise wrong(config, "run_dir", f"the trained model would replace {folder}; give another folder")


def check_checkpoint(config: DictConfig) -> None:
    """Refuse a checkpoint that is not there, or whose files have other sizes, where the run is to go on from it."""
    given = config.trainer.resume_from_path if config.trainer.resume_mode == "resume_path" else None
    if given and (why := damage(Path(given), contents=False)):
        fix = "give a whole checkpoint, or let trainer.resume_mode=auto find the newest"
        raise wrong(config, "trainer.resume_from_path", f"{why}; {fix}")


def held(config: DictConfig) -> contextlib.ExitStack:
    """Hold the run's folder, and the folder of checkpoints as far as the run changes that: a context manager.

    The locks keep other runs out of these folders, and the open folders this run out of others at the same paths.

    Refuses folders that another run holds, or that cannot be made.
    """
    trainer, saved = config.trainer, Path(config.trainer.default_local_dir)
    changed = not trainer.val_only and (trainer.save_freq > 0 or saved.is_dir())
    folders = {"run_dir": config.run_dir}
    if changed and saved.resolve() != Path(config.run_dir).resolve():
        folders["trainer.default_local_dir"] = trainer.default_local_dir
    with contextlib.ExitStack() as both:
        for setting, path in folders.items():
            both.enter_context(taken(setting, path))
            both.enter_context(held_folders.held(setting, path))
        return both.pop_all()


def taken(setting: str, path: str) -> "AcquireReturnProxy[Any]":
    """Make the folder, and hold it: a context manager. The kernel lets go of it when this process ends in any way."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        return FileLock(Path(path) / LOCK, fallback_to_soft=False).acquire(timeout=0)
    except Timeout:
        raise SettingError(f"{setting}={path}: another run writes there; give each run a folder of its own") from None
    except OSError as error:
        if error.errno == errno.ENOSYS:
            words = "its file system has no locks (flock), by which two runs keep out of one folder"
            raise SettingError(f"{setting}={path}: {words}; mount it with them (Lustre: -o flock)") from None
        raise SettingError(f"{setting}={path}: cannot be made ({first_line(error)}); give another folder") from None


def check_disk_space(config: DictConfig) -> None:
    """Refuse a run whose weights and optimizer states, at the least, do not fit on the disks of its folders.

    Not checked are weights other than safetensors.
    """
    trainer, model = config.trainer, config.actor_rollout_ref.model
    number_of_parameters = parameters(Path(model.path))
    if trainer.val_only or number_of_parameters is None:
        return
    weights = number_of_parameters * (4 if config.actor_rollout_ref.actor.megatron.dtype == "float32" else 2)
    has_optimizer = "optimizer" in config.actor_rollout_ref.actor.checkpoint.save_contents and not model.lora.rank
    checkpoint = weights + (number_of_parameters * _OF_OPTIMIZER if has_optimizer else 0)
    number = _checkpoints(config)
    kept = min(number, (trainer.max_actor_ckpt_to_keep or number) + 1)  # the oldest goes after the newest has come
    models = int(config.save_model) + (number if config.save_weights else 0)
    fewer = ", or trainer.max_actor_ckpt_to_keep a smaller number" if kept > 2 else ""
    written = {
        "trainer.default_local_dir": (trainer.default_local_dir, kept * checkpoint),
        "run_dir": (config.run_dir, models * weights),
    }
    for setting, (path, size) in written.items():
        disk = disk_of(path)
        need = sum(other for folder, other in written.values() if disk_of(folder).stat().st_dev == disk.stat().st_dev)
        space = shutil.disk_usage(disk)
        if size and space.total and need > space.free:  # a file system that does not count has a total of 0
            words = f"the run writes {need / _GB:.3g} GB there at the least, and {space.free / _GB:.3g} GB are free"
            raise SettingError(f"{setting}={path}: {words}; give a folder with more space{fewer}")


def _checkpoints(config: DictConfig) -> int:
    """The number of checkpoints that the run writes; of a run that goes on, one at the least."""
    trainer = config.trainer
    if trainer.save_freq < 1:
        return 0
    if trainer.resume_mode != "disable" or not trainer.total_training_steps:
        return 1
    return math.ceil(trainer.total_training_steps / trainer.save_freq)
