"""The samplers' idle clock, and the calls of many requests as one."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from verl.workers.rollout.router import RequestLoadBalancer

from verl_vcpo.samplers import router
from verl_vcpo.samplers.router import GatheredCalls, IdleTimeLoadBalancer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(router.time, "monotonic", lambda: now[0])
    return now


def test_idle_share_is_the_time_without_requests(clock: list[float]) -> None:
    balancer = IdleTimeLoadBalancer({"s": None})
    clock[0] += 3  # idle
    balancer.acquire_servers(["r1"])
    balancer.acquire_servers(["r2"])
    clock[0] += 4  # busy
    balancer.release_servers({"s": 1})
    clock[0] += 2  # still busy with r2
    balancer.release_servers({"s": 1})
    clock[0] += 1  # idle
    assert balancer.take_idle_share() == pytest.approx(0.4)
    clock[0] += 5
    assert balancer.take_idle_share() == pytest.approx(1.0)


def test_time_before_the_first_server_is_no_idle_time(clock: list[float]) -> None:
    balancer = IdleTimeLoadBalancer({})
    clock[0] += 50
    balancer.add_servers({"s": None})
    balancer.acquire_servers(["r"])
    clock[0] += 3  # busy
    balancer.release_servers({"s": 1})
    clock[0] += 1  # idle
    assert balancer.take_idle_share() == pytest.approx(0.25)


def test_a_request_goes_where_the_fewest_are_and_a_session_stays() -> None:
    balancer = IdleTimeLoadBalancer({"a": 1, "b": 2})
    servers = [server for server, _ in balancer.acquire_servers(["r0", "r1", "r2", "r3"])]
    assert sorted(servers) == ["a", "a", "b", "b"]
    balancer.release_servers({"a": 2, "unknown": 1})
    assert balancer.acquire_servers([f"r{servers.index('b')}", "new"]) == [("b", 2), ("a", 1)]
    balancer.remove_servers(["b"])
    assert balancer.acquire_servers([f"r{servers.index('b')}"]) == [("a", 1)], "its server is gone"
    balancer.release_servers({"b": 1})
    assert balancer.get_all_servers() == ["a"] and balancer.get_total_inflight() == 2


def test_verls_own_client_can_ask_too() -> None:
    balancer = IdleTimeLoadBalancer({"a": 1})
    assert balancer.acquire_server("r") == ("a", 1) and balancer.get_total_inflight() == 1
    balancer.release_server("a", "r")
    assert balancer.get_total_inflight() == 0 and balancer.clear_sticky_cache() == {"cleared_entries": 1}
    assert {*vars(RequestLoadBalancer)} & {"require_acquire_fields", "require_release_fields"}
    assert balancer.require_acquire_fields() == balancer.require_release_fields() == []


def test_the_balancers_process_imports_nothing_large() -> None:
    program = f"import sys, {router.__name__}; print({{'torch', 'verl', 'ray'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


def test_requests_that_begin_together_are_one_call_and_a_stopped_one_is_released() -> None:
    balancer, calls = IdleTimeLoadBalancer({"a": "handle of a", "b": "handle of b"}), list[list[str]]()

    async def acquire(request_ids: list[str]) -> list[tuple[str, Any]]:
        calls.append(request_ids)
        await asyncio.sleep(0)
        return balancer.acquire_servers(request_ids)

    actor = SimpleNamespace(
        acquire_servers=SimpleNamespace(remote=acquire),
        release_servers=SimpleNamespace(remote=balancer.release_servers),
    )

    async def main() -> None:
        gathered = GatheredCalls(actor)
        requests = [asyncio.ensure_future(gathered.acquire(f"r{i}")) for i in range(4)]
        while not calls:
            await asyncio.sleep(0)
        requests[0].cancel()
        late = asyncio.ensure_future(gathered.acquire("late"))
        while balancer.get_total_inflight() < 5:
            await asyncio.sleep(0)
        late.cancel()  # its server is given, and it has not gone on yet
        servers = await asyncio.gather(*requests[1:])
        assert {*servers} == {("a", "handle of a"), ("b", "handle of b")}
        assert len(calls) == 2 and balancer.get_total_inflight() == 5
        for server_id, _ in servers:
            gathered.release(server_id)
        await asyncio.sleep(2 * router._RELEASE_S)
        assert balancer.get_total_inflight() == 0
        balancer.remove_servers(["a", "b"])
        both = await asyncio.gather(*[gathered.acquire("r") for _ in range(2)], return_exceptions=True)
        assert [router.NO_SERVERS in str(error) for error in both] == [True, True]

    asyncio.run(main())
