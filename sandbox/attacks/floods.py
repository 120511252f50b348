"""Attacks by requests that are many, large or slow. Bounded in number and time, and to loopback only."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

from sandbox.attacks.client import Peak, RequestAttack, ask, body, connect, exchange, head
from sandbox.attacks.health import Target

_MB = 1 << 20
_CLIENTS = 300
_OF_ONE_MB, _OF_MANY_MB = 100, 400
_CLOSED_S = 45.0


async def _verdict(target: Target, peak: Peak | None = None, most_mb: int = _OF_MANY_MB) -> str:
    if peak and peak.growth_mb > most_mb:
        return f"DEGRADED: the server grew by {peak.growth_mb:.0f} MiB"
    late = await target.answers()
    return f"DEGRADED: {late}" if late else ""


def _large(start: bytes, part: bytes, repeat: int) -> Any:
    """One body, in parts."""

    async def act(target: Target) -> str:
        async with Peak(target) as peak:
            sending = asyncio.create_task(exchange(target, start, part, repeat=repeat, timeout_s=20))
            await asyncio.sleep(0.3)
            late = await target.answers()
            status, text = await sending
        if late or status >= 500 or len(text) > 10_000:
            return f"DEGRADED: {late or f'HTTP {status}, {len(text)} bytes'}"
        return await _verdict(target, peak, _OF_ONE_MB)

    return act


async def _many_bodies(target: Target) -> str:
    """Programs and inputs of the largest size that is allowed by characters, in JSON six times that."""
    large = body(code="#" + "\U0001f600" * (_MB - 1), stdin="\U0001f600" * _MB, run_timeout=0.2)
    async with Peak(target) as peak:
        await asyncio.gather(*[ask(target, large) for _ in range(40)])
    return await _verdict(target, peak)


async def _bodies_below_the_limit(target: Target) -> str:
    """Bodies that one client may send, by many."""
    large = body(code="import time; time.sleep(0.2)", stdin="x" * 900_000, run_timeout=2)
    async with Peak(target) as peak:
        statuses = [status for status, _ in await asyncio.gather(*[ask(target, large) for _ in range(120)])]
    if any(status not in (200, 413, 422, 429, 503) for status in statuses):
        return f"DEGRADED: {sorted(set(statuses))}"
    return await _verdict(target, peak)


@contextlib.asynccontextmanager
async def _held(target: Target, start: bytes, count: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """So many connections that have sent this and stay."""
    connections = []
    try:
        for _ in range(count):
            reader, writer = await connect(target)
            connections.append((reader, writer))
            with contextlib.suppress(ConnectionError, TimeoutError):
                writer.write(start)
                await asyncio.wait_for(writer.drain(), 2)
        yield [reader for reader, _ in connections]
    finally:
        for _, writer in connections:
            writer.close()


def _slow(start: bytes, count: int = _CLIENTS) -> Any:
    """Clients that send no more than this: others must be served meanwhile."""

    async def act(target: Target) -> str:
        async with _held(target, start, count):
            await asyncio.sleep(0.5)
            return await _verdict(target)

    return act


def _closed(start: bytes) -> Any:
    """A connection that sends no more than this has to be closed in time."""

    async def act(target: Target) -> str:
        async with _held(target, start, 1) as readers:
            began = time.perf_counter()
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(_CLOSED_S):
                    while await readers[0].read(1 << 16):
                        continue
            took = time.perf_counter() - began
        return "" if took < _CLOSED_S else f"DEGRADED: it is open after {took:.0f} s"

    return act


async def _drips(target: Target) -> str:
    """A client that sends a byte a second, always in time for a limit on silence."""
    reader, writer = await connect(target)
    began = time.perf_counter()
    try:
        for byte in head(1000) + body():
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(1)
            if reader.at_eof() or time.perf_counter() - began > _CLOSED_S:
                break
    except ConnectionError:
        return ""
    finally:
        writer.close()
    took = time.perf_counter() - began
    return "" if took < _CLOSED_S else f"DEGRADED: it is open after {took:.0f} s"


async def _unread(target: Target) -> str:
    """Clients that ask for much output and do not read it."""
    content = body(code="print('x' * 250_000)")
    async with _held(target, head(len(content)) + content, 40):
        await asyncio.sleep(3)
        return await _verdict(target)


async def _unread_for_ever(target: Target) -> str:
    content = body(code="import os; os.write(1, bytes(250_000))")
    _reader, writer = await connect(target)
    began = time.perf_counter()
    try:
        writer.write(head(len(content)) + content)
        await writer.drain()
        while time.perf_counter() - began < _CLOSED_S:
            await asyncio.sleep(1)
            stats = await target.stats()
            if not stats["waiting_or_running"]:
                return ""
    finally:
        writer.close()
    return "DEGRADED: the program counts as running while its client does not read"


async def _hang_ups(target: Target) -> str:
    """Programs whose clients hang up, in front of one whose client waits."""
    content = body(code="import time; time.sleep(4)")
    async with _held(target, head(len(content)) + content, 6 * target.concurrency):
        await asyncio.sleep(0.5)
    return await _verdict(target)


async def _half_closed(target: Target) -> str:
    """Clients that send their request and close their side of the connection."""
    content = body(code="import time; time.sleep(3)")
    for _ in range(3 * target.concurrency):
        _, writer = await connect(target)
        writer.write(head(len(content)) + content)
        writer.write_eof()
    await asyncio.sleep(0.3)
    return await _verdict(target)


async def _short_limits(target: Target) -> str:
    """Harmless programs whose limit comes while they start: a slot must not be lost by it."""
    gate = asyncio.Semaphore(12)

    async def one() -> dict[str, Any]:
        async with gate:
            return await target.run("import time\nwhile True: time.sleep(1)", random.uniform(0.1, 0.3))

    async with asyncio.timeout(150):
        answers = await asyncio.gather(*[one() for _ in range(80)])
    slowest = max(answer["run_result"]["execution_time"] for answer in answers)
    return f"DEGRADED: one took {slowest:.1f} s" if slowest > 5 else await _verdict(target)


async def _queue(target: Target) -> str:
    """More requests than may wait: others are refused, and afterwards all is well."""
    content = body(code="pass", run_timeout=1)
    statuses = [status for status, _ in await asyncio.gather(*[ask(target, content) for _ in range(250)])]
    wrong = {status for status in statuses if status not in (200, 503)}
    return f"DEGRADED: {wrong}" if wrong else await _verdict(target)


async def _pipelined(target: Target) -> str:
    """Many requests on one connection, sent before the first is answered."""
    content = body(code="import time; time.sleep(4)")
    async with _held(target, (head(len(content)) + content) * 50, 1):
        await asyncio.sleep(0.5)
        late = await target.answers()
    return f"DEGRADED: {late}" if late else ""


async def _watched(target: Target) -> str:
    """What the host sees of a program's processes."""
    running = asyncio.create_task(target.run("import time; time.sleep(2)"))
    await asyncio.sleep(1.0)
    found = []
    for process in target.processes():
        with contextlib.suppress(OSError):
            with open(f"/proc/{process.pid}/status") as file:
                status = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
            with open(f"/proc/{process.pid}/oom_score_adj") as file:
                adjusted = file.read().strip()
            inside = len(status.get("NSpid", "").split()) - len(_own_numbers(target.pid))
            if inside < 1 or status["Name"].startswith("bwrap"):
                continue
            expected = {"NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0" * 16, "CapPrm": "0" * 16}
            found += [f"{name}: {status[name]}" for name, value in expected.items() if status[name] != value]
            found += [f"user {status['Uid'].split()[0]}"] * (status["Uid"].split()[0] == "0")
            found += [f"oom_score_adj {adjusted}"] * (adjusted != "1000")
    await running
    return f"DEGRADED: {json.dumps(found)}" if found else ""


