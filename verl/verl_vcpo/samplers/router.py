"""The samplers' load balancer with a measurement of idle time (extends verl/workers/rollout/router.py).

verl builds the balancer from the file that `actor_rollout_ref.rollout.router_config_path` names.
"""

import time
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

_SESSIONS = 200_000  # above the default of 10,000, sessions of several turns in flight would lose their server


class IdleTimeLoadBalancer(GlobalRequestLoadBalancer):
    """verl's sticky, least-loaded balancer, which also adds up the time of servers without a request.

    A request keeps its server over weight updates: a server that loads weights is not idle.
    """

    def __init__(self, servers: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        super().__init__(servers, max_cache_size=_SESSIONS)
        self._idle_s, self._up_s, self._counted_until = 0.0, 0.0, time.monotonic()

    def _count(self) -> None:
        """Add the time since the last call, in which no request came or went."""
        now, requests = time.monotonic(), self._inflight_requests.values()
        self._idle_s += (now - self._counted_until) * sum(not count for count in requests)
        self._up_s += (now - self._counted_until) * len(requests)
        self._counted_until = now

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        self._count()
        return super().acquire_server(request_id)

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._count()
        super().release_server(server_id, request_id)

    def add_servers(self, servers: dict[str, Any]) -> None:
        self._count()
        super().add_servers(servers)

    def remove_servers(self, server_ids: list[str]) -> None:
        self._count()
        super().remove_servers(server_ids)

    def take_idle_share(self) -> float:
        """Return the share of the time since the last call that a server had no request: the mean over servers."""
        self._count()
        share = self._idle_s / self._up_s if self._up_s else 0.0
        self._idle_s = self._up_s = 0.0
        return share
