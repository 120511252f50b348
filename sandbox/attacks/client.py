"""What an attack by requests is, and a client for requests that no well-behaved client sends."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from sandbox.attacks.health import Target
from tests.kit.sandbox_server import Mode

Act = Callable[[Target], Awaitable[str]]
OwnAct = Callable[[Mode, bool], Awaitable[str]]


@dataclass(frozen=True)
class RequestAttack:
    """Requests that try to make the server serve others worse, or whom it should not serve.

    name, act: what it tries, and how: "" or, of the attacks that succeeded, "DEGRADED: why" or "ESCAPED: why".
    light: it is one request, or a few: all of these run at once, and the server is looked at after all of them.
    slow: it takes long, and takes little while it lasts: other attacks run meanwhile.
    own_server: it starts servers itself: `act` gets the mode to start them in, and whether memory is limited there.
    """

    name: str
    act: Act | OwnAct
    light: bool = False
    slow: bool = False
    own_server: bool = False

    async def tried(self, target: Target) -> str:
        """What it found on this server."""
        return await self._guarded(self.act(target))  # type: ignore[call-arg, arg-type]

    async def alone(self, mode: Mode, bounded: bool) -> str:
        """What it found on servers that it started."""
        return await self._guarded(self.act(mode, bounded))  # type: ignore[call-arg, arg-type]

    async def _guarded(self, acting: Awaitable[str]) -> str:
        try:
            return await asyncio.wait_for(acting, 180)
        except (TimeoutError, RuntimeError, OSError, ValueError, KeyError, aiohttp.ClientError) as error:
            return f"DEGRADED: {type(error).__name__} {error}"


def body(**fields: Any) -> bytes:
    """A request for a program."""
    return json.dumps({"code": "print(6 * 7)", "language": "python", **fields}).encode()


def head(
    length: int | None, method: str = "POST", path: str = "/run_code", host: str = "127.0.0.1", **more: str
) -> bytes:
    """The start of a request. `more`: headers, with underscores for hyphens."""
    headers = {"Host": host, "Content-Type": "application/json"}
    headers |= {} if length is None else {"Content-Length": str(length)}
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("utf-8", "surrogateescape")


async def connect(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the server."""
    return await asyncio.open_connection("127.0.0.1", target.port)


async def exchange(target: Target, *parts: bytes, repeat: int = 1, timeout_s: float = 20.0) -> tuple[int, bytes]:
    """(the status, the body) that answer these bytes, the last part sent `repeat` times; status 0: nothing did."""
    reader, writer = await connect(target)
    sending = asyncio.create_task(_send(writer, [*parts[:-1], *[parts[-1]] * repeat]))
    try:
        async with asyncio.timeout(timeout_s):
            return await _answer(reader)
    except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        return 0, b""
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


async def _send(writer: asyncio.StreamWriter, parts: list[bytes]) -> None:
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    start = await reader.readuntil(b"\r\n\r\n")
    lines = start.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    length = headers.get("content-length")
    content = await (reader.readexactly(int(length)) if length else reader.read(1 << 20))
    return int(lines[0].split()[1]), content


async def ask(target: Target, content: bytes, **headers: str) -> tuple[int, bytes]:
    """(the status, the body) that answer this body of `POST /run_code`."""
    return await exchange(target, head(len(content), **headers), content, timeout_s=60.0)


def ran(status: int, content: bytes) -> bool:
    """Whether the program of `body` was run."""
    return status == 200 and b"42" in content


class Peak:
    """The most memory that the server has while it lasts, as growth in MiB."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.growth_mb = 0.0

    async def __aenter__(self) -> "Peak":
        self._before = self._target.memory_mb
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._note()
        self._task.cancel()

    async def _follow(self) -> None:
        while True:
            self._note()
            await asyncio.sleep(0.02)

    def _note(self) -> None:
        self.growth_mb = max(self.growth_mb, self._target.memory_mb - self._before)
