"""The class that `rollout.name=vllm` stands for (extends verl/workers/rollout/replica.py)."""

import importlib

from verl.workers.rollout.replica import RolloutReplicaRegistry


def register(module: str, name: str) -> None:
    """Have `rollout.name=vllm` stand for this class of replicas in this process, the driver's.

    The class is imported when verl first asks for it: importing vLLM takes seconds, and other processes start first.
    """
    RolloutReplicaRegistry.register("vllm", lambda: getattr(importlib.import_module(module), name))
