"""A stand-in for vLLM's engine that counts tokens by the clock, behind the real servers: no model, no process.

The engine works on `max_num_seqs` requests at a time; other requests wait in the order of their arrival. A running
request gets a token every `rollout.custom.token_s` seconds. Lengths are drawn with mean `rollout.custom.mean_tokens`,
without memory: a response that a weight update has interrupted needs as many more tokens as a new one. All tokens are
the same token, of log-prob `rollout.custom.log_prob` (-1).
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from verl_vcpo.samplers import replica
from verl_vcpo.samplers.vllm_server import LagKvLLMHttpServer, LagKvLLMReplica, keeps_kv_cache

_TOKEN = 5


def _output(tokens: int, finish_reason: str | None, log_prob: float) -> Any:
    """Return the fields of vLLM's output that verl's server reads."""
    log_probs = {_TOKEN: SimpleNamespace(logprob=log_prob)}
    response = SimpleNamespace(
        token_ids=[_TOKEN] * tokens, logprobs=[log_probs] * tokens, finish_reason=finish_reason, num_preempted=0
    )
    return SimpleNamespace(outputs=[response], num_cached_tokens=0, metrics=None)


class TokenCountingEngine:
    """An engine with the methods of vLLM's AsyncLLM that verl's server calls."""

    def __init__(self, slots: int, token_s: float, mean_tokens: float, seed: int, log_prob: float = -1.0) -> None:
        self._log_prob = log_prob  # the same for each token
        self._slots, self._token_s, self._mean_tokens = asyncio.Semaphore(slots), token_s, mean_tokens
        self._rng = random.Random(seed)
        self.output_processor = SimpleNamespace(request_states={})  # request -> set when the request is aborted

    async def add_request(self, request_id: str) -> asyncio.Event:
        self.output_processor.request_states[request_id] = aborted = asyncio.Event()
        return aborted

    async def generate(
        self, *, prompt: Any, sampling_params: Any, request_id: str, lora_request: Any, priority: int
    ) -> AsyncIterator[Any]:
        """Yield like vLLM, nothing before the first token, which a request that waits for a slot does not have."""
        aborted = await self.add_request(request_id)
        try:
            if not await self._slot(aborted):
                yield _output(0, "abort", self._log_prob)
                return
            try:
                yield _output(1, None, self._log_prob)
                length = min(1 + int(self._rng.expovariate(1 / self._mean_tokens)), sampling_params.max_tokens)
                start = time.monotonic()
                try:
                    await asyncio.wait_for(aborted.wait(), length * self._token_s)
                    yield _output(min(length, int((time.monotonic() - start) / self._token_s)), "abort", self._log_prob)
                except TimeoutError:
                    yield _output(length, "stop", self._log_prob)
            finally:
                self._slots.release()
        finally:
            del self.output_processor.request_states[request_id]

    async def _slot(self, aborted: asyncio.Event) -> bool:
        """Wait for a slot. Return True if the request gets a slot before it is aborted."""
        slot, end = asyncio.ensure_future(self._slots.acquire()), asyncio.ensure_future(aborted.wait())
        await asyncio.wait({slot, end}, return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if slot.done() and not aborted.is_set():
            return True
        if not slot.cancel():
            self._slots.release()
        return False

    async def abort(self, request_id: str | list[str]) -> None:
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if one in self.output_processor.request_states:
                self.output_processor.request_states[one].set()

    async def pause_generation(self, wait_for_inflight_requests: bool, clear_cache: bool) -> None:
        for aborted in list(self.output_processor.request_states.values()):
            aborted.set()
        while self.output_processor.request_states:
            await asyncio.sleep(0.001)

    async def resume_generation(self) -> None:
        """Do nothing: the server holds requests back while weights are updated."""

    async def is_sleeping(self) -> bool:
        return False

    async def wait_for_requests_to_drain(self) -> None:
        while self.output_processor.request_states:
            await asyncio.sleep(0.001)


class TokenCountingvLLMHttpServer(LagKvLLMHttpServer):
    """The real server, with the real gate, around a `TokenCountingEngine`. ActorWatch knows the end of its name."""

    async def launch_server(self, *_: Any, **__: Any) -> None:
        if keeps_kv_cache(self.config):
            raise ValueError("async.kv_cache=keep: the counting engine aborts requests, and cannot pause them")
        custom = self.config.custom
        self.engine = TokenCountingEngine(
            self.config.max_num_seqs,
            custom["token_s"],
            custom["mean_tokens"],
            self.replica_rank,
            custom.get("log_prob", -1.0),
        )
        self._extend(self.engine)
        self._server_port = self._master_port


class TokenCountingReplica(LagKvLLMReplica):
    """A replica of one `TokenCountingvLLMHttpServer`, without workers: there are no weights to receive."""

    server = TokenCountingvLLMHttpServer

    async def init_standalone(self) -> None:
        self.workers: list[Any] = []
        self.resource_pool = SimpleNamespace(pgs=[])
        await self.launch_servers()

    async def launch_servers(self) -> None:
        server = self.server_class.options(max_concurrency=self.max_concurrency).remote(
            config=self.config,
            model_config=self.model_config,
            rollout_mode=self.rollout_mode,
            workers=[],
            replica_rank=self.replica_rank,
            node_rank=0,
            gpus_per_node=1,
            nnodes=1,
            cuda_visible_devices="",
        )
        await server.launch_server.remote()
        address, port = await server.get_server_address.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, f"{address}:{port}"


class CountingWeights:
    """A stand-in for verl's CheckpointEngineManager without weights: servers abort requests, wait, and resume."""

    def __init__(self, replicas: list[Any], transfer_s: float) -> None:
        self.replicas, self._transfer_s = replicas, transfer_s

    def update_weights(self, global_steps: int) -> dict[str, Any]:
        asyncio.run(self._update(global_steps))
        return {}

    async def _update(self, version: int) -> None:
        await asyncio.gather(*[replica.abort_all_requests() for replica in self.replicas])
        await asyncio.sleep(self._transfer_s)
        await asyncio.gather(*[r.servers[0].set_global_steps.remote(version) for r in self.replicas])
        await asyncio.gather(*[replica.resume_generation() for replica in self.replicas])


def register_engine() -> None:
    """Have `rollout.name=vllm` stand for the counting engine in this process."""
    replica.register(__name__, TokenCountingReplica.__name__)
