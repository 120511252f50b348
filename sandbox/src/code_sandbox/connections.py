"""HTTP connections with limits on their number, on the time of a request and on the time of its answer."""

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

TRANSFER_S = 30.0
"""The seconds in which a whole request has to arrive, and in which a client has to take an answer."""
_logger = logging.getLogger("sandbox")


class TimedConnection(H11Protocol):
    """uvicorn's connection, for one request (`CLOSE`); `limit_concurrency` limits the number of connections."""

    CLOSE = [("connection", "close")]
    """The headers of every answer, so that a connection lasts for one request."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            _logger.warning("more than %d connections: one was closed", self.limit_concurrency)
            transport.abort()
            return
        self._timer = self.loop.call_later(TRANSFER_S, self._end_unless, self._has_arrived)

    def pause_writing(self) -> None:
        """Start the time limit of a client that has stopped reading its answer."""
        super().pause_writing()
        self._timer = self.loop.call_later(TRANSFER_S, self._end_unless, lambda: False)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _has_arrived(self) -> bool:
        return self.cycle is not None and not self.cycle.more_body

    def _end_unless(self, well: Any) -> None:
        self._timer = None
        if not well():
            self.transport.abort()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
