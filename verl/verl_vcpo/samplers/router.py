"""The samplers' load balancer with a measurement of idle time.

verl builds the balancer from the file that `actor_rollout_ref.rollout.router_config_path` names. The module imports
nothing of verl's: with that the balancer's process would take 5 seconds more to start, and 500 MB.
"""

import asyncio
import random
import time
from collections import Counter, OrderedDict
from typing import Any

NO_SERVERS = "No available servers"
"""The error of a balancer that has no server now; a replacement may be starting."""
_RELEASE_S = 0.05  # requests that end in this time are released together
_SESSIONS = 200_000  # as many as are in flight: a session that is forgotten loses its server


class IdleTimeLoadBalancer:
    """Gives each request the server with the fewest requests, and adds up the time of servers without a request.

    The requests of a session, all of which have its id, go to one server: it has their common beginning in its cache. A
    request keeps its server over weight updates: a server that loads weights is not idle.

    Args:
        servers: a server's address -> its handle.
        config: verl's, of the file; nothing is read.
    """

    def __init__(self, servers: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        self._servers = dict(servers)
        self._requests = dict.fromkeys(servers, 0)
        self._server_of: OrderedDict[str, str] = OrderedDict()
        self._idle_s, self._up_s, self._counted_until = 0.0, 0.0, time.monotonic()

    def _count(self) -> None:
        """Add the time since the last call, in which no request came or went."""
        now, requests = time.monotonic(), self._requests.values()
        self._idle_s += (now - self._counted_until) * sum(not count for count in requests)
        self._up_s += (now - self._counted_until) * len(requests)
        self._counted_until = now

    def acquire_servers(self, request_ids: list[str]) -> list[tuple[str, Any]]:
        """Return the address and the handle of a server for each request. Raises RuntimeError: there are none."""
        self._count()
        if not self._servers:
            raise RuntimeError(NO_SERVERS)
        return [self._acquire(request_id) for request_id in request_ids]

    def _acquire(self, request_id: str) -> tuple[str, Any]:
        address = self._server_of.pop(request_id, None)
        if address not in self._servers:
            fewest = min(self._requests.values())
            address = random.choice([server for server, count in self._requests.items() if count == fewest])
        self._server_of[request_id] = address
        if len(self._server_of) > _SESSIONS:
            self._server_of.popitem(last=False)
        self._requests[address] += 1
        return address, self._servers[address]

    def release_servers(self, ended: dict[str, int]) -> None:
        """Count requests that have ended: a server's address -> their number."""
        self._count()
        for address, count in ended.items():
            if address in self._requests:
                self._requests[address] = max(self._requests[address] - count, 0)

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """Return a server for one request, as verl's own client asks. Raises RuntimeError: there are none."""
        return self.acquire_servers([request_id])[0]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Count a request that has ended."""
        self.release_servers({server_id: 1})

    def require_acquire_fields(self) -> list[str]:
        """Return which arguments of a request a choice needs: none."""
        return []

    def require_release_fields(self) -> list[str]:
        """Return which arguments of a request that has ended are needed: none."""
        return []

    def clear_sticky_cache(self) -> dict[str, int]:
        """Forget which server a session has; return the number of sessions."""
        sessions = len(self._server_of)
        self._server_of.clear()
        return {"cleared_entries": sessions}

    def add_servers(self, servers: dict[str, Any]) -> None:
        """Begin to give requests to these servers."""
        self._count()
        self._servers |= servers
        self._requests |= dict.fromkeys(servers, 0)

    def remove_servers(self, server_ids: list[str]) -> None:
        """Give these servers no more requests."""
        self._count()
        for address in server_ids:
            self._servers.pop(address, None)
            self._requests.pop(address, None)

    def get_all_servers(self) -> list[str]:
        """Return the servers' addresses."""
        return list(self._servers)

    def get_total_inflight(self) -> int:
        """Return the number of requests of all servers."""
        return sum(self._requests.values())

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
        try:
            return await server
        except asyncio.CancelledError:
            if server.done() and not server.cancelled() and not server.exception():  # given in the same moment
                self.release(server.result()[0])
            raise

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
