"""verl's server with our gate around an engine that only counts tokens: a weight update waits for no slot."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.kit.counting_engine import TokenCountingEngine
from verl_vcpo.samplers.kv_cache import KVCache
from verl_vcpo.samplers.vllm_server import LagKvLLMHttpServer, answered_or_dead

TOKENS = 100_000  # of a response; at a tenth of a second each, none ends while a test runs


class Settings(SimpleNamespace):
    """Settings that `get` reads too, as verl's do."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class PausingEngine(TokenCountingEngine):
    """Pauses without an end to any request, as vLLM does with mode="keep"."""

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:  # type: ignore[override]
        assert (mode, clear_cache) == ("keep", False)


def server_with(slots: int, kv_cache: KVCache = KVCache.RECOMPUTE) -> LagKvLLMHttpServer:
    """A server as its constructor and `run_server` leave it, without Ray and vLLM."""
    server = object.__new__(LagKvLLMHttpServer)
    server.config = Settings(
        custom={"kv_cache": kv_cache},
        max_model_len=2 * TOKENS,
        response_length=TOKENS,
        full_determinism=False,
        enable_rollout_routing_replay=False,
        mtp=None,
    )
    server.model_config = Settings(processor=None, lora_rank=0, lora={})
    server._disaggregation_role = "null"
    server.node_rank, server.replica_rank, server.global_steps = 0, 0, 3
    server._submission_paused, server._rejecting, server._resume_event = False, False, asyncio.Event()
    server._on_their_way, server._without_token, server._admitted_with, server._dropped = set(), set(), {}, {}
    engine = PausingEngine if kv_cache == KVCache.KEEP else TokenCountingEngine
    server.engine = engine(slots, token_s=0.1, mean_tokens=TOKENS, seed=1)
    server._extend(server.engine)
    return server


async def answers(server: LagKvLLMHttpServer, requests: int) -> list[asyncio.Task[Any]]:
    """Requests that the engine has; as many as there are slots are being worked on."""
    tasks = [
        asyncio.create_task(server.generate([1, 2, 3], {"max_tokens": TOKENS, "logprobs": True}, f"request {i}"))
        for i in range(requests)
    ]
    while len(server.engine.output_processor.request_states) < requests:
        await asyncio.sleep(0.01)
    return tasks


def test_an_update_does_not_wait_for_requests_that_wait_for_a_slot() -> None:
    async def scenario() -> None:
        server = server_with(slots=1)
        tasks = await answers(server, 3)
        async with asyncio.timeout(30):  # verl waits for the first token of each request, for a minute at most
            assert (await server.abort_all_requests())["aborted_count"] == 3
            outputs = await asyncio.gather(*tasks)
        assert {output.stop_reason for output in outputs} == {"aborted"}
        assert {output.extra_fields["min_global_steps"] for output in outputs} == {3}
        assert not server._admitting

    asyncio.run(scenario())


def test_a_kept_cache_is_not_for_requests_without_a_token() -> None:
    async def scenario() -> None:
        server = server_with(slots=1, kv_cache=KVCache.KEEP)
        working, *waiting = await answers(server, 3)
        while "request 0" in server._without_token:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            await server.abort_all_requests()
            assert [(output.token_ids, output.stop_reason) for output in await asyncio.gather(*waiting)] == [
                ([], "aborted")
            ] * 2, "they come again, and begin with the new weights"
        assert not working.done()
        working.cancel()

    asyncio.run(scenario())


def test_an_update_waits_for_requests_on_their_way_to_the_engine() -> None:
    async def scenario() -> None:
        server = server_with(slots=1)
        arrives = asyncio.Event()
        add_request = server.engine.add_request

        async def slow(*args: Any) -> Any:
            await arrives.wait()
            return await add_request(*args)

        server.engine.add_request = server._counted(slow)
        task = asyncio.create_task(server.generate([1], {"max_tokens": TOKENS, "logprobs": True}, "request"))
        while not server._admitting:
            await asyncio.sleep(0.01)
        update = asyncio.create_task(server.abort_all_requests())
        await asyncio.sleep(0.1)
        assert not update.done(), "the pause would miss the request"
        arrives.set()
        async with asyncio.timeout(30):
            assert (await update)["aborted_count"] == 1
            assert (await task).stop_reason == "aborted"

    asyncio.run(scenario())


def test_a_control_call_ends_when_the_engine_dies() -> None:
    async def scenario() -> None:
        engine = SimpleNamespace(errored=False, dead_error=EngineDeadError())
        never = asyncio.Event()

        async def call(name: str) -> str:
            if name == "update_weights":
                await never.wait()  # as vLLM's, of an engine whose process is killed
            return name

        bounded = answered_or_dead(engine, call)
        assert await bounded("is_sleeping") == "is_sleeping"
        update = asyncio.create_task(bounded("update_weights"))
        await asyncio.sleep(0.1)
        assert not update.done()
        engine.errored = True
        async with asyncio.timeout(30):
            with pytest.raises(EngineDeadError):
                await update

    asyncio.run(scenario())
