"""What an earlier run has left in a run's folder is moved aside, never overwritten."""

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.fully_async_policy.checks.errors import SettingError, first_line
from verl_vcpo.metrics_file import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from omegaconf import DictConfig

VERL_LOG, TENSORBOARD, FILE_LOGGER = "verl.log", "tensorboard", "verl_metrics.jsonl"
_WANDB = "wandb"


def set_aside(config: "DictConfig") -> str:
    """Move what an earlier run wrote from `run_dir` to `run_dir.N`, unless this run goes on with that run.

    Checkpoints in a folder outside `run_dir` get a folder with the same ending. Files that no run writes stay.

    Returns:
        One line that says so; '' where there was no earlier run.

    Raises:
        SettingError: the files cannot be moved, or the model is among them.
    """
    run_dir, saved = Path(config.run_dir).absolute(), Path(config.trainer.default_local_dir).absolute()
    found = _of_run(run_dir, saved, config.trainer)
    if not found:
        return ""
    number = next(n for n in itertools.count(1) if not any(os.path.lexists(f"{path}.{n}") for path in (run_dir, saved)))
    model = Path(config.actor_rollout_ref.model.path).absolute()
    if any(model.is_relative_to(path) for path in found):
        raise SettingError(
            f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}: an earlier run wrote it into the "
            f"folder of this run, run_dir={config.run_dir}; give this run a folder of its own"
        )
    try:
        for path in found:
            above = run_dir if path.is_relative_to(run_dir) else saved
            aside = Path(f"{above}.{number}") / path.relative_to(above)
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.rename(path, aside)
    except OSError as error:
        raise SettingError(
            f"run_dir={config.run_dir}: has an earlier run, which cannot be moved to {config.run_dir}.{number} "
            f"({first_line(error)}); give another folder, or go on with that run: trainer.resume_mode=auto"
        ) from None
    return f"{config.run_dir} had an earlier run: its files are now in {config.run_dir}.{number}"


def _of_run(run_dir: Path, saved: Path, trainer: "DictConfig") -> list[Path]:
    """What an earlier run has written, and this run would write: the metrics last, which say that there is more."""
    from verl_vcpo.trainer.ppo.v1 import checkpoint, run_log

    checkpoints = [] if trainer.val_only else checkpoint.checkpoints(saved)
    if trainer.resume_mode == "resume_path" or (trainer.resume_mode == "auto" and checkpoints):
        return []
    metrics = run_dir / METRICS_FILE
    if not checkpoints and not (metrics.is_file() and read_metrics(run_dir)):
        return []
    records = (run_log.SAMPLES_FILE, run_log.SUMMARY_FILE, run_log.CONFIG_FILE, run_log.COMMAND_FILE)
    names = (*records, VERL_LOG, FILE_LOGGER, TENSORBOARD, _WANDB, run_log.WEIGHTS_FOLDER, run_log.MODEL_FOLDER)
    written = (*checkpoints, saved / checkpoint.TRACKER, *(run_dir / name for name in names), metrics)
    return [path for path in written if path.exists()]