def _own_numbers(pid: int) -> list[str]:
    with open(f"/proc/{pid}/status") as file:
        return next(line for line in file if line.startswith("NSpid")).split()[1:]


_CHUNK = b"100000\r\n" + b"x" * _MB + b"\r\n"
FLOODS = [
    RequestAttack("flood: a body of 200 MB", _large(head(200 * _MB), b"x" * _MB, 200)),
    RequestAttack("flood: a body of 200 MB, by PUT", _large(head(200 * _MB, "PUT"), b"x" * _MB, 200)),
    RequestAttack("flood: chunks of 200 MB", _large(head(None, Transfer_Encoding="chunked"), _CHUNK, 200)),
    RequestAttack(
        "flood: chunks of 200 MB, by PUT", _large(head(None, "PUT", "/stats", Transfer_Encoding="chunked"), _CHUNK, 200)
    ),
    RequestAttack("flood: a header without an end", _large(b"POST /run_code HTTP/1.1\r\nX: ", b"x" * _MB, 100)),
    RequestAttack("flood: 40 bodies of 24 MB", _many_bodies),
    RequestAttack("flood: 120 bodies that are allowed", _bodies_below_the_limit),
    RequestAttack("flood: 250 programs at once", _queue),
    RequestAttack("flood: 80 limits of 0.1 to 0.3 s", _short_limits),
    RequestAttack("slow: 300 clients that send nothing", _slow(b"")),
    RequestAttack(
        "slow: 300 clients that do not end the header", _slow(b"POST /run_code HTTP/1.1\r\nHost: localhost\r\n")
    ),
    RequestAttack("slow: 300 clients that do not end the body", _slow(head(1000) + b"{")),
    RequestAttack("slow: 300 clients that keep the connection", _slow(head(None, "GET", "/v1/ping"))),
    RequestAttack("slow: 40 clients that announce 4 MB", _slow(head(4 * _MB), 40)),
    RequestAttack("slow: 40 clients that send 4 MB but for the end", _slow(head(4 * _MB) + b" " * (4 * _MB - 1), 40)),
    RequestAttack("slow: 40 clients that do not read", _unread),
    RequestAttack("slow: requests in a row", _pipelined),
    RequestAttack("slow: clients that hang up", _hang_ups),
    RequestAttack("slow: clients that close their side", _half_closed),
    RequestAttack("slow: no header", _closed(b""), slow=True),
    RequestAttack("slow: half a header", _closed(b"POST /run_code HTTP/1.1\r\nHost: lo"), slow=True),
    RequestAttack("slow: half a body", _closed(head(1000) + b"{"), slow=True),
    RequestAttack("slow: a body of another method", _closed(head(1000, "PUT") + b"{"), slow=True),
    RequestAttack("slow: a byte a second", _drips, slow=True),
    RequestAttack("slow: an answer that nobody reads", _unread_for_ever),
    RequestAttack("what the host sees of a program", _watched),
]
