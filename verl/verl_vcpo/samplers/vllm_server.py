"""verl's vLLM server with weight updates in the middle of responses (extends .../vllm_rollout/vllm_async_server.py).

`async.kv_cache` decides what happens to unfinished responses when new weights arrive:

    recompute  requests are aborted, and the client requests the rest: the new weights compute the prefix again
    keep       requests are paused, and continue with the keys and values of the old weights (PipelineRL)

In both cases no prefix that old weights have computed is reused for another request.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from cachetools import LRUCache
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from verl_vcpo.common.token_versions import SAMPLER
from verl_vcpo.samplers import engine_error
from verl_vcpo.samplers.admission import most_calls
from verl_vcpo.samplers.engine_processes import EngineProcesses, engine_processes
from verl_vcpo.samplers.kv_cache import KVCache
from verl_vcpo.samplers.server_actor import server_actor
from verl_vcpo.weights.receiver import LagKCheckpointEngineWorker

_LIFE_SIGN_S = 1.0
_MOST_DROPPED = 10_000  # ids of ended requests that are kept, for requests that arrive after their end


def keeps_kv_cache(rollout_config: Any) -> bool:
    """Return True if `rollout.custom.kv_cache`, which the launcher sets to `async.kv_cache`, is `keep`."""
    return (rollout_config.custom or {}).get("kv_cache") == KVCache.KEEP


def answered_or_dead(engine: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, a control call to vLLM's engine, which raises EngineDeadError when the engine's process dies.

    vLLM fails the requests of an engine that dies, but not the control calls: the weight update in which the engine
    died would wait for ever.
    """

    async def bounded(*args: Any) -> Any:
        answer = asyncio.ensure_future(call(*args))
        try:
            while not answer.done():
                if engine.errored:
                    raise engine.dead_error
                await asyncio.wait({answer}, timeout=_LIFE_SIGN_S)
            return answer.result()
        finally:
            answer.cancel()

    return bounded


class LagKvLLMHttpServer(vLLMHttpServer):
    """A server that reports a request's first policy version, and can pause requests instead of aborting them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._on_their_way: set[str] = set()
        self._without_token: set[str] = set()
        super().__init__(*args, **kwargs)
        self._admitted_with: dict[str, int | None] = {}
        self._dropped: LRUCache[str, None] = LRUCache(maxsize=_MOST_DROPPED)

    def _get_worker_extension_cls(self) -> str:
        return "verl_vcpo.samplers.vllm_worker.LagKWorkerExtension"

    async def run_server(self, args: Any) -> None:
        try:
            await super().run_server(args)
        except Exception as error:
            why = engine_error.cause(error, engine_error.own_logs())
            raise RuntimeError(f"a sampler's engine did not start: {why}") from error
        self._extend(self.engine)
        core = self.engine.engine_core
        core.call_utility_async = answered_or_dead(self.engine, core.call_utility_async)

    def _extend(self, engine: Any) -> None:
        engine.generate = self._salted(engine.generate)
        engine.add_request = self._counted(engine.add_request)
        engine.pause_generation = self._pausing(engine)

    def _salted(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Use the policy version as salt: vLLM shares cached prefixes between requests of the same salt only.

        The first output removes a request from those without a token, which `_pausing` does not keep.
        """

        async def salted(*, prompt: dict[str, Any], request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
            prompt["cache_salt"] = f"policy {self.global_steps}"
            async for output in generate(prompt=prompt, request_id=request_id, **kwargs):
                self._without_token.discard(request_id)
                yield output

        return salted

    def _counted(self, add_request: Callable[..., Any]) -> Callable[..., Any]:
        """Count a request as no longer on its way once the engine has the request."""

        async def counted(request_id: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return await add_request(request_id, *args, **kwargs)
            finally:
                self._on_their_way.discard(request_id)

        return counted

    @property
    def _admitting(self) -> int:
        """The number of requests past the gate that the engine does not have yet: a weight update waits for these.

        verl counts a request until its first token. A request that waits in the engine for a slot has no token: every
        weight update would wait for slots, a minute at most.
        """
        return len(self._on_their_way)

    @_admitting.setter
    def _admitting(self, _: int) -> None:
        """Ignore verl's own count."""

    def _pausing(self, engine: Any) -> Callable[..., Any]:
        """Leave requests in the engine with `keep`, except those without a token, which come again after the update.

        A request without a token would count as begun with the old weights, and find prefixes of the old weights.
        """
        pause_generation = engine.pause_generation

        async def pause(**as_verl: Any) -> None:
            if not keeps_kv_cache(self.config):
                await pause_generation(**as_verl)
                return
            await engine.abort(list(self._without_token))
            await pause_generation(mode="keep", clear_cache=False)

        return pause

    async def probe(self) -> EngineProcesses:
        """Return the engine's processes on this node; an answer says that the engine lives, not only this server."""
        if self.node_rank == 0:
            await self.engine.is_sleeping()  # a cheap call that the engine's process has to answer
        return engine_processes(ray.get_runtime_context().get_node_id())

    async def drop_request(self, request_id: str) -> None:
        """End a request that nobody waits for, whether it is in the engine or still on its way there."""
        self._dropped[request_id] = None
        await self.engine.abort([request_id])

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        if request_id in self._dropped:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self.global_steps})
        rejected = await super()._park_until_admitted(request_id)
        if rejected is None:
            self._on_their_way.add(request_id)
            self._without_token.add(request_id)
        self._admitted_with[request_id] = self.global_steps
        return rejected

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        """Put the policy version of the response's start, and the sampler's rank, into verl's output."""
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            self._on_their_way.discard(request_id)
            self._without_token.discard(request_id)
            version = self._admitted_with.pop(request_id, self.global_steps)
        output.extra_fields |= {"min_global_steps": version, SAMPLER: self.replica_rank}
        return output


class LagKvLLMReplica(vLLMReplica):
    """A replica of `LagKvLLMHttpServer`s."""

    server = LagKvLLMHttpServer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = server_actor(self.server)

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """Return verl's class and arguments with our receiver of weights."""
        made = super().get_ray_class_with_init_args()
        made.cls = ray.remote(LagKCheckpointEngineWorker)
        return made

    @property
    def max_concurrency(self) -> int:
        """The most calls at a time: more than the server's actor can have, so control calls never wait for requests."""
        return max(super().max_concurrency, most_calls(self.config))

    async def release_kv_cache(self) -> None:
        if not keeps_kv_cache(self.config):  # upstream first waits until no request is left
            await super().release_kv_cache()

    async def resume_kv_cache(self) -> None:
        if not keeps_kv_cache(self.config):
            await super().resume_kv_cache()
