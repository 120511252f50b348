"""The oldest and newest policy version of a response are those that sampled its tokens, whatever updates hit.

The real client and the real servers' gates; the engine samples, in place of a token, the version that it has.
"""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from verl.workers.rollout.replica import TokenOutput

from tests.samplers.test_llm_client import Handle, client
from tests.samplers.test_vllm_server import server_with
from verl_vcpo.common.token_versions import token_versions
from verl_vcpo.samplers.kv_cache import KVCache
from verl_vcpo.samplers.router import IdleTimeLoadBalancer
from verl_vcpo.samplers.vllm_server import LagKvLLMHttpServer

FIRST = 3  # a server's version before the first update


class VersionEngine:
    """Takes the calls that the server makes of vLLM's engine; a token is the server's policy version."""

    def __init__(self, slots: int, server: LagKvLLMHttpServer) -> None:
        self._slots, self._server = asyncio.Semaphore(slots), server
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self.output_processor = SimpleNamespace(request_states={})  # request -> whether it is aborted

    async def add_request(self, request_id: str) -> None:
        self.output_processor.request_states[request_id] = False

    async def generate(
        self, *, prompt: Any, sampling_params: Any, request_id: str, lora_request: Any, priority: int
    ) -> AsyncIterator[Any]:
        await self.add_request(request_id)
        states, versions = self.output_processor.request_states, list[int]()
        try:
            async with self._slots:
                while not states[request_id] and len(versions) < sampling_params.max_tokens:
                    if self._goes_on.is_set():
                        versions.append(self._server.global_steps)
                        yield _output(versions, None)
                    await asyncio.sleep(0)
                yield _output(versions, "abort" if states[request_id] else "length")
        finally:
            del states[request_id]

    async def abort(self, request_id: str | list[str]) -> None:
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if one in self.output_processor.request_states:
                self.output_processor.request_states[one] = True

    async def pause_generation(self, mode: str = "abort", **_: Any) -> None:
        self._goes_on.clear()
        if mode == "keep":
            return
        await self.abort(list(self.output_processor.request_states))
        while self.output_processor.request_states:
            await asyncio.sleep(0)

    async def resume_generation(self) -> None:
        self._goes_on.set()


def _output(versions: list[int], finish_reason: str | None) -> Any:
    log_probs = [{version: SimpleNamespace(logprob=-1.0)} for version in versions]
    response = SimpleNamespace(
        token_ids=list(versions), logprobs=log_probs, finish_reason=finish_reason, num_preempted=0
    )
    return SimpleNamespace(outputs=[response], num_cached_tokens=0, metrics=None)


async def ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def updated(servers: list[LagKvLLMHttpServer], version: int, transfer: int) -> None:
    """What verl's CheckpointEngineManager does; the weights take `transfer` ticks, and servers get them in turn."""
    await asyncio.gather(*[server.abort_all_requests() for server in servers])
    for server in servers:
        await ticks(transfer)
        await server.set_global_steps(version)
    await asyncio.gather(*[server.resume_generation() for server in servers])


async def responses(
    kv_cache: KVCache, samplers: int, slots: int, requests: list[tuple[int, int]], updates: list[tuple[int, int]]
) -> list[TokenOutput]:
    """Of requests (ticks until each, its tokens) while updates come (ticks until each, ticks that its weights take)."""
    servers = [server_with(slots, kv_cache) for _ in range(samplers)]
    for server in servers:
        server.engine = VersionEngine(slots, server)
        server._extend(server.engine)
    pool = IdleTimeLoadBalancer({str(i): Handle(server) for i, server in enumerate(servers)})
    llm = client(pool, slots=slots)  # type: ignore[arg-type]

    async def request(number: int, start: int, tokens: int) -> TokenOutput:
        await ticks(start)
        sampling = {"max_tokens": tokens, "logprobs": True}
        return await llm.generate(f"request {number}", prompt_ids=[1], sampling_params=sampling)

    async def update() -> None:
        for i, (wait, transfer) in enumerate(updates):
            await ticks(wait)
            await updated(servers, FIRST + 1 + i, transfer)

    async with asyncio.timeout(60):
        *outputs, _ = await asyncio.gather(*[request(i, *one) for i, one in enumerate(requests)], update())
    return outputs


@settings(max_examples=150)
@given(
    kv_cache=st.sampled_from(KVCache),
    samplers=st.integers(1, 2),
    slots=st.integers(1, 3),
    requests=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=6),
    updates=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=5),
)
def test_labels_are_the_versions_of_the_tokens(
    kv_cache: KVCache, samplers: int, slots: int, requests: list[tuple[int, int]], updates: list[tuple[int, int]]
) -> None:
    outputs = asyncio.run(responses(kv_cache, samplers, slots, requests, updates))
    for output, (_, tokens) in zip(outputs, requests, strict=True):
        assert len(output.token_ids) == len(output.log_probs) == tokens
        assert output.token_ids == sorted(output.token_ids)
        assert output.extra_fields["min_global_steps"] == output.token_ids[0], output
        assert output.extra_fields["max_global_steps"] == output.token_ids[-1], output
        runs = token_versions(output.extra_fields, tokens)
        of_tokens = [version for version, run in runs for _ in range(run)]
        assert all(version in (None, token) for version, token in zip(of_tokens, output.token_ids, strict=True)), output
        assert kv_cache is KVCache.KEEP or None not in of_tokens


def test_updates_do_hit_responses() -> None:
    for kv_cache in KVCache:
        (output,) = asyncio.run(responses(kv_cache, 1, 1, [(0, 40)], [(10, 5), (15, 5)]))
        assert set(output.token_ids) == {FIRST, FIRST + 1, FIRST + 2}
