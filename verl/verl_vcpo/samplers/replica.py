"""Which class `rollout.name=vllm` means (extends verl/workers/rollout/replica.py)."""

import importlib

from verl.workers.rollout.replica import RolloutReplicaRegistry


def register(module: str, name: str) -> None:
    """`rollout.name=vllm` means this class of replicas from now on, in this (the driver's) process.

    The class is imported when verl first asks for it: it imports vLLM, for seconds in which other processes can start.
    """
    RolloutReplicaRegistry.register("vllm", lambda: getattr(importlib.import_module(module), name))
