"""The replacement of dead samplers while the run goes on; clients send their requests to another sampler meanwhile.

A sampler whose node is gone has no device left. Unless another device is free, the run goes on without that sampler.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform

from verl_vcpo.common.console import print_line
from verl_vcpo.samplers import engine_processes
from verl_vcpo.samplers.client import is_server_failure
from verl_vcpo.samplers.engine_processes import EngineProcesses

_PROBE_S = 60.0
_NODE_DEATH_S = 180.0  # Ray declares a node that does not answer dead after about a minute
_DEVICES_S, _POLL_S = 10.0, 0.5
START_S = 1800.0  # a large model is read, compiled and captured in CUDA graphs


class SamplerKeeper:
    """A keeper of as many samplers as the run started with.

    A client takes a server that fails out of the load balancer's pool (client.py). For each sampler that is missing in
    the pool `replace_missing` starts another sampler, sends it the trainer's weights and adds it to the pool.

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
        """Let time pass while the trainer waits for samples, then replace missing samplers, which deliver none."""
        time.sleep(seconds)
        self.replace_missing()

    def replace_dead(self) -> int:
        """Probe all samplers and replace those that do not answer. Return the number of dead samplers."""
        self._remove_dead()
        return self.replace_missing()

    def replace_missing(self) -> int:
        """Replace the samplers that are missing in the balancer's pool. Return the number of missing samplers."""
        pool = set(ray.get(self._servers.global_load_balancer.get_all_servers.remote()))
        missing = [replica for replica in self._servers.rollout_replicas if replica._server_address not in pool]
        if missing:
            print_line("A sampler died: starting another one in its place ...")
            self._before_restart()
            restarted = self._replace(missing)
            print_line(f"{restarted} sampler(s) restarted, with policy version {self.version}.")
            if restarted < len(missing):
                left = len(self._servers.rollout_replicas)
                print_line(f"No device is free for {len(missing) - restarted} more: the run goes on with {left}.")
        return len(missing)

    def _remove_dead(self) -> None:
        """Probe every sampler's engine and workers, and take samplers that do not answer out of the balancer's pool."""
        replicas = self._servers.rollout_replicas
        probes = {replica: _probes(replica) for replica in replicas}
        deadline = time.monotonic() + self._timeout_s
        dead = [r for r in replicas if not self._answers(r, probes[r], max(0.0, deadline - time.monotonic()))]
        if dead:
            addresses = [replica._server_address for replica in dead]
            ray.get(self._servers.global_load_balancer.remove_servers.remote(addresses))

    def _answers(self, replica: Any, probes: list[Any], timeout_s: float) -> bool:
        """Return True if a sampler answers its probes in time, and note its engine's processes for later removal."""
        try:
            answers = ray.get(probes, timeout=timeout_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            if not is_server_failure(error):
                raise
            return False
        self._engines[replica._server_address] = answers[: len(replica.servers)]
        return True

    def _replace(self, missing: list[Any]) -> int:
        """Start samplers in place of the missing ones, as many as have devices. Return the number of started samplers.

        Raises:
            RuntimeError: no sampler is left, and none can be started.
        """
        for replica in missing:
            _remove(replica, self._engines.pop(replica._server_address, []))
        kept = [replica for replica in self._servers.rollout_replicas if replica not in missing]
        each = missing[0].world_size
        startable = _free_devices(wanted=each * len(missing)) // each
        if not kept and not startable:
            raise RuntimeError(
                f"no sampler is left, and none of Ray's nodes has {each} free device(s) for one: start Ray on another "
                "node, or lower actor_rollout_ref.rollout.nnodes"
            )
        fresh = asyncio.run(self._start([replica.replica_rank for replica in missing[:startable]]))
        self._servers.rollout_replicas = self._weights.replicas = [*kept, *fresh]
        self._weights.update_weights(self.version)
        # A replacement that died again is not added to the pool; the next call replaces it.
        alive = [replica for replica in fresh if self._answers(replica, _probes(replica), self._timeout_s)]
        handles = {replica._server_address: replica._server_handle for replica in alive}
        ray.get(self._servers.global_load_balancer.add_servers.remote(handles))
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
        starts = asyncio.gather(*[replica.init_standalone() for replica in fresh])
        try:
            await asyncio.wait_for(starts, START_S)
        except TimeoutError:
            raise RuntimeError(
                f"a sampler that replaces a dead one was not up after {START_S:.0f} s: its worker's log says why; the "
                "run goes on from its last checkpoint when it is started again"
            ) from None
        return fresh


def _probes(replica: Any) -> list[Any]:
    """Call the sampler's servers, which ask their engine, and then the sampler's workers; all answer if they live."""
    calls = [server.probe for server in replica.servers] + [worker.__ray_ready__ for worker in replica.workers]
    return [call.remote() for call in calls]


def _remove(replica: Any, engines: list[EngineProcesses]) -> None:
    """End the remaining processes of a sampler, and free the devices and actor names for the replacement."""
    for engine in engines:  # an engine's processes outlive their server, and keep a GPU's memory
        on_node = NodeAffinitySchedulingStrategy(engine.node_id, soft=False)
        with contextlib.suppress(ray.exceptions.RayError):  # the node is gone, and so are its processes
            ray.get(_end_engine.options(scheduling_strategy=on_node).remote(engine), timeout=_NODE_DEATH_S)
    actors = (*replica.servers, *replica.workers)
    for actor in actors:
        ray.kill(actor)
    for actor in actors:
        while True:
            try:
                ray.get(actor.__ray_ready__.remote(), timeout=_NODE_DEATH_S)
            except ray.exceptions.RayActorError:
                break
    for group in replica.resource_pool.pgs or []:
        ray.util.remove_placement_group(group)


def _free_devices(wanted: int) -> int:
    """Return the number of free devices on all nodes, at most `wanted`; devices that were just freed take a moment."""
    name, deadline = get_platform().ray_resource_name(), time.monotonic() + _DEVICES_S
    while True:
        nodes = ray._private.state.available_resources_per_node().values()
        free = sum(int(resources.get(name, 0)) for resources in nodes)
        if free >= wanted or time.monotonic() > deadline:
            return min(free, wanted)
        time.sleep(_POLL_S)


_end_engine = ray.remote(num_cpus=0)(engine_processes.end)
