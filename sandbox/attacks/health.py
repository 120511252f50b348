"""Is the server as it was before an attack, and this machine too?"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

_PROMPT_S = 5.0
_SETTLED_S = 30.0
_SPARE_DESCRIPTORS = 16  # connections that are about to be closed
_GROWTH_MB = 400
_COUNTERS = (Path("/proc/sys/fs/aio-nr"), Path("/proc/sys/kernel/pty/nr"))
_SANDBOX_USERS = range(60706, 65520)


@dataclass
class Target:
    """A server under attack.

    url, pid: where it listens; its process.
    concurrency, warm: the programs that it runs at a time, the interpreters that it keeps ready.
    session: a client's.
    """

    url: str
    pid: int
    concurrency: int
    warm: int
    session: aiohttp.ClientSession
    seen: dict[int, float] = field(default_factory=dict)
    """Its processes so far: number -> when it began."""

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def memory_mb(self) -> float:
        """Of the server alone."""
        return psutil.Process(self.pid).memory_info().rss / 2**20

    async def stats(self) -> dict[str, Any]:
        """What `GET /stats` says."""
        async with self.session.get(f"{self.url}/stats") as answer:
            return await answer.json()

    async def run(self, code: str, time_s: float = 10.0, stdin: str = "") -> dict[str, Any]:
        """The answer to a program. Raises RuntimeError where the service failed."""
        request = {"code": code, "language": "python", "run_timeout": time_s, "stdin": stdin}
        async with self.session.post(f"{self.url}/run_code", json=request) as answer:
            if answer.status != 200:
                raise RuntimeError(f"HTTP {answer.status} {(await answer.text())[:300]}")
            return await answer.json()

    async def answers(self) -> str:
        """Whether it runs a program promptly; if not, what it did."""
        start = time.perf_counter()
        try:
            answer = await asyncio.wait_for(self.run("print(6 * 7)"), 2 * _PROMPT_S)
        except (TimeoutError, RuntimeError, aiohttp.ClientError) as error:
            return f"print(6 * 7) was not answered ({type(error).__name__} {error})"
        took = time.perf_counter() - start
        if (answer["run_result"]["stdout"], answer["run_result"]["stderr"]) != ("42\n", ""):
            return f"print(6 * 7) gave {answer}"
        return f"print(6 * 7) took {took:.1f} s" if took > _PROMPT_S else ""

    def processes(self) -> list[psutil.Process]:
        """Those that it has started, and theirs, that are there now."""
        try:
            now = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            now = []
        for process in now:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.seen[process.pid] = process.create_time()
        return now

    def left(self) -> list[int]:
        """Processes that it ever had and that are there, though it has ended."""
        alive = []
        for pid, began in self.seen.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).create_time() == began:
                    alive.append(pid)
        return alive

    async def warmed(self) -> None:
        """Wait until all its warm interpreters are there. Raises TimeoutError."""
        async with asyncio.timeout(120):
            while (await self.stats())["warm"] < self.warm:
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def followed(target: Target) -> Any:
    """While it lasts, the server's processes are noted, so that none gets away unseen."""

    async def follow() -> None:
        while True:
            target.processes()
            await asyncio.sleep(0.25)

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()


class Health:
    """What there is while nothing runs, to compare with. Make it when the server is warm and idle."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._processes = len(target.processes())
        self._descriptors = psutil.Process(target.pid).num_fds()
        self._memory_mb = target.memory_mb
        self._counters = [int(path.read_text()) for path in _COUNTERS if path.exists()]
        self.groups = own_folders(target.pid)

    async def problems(self) -> list[str]:
        """What is worse than before, in words; waits a while for what settles by itself."""
        found = [problem for problem in [await self._target.answers(), await self._all_slots()] if problem]
        deadline = time.monotonic() + _SETTLED_S
        while (unsettled := await self._unsettled()) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        return found + unsettled

    async def _all_slots(self) -> str:
        count = self._target.concurrency
        start = time.perf_counter()
        try:
            async with asyncio.timeout(30):
                await asyncio.gather(*[self._target.run("import time; time.sleep(0.2)") for _ in range(count)])
        except (TimeoutError, RuntimeError, aiohttp.ClientError) as error:
            return f"{count} programs at a time were not answered ({type(error).__name__} {error})"
        took = time.perf_counter() - start
        return f"{count} programs of 0.2 s took {took:.1f} s" if took > 0.2 + _PROMPT_S else ""

    async def _unsettled(self) -> list[str]:
        target, found = self._target, []
        stats = await target.stats()
        found += [f"{name}: {stats[name]}" for name in ("waiting_or_running", "over_limit") if stats[name]]
        if stats["warm"] != target.warm:
            found.append(f"warm: {stats['warm']} of {target.warm}")
        processes = target.processes()
        if len(processes) > self._processes:
            found.append(f"{len(processes)} processes, {self._processes} before")
        zombies = [p.pid for p in processes if _status(p) == psutil.STATUS_ZOMBIE]
        if zombies:
            found.append(f"{len(zombies)} zombies")
        descriptors = psutil.Process(target.pid).num_fds()
        if descriptors > self._descriptors + _SPARE_DESCRIPTORS:
            found.append(f"{descriptors} descriptors of the server, {self._descriptors} before")
        if target.memory_mb > self._memory_mb + _GROWTH_MB:
            found.append(f"{target.memory_mb:.0f} MiB of the server, {self._memory_mb:.0f} before")
        return found + self._of_the_machine()

    def _of_the_machine(self) -> list[str]:
        found = []
        for path, before in zip([p for p in _COUNTERS if p.exists()], self._counters, strict=True):
            if int(path.read_text()) > before:
                found.append(f"{path}: {path.read_text().strip()}, {before} before")
        left = [path.name for path in Path("/dev/shm").iterdir() if self._is_left(path)]
        if left:
            found.append(f"/dev/shm: {left}")
        for folder in self.groups:
            groups = sum(path.is_dir() for path in folder.iterdir()) if folder.exists() else 0
            if groups > self._target.warm:
                found.append(f"{folder}: {groups} groups")
        return found

    def _is_left(self, path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_uid in _SANDBOX_USERS and not path.name.startswith("sandbox-bait-")
        return False


def own_folders(pid: int) -> list[Path]:
    """The folders of control groups that the server has, by the locks that it holds on them."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = link.readlink()
            if "vcpo-sandbox-" in target.name and "cgroup" in str(target):
                found.add(target)
    return sorted(found)


def _status(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status()
    return ""
