"""Samplers that die are replaced while the run goes on; their prompts go on elsewhere, or on the replacement."""

import asyncio
from typing import Any

import ray

_PROBE_S = 30.0


class SamplerKeeper:
    """Keeps as many samplers up as the run started with.

    Clients take a server that fails out of the load balancer's pool. `replace_broken` starts another one in its place,
    gives it the current weights and puts it into the pool.

    Args:
        servers: verl's LLMServerManager of the samplers.
        weights: verl's CheckpointEngineManager, which sends them the weights.
    """

    def __init__(self, servers: Any, weights: Any) -> None:
        self._servers, self._weights = servers, weights
        self.restarted = 0

    def broken(self) -> list[Any]:
        """The replicas that the balancer no longer uses."""
        pool = set(ray.get(self._servers.global_load_balancer.get_all_servers.remote()))
        return [replica for replica in self._servers.rollout_replicas if replica._server_address not in pool]

    def report_dead(self) -> None:
        """Ask every sampler for a sign of life; those without one leave the balancer's pool."""
        for replica in self._servers.rollout_replicas:
            signs = [server.__ray_call__.remote(_engine_is_dead) for server in replica.servers]
            try:
                dead = any(ray.get(signs, timeout=_PROBE_S))
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                dead = True
            if dead:
                ray.get(self._servers.global_load_balancer.remove_servers.remote([replica._server_address]))

    def replace_broken(self, version: int) -> int:
        """Replace what is broken; how many that were.

        Args:
            version: the policy version that the samplers have now.
        """
        broken = self.broken()
        if not broken:
            return 0
        for replica in broken:
            _remove(replica)
        fresh = asyncio.run(self._start([replica.replica_rank for replica in broken]))
        kept = [replica for replica in self._servers.rollout_replicas if replica not in broken]
        self._servers.rollout_replicas = self._weights.replicas = [*kept, *fresh]
        self._weights.update_weights(version)
        handles = {replica._server_address: replica._server_handle for replica in fresh}
        ray.get(self._servers.global_load_balancer.add_servers.remote(handles))
        self.restarted += len(fresh)
        return len(fresh)

    async def _start(self, ranks: list[int]) -> list[Any]:
        fresh = [
            self._servers.rollout_replica_class(
                replica_rank=rank,
                config=self._servers.rollout_config,
                model_config=self._servers.model_config,
                gpus_per_node=self._servers.rollout_config.n_gpus_per_node,
            )
            for rank in ranks
        ]
        await asyncio.gather(*[replica.init_standalone() for replica in fresh])
        return fresh


def _engine_is_dead(server: Any) -> bool:
    """Runs in the server: its engine, a process of its own, may be gone. Only the first node of a replica has one."""
    engine = getattr(server, "engine", None)
    return bool(engine is not None and engine.errored)


def _remove(replica: Any) -> None:
    """End what is left of a sampler and free its devices and its actors' names, which the next one takes over."""
    actors = (*replica.servers, *replica.workers)
    for actor in actors:
        ray.kill(actor)
    for actor in actors:
        while True:
            try:
                ray.get(actor.__ray_ready__.remote(), timeout=_PROBE_S)
            except ray.exceptions.RayActorError:
                break
    for group in replica.resource_pool.pgs or []:
        ray.util.remove_placement_group(group)
