"""The machine's devices."""

from omegaconf import DictConfig

from recipe.fully_async_policy.checks.errors import SettingError
from recipe.fully_async_policy.ray_access import cluster_address


def check_gpus(config: DictConfig) -> None:
    """Refuse a run on GPUs on a machine without any; in a cluster that the run joins they are elsewhere.

    Raises:
        SettingError: there is none.
    """
    if config.trainer.device != "cuda" or cluster_address(config.ray_kwargs.ray_init):
        return
    import torch

    if not torch.cuda.is_available():
        raise SettingError(
            "hardware=gpu: torch finds no GPU on this machine; give hardware=cpu, join a cluster that has some "
            "(ray_kwargs.ray_init.address), or see the plan alone with --dry-run"
        )
