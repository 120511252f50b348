"""The vLLM server with the CPU worker extension."""

import os
from typing import Any

from verl_vcpo.samplers import vllm_server

# The executor's path, because vLLM's CPU platform turns the short name "uni" into "mp": only a worker in a process of
# its own can have OpenMP threads that are bound to cores. In a run nothing is bound (environment.py).
_WORKER_IN_THE_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

DEVICE_REASONS = {
    "CPUvLLMHttpServer._get_worker_extension_cls": "vLLM's CPU worker loads weights in another way (vllm_worker.py)",
    "CPUvLLMHttpServer._preprocess_engine_kwargs": "vLLM would give its CPU worker a process of its own",
    "CPUvLLMReplica.server": "starts the server above",
}


class CPUvLLMHttpServer(vllm_server.LagKvLLMHttpServer):
    """A server of the policy with vLLM's CPU worker, in the engine's process where the model is in one piece.

    A worker in a process of its own would import all packages once more, and get every step's requests through shared
    memory.
    """

    def _get_worker_extension_cls(self) -> str:
        return "verl_vcpo.cpu.vllm_worker.CPUWorkerExtension"

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        unbound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"
        if self.replica_world_size == 1 and unbound:
            engine_kwargs.setdefault("distributed_executor_backend", _WORKER_IN_THE_ENGINE)


class CPUvLLMReplica(vllm_server.LagKvLLMReplica):
    """A replica whose servers are `CPUvLLMHttpServer`."""

    server = CPUvLLMHttpServer
