"""The samplers' client over servers that only count: admission, weight updates, and servers that fail."""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from ray.exceptions import RayActorError
from verl.workers.rollout.replica import TokenOutput

from verl_vcpo.samplers.admission import AdmissionGate, admitted_per_worker, most_calls, request_order
from verl_vcpo.samplers.client import MAX_SERVER_FAILURES, RequestEndsServers, ResumingLLMClient, _joined
from verl_vcpo.samplers.router import IdleTimeLoadBalancer
from verl_vcpo.user_code.errors import UserCodeError


class Handle:
    """An actor's handle: `.name.remote(...)` calls the object's method, as Ray does, in another task."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self._actor, name)(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        return SimpleNamespace(remote=lambda *args, **kwargs: asyncio.ensure_future(call(*args, **kwargs)))


class CountingServer:
    """In place of LagKvLLMHttpServer: counts its requests, and answers after a weight update or a while."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds, self.answers_probes, self.dead = seconds, True, False
        self.requests, self.most, self.order = 0, 0, list[int]()
        self.dropped: list[str] = []
        self.update = asyncio.Event()
        self.poison: set[int] = set()
        self._died = asyncio.Event()

    async def generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> TokenOutput:
        self.requests += 1
        self.most = max(self.most, self.requests)
        self.order.append(prompt_ids[0])
        if prompt_ids[0] in self.poison:
            await asyncio.sleep(self.seconds / 2)
            self.dead = True
            self._died.set()
        try:
            events = [asyncio.ensure_future(event.wait()) for event in (self.update, self._died)]
            done, _waiting = await asyncio.wait(events, timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
            for event in events:
                event.cancel()
            if self.dead:
                raise RayActorError
            tokens, reason = ([], "aborted") if done else ([7, 8], "completed")
            return TokenOutput(token_ids=tokens, log_probs=[0.0] * len(tokens), stop_reason=reason)
        finally:
            self.requests -= 1

    async def probe(self) -> None:
        if not self.answers_probes:
            await asyncio.sleep(60)

    def drop_request(self, request_id: str) -> None:
        self.dropped.append(request_id)


class Pool:
    """A load balancer that counts, and servers, which are replaced when they are taken out."""

    def __init__(self, make: Callable[[], CountingServer], count: int = 1) -> None:
        self.servers = [make() for _ in range(count)]
        self._make, self.acquired, self.releases, self.calls = make, 0, 0, 0
        self._balancer = IdleTimeLoadBalancer({str(i): Handle(server) for i, server in enumerate(self.servers)})

    def acquire_servers(self, request_ids: list[str]) -> Any:
        self.acquired += len(request_ids)
        self.calls += 1
        return self._balancer.acquire_servers(request_ids)

    def release_servers(self, requests: dict[str, int]) -> None:
        self.releases += sum(requests.values())
        self._balancer.release_servers(requests)

    def remove_servers(self, ids: list[str]) -> None:
        known = set(self._balancer.get_all_servers())
        self._balancer.remove_servers(ids)
        for _ in known & set(ids):
            self.servers.append(self._make())
            self._balancer.add_servers({str(len(self.servers) - 1): Handle(self.servers[-1])})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._balancer, name)


def client(pool: Pool, slots: int = 4, timeout_s: float = 30.0) -> ResumingLLMClient:
    rollout = dict(
        name="vllm", response_length=2, max_num_seqs=slots, n_gpus_per_node=1, nnodes=1, tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1, data_parallel_size=1, temperature=1.0, agent={"num_workers": 1},
    )  # fmt: skip
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "async": {"sampler_timeout_s": timeout_s}})
    return ResumingLLMClient(config, load_balancer_handle=Handle(pool))


async def ask(llm: ResumingLLMClient, number: int, order: tuple[int, ...] = (), **sampling: Any) -> TokenOutput:
    request_order.set(order)
    return await llm.generate(f"request {number}", prompt_ids=[number], sampling_params=sampling)


