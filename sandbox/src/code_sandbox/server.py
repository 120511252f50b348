"""The sandbox over HTTP: `POST /run_code`, compatible with SandboxFusion; `GET /v1/ping`; `GET /stats`."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from code_sandbox.guard import Guard
from code_sandbox.isolation import Sandbox
from code_sandbox.limits import IsolationError, Limits, ProgramOutcome
from code_sandbox.pool import WarmPool
from code_sandbox.protocol import CommandResult, CommandStatus, RunRequest, RunResponse, RunStatus

_CORES = len(os.sched_getaffinity(0))
_LATE_S = 10.0
_logger = logging.getLogger("sandbox")


class Service:
    """A service that runs programs, `concurrency` at a time; others wait in order.

    Args:
        sandbox: the sandbox in which programs run.
        limits: the largest limits that a request can ask for.
        concurrency: programs at a time.
        queue: programs that may wait; more are refused with HTTP status 503, which clients try again.
        modules, warm: the modules that the pool's interpreters have imported, and the number of interpreters.
    """

    def __init__(
        self, sandbox: Sandbox, limits: Limits, concurrency: int, queue: int, modules: tuple[str, ...], warm: int
    ) -> None:
        self._sandbox, self._limits = sandbox, limits
        self._free, self._room = asyncio.Semaphore(concurrency), concurrency + queue
        self._here = 0
        self._due: dict[int, float] = {}  # the time.monotonic by which each running program has to have ended
        self.pool = WarmPool(sandbox, limits, modules, warm, lambda: self._here >= _CORES)
        self.ended: Counter[str] = Counter()
        """The number of programs by `RunStatus`."""

    async def run_code(self, request: RunRequest) -> RunResponse:
        """Run one program, from the queue to its end."""
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
            self.pool.changed()
        self.ended[str(response.status)] += 1
        return response

    async def _run(self, request: RunRequest) -> RunResponse:
        memory_mb = self._limits.memory_mb
        if request.memory_limit_MB > 0:
            memory_mb = max(64, min(memory_mb, request.memory_limit_MB))
        time_s = max(0.1, min(self._limits.time_s, request.run_timeout))
        limits = dataclasses.replace(self._limits, memory_mb=memory_mb, time_s=time_s)
        self._due[id(request)] = time.monotonic() + time_s + _LATE_S
        try:
            # A warm interpreter's control group has the server's limit.
            warm = self.pool.take(request.code) if memory_mb == self._limits.memory_mb else None
            interpreter = warm or await self._sandbox.start(limits)
            outcome = await interpreter.run(request.code, request.stdin or "", limits)
        except (IsolationError, OSError) as error:
            _logger.error("a program could not be run: %s", error)
            raise HTTPException(500, str(error)) from None
        finally:
            del self._due[id(request)]
        return _response(outcome)

    def stats(self) -> dict[str, float | bool | str]:
        """Return numbers of programs (waiting or running, beyond their limit, ended by `RunStatus`), of warm
        interpreters; the seconds that a program has, and how programs are isolated here."""
        ended = {str(status): self.ended[str(status)] for status in RunStatus}
        return {
            "waiting_or_running": self._here,
            "over_limit": sum(due < time.monotonic() for due in self._due.values()),
            **ended,
            "warm": len(self.pool),
            "time_s": self._limits.time_s,
            "limits_whole_programs": self._sandbox.limits_whole_programs,
            "isolation": self._sandbox.isolation,
        }


def _refusal(request: RunRequest) -> str | None:
    """Return why this server cannot run the request, or None."""
    if request.language != "python":
        return "language: this sandbox runs python"
    if request.files or request.fetch_files:
        return "files, fetch_files: this sandbox takes and gives no files"
    return None


def _response(outcome: ProgramOutcome) -> RunResponse:
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


async def _wrong_request(request: Request, error: Exception) -> JSONResponse:
    """Answer a wrong request with its fault, in one line, without its content, which may be huge and no JSON."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part)[:40] for part in first["loc"][:3])
    return JSONResponse({"detail": f"{where}: {first['msg'][:200]}".encode("ascii", "backslashreplace").decode()}, 422)


async def _unreadable(request: Request, error: Exception) -> JSONResponse:
    """Answer a body that FastAPI cannot parse and gives 400 for: not UTF-8, nested too deep, with an endless number."""
    return JSONResponse({"detail": "body: it cannot be read as JSON"}, 422)


def build_app(service: Service, sandbox: Sandbox, token: str | None) -> Guard:
    """Build the application. `token`: the clients' token; None: only programs of this machine are answered."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.pool.open()
        yield
        await service.pool.close()
        sandbox.close()
        _logger.info("stopped: %s", service.stats())

    app = FastAPI(title="Code sandbox", lifespan=life, openapi_url=None)
    app.add_exception_handler(RequestValidationError, _wrong_request)
    app.add_exception_handler(400, _unreadable)
    app.post("/run_code", response_model=RunResponse)(service.run_code)
    app.get("/v1/ping")(lambda: "pong")
    app.get("/stats")(service.stats)
    return Guard(app, token)
