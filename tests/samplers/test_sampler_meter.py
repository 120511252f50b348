"""What a sampler's engine did is added up from vLLM's statistics."""

from types import SimpleNamespace
from typing import Any

import pytest

from verl_vcpo.samplers.meter import SamplerMeter, metrics


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def iteration(tokens: int, *, left: int, waiting: int = 0) -> tuple[Any, Any]:
    scheduler = SimpleNamespace(num_running_reqs=left, num_waiting_reqs=waiting)
    return scheduler, SimpleNamespace(num_generation_tokens=tokens)


@pytest.fixture
def meter() -> SamplerMeter:
    """Three requests in an engine: an iteration of 0.5 s, two of 0.25 s, then an idle second."""
    clock = Clock()
    meter = SamplerMeter(clock)
    clock.now = 1.0
    meter.arrived()
    for now, seen in (
        (1.5, iteration(3, left=3, waiting=1)),
        (1.75, iteration(3, left=2)),
        (2.0, iteration(2, left=0)),
    ):
        clock.now = now
        meter.record(*seen, mm_cache_stats=None, engine_idx=0)
    clock.now = 3.0
    return meter


def test_time_and_tokens_are_added_up(meter: SamplerMeter) -> None:
    taken = meter.take()
    assert (taken["tokens"], taken["busy_s"], taken["passed_s"]) == (8, 1.0, 3.0)
    assert (taken["running_s"], taken["waiting_s"]) == (3 * 0.5 + 3 * 0.25 + 2 * 0.25, 0.5)
    assert meter.take()["tokens"] == 0


def test_the_time_of_a_weight_update_is_not_the_engines() -> None:
    clock = Clock()
    meter = SamplerMeter(clock)
    meter.arrived()
    clock.now = 0.1
    meter.record(*iteration(1, left=1))
    meter.stop()
    meter.interrupted(25)
    clock.now = 5.0
    meter.arrived()
    clock.now = 5.1
    meter.record(*iteration(1, left=0))
    taken = meter.take()
    assert taken["busy_s"] == pytest.approx(0.2) and taken["recomputed_tokens"] == 25


def test_the_step_has_the_sums_of_all_samplers(meter: SamplerMeter) -> None:
    found = metrics([meter.take(), SamplerMeter().take()])
    assert (found["vcpo/sampler/count"], found["vcpo/sampler/tokens_per_busy_s"]) == (2, 8.0)
    assert metrics([]) == {}


def test_vllm_calls_the_meter_as_it_calls_its_own_loggers() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    manager = object.__new__(StatLoggerManager)
    manager.stat_loggers = [meter := SamplerMeter()]  # type: ignore[list-item]
    stats = IterationStats()
    stats.num_generation_tokens = 2
    manager.record(SchedulerStats(num_running_reqs=2), stats, mm_cache_stats=None, engine_idx=0)
    manager.log()
    manager.record_sleep_state(0, 0)
    assert meter.take()["tokens"] == 2
