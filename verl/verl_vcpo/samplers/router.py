"""The samplers' load balancer with a measurement of idle time (extends verl/workers/rollout/router.py).

verl builds the balancer from the file that `actor_rollout_ref.rollout.router_config_path` names.
"""

import asyncio
import time
from collections import Counter
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

_RELEASE_S = 0.05  # requests that end in this time are released together
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

    def acquire_servers(self, request_ids: list[str]) -> list[tuple[str, Any]]:
        """Return the id and the handle of a server for each request. Raises RuntimeError: there are none."""
        return [self.acquire_server(request_id) for request_id in request_ids]

    def release_servers(self, requests: dict[str, int]) -> None:
        """Release servers; `requests` has the number of requests that have ended, by server."""
        for server_id, ended in requests.items():
            for _ in range(ended):
                self.release_server(server_id)

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


class GatheredCalls:
    """The balancer for one agent-loop worker: requests that begin at the same time are one call, and so at their ends.

    All samples of a prompt begin at the same time, and all prompts of a validation.

    Args:
        balancer: the actor of an `IdleTimeLoadBalancer`.
    """

    def __init__(self, balancer: Any) -> None:
        self._balancer = balancer
        self._asking: list[tuple[str, asyncio.Future[tuple[str, Any]]]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._ended: Counter[str] = Counter()

    async def acquire(self, request_id: str) -> tuple[str, Any]:
        """Return the id and the handle of a server. Raises what the balancer raises."""
        loop = asyncio.get_running_loop()
        server: asyncio.Future[tuple[str, Any]] = loop.create_future()
        self._asking.append((request_id, server))
        if len(self._asking) == 1:
            loop.call_soon(self._begin)
        return await server

    def _begin(self) -> None:
        asking, self._asking = self._asking, []
        call = asyncio.ensure_future(self._acquire(asking))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _acquire(self, asking: list[tuple[str, asyncio.Future[tuple[str, Any]]]]) -> None:
        try:
            servers = await self._balancer.acquire_servers.remote([request_id for request_id, _ in asking])
        except Exception as error:
            for _, server in asking:
                if not server.done():
                    server.set_exception(error)
            return
        for (_, server), given in zip(asking, servers, strict=True):
            if server.done():  # its request was stopped meanwhile
                self.release(given[0])
            else:
                server.set_result(given)

    def release(self, server_id: str) -> None:
        """Tell the balancer soon that a request of the server has ended."""
        if not self._ended:
            asyncio.get_running_loop().call_later(_RELEASE_S, self._release)
        self._ended[server_id] += 1

    def _release(self) -> None:
        ended, self._ended = self._ended, Counter()
        self._balancer.release_servers.remote(dict(ended))