AS_VERL = dict(temperature=1.0, top_p=1, top_k=-1, repetition_penalty=1.0, logprobs=True)


@pytest.mark.parametrize(
    ("sampling", "refused"),
    [
        (AS_VERL | dict(max_tokens=2, stop=["."], stop_token_ids=[3], seed=1, min_p=0, logit_bias=None), None),
        (dict(temperature=0.5), "temperature=0.5, .*; give temperature=1,"),
        (AS_VERL | dict(top_k=5), "top_k=5, .*; give top_k=-1,"),
        (AS_VERL | dict(repetition_penalty=1.1), "give repetition_penalty=1,"),
        *((AS_VERL | {name: 1}, f"give {name}=0,") for name in ("min_p", "min_tokens", "presence_penalty")),
        *((AS_VERL | {name: [1]}, f"leave {name} out,") for name in ("logit_bias", "bad_words", "structured_outputs")),
    ],
)
def test_a_training_request_draws_from_the_policy(sampling: dict[str, Any], refused: str | None) -> None:
    async def main(order: tuple[int, ...]) -> None:
        await ask(client(Pool(CountingServer)), 1, order, **sampling)

    asyncio.run(main((False, 0)))  # of a validation
    with pytest.raises(UserCodeError, match=refused) if refused else contextlib.nullcontext():
        asyncio.run(main((True, 0)))


def test_only_a_multiple_of_the_slots_is_at_the_samplers_the_earliest_deadline_first() -> None:
    async def main() -> None:
        pool = Pool(CountingServer)
        llm = client(pool, slots=4)
        await asyncio.gather(*[ask(llm, number, order=(1, 100 - number)) for number in range(100)])
        (server,) = pool.servers
        assert server.most == 8
        assert server.order[8:] == list(range(99, 7, -1)), "the first eight found the gate open"

    asyncio.run(main())


def test_a_validation_comes_before_the_backlog() -> None:
    async def main() -> None:
        pool = Pool(CountingServer)
        llm = client(pool, slots=2)
        training = [asyncio.ensure_future(ask(llm, number, order=(1, number))) for number in range(50)]
        await asyncio.sleep(0.005)
        await ask(llm, 1000, order=(0, 9))
        assert pool.servers[0].order.index(1000) <= 8
        await asyncio.gather(*training)

    asyncio.run(main())


def test_a_weight_update_asks_the_load_balancer_nothing() -> None:
    async def main() -> None:
        pool = Pool(lambda: CountingServer(seconds=600.0))
        llm = client(pool, slots=50)
        answers = [asyncio.ensure_future(ask(llm, number)) for number in range(100)]
        while len(pool.servers[0].order) < 100:
            await asyncio.sleep(0.001)
        pool.servers[0].seconds = 0.01
        pool.servers[0].update.set()  # every request is aborted, and sent again
        await asyncio.sleep(0)
        pool.servers[0].update.clear()
        assert [answer.token_ids for answer in await asyncio.gather(*answers)] == [[7, 8]] * 100
        assert pool.acquired == 100 and len(pool.servers[0].order) == 200
        while pool.releases < 100:
            await asyncio.sleep(0.01)
        assert pool.get_total_inflight() == 0 and pool.calls < 10, "requests that begin together ask together"

    asyncio.run(main())


def test_a_slow_sampler_is_not_a_dead_one() -> None:
    async def main() -> None:
        pool = Pool(lambda: CountingServer(seconds=0.5))
        answer = await ask(client(pool, timeout_s=0.05), 1)
        assert answer.token_ids == [7, 8] and len(pool.servers) == 1, "its engine answered every probe"

    asyncio.run(main())


def test_a_sampler_that_hangs_is_taken_out() -> None:
    async def main() -> None:
        pool = Pool(CountingServer)
        hung = pool.servers[0]
        hung.seconds, hung.answers_probes = 60.0, False
        answer = await ask(client(pool, timeout_s=0.05), 1)
        assert answer.token_ids == [7, 8] and len(pool.servers) == 2

    asyncio.run(main())


