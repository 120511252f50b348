"""The sandbox's client, which tries again after a failure of the service, but not of a program."""

import asyncio
import logging
import time

import aiohttp

from code_sandbox.protocol import CommandResult, RunResponse, RunStatus

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_CONNECT_S = 10.0
_logger = logging.getLogger(__name__)


class SandboxUnavailable(RuntimeError):
    """The error, in one line, of a service that did not run a program however often it was asked."""


class SandboxClient:
    """A client of a server that speaks SandboxFusion's `/run_code`: this project's or ByteDance's.

    Args:
        url: the server, without a path.
        token: what the server's `--token-file` holds; None: it has none.
        patience_s: how long a service that fails is tried again, with growing pauses, before giving up.
        queue_s: how long an accepted program may wait for its turn.
    """

    def __init__(self, url: str, patience_s: float = 60.0, queue_s: float = 600.0, token: str | None = None) -> None:
        self._url = f"{url.rstrip('/')}/run_code"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._patience_s, self._queue_s = patience_s, queue_s

    async def run(self, code: str, run_timeout: float, stdin: str = "") -> CommandResult:
        """Run a program, and return its result.

        Raises:
            SandboxUnavailable: the program was not run: refused connections, HTTP errors, or `SandboxError`.
        """
        request = {"code": code, "language": "python", "stdin": stdin, "run_timeout": run_timeout}
        limit = aiohttp.ClientTimeout(total=self._queue_s + run_timeout, sock_connect=_CONNECT_S)
        deadline, wait_s = time.monotonic() + self._patience_s, _FIRST_WAIT_S
        while True:
            try:
                return await self._ask(request, limit)
            except (aiohttp.ClientConnectionError, aiohttp.ServerTimeoutError, _ServerError, TimeoutError) as error:
                if time.monotonic() + wait_s > deadline:
                    raise SandboxUnavailable(
                        f"tool_use.sandbox_url: {self._url} failed for {self._patience_s:g} s ({_one_line(error)})"
                    ) from None
                _logger.warning("%s failed (%s): trying again in %.1f s", self._url, _one_line(error), wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _ask(self, request: dict[str, object], limit: aiohttp.ClientTimeout) -> CommandResult:
        async with (
            aiohttp.ClientSession(timeout=limit, headers=self._headers) as session,
            session.post(self._url, json=request) as answer,
        ):
            if answer.status >= 500:
                raise _ServerError(f"HTTP {answer.status}: {(await answer.text())[:200]}")
            if answer.status != 200:
                raise SandboxUnavailable(f"{self._url} refused: HTTP {answer.status}: {(await answer.text())[:200]}")
            response = RunResponse.model_validate_json(await answer.read())
        if response.status == RunStatus.SANDBOX_ERROR or response.run_result is None:
            raise SandboxUnavailable(f"{self._url}: {response.message}")
        return response.run_result


class _ServerError(RuntimeError):
    """An HTTP status of 500 or more."""


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__} {error}".split())
