"""The machine's devices."""

from omegaconf import DictConfig

from recipe.fully_async_policy.launch.ray_access import cluster_address
from recipe.fully_async_policy.plan.gpu_memory import read_layout
from recipe.fully_async_policy.settings.compiler import missing_for_triton
from recipe.fully_async_policy.settings.errors import SettingError


def check_gpus(config: DictConfig) -> None:
    """Refuse several nodes without a cluster to join, more GPUs than the machine has, and GPUs without a C compiler.

    Raises:
        SettingError: the first of them.
    """
    if cluster_address(config.ray_kwargs.ray_init):
        _check_compiler(config)
        return
    for setting, nodes in (
        ("trainer.nnodes", config.trainer.nnodes),
        ("actor_rollout_ref.rollout.nnodes", config.actor_rollout_ref.rollout.nnodes),
    ):
        if nodes > 1:
            raise SettingError(
                f"{setting}={nodes}: a Ray that the run starts has one node; set it to 1, or join a cluster "
                "(ray_kwargs.ray_init.address)"
            )
    if config.trainer.device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise SettingError(
            "hardware=gpu: torch finds no GPU on this machine; give hardware=cpu, join a cluster that has some "
            "(ray_kwargs.ray_init.address), or see the plan alone with --dry-run"
        )
    _check_number(config, torch.cuda.device_count())
    _check_compiler(config)


def _check_number(config: DictConfig, here: int) -> None:
    layout = read_layout(config)
    if layout.total > here and config.ray_kwargs.ray_init.get("num_gpus") is None:
        raise SettingError(
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}, actor_rollout_ref.rollout.n_gpus_per_node="
            f"{config.actor_rollout_ref.rollout.n_gpus_per_node}: trainer and samplers have GPUs of their own, "
            f"{layout.total} together, and this machine has {here}; lower them (1 and 1 is the least), or join a "
            "cluster (ray_kwargs.ray_init.address)"
        )


def _check_compiler(config: DictConfig) -> None:
    """Of this machine, where it has GPUs: a head without any compiles nothing."""
    import torch

    if config.trainer.device == "cuda" and torch.cuda.is_available() and (missing := missing_for_triton()):
        raise SettingError(f"hardware=gpu: {missing}")
