"""The samplers' idle clock."""

import pytest

from verl_vcpo.samplers import router
from verl_vcpo.samplers.router import IdleTimeLoadBalancer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(router.time, "monotonic", lambda: now[0])
    return now


def test_idle_share_is_the_time_without_requests(clock: list[float]) -> None:
    balancer = IdleTimeLoadBalancer({"s": None})
    clock[0] += 3  # idle
    balancer.acquire_server("r1")
    balancer.acquire_server("r2")
    clock[0] += 4  # busy
    balancer.release_server("s")
    clock[0] += 2  # still busy with r2
    balancer.release_server("s")
    clock[0] += 1  # idle
    assert balancer.take_idle_share() == pytest.approx(0.4)
    clock[0] += 5
    assert balancer.take_idle_share() == pytest.approx(1.0)


def test_time_before_the_first_server_is_no_idle_time(clock: list[float]) -> None:
    balancer = IdleTimeLoadBalancer({})
    clock[0] += 50
    balancer.add_servers({"s": None})
    balancer.acquire_server("r")
    clock[0] += 3  # busy
    balancer.release_server("s")
    clock[0] += 1  # idle
    assert balancer.take_idle_share() == pytest.approx(0.25)
