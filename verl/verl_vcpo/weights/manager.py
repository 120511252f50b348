"""The time limit of a weight update, `async.weight_update_timeout_s` (extends verl/checkpoint_engine/base.py).

verl's manager waits without a limit for samplers to stop, for the group to form, for the weights to arrive and for
samplers to go on. A process that hangs, or a broadcast to a process that died, would keep the run there for ever.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ray
from verl.checkpoint_engine import base
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.utils.ray_utils import auto_await

_PROBE_S = 5.0


class WeightUpdateTimeout(TimeoutError):
    """The error of a weight update that took too long, in one line: the setting, who did not finish, and what to do."""


class BoundedCheckpointEngineManager(CheckpointEngineManager):
    """verl's manager with a limit: every wait ends when the time of an update, `timeout_s`, is over."""

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any], timeout_s: float) -> None:
        super().__init__(config, actor_wg, replicas)
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._version: int | None = None

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> Any:
        """Update the samplers' weights as verl does; after a failure tell the engine's processes to stop waiting.

        Raises:
            WeightUpdateTimeout: the update's time is over.
            ray.exceptions.RayError: a process died, or failed; a sampler's engine died.
        """
        self._deadline, self._version = time.monotonic() + self._timeout_s, global_steps
        try:
            with self._bounded_ray_get():
                return await super().update_weights(global_steps)
        except ray.exceptions.RayError:
            give_up = getattr(self.backend_cls, "give_up", None)
            if give_up is not None:
                give_up()
            raise
        finally:
            self._deadline = None

    @contextmanager
    def _bounded_ray_get(self) -> Iterator[None]:
        """Give `ray.get` the limit in the block, in calls of verl's module: in an update, and nowhere else."""
        base.ray = SimpleNamespace(**{**vars(ray), "get": self._get})
        try:
            yield
        finally:
            base.ray = ray

    def _get(self, answers: list[Any]) -> list[Any]:
        """Return the answers of all workers; raise the error of the first worker that fails at once.

        A sampler's worker waits without end for an engine that has died, so the sampler's server is probed meanwhile.
        """
        probes: list[Any] = []
        while True:
            try:
                return ray.get(answers, timeout=min(_PROBE_S, self._time_left()))
            except ray.exceptions.GetTimeoutError:
                _, late = ray.wait(answers, num_returns=len(answers), timeout=0)
                if not late:  # the last answer came just now, or the error is one that a worker raised
                    return ray.get(answers, timeout=self._timeout_s)
                if not self._time_left():
                    names = self._names_of_workers()
                    raise self._too_late([names[answer.task_id().actor_id()] for answer in late]) from None
            probes = probes or [server.probe.remote() for replica in self.replicas for server in replica.servers]
            answered, probes = ray.wait(probes, num_returns=len(probes), timeout=0)
            ray.get(answered, timeout=self._timeout_s)  # an engine that loads weights answers later, a dead one raises

    async def _all_replicas(self, method: str, **kwargs: Any) -> None:
        """Call a method of every sampler."""
        calls = {asyncio.ensure_future(getattr(r, method)(**kwargs)): r.replica_rank for r in self.replicas}
        if not calls:
            return
        done, late = await asyncio.wait(calls, timeout=self._time_left(), return_when=asyncio.FIRST_EXCEPTION)
        for call in done:
            call.result()
        if late:
            raise self._too_late([f"sampler {calls[call]}" for call in late])

    @auto_await
    async def abort_replicas(self, reject_request: bool = False) -> None:
        await self._all_replicas("abort_all_requests", reject_request=reject_request)

    @auto_await
    async def release_kv_cache_replicas(self) -> None:
        await self._all_replicas("release_kv_cache")

    @auto_await
    async def resume_kv_cache_replicas(self) -> None:
        await self._all_replicas("resume_kv_cache")

    @auto_await
    async def resume_generation_replicas(self) -> None:
        await self._all_replicas("resume_generation")

    def _time_left(self) -> float:
        """Return the seconds left of the update; outside of an update each method may take as long as an update."""
        return self._timeout_s if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _names_of_workers(self) -> dict[Any, str]:
        names = {worker._actor_id: f"trainer rank {rank}" for rank, worker in enumerate(self.actor_wg.workers)}
        for replica in self.replicas:
            for rank, worker in enumerate(replica.workers):
                names[worker._actor_id] = f"sampler {replica.replica_rank} (worker {rank})"
        return names

    def _too_late(self, late: list[str]) -> WeightUpdateTimeout:
        return WeightUpdateTimeout(
            f"async.weight_update_timeout_s={self._timeout_s:g}: in the weight update to version {self._version} "
            f"{', '.join(sorted(late))} did not finish in time; where nothing hangs and the update is only slow, set a "
            "higher limit"
        )
