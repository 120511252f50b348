"""The sandbox over HTTP: `POST /run_code`, compatible with SandboxFusion; `GET /v1/ping`; `GET /stats`."""

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator

from fastapi import FastAPI, HTTPException

from recipe.code_sandbox.isolation import IsolationError, Limits, Outcome, Sandbox
from recipe.code_sandbox.protocol import CommandResult, CommandStatus, RunRequest, RunResponse, RunStatus

_logger = logging.getLogger("sandbox")


class Service:
    """Runs programs, `concurrency` at a time; others wait in order.

    Args:
        sandbox: where.
        limits: the most that a request can ask for.
        concurrency: programs at a time.
        queue: programs that may wait; more are refused with HTTP status 503, which clients try again.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, concurrency: int, queue: int) -> None:
        self._sandbox, self._limits = sandbox, limits
        self._free, self._room = asyncio.Semaphore(concurrency), concurrency + queue
        self._here = 0
        self.ended: Counter[str] = Counter()
        """Programs by how they ended."""

    async def run_code(self, request: RunRequest) -> RunResponse:
        """One program, from the queue to its end."""
        refusal = _refusal(request)
        if refusal:
            return RunResponse(status=RunStatus.SANDBOX_ERROR, message=refusal)
        if self._here >= self._room:
            raise HTTPException(503, "the queue is full: raise --queue or --concurrency", {"Retry-After": "1"})
        self._here += 1
        try:
            async with self._free:
                response = await self._run(request)
        finally:
            self._here -= 1
        self.ended[str(response.status)] += 1
        return response

    async def _run(self, request: RunRequest) -> RunResponse:
        memory_mb = self._limits.memory_mb
        if request.memory_limit_MB > 0:
            memory_mb = max(64, min(memory_mb, request.memory_limit_MB))
        time_s = max(0.1, min(self._limits.time_s, request.run_timeout))
        limits = dataclasses.replace(self._limits, memory_mb=memory_mb, time_s=time_s)
        try:
            outcome = await self._sandbox.run(request.code, request.stdin or "", limits)
        except (IsolationError, OSError) as error:
            _logger.error("a program could not be run: %s", error)
            raise HTTPException(500, str(error)) from None
        return _response(outcome)

    def stats(self) -> dict[str, int | bool]:
        """Programs that wait or run, those that ended, by how, and `Sandbox.limits_whole_programs`."""
        ended = {str(status): self.ended[str(status)] for status in RunStatus}
        return {
            "waiting_or_running": self._here,
            **ended,
            "limits_whole_programs": self._sandbox.limits_whole_programs,
        }


def _refusal(request: RunRequest) -> str | None:
    """Why this server cannot do what is asked, if so."""
    if request.language != "python":
        return f"language={request.language!r}: this sandbox runs python"
    if request.files or request.fetch_files:
        return "files, fetch_files: this sandbox takes and gives no files"
    return None


def _response(outcome: Outcome) -> RunResponse:
    in_time = outcome.return_code is not None
    result = CommandResult(
        status=CommandStatus.FINISHED if in_time else CommandStatus.TIME_LIMIT,
        execution_time=round(outcome.duration_s, 4),
        return_code=outcome.return_code,
        stdout=outcome.stdout,
        stderr=outcome.stderr,
    )
    status = RunStatus.SUCCESS if outcome.return_code == 0 else RunStatus.FAILED
    return RunResponse(status=status, run_result=result)


def build_app(sandbox: Sandbox, limits: Limits, concurrency: int, queue: int) -> FastAPI:
    """The application. It refuses to start where programs cannot be isolated."""
    service = Service(sandbox, limits, concurrency, queue)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        sandbox.close()
        _logger.info("stopped: %s", service.stats())

    app = FastAPI(title="Code sandbox", lifespan=life)
    app.post("/run_code", response_model=RunResponse)(service.run_code)
    app.get("/v1/ping")(lambda: "pong")
    app.get("/stats")(service.stats)
    return app
