"""Samplers that die are replaced while the run goes on; clients send their requests to another sampler meanwhile."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_vcpo.console import print_line
from verl_vcpo.workers.rollout import engine_processes
from verl_vcpo.workers.rollout.engine_processes import EngineProcesses
from verl_vcpo.workers.rollout.llm_client import is_server_failure

_PROBE_S = 60.0


class SamplerKeeper:
    """Keeps as many samplers up as the run started with.

    A client takes a server that fails out of the load balancer's pool (llm_client.py). `replace_missing` starts a
    sampler for each one that is missing in the pool, gives it the trainer's weights and puts it into the pool.

    Args:
        servers: verl's LLMServerManager of the samplers.
        weights: verl's CheckpointEngineManager, which sends the trainer's weights to the samplers.
        timeout_s: a sampler that does not answer a probe for so long (a minute at most) is dead.
        version: the policy version that the samplers have.
        before_restart: called when a sampler has died, while the other processes of the run are up.
    """

    def __init__(
        self, servers: Any, weights: Any, timeout_s: float, version: int, before_restart: Callable[[], object]
    ) -> None:
        self._servers, self._weights, self._timeout_s = servers, weights, min(timeout_s, _PROBE_S)
        self._before_restart = before_restart
        self._engines: dict[str, list[EngineProcesses]] = {}
        self.version = version
        """The policy version that the samplers have: set before every weight update."""
        self._remove_dead()

    def sleep(self, seconds: float) -> None:
        """Let time pass while the trainer waits for samples, which dead samplers would never deliver."""
        time.sleep(seconds)
        self.replace_missing()

    def replace_dead(self) -> int:
        """Probe all samplers and replace those that do not answer. Returns the number of replaced samplers."""
        self._remove_dead()
        return self.replace_missing()

    def replace_missing(self) -> int:
        """Replace the samplers that are missing in the balancer's pool. Returns their number."""
        pool = set(ray.get(self._servers.global_load_balancer.get_all_servers.remote()))
        missing = [replica for replica in self._servers.rollout_replicas if replica._server_address not in pool]
        if missing:
            print_line("A sampler died: starting another one in its place ...")
            self._before_restart()
            self._replace(missing)
            print_line(f"{len(missing)} sampler(s) restarted, with policy version {self.version}.")
        return len(missing)

    def _remove_dead(self) -> None:
        """Probe every sampler's engine, and take those that do not answer out of the balancer's pool."""
        probes = {r: [server.probe.remote() for server in r.servers] for r in self._servers.rollout_replicas}
        deadline = time.monotonic() + self._timeout_s
        for replica, answers in probes.items():
            try:
                engines = ray.get(answers, timeout=max(0.0, deadline - time.monotonic()))
                self._engines[replica._server_address] = engines
            except (ray.exceptions.RayError, TimeoutError) as error:
                if not is_server_failure(error):
                    raise
                ray.get(self._servers.global_load_balancer.remove_servers.remote([replica._server_address]))

    def _replace(self, missing: list[Any]) -> None:
        for replica in missing:
            _remove(replica, self._engines.pop(replica._server_address, []))
        fresh = asyncio.run(self._start([replica.replica_rank for replica in missing]))
        kept = [replica for replica in self._servers.rollout_replicas if replica not in missing]
        self._servers.rollout_replicas = self._weights.replicas = [*kept, *fresh]
        self._weights.update_weights(self.version)
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


def _remove(replica: Any, engines: list[EngineProcesses]) -> None:
    """End the processes of a sampler that are left, and free the devices and actor names for the replacement."""
    for engine in engines:  # an engine's processes outlive their server, and keep a GPU's memory
        on_node = NodeAffinitySchedulingStrategy(engine.node_id, soft=True)
        ray.get(_end_engine.options(scheduling_strategy=on_node).remote(engine))
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


_end_engine = ray.remote(num_cpus=0)(engine_processes.end)
