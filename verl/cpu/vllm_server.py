"""verl's vLLM server with the CPU worker extension."""

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica


class CPUvLLMHttpServer(vLLMHttpServer):
    """Serves the policy with vLLM's CPU worker."""

    def _get_worker_extension_cls(self) -> str:
        return "verl_vcpo.cpu.vllm_worker.CPUWorkerExtension"


class CPUvLLMReplica(vLLMReplica):
    """A replica whose servers are `CPUvLLMHttpServer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(CPUvLLMHttpServer)


def register() -> None:
    """`rollout.name=vllm` means `CPUvLLMReplica` from now on, in this (the driver's) process."""
    RolloutReplicaRegistry.register("vllm", lambda: CPUvLLMReplica)
