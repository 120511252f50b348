"""How fast the code sandbox is, and how much memory its server takes."""

import asyncio
import statistics
import time
from typing import Any

import aiohttp
import psutil
from tqdm import tqdm

from tests.kit.sandbox_server import served

CONCURRENCY = 32
_WARM, _WARM_CONCURRENCY = 16, 4
PROGRAMS = {
    "print": "print(6 * 7)",
    "numpy": "import numpy as np; print(np.linalg.det(np.eye(3)))",
    "sympy": "import sympy as s; x = s.Symbol('x'); print(s.integrate(s.sin(x), x))",
    "scipy": "from scipy.optimize import brentq; print(brentq(lambda x: x * x - 2, 0, 2))",
}


async def _load(url: str, code: str, runs: int, at_a_time: int) -> tuple[float, list[float]]:
    """(seconds, latencies in seconds) of `runs` programs, so many requests at a time."""
    gate, latencies = asyncio.Semaphore(at_a_time), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        with tqdm(total=runs, desc="executions", disable=None, leave=False) as progress:

            async def one() -> None:
                async with gate:
                    request = {"code": code, "language": "python", "run_timeout": 30.0}
                    start = time.perf_counter()
                    async with session.post(f"{url}/run_code", json=request) as answer:
                        content = await answer.json()
                    latencies.append(time.perf_counter() - start)
                    if answer.status != 200 or content["status"] != "Success":
                        raise RuntimeError(f"a program of the benchmark failed: HTTP {answer.status} {content}")
                    progress.update()

            start = time.perf_counter()
            await asyncio.gather(*[one() for _ in range(runs)])
            return time.perf_counter() - start, latencies


async def _warmed(url: str, count: int) -> None:
    """Until so many warm interpreters are there. Raises TimeoutError after some minutes."""
    async with asyncio.timeout(300), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/stats") as answer:
                if (await answer.json())["warm"] >= count:
                    return
            await asyncio.sleep(0.2)


def _resident_mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def _figures(seconds: float, latencies: list[float]) -> dict[str, float]:
    return {
        "per_s": round(len(latencies) / seconds, 1),
        "p50_s": round(statistics.median(latencies), 3),
        "p99_s": round(statistics.quantiles(latencies, n=100, method="inclusive")[98], 3),
    }


def measure(runs: int) -> dict[str, Any]:
    """Executions per second, latencies and the server's memory.

    The table is measured with the server as it is by default; the latency from a full pool with a pool of its own.
    """
    figures: dict[str, Any] = {"programs": {}}
    with served("--time-s", "30") as (url, pid):
        for name, code in PROGRAMS.items():
            figures["programs"][name] = _figures(*asyncio.run(_load(url, code, 3 * CONCURRENCY, CONCURRENCY)))
        before = _resident_mb(pid)
        asyncio.run(_load(url, PROGRAMS["print"], runs, CONCURRENCY))
        after = _resident_mb(pid)
        figures |= {"runs": runs, "memory_mb": round(after, 1), "memory_growth_mb": round(after - before, 1)}
    with served("--time-s", "30", "--warm", "0") as (url, pid):
        asyncio.run(_load(url, PROGRAMS["print"], 20, _WARM_CONCURRENCY))
        figures["processes_left"] = len(psutil.Process(pid).children(recursive=True))
    with served("--time-s", "30", "--warm", str(_WARM)) as (url, pid):
        asyncio.run(_warmed(url, _WARM))
        figures["warm"] = _figures(*asyncio.run(_load(url, PROGRAMS["sympy"], _WARM, _WARM_CONCURRENCY)))
    return figures


def print_figures(figures: dict[str, Any]) -> None:
    """As lines for people."""
    for name, numbers in figures["programs"].items():
        print(
            f"{name:>8}  {numbers['per_s']:6.1f} executions/s at {CONCURRENCY} requests, latency "
            f"{numbers['p50_s']:.2f} s median, {numbers['p99_s']:.2f} s p99"
        )
    warm = figures["warm"]
    print(
        f"{'sympy':>8}  from a full pool, {_WARM_CONCURRENCY} requests at a time: {warm['p50_s']:.3f} s median, "
        f"{warm['p99_s']:.3f} s p99"
    )
    print(
        f"server: {figures['memory_mb']} MB after {figures['runs']} runs, grown by {figures['memory_growth_mb']} MB; "
        f"{figures['processes_left']} processes left"
    )
