"""The nodes of a cluster that is still starting: a run begins once Ray has what the run's processes take.

verl asks Ray once, and refuses a cluster whose nodes are still on their way. A placement that no node has room for is
waited for without a limit.
"""

import dataclasses
import math
import time
from typing import Any, NamedTuple

import ray
from omegaconf import DictConfig
from verl.plugin.platform import get_platform
from verl.single_controller.ray.base import ResourcePoolManager

from recipe.fully_async_policy.settings.variables import cluster_address
from verl_vcpo.common.console import print_line

_NODES_S, _OWN_RAY_S, _TELL_S, _POLL_S = 1800.0, 60.0, 60.0, 1.0
_CPUS_OF_TRAINER: Any = next(
    f.default for f in dataclasses.fields(ResourcePoolManager) if f.name == "max_colocate_count"
)
_CPUS_OF_SAMPLER = 2  # verl/workers/rollout/replica.py, init_standalone


class _Share(NamedTuple):
    """`number` times `gpus` GPUs on one node, each with `cpus` of Ray's CPUs."""

    who: str
    setting: str
    number: int
    gpus: int
    cpus: int


def wait_for_nodes(config: DictConfig, wait_s: float = _NODES_S) -> None:
    """Wait until Ray's nodes have the GPUs and CPUs of the trainer and the samplers, and say what is missing.

    Raises:
        RuntimeError: something is still missing after `wait_s`; in a Ray of the run's own, which gets no other nodes,
            after a minute.
    """
    limit = wait_s if cluster_address(config.ray_kwargs.ray_init) else min(wait_s, _OWN_RAY_S)
    start = told = time.monotonic()
    while missing := _missing(config):
        now = time.monotonic()
        if now - start > limit:
            raise RuntimeError(f"{missing} (after {now - start:.0f} s)")
        if now - told > _TELL_S:
            print_line(f"Waiting for nodes: {missing}.")
            told = now
        time.sleep(_POLL_S)


def _missing(config: DictConfig) -> str:
    """What Ray's nodes lack, with the settings that ask for it; '' where they have room."""
    nodes = list(ray._private.state.available_resources_per_node().values())
    name = get_platform().ray_resource_name()
    free = [(node.get(name, 0), node.get("CPU", 0)) for node in nodes]
    shares = _shares(config)
    wanted, found = sum(share.number * share.gpus for share in shares), sum(gpus for gpus, _ in free)
    if found < wanted:
        asked = ", ".join(f"{share.number * share.gpus} of the {share.who} ({share.setting})" for share in shares)
        return f"Ray's {len(nodes)} nodes have {found:g} free GPUs, and the run takes {wanted}: {asked}"
    for share in shares:
        cpus = share.gpus * share.cpus
        if sum(math.floor(min(gpus / share.gpus, has / cpus)) for gpus, has in free) < share.number:
            room = ", ".join(f"{gpus:g} and {has:g}" for gpus, has in free)
            asked = f"{share.number} times {share.gpus} GPUs and {cpus} of Ray's CPUs on one node"
            return f"the {share.who} ({share.setting}): {asked}, and Ray's nodes have free {room}"
    return ""


def _shares(config: DictConfig) -> tuple[_Share, _Share]:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    ranks = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    each = min(ranks, rollout.n_gpus_per_node)
    return (
        _Share("trainer", "trainer.nnodes, n_gpus_per_node", trainer.nnodes, trainer.n_gpus_per_node, _CPUS_OF_TRAINER),
        _Share(
            "samplers",
            "actor_rollout_ref.rollout.nnodes, n_gpus_per_node",
            rollout.nnodes * rollout.n_gpus_per_node // each,
            each,
            _CPUS_OF_SAMPLER,
        ),
    )
