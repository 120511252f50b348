"""What a sampler's engine did between two steps of the trainer, from vLLM's own statistics of its iterations."""

import time
from collections.abc import Callable
from typing import Any

import ray

_ANSWER_S = 5.0


class SamplerMeter:
    """Takes vLLM's statistics (`engine.logger_manager.stat_loggers`), and adds them up until `take`.

    Time counts from the first request that the engine has until it has none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_since: float | None = None
        self._taken_at = clock()
        self._reset()

    def _reset(self) -> None:
        self._busy_s = self._running_s = self._waiting_s = 0.0
        self._tokens = self._recomputed = 0

    def arrived(self) -> None:
        """The engine is given a request."""
        if self._busy_since is None:
            self._busy_since = self._clock()

    def stop(self) -> None:
        """The engine stops what it does, for a weight update."""
        self._busy_since = None

    def interrupted(self, tokens: int) -> None:
        """A request's context of so many tokens has to be computed again, with new weights."""
        self._recomputed += tokens

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Take in an iteration: vLLM's SchedulerStats (what is left in the engine) and IterationStats, or None."""
        if scheduler_stats is None or iteration_stats is None:
            return
        now, since = self._clock(), self._busy_since
        running, waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
        self._busy_since = now if running + waiting else None
        tokens = iteration_stats.num_generation_tokens
        self._tokens += tokens
        if since is None:
            return
        seconds = now - since
        self._busy_s += seconds
        self._running_s += seconds * max(running, tokens)
        self._waiting_s += seconds * waiting

    def log(self) -> None:
        """Of vLLM's loggers: nothing is printed."""

    def record_sleep_state(self, *_: Any) -> None:
        """Of vLLM's loggers: a sampler never sleeps."""

    def take(self) -> dict[str, Any]:
        """The sums since the last call."""
        now = self._clock()
        taken = {
            "passed_s": now - self._taken_at,
            "busy_s": self._busy_s,
            "running_s": self._running_s,
            "waiting_s": self._waiting_s,
            "tokens": self._tokens,
            "recomputed_tokens": self._recomputed,
        }
        self._taken_at = now
        self._reset()
        return taken


def take_all(replicas: list[Any]) -> list[dict[str, Any]]:
    """What the meters of these samplers took, without samplers that do not answer: `SamplerKeeper` replaces these."""
    calls = [replica.servers[0].take_meter.remote() for replica in replicas]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_S) if calls else ([], [])
    taken = []
    for call in done:
        try:
            taken.append(ray.get(call))
        except ray.exceptions.RayActorError:
            continue
    return taken


def metrics(taken: list[dict[str, Any]]) -> dict[str, float]:
    """`vcpo/sampler/*` of a step; nothing where no sampler answered."""
    if not taken:
        return {}
    passed_s = sum(one["passed_s"] for one in taken) or 1e-9
    busy_s, tokens = sum(one["busy_s"] for one in taken), sum(one["tokens"] for one in taken)
    return {
        "vcpo/sampler/count": len(taken),
        "vcpo/sampler/tokens": tokens,
        "vcpo/sampler/busy_s": busy_s,
        "vcpo/sampler/tokens_per_busy_s": tokens / busy_s if busy_s else 0.0,
        "vcpo/sampler/running": sum(one["running_s"] for one in taken) / passed_s,
        "vcpo/sampler/waiting": sum(one["waiting_s"] for one in taken) / passed_s,
        "vcpo/sampler/recomputed_tokens": sum(one["recomputed_tokens"] for one in taken),
    }