def test_a_request_that_ends_its_servers_is_named_and_the_others_are_answered() -> None:
    """Poison among 32 requests: after two servers each suspect comes alone, and only the poison meets a third."""

    def poisoned() -> CountingServer:
        server = CountingServer()
        server.poison = {5}
        return server

    async def main() -> None:
        pool = Pool(poisoned)
        llm = client(pool, slots=16)
        results = await asyncio.gather(*[ask(llm, number) for number in range(32)], return_exceptions=True)
        assert isinstance(results[5], RequestEndsServers)
        assert all(isinstance(result, TokenOutput) for number, result in enumerate(results) if number != 5)
        assert len(pool.servers) == 1 + MAX_SERVER_FAILURES

    asyncio.run(main())


def test_requests_that_nobody_waits_for_are_ended_at_their_servers() -> None:
    async def main() -> None:
        pool = Pool(lambda: CountingServer(seconds=60.0), count=2)
        llm = client(pool)
        requests = [asyncio.ensure_future(ask(llm, number)) for number in range(6)]
        async with asyncio.timeout(60):
            while sum(server.requests for server in pool.servers) < len(requests):
                await asyncio.sleep(0.001)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            while pool.releases < 6 or sum(len(server.dropped) for server in pool.servers) < 6:
                await asyncio.sleep(0.001)
        assert [len(server.dropped) for server in pool.servers] == [3, 3]
        assert pool.get_total_inflight() == 0

    asyncio.run(main())


def test_a_place_is_not_lost_when_a_waiting_request_is_cancelled() -> None:
    async def main() -> None:
        gate = AdmissionGate(1)

        async def hold(seconds: float) -> None:
            async with gate.admitted(()):
                await asyncio.sleep(seconds)

        first, second = asyncio.ensure_future(hold(0.02)), asyncio.ensure_future(hold(9.0))
        await asyncio.sleep(0.01)
        second.cancel()
        await first
        await asyncio.wait_for(hold(0.0), 1.0)

    asyncio.run(main())


@pytest.mark.parametrize("workers", [1, 8])
def test_the_places_follow_from_the_layout(workers: int) -> None:
    """math/vcpo_k=10.sh: two samplers of two GPUs; verl gives a server 1,000 calls at a time."""
    rollout = SimpleNamespace(
        n_gpus_per_node=4, nnodes=1, tensor_model_parallel_size=2, pipeline_model_parallel_size=1, data_parallel_size=1,
        max_num_seqs=1024, agent=SimpleNamespace(num_workers=workers),
    )  # fmt: skip
    assert admitted_per_worker(rollout) * workers == 4096
    assert most_calls(rollout) > 4096


def test_a_continued_response_has_each_tokens_experts_once() -> None:
    """Catches experts that are missing where an aborted part has none: verl would fill up with expert 0."""

    def part(tokens: int, experts: list[int] | None) -> TokenOutput:
        rows = None if experts is None else np.array(experts).reshape(-1, 1, 1)
        return TokenOutput(token_ids=[7] * tokens, routed_experts=rows)

    whole = part(2, [1, 1, 1, 1])  # of a prompt of three tokens; the last token went through no model
    for later in (part(1, None), part(0, None), part(2, [2] * 7)):
        whole = _joined(whole, later)
    assert whole.routed_experts.flatten().tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert _joined(part(2, None), part(1, [2] * 5)).routed_experts.flatten().tolist() == [2] * 5


def test_a_response_comes_from_the_sampler_of_its_first_token() -> None:
    parts = [TokenOutput(token_ids=[7] * tokens, extra_fields={"sampler": tokens}) for tokens in (0, 1, 2)]
    assert functools.reduce(_joined, parts).extra_fields["sampler"] == 1
