"""Whether the run's folders have room for what the run writes there: checkpoints, and the trained model."""

import json
import math
import shutil
from pathlib import Path

from omegaconf import DictConfig
from safetensors import safe_open

from recipe.fully_async_policy.launch.ray_access import cluster_address
from recipe.fully_async_policy.settings.errors import SettingError
from recipe.fully_async_policy.settings.model import INDEX

_OF_OPTIMIZER = 12
"""Bytes of a parameter in Adam's part of a checkpoint: the parameter and two means, in float32."""
_GB = 1e9


def check_disk_space(config: DictConfig) -> None:
    """Refuse a run whose weights and optimizer states, at the least, do not fit on the disks of its folders.

    Not checked are a run in a Ray cluster, whose trainer may have another disk, and weights other than safetensors.
    """
    trainer, model = config.trainer, config.actor_rollout_ref.model
    parameters = _parameters(Path(model.path))
    if trainer.val_only or parameters is None or cluster_address(config.ray_kwargs.ray_init):
        return
    weights = parameters * (4 if config.actor_rollout_ref.actor.megatron.dtype == "float32" else 2)
    has_optimizer = "optimizer" in config.actor_rollout_ref.actor.checkpoint.save_contents and not model.lora.rank
    checkpoint = weights + (parameters * _OF_OPTIMIZER if has_optimizer else 0)
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


def disk_of(folder: str | Path) -> Path:
    """The first folder above that is there."""
    path = Path(folder).absolute()
    return next(above for above in (path, *path.parents) if above.exists())


def _parameters(folder: Path) -> int | None:
    """The number of the parameters in a model's folder; None: not known."""
    index = folder / INDEX
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    if not all((folder / name).is_file() for name in names):
        return None
    total = 0
    for name in names:
        with safe_open(folder / name, framework="numpy") as tensors:
            total += sum(math.prod(part.get_shape()) for part in map(tensors.get_slice, tensors.keys()))
    return total
