"""The vLLM server with the CPU worker extension."""

from verl_vcpo.workers.rollout import vllm_server


class CPUvLLMHttpServer(vllm_server.LagKvLLMHttpServer):
    """Serves the policy with vLLM's CPU worker."""

    def _get_worker_extension_cls(self) -> str:
        return "verl_vcpo.cpu.vllm_worker.CPUWorkerExtension"


class CPUvLLMReplica(vllm_server.LagKvLLMReplica):
    """A replica whose servers are `CPUvLLMHttpServer`."""

    server = CPUvLLMHttpServer


def register() -> None:
    """`rollout.name=vllm` means `CPUvLLMReplica` from now on, in this (the driver's) process."""
    vllm_server.register(CPUvLLMReplica)
