"""verl's vLLM server with weight updates in the middle of responses (extends .../vllm_rollout/vllm_async_server.py).

`async.kv_cache` says what becomes of the responses that are on their way while new weights arrive:

    recompute  they are aborted, and the client requests the rest: the prefix is computed anew with the new weights
    keep       they are paused and go on with the keys and values of the old weights (PipelineRL)

Either way no prefix that old weights computed is reused for another request.
"""

from collections.abc import Callable
from typing import Any

import psutil
import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from verl_vcpo.workers.rollout.kv_cache import KVCache


def keeps_kv_cache(rollout_config: Any) -> bool:
    """Whether `rollout.custom.kv_cache` (the launcher sets it to `async.kv_cache`) is `keep`."""
    return (rollout_config.custom or {}).get("kv_cache") == KVCache.KEEP


class LagKvLLMHttpServer(vLLMHttpServer):
    """Knows which policy version a request started with, and can pause requests instead of aborting them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._admitted_with: dict[str, int | None] = {}

    def _get_worker_extension_cls(self) -> str:
        return "verl_vcpo.workers.rollout.vllm_worker.LagKWorkerExtension"

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        self.engine.generate = self._salted(self.engine.generate)
        if keeps_kv_cache(self.config):
            self.engine.pause_generation = self._pausing(self.engine.pause_generation)

    def _salted(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM shares prefixes between requests of the same salt only: here, of the same policy version."""

        def salted(*, prompt: dict[str, Any], **kwargs: Any) -> Any:
            prompt["cache_salt"] = f"policy {self.global_steps}"
            return generate(prompt=prompt, **kwargs)

        return salted

    @staticmethod
    def _pausing(pause_generation: Callable[..., Any]) -> Callable[..., Any]:
        async def pause(**_: Any) -> None:
            await pause_generation(mode="keep", clear_cache=False)

        return pause

    async def probe(self) -> tuple[str, list[tuple[int, float]]]:
        """A sign of life of the engine, not only of this server.

        Returns:
            this node's id; process id and time of creation of each of the engine's processes.
        """
        if self.node_rank == 0:
            await self.engine.is_sleeping()  # any call that the engine's process has to answer
        children = psutil.Process().children(recursive=True)
        return ray.get_runtime_context().get_node_id(), [(child.pid, child.create_time()) for child in children]

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        rejected = await super()._park_until_admitted(request_id)
        self._admitted_with[request_id] = self.global_steps
        return rejected

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        """verl's, with the version that the response started with as `min_global_steps`."""
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            version = self._admitted_with.pop(request_id, self.global_steps)
        output.extra_fields["min_global_steps"] = version
        return output


class LagKvLLMReplica(vLLMReplica):
    """A replica of `LagKvLLMHttpServer`s."""

    server = LagKvLLMHttpServer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(self.server)

    async def release_kv_cache(self) -> None:
        if not keeps_kv_cache(self.config):  # upstream first waits until no request is left
            await super().release_kv_cache()

    async def resume_kv_cache(self) -> None:
        if not keeps_kv_cache(self.config):
            await super().resume_kv_cache()


def register(replica: type[LagKvLLMReplica] = LagKvLLMReplica) -> None:
    """`rollout.name=vllm` means `replica` from now on, in this (the driver's) process."""
    RolloutReplicaRegistry.register("vllm", lambda: replica)
