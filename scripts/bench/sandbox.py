"""Does the code sandbox hold, and how fast is it? `python -m scripts.bench.sandbox [--json]`.

Attacks: each program of scripts/bench/sandbox_attacks.py in a sandbox, where it must fail, and, where that harms
nothing, as an ordinary process, where it must succeed. Then executions per second and their latency with 32 requests
at a time, and the server's memory after many. About two minutes on 2 cores. Exit code 1 if anything escaped.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil
from tqdm import tqdm

from scripts.bench.sandbox_attacks import ATTACKS, FILES_MB, LIMIT_MB, PROCESSES, TIME_S, Attack
from scripts.bench.sandbox_bait import kill_marked, laid_out, program, run_unsandboxed, served

ATTACK_SERVER = [
    *("--memory-mb", str(LIMIT_MB), "--processes", str(PROCESSES), "--files-mb", str(FILES_MB)),
    *("--time-s", str(TIME_S), "--concurrency", "6"),
]
_SECRET_VARIABLE, _SECRET = "VCPO_BAIT", "a-secret-that-no-program-may-read"
_LATE_S = 5.0
_CONCURRENCY = 32
PROGRAMS = {
    "print": "print(6 * 7)",
    "numpy": "import numpy as np; print(np.linalg.det(np.eye(3)))",
    "sympy": "import sympy as s; x = s.Symbol('x'); print(s.integrate(s.sin(x), x))",
    "scipy": "from scipy.optimize import brentq; print(brentq(lambda x: x * x - 2, 0, 2))",
}


@dataclass(frozen=True)
class Verdict:
    """What came of one attack."""

    name: str
    escaped: bool
    without_sandbox: bool | None
    """Whether it succeeds without one; None where it was not tried."""
    answer: dict[str, Any]


async def _post(session: aiohttp.ClientSession, url: str, code: str, time_s: float) -> dict[str, Any]:
    request = {"code": code, "language": "python", "run_timeout": time_s}
    async with session.post(f"{url}/run_code", json=request) as answer:
        if answer.status != 200:
            raise RuntimeError(f"the server failed: HTTP {answer.status} {await answer.text()} for\n{code}")
        return await answer.json()


async def _attack(session: aiohttp.ClientSession, url: str, attack: Attack, bait: dict[str, Any]) -> dict[str, Any]:
    neighbour = None
    if attack.neighbour:
        code = program(attack.neighbour, bait, inside=True)
        neighbour = asyncio.create_task(_post(session, url, code, TIME_S))
    answer = await _post(session, url, program(attack.code, bait, inside=True), attack.time_s)
    if neighbour:
        answer["neighbour"] = await neighbour
    return answer


def _held(attack: Attack, answer: dict[str, Any], bait: dict[str, Any]) -> bool:
    result = answer["run_result"]
    if "ESCAPED" in result["stdout"] + result["stderr"] or (attack.trace and attack.trace(bait)):
        return False
    return result["execution_time"] < attack.time_s + _LATE_S


def _control(attack: Attack, bait: dict[str, Any]) -> bool:
    """Whether the attack succeeds as an ordinary process."""
    environment = {_SECRET_VARIABLE: _SECRET}
    with ThreadPoolExecutor(1) as pool:
        beside = None
        if attack.neighbour:
            code = program(attack.neighbour, bait, inside=False)
            beside = pool.submit(run_unsandboxed, code, environment)
        output = run_unsandboxed(program(attack.code, bait, inside=False), environment)
        if beside:
            beside.result()
    return "ESCAPED" in output or bool(attack.trace and attack.trace(bait))


def run_attacks(attacks: list[Attack] = ATTACKS, control: bool = True) -> tuple[list[Verdict], list[str]]:
    """(the verdicts, the names of the attacks that were left out for want of control groups)."""

    async def against(url: str, bait: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
            async with session.get(f"{url}/stats") as stats:
                groups = (await stats.json())["limits_whole_programs"]
            kept = [a for a in attacks if groups or not a.whole_program]
            answers = await asyncio.gather(*[_attack(session, url, attack, bait) for attack in kept])
            await _post(session, url, "print(1)", TIME_S)  # the server is alive
        return answers, groups

    with served(*ATTACK_SERVER, environment={_SECRET_VARIABLE: _SECRET}) as (url, _):
        port = int(url.rsplit(":", 1)[1])
        with laid_out(port, _SECRET) as bait:
            answers, groups = asyncio.run(against(url, bait))
            kept = [a for a in attacks if groups or not a.whole_program]
            held = [_held(attack, answer, bait) for attack, answer in zip(kept, answers, strict=True)]
            freely: list[bool | None] = []
            for attack in tqdm(kept, desc="without a sandbox", disable=None if control else True):
                freely.append(_control(attack, bait) if control and attack.control else None)
                kill_marked(bait["mark"])
    verdicts = [
        Verdict(attack.name, not good, free, answer)
        for attack, good, free, answer in zip(kept, held, freely, answers, strict=True)
    ]
    return verdicts, [a.name for a in attacks if a not in kept]


async def _load(url: str, code: str, runs: int) -> tuple[float, list[float]]:
    """(seconds, latencies in seconds) of `runs` programs, `_CONCURRENCY` requests at a time."""
    gate, latencies = asyncio.Semaphore(_CONCURRENCY), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        with tqdm(total=runs, desc="executions", disable=None, leave=False) as progress:

            async def one() -> None:
                async with gate:
                    start = time.perf_counter()
                    answer = await _post(session, url, code, 30.0)
                    latencies.append(time.perf_counter() - start)
                    if answer["status"] != "Success":
                        raise RuntimeError(f"a program of the benchmark failed: {answer}")
                    progress.update()

            start = time.perf_counter()
            await asyncio.gather(*[one() for _ in range(runs)])
            return time.perf_counter() - start, latencies


def _resident_mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def measure(runs: int) -> dict[str, Any]:
    """Executions per second, latencies and the server's memory."""
    figures: dict[str, Any] = {"programs": {}}
    with served("--time-s", "30") as (url, pid):
        for name, code in PROGRAMS.items():
            seconds, latencies = asyncio.run(_load(url, code, 3 * _CONCURRENCY))
            figures["programs"][name] = {
                "per_s": round(len(latencies) / seconds, 1),
                "p50_s": round(statistics.median(latencies), 3),
                "p99_s": round(statistics.quantiles(latencies, n=100)[98], 3),
            }
        before = _resident_mb(pid)
        asyncio.run(_load(url, PROGRAMS["print"], runs))
        after = _resident_mb(pid)
        left = len(psutil.Process(pid).children(recursive=True))
        figures |= {"runs": runs, "memory_mb": round(after, 1), "memory_growth_mb": round(after - before, 1)}
        figures["processes_left"] = left
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="executions before memory is measured (default 2000)")
    parser.add_argument("--only", default="", help="attacks whose name contains this; nothing else is measured")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, last")
    arguments = parser.parse_args()
    verdicts, left_out = run_attacks([a for a in ATTACKS if arguments.only in a.name])
    shown = {True: "succeeds", False: "FAILS TOO", None: "not tried"}
    for verdict in verdicts:
        outcome, freely = "ESCAPED" if verdict.escaped else "held", shown[verdict.without_sandbox]
        print(f"{outcome:>8}  {verdict.name:<40} without: {freely}")
    for name in left_out:
        print(f"{'left out':>8}  {name:<40} needs control groups")
    escaped = [verdict.name for verdict in verdicts if verdict.escaped]
    print(f"{len(verdicts)} attacks, {len(escaped)} escaped")
    if arguments.only:
        for verdict in verdicts:
            print(verdict.name, json.dumps(verdict.answer))
        return int(bool(escaped))
    figures = measure(arguments.runs)
    for name, numbers in figures["programs"].items():
        print(
            f"{name:>8}  {numbers['per_s']:6.1f} executions/s at {_CONCURRENCY} requests, latency "
            f"{numbers['p50_s']:.2f} s median, {numbers['p99_s']:.2f} s p99"
        )
    print(
        f"server: {figures['memory_mb']} MB after {arguments.runs} runs, grown by {figures['memory_growth_mb']} MB; "
        f"{figures['processes_left']} processes left"
    )
    if arguments.json:
        tried = [verdict for verdict in verdicts if verdict.without_sandbox is not None]
        counts = {
            "attacks": len(verdicts),
            "escaped": escaped,
            "left_out": left_out,
            "succeed_without": sum(bool(v.without_sandbox) for v in tried),
            "tried_without": len(tried),
        }
        print(json.dumps(counts | figures))
    return int(bool(escaped))


if __name__ == "__main__":
    sys.exit(main())
