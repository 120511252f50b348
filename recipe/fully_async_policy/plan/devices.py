"""The machine's devices."""

from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.launch.compiler import missing_for_triton
from recipe.fully_async_policy.plan.gpu_memory import read_layout
from recipe.fully_async_policy.settings.errors import SettingError, wrong
from recipe.fully_async_policy.settings.variables import cluster_address

_JOIN = "join a cluster (ray_kwargs.ray_init.address)"


def check_gpus(config: DictConfig) -> None:
    """Refuse several nodes without a cluster to join, more GPUs than the machine has, and GPUs without a C compiler."""
    own_ray = not cluster_address(config.ray_kwargs.ray_init)
    for name in ("trainer.nnodes", "actor_rollout_ref.rollout.nnodes"):
        if own_ray and OmegaConf.select(config, name) > 1:
            raise wrong(config, name, f"a Ray that the run starts has one node; set it to 1, or {_JOIN}")
    import torch

    if config.trainer.device == "cpu" and torch.cuda.is_available():
        words = "take it with scripts/install_gpu.sh, or make a .venv with torch's CPU build: docs/guide/start.md"
        raise SettingError(f"hardware=cpu: this torch, made for CUDA, finds the machine's GPU; {words}")
    if config.trainer.device != "cuda":
        return
    if torch.cuda.is_available():
        if own_ray:
            _check_number(config, torch.cuda.device_count())
        if missing := missing_for_triton():
            raise SettingError(f"hardware=gpu: {missing}")
    elif own_ray:  # a cluster's head without any compiles nothing
        words = f"give hardware=cpu, {_JOIN} that has some, or see the plan alone with --dry-run"
        raise SettingError(f"hardware=gpu: torch finds no GPU on this machine; {words}")


def _check_number(config: DictConfig, here: int) -> None:
    layout, samplers = read_layout(config), "actor_rollout_ref.rollout.n_gpus_per_node"
    if layout.total > here and config.ray_kwargs.ray_init.get("num_gpus") is None:
        words = f"trainer and samplers ({samplers}={config.actor_rollout_ref.rollout.n_gpus_per_node}) have GPUs of"
        fix = f"lower them (1 and 1 is the least), or {_JOIN}"
        words = f"{words} their own, {layout.total} together, and this machine has {here}; {fix}"
        raise wrong(config, "trainer.n_gpus_per_node", words)
