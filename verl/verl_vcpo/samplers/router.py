"""The samplers' load balancer with a measurement of idle time (extends verl/workers/rollout/router.py).

verl builds the balancer from the file that `actor_rollout_ref.rollout.router_config_path` names.
"""

import time
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

_SESSIONS = 200_000  # above the default of 10,000, sessions of several turns in flight would lose their server


class IdleTimeLoadBalancer(GlobalRequestLoadBalancer):
    """verl's sticky, least-loaded balancer plus a clock per server that runs while the server has no request.

    A request keeps its server over weight updates: the clock stands still while the server loads weights.
    """

    def __init__(self, servers: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        super().__init__(servers, max_cache_size=_SESSIONS)
        now = time.monotonic()
        self._since = now
        self._idle_since: dict[str, float | None] = dict.fromkeys(servers, now)
        self._idle_s = dict.fromkeys(servers, 0.0)

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        server_id, handle = super().acquire_server(request_id)
        self._stop_clock(server_id, time.monotonic())
        return server_id, handle

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        super().release_server(server_id, request_id)
        if server_id in self._idle_since and self._inflight_requests.get(server_id) == 0:
            self._idle_since[server_id] = time.monotonic()

    def release_servers(self, server_ids: list[str]) -> None:
        """Release the servers of several requests, one server for each request."""
        for server_id in server_ids:
            self.release_server(server_id)

    def add_servers(self, servers: dict[str, Any]) -> None:
        if not self._idle_since:
            self._since = time.monotonic()  # the time without any server is no server's idle time
        super().add_servers(servers)
        self._idle_since.update(dict.fromkeys(servers, time.monotonic()))
        self._idle_s.update(dict.fromkeys(servers, 0.0))

    def remove_servers(self, server_ids: list[str]) -> None:
        super().remove_servers([server_id for server_id in server_ids if server_id in self._servers])
        for server_id in server_ids:
            self._idle_since.pop(server_id, None)
            self._idle_s.pop(server_id, None)

    def _stop_clock(self, server_id: str, now: float) -> None:
        since = self._idle_since.get(server_id)
        if since is not None:
            self._idle_s[server_id] = self._idle_s.get(server_id, 0.0) + now - since
        self._idle_since[server_id] = None

    def take_idle_share(self) -> float:
        """Return the share of the time since the last call that a server had no request: the mean over servers."""
        now = time.monotonic()
        for server_id, since in list(self._idle_since.items()):
            if since is not None:
                self._stop_clock(server_id, now)
                self._idle_since[server_id] = now
        share = sum(self._idle_s.values()) / (max(now - self._since, 1e-9) * max(len(self._idle_s), 1))
        self._since = now
        self._idle_s = dict.fromkeys(self._idle_s, 0.0)
        return min(share, 1.0)
