"""Samplers that die are replaced while the run goes on; their prompts go on elsewhere, or on the replacement."""

import asyncio
import contextlib
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_vcpo.workers.rollout.llm_client import is_server_failure

_PROBE_S = 60.0

Engine = tuple[str, list[tuple[int, float]]]
"""A node, and the processes of an engine on it."""


class SamplerKeeper:
    """Keeps as many samplers up as the run started with.

    Clients take a server that fails out of the load balancer's pool. `replace` starts another one in its place,
    gives it the current weights and puts it into the pool.

    Args:
        servers: verl's LLMServerManager of the samplers.
        weights: verl's CheckpointEngineManager, which sends them the weights.
        timeout_s: a sampler that gives no sign of life for so long (a minute at most) is dead.
    """

    def __init__(self, servers: Any, weights: Any, timeout_s: float) -> None:
        self._servers, self._weights, self._timeout_s = servers, weights, min(timeout_s, _PROBE_S)
        self._engines: dict[str, list[Engine]] = {}
        self.take_out_the_dead()

    def broken(self) -> list[Any]:
        """The replicas that the balancer no longer uses."""
        pool = set(ray.get(self._servers.global_load_balancer.get_all_servers.remote()))
        return [replica for replica in self._servers.rollout_replicas if replica._server_address not in pool]

    def take_out_the_dead(self) -> None:
        """Ask every sampler's engine for a sign of life; those without one leave the balancer's pool."""
        for replica in self._servers.rollout_replicas:
            try:
                signs = ray.get([server.probe.remote() for server in replica.servers], timeout=self._timeout_s)
                self._engines[replica._server_address] = signs
            except (ray.exceptions.RayError, TimeoutError) as error:
                if not is_server_failure(error):
                    raise
                ray.get(self._servers.global_load_balancer.remove_servers.remote([replica._server_address]))

    def replace(self, broken: list[Any], version: int) -> None:
        """Start other replicas in the place of the broken ones.

        Args:
            broken: what `broken` returned.
            version: the policy version that the samplers have now.
        """
        for replica in broken:
            _remove(replica, self._engines.pop(replica._server_address, []))
        fresh = asyncio.run(self._start([replica.replica_rank for replica in broken]))
        kept = [replica for replica in self._servers.rollout_replicas if replica not in broken]
        self._servers.rollout_replicas = self._weights.replicas = [*kept, *fresh]
        self._weights.update_weights(version)
        handles = {replica._server_address: replica._server_handle for replica in fresh}
        ray.get(self._servers.global_load_balancer.add_servers.remote(handles))

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


def _remove(replica: Any, engines: list[Engine]) -> None:
    """End what is left of a sampler and free its devices and its actors' names, which the next one takes over."""
    for node_id, processes in engines:  # they outlive their server, and a GPU's memory with them
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=True)
        ray.get(_kill.options(scheduling_strategy=on_node).remote(processes))
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


@ray.remote(num_cpus=0)
def _kill(processes: list[tuple[int, float]]) -> None:
    """End these processes of this node: (id, time of creation), since ids are used again."""
    for pid, created in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()
