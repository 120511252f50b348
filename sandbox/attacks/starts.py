"""Attacks that start servers: without the token, after the server was killed, in ways that it has to refuse."""

import asyncio
import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil

from sandbox.attacks.client import RequestAttack, ask, body, exchange, head, ran
from sandbox.attacks.health import Target, own_folders
from tests.kit.sandbox_server import Mode, served

_FEW = ("--concurrency", "2", "--warm", "0", "--time-s", "60")


@contextlib.contextmanager
def _token(mode: Mode) -> Iterator[tuple[str, str]]:
    """(a token, the file that has it)."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="vcpo-bench-", dir="/var/tmp") as folder:
        file = Path(folder) / "token"
        file.write_text(f"{token}\n")
        file.chmod(0o600)
        if mode.user is not None:
            for path in (Path(folder), file):
                os.chown(path, mode.user, mode.user)
        yield token, str(file)


def _target(url: str, pid: int, session: aiohttp.ClientSession) -> Target:
    return Target(url, pid, 2, 0, session)


async def _without_token(mode: Mode, bounded: bool) -> str:
    """Clients that have not got the token, or nearly have it."""
    with _token(mode) as (token, file), served(*_FEW, "--token-file", file, mode=mode) as (url, pid):
        async with aiohttp.ClientSession() as session:
            target = _target(url, pid, session)
            wrong = [
                "",
                token,
                "Bearer",
                "Bearer ",
                f"Bearer {token[:-1]}",
                f"Bearer {token}x",
                f"Bearer {token.upper()}x",
            ]
            wrong += [
                f"Basic {token}",
                f"bearer  {token}",
                "Bearer \udcff\udcfe",
                "Bearer " + "x" * 5000,
                "Bearer null",
            ]
            for given in wrong:
                status, text = await ask(target, body(), Authorization=given)
                if ran(status, text):
                    return f"ESCAPED: {given[:40]!r} is taken for the token"
                if status >= 500:
                    return f"DEGRADED: HTTP {status} for {given[:40]!r}"
            for path in ("/stats", "/docs", f"/stats?token={token}", "//stats", "/run_code", "/v1/ping/../../stats"):
                status, text = await exchange(target, head(None, "GET", path), b"")
                if status == 200:
                    return f"ESCAPED: {path} is open"
            status, text = await ask(target, body(), Authorization=f"Bearer {token}", host="sandbox.example")
            return "" if ran(status, text) else f"DEGRADED: the token is not taken: HTTP {status} {text[:100]!r}"


async def _killed(mode: Mode, bounded: bool) -> str:
    """A server that is killed leaves nothing, and starts again."""
    marks = []
    for _ in range(2):
        with _ended_hard(mode) as (url, pid, session_of):
            async with session_of as session:
                target = _target(url, pid, session)
                answer = await target.run("print(6 * 7)")
                if answer["run_result"]["stdout"] != "42\n":
                    return f"DEGRADED: it gave {answer}"
                code = "import os, time\nif os.fork() == 0:\n    for i in range(3): os.close(i)\ntime.sleep(50)"
                running = [asyncio.create_task(target.run(code, 50.0)) for _ in range(2)]
                await asyncio.sleep(1.5)
                target.processes()
                marks.append((target, own_folders(pid)))
                psutil.Process(pid).kill()
                await asyncio.gather(*running, return_exceptions=True)
        deadline = time.monotonic() + 10
        while marks[-1][0].left() and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        if left := marks[-1][0].left():
            return f"ESCAPED: {len(left)} processes live on"
    if groups := [str(folder) for folder in marks[0][1] if folder.exists()]:
        return f"DEGRADED: the next server leaves {groups}"
    with served(*_FEW, mode=mode):  # clears up after the last one
        pass
    groups = [str(folder) for folder in marks[1][1] if folder.exists()]
    return f"DEGRADED: the next server leaves {groups}" if groups else ""


@contextlib.contextmanager
def _ended_hard(mode: Mode) -> Iterator[tuple[str, int, aiohttp.ClientSession]]:
    with contextlib.suppress(psutil.NoSuchProcess), served(*_FEW, mode=mode) as (url, pid):
        yield url, pid, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60))


async def _forty(mode: Mode, bounded: bool) -> str:
    """Programs that end and programs that are ended: none of their processes stays as a zombie."""
    with served(*_FEW, mode=mode) as (url, pid):
        async with aiohttp.ClientSession() as session:
            target = _target(url, pid, session)
            for _ in range(20):
                ended = asyncio.create_task(target.run("while True: pass", 0.1))
                good = await target.run("print(1)")
                await ended
                if (good["run_result"]["stdout"], good["run_result"]["stderr"]) != ("1\n", ""):
                    return f"DEGRADED: print(1) gave {good['run_result']}"
            await asyncio.sleep(0.5)
            left = [f"{p.name()} {p.status()}" for p in target.processes()]
            return f"DEGRADED: after 40 programs there are {left}" if left else ""


STARTS = [
    RequestAttack("start: without the token", _without_token, own_server=True),
    RequestAttack("start: killed, and started again", _killed, own_server=True),
    RequestAttack("start: zombies of 40 programs", _forty, own_server=True),
]
