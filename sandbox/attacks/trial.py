"""Attacks against a server that is started in one way, and what came of each."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tqdm import tqdm

from sandbox.attacks.bait import kill_marked, laid_out, program, run_unsandboxed
from sandbox.attacks.client import RequestAttack
from sandbox.attacks.health import Health, Target, followed
from sandbox.attacks.programs import ATTACKS, FILES_MB, LIMIT_MB, PROCESSES, TIME_S, Attack
from sandbox.attacks.requests import REQUESTS
from tests.kit.sandbox_server import OWN, Mode, served

CONCURRENCY, WARM = 4, 2
SERVER = [
    *("--memory-mb", str(LIMIT_MB), "--processes", str(PROCESSES), "--files-mb", str(FILES_MB)),
    *("--time-s", str(TIME_S), "--concurrency", str(CONCURRENCY), "--warm", str(WARM)),
]
SECRET_VARIABLE, SECRET = "VCPO_BAIT", "a-secret-that-no-program-may-read"
_LATE_S = 5.0
HELD, DEGRADED, ESCAPED = "held", "degraded", "escaped"


@dataclass
class AttackVerdict:
    """What came of one attack."""

    name: str
    outcome: str
    reasons: list[str] = field(default_factory=list)
    answer: Any = None
    took_s: float = 0.0


@dataclass
class Trial:
    """What came of the attacks in one mode. `isolation`: what the server says about itself."""

    mode: str
    isolation: str
    verdicts: list[AttackVerdict]
    left_out: list[str]
    """Names of those that can be stopped only where memory is limited for a program as a whole, and it is not."""

    def named(self, outcome: str) -> list[str]:
        """The names of the attacks that ended so."""
        return [verdict.name for verdict in self.verdicts if verdict.outcome == outcome]


@contextlib.asynccontextmanager
async def _attacked(url: str, pid: int) -> AsyncIterator[Target]:
    timeout, connector = aiohttp.ClientTimeout(600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        target = Target(url, pid, CONCURRENCY, WARM, session)
        await target.warmed()
        async with followed(target):
            yield target


async def _tried(target: Target, attack: Attack, bait: dict[str, Any]) -> AttackVerdict:
    """One attack, its neighbour and what ran before, by what they print and when they end."""
    try:
        if attack.before:
            await target.run(program(attack.before, bait, inside=True))
        if attack.warm:
            await target.warmed()
        beside = []
        if attack.neighbour:
            beside.append(target.run(program(attack.neighbour, bait, inside=True), TIME_S))
        code = program(attack.code, bait, inside=True)
        answers = await asyncio.gather(*beside, target.run(code, attack.time_s, attack.stdin))
    except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
        return AttackVerdict(attack.name, DEGRADED, [f"the service failed: {type(error).__name__} {error}"])
    verdict = AttackVerdict(attack.name, HELD, answer=answers)
    for i, answer in enumerate(answers):
        limit = TIME_S if i < len(beside) else attack.time_s
        _judge(verdict, answer | {"untold": bait["untold"]}, limit, "its neighbour" if i < len(beside) else "it")
        if i >= len(beside) and attack.told and attack.told(answer | {"untold": bait["untold"]}):
            _worse(verdict, DEGRADED, "the answer shows it")
    if attack.trace and attack.trace(bait):
        _worse(verdict, ESCAPED, "it left its trace on the host")
    return verdict


def _judge(verdict: AttackVerdict, answer: dict[str, Any], limit_s: float, who: str) -> None:
    result = answer["run_result"]
    said = result["stdout"] + result["stderr"]
    for outcome in (DEGRADED, ESCAPED):
        if outcome.upper() in said:
            _worse(verdict, outcome, f"{who} says so")
    if answer["untold"] in said:
        _worse(verdict, ESCAPED, f"{who} knows the secret")
    if result["execution_time"] > limit_s + _LATE_S:
        _worse(verdict, DEGRADED, f"{who} ran for {result['execution_time']:.1f} s of {limit_s:g} s")
    if who != "it" and result["return_code"] != 0:
        _worse(verdict, DEGRADED, f"{who} ended with {result['return_code']}: {result['stderr'][-200:]}")


def _of_request(request: RequestAttack, found: str) -> AttackVerdict:
    outcome = found.split(":")[0].lower() if found else HELD
    return AttackVerdict(request.name, outcome, [found] if found else [])


def _worse(verdict: AttackVerdict, outcome: str, reason: str) -> None:
    verdict.reasons.append(reason)
    if verdict.outcome != ESCAPED:
        verdict.outcome = outcome


async def _together(
    target: Target, attacks: Sequence[Attack] | Sequence[RequestAttack], bait: dict[str, Any]
) -> list[AttackVerdict]:
    """At once, but for those that wait for a warm interpreter."""
    verdicts = [await _one(target, attack, bait) for attack in attacks if isinstance(attack, Attack) and attack.warm]
    at_once = [attack for attack in attacks if not (isinstance(attack, Attack) and attack.warm)]
    return verdicts + await asyncio.gather(*[_one(target, attack, bait) for attack in at_once])


async def _one(target: Target, attack: Attack | RequestAttack, bait: dict[str, Any]) -> AttackVerdict:
    start = time.perf_counter()
    if isinstance(attack, Attack):
        verdict = await _tried(target, attack, bait)
    else:
        verdict = _of_request(attack, await attack.tried(target))
    verdict.took_s = time.perf_counter() - start
    return verdict


async def _one_by_one(
    target: Target, attacks: list[Attack | RequestAttack], health: Health, bait: dict[str, Any], show: bool
) -> list[AttackVerdict]:
    """Those after which the server is looked at."""
    verdicts = []
    for attack in tqdm(attacks, desc="one after another", disable=None if show else True, leave=False):
        verdict = await _one(target, attack, bait)
        for problem in await health.problems():
            _worse(verdict, DEGRADED, f"afterwards: {problem}")
        verdicts.append(verdict)
        if show and verdict.outcome != HELD:
            tqdm.write(f"{verdict.outcome} after {verdict.took_s:.1f} s: {verdict.name}: {verdict.reasons}")
    return verdicts


async def _against(
    url: str, pid: int, attacks: list[Attack], requests: list[RequestAttack], bait: dict[str, Any], show: bool
) -> tuple[list[AttackVerdict], Target, Health]:
    async with _attacked(url, pid) as target:
        health = Health(target)
        slow = [request for request in requests if request.slow]
        waiting = asyncio.gather(*[request.tried(target) for request in slow])
        verdicts = []
        for name, some in (
            ("all of those that run at once", [a for a in attacks if not a.alone and not a.warm]),
            ("all of those in warm interpreters", [a for a in attacks if a.warm and not a.alone]),
            ("all of the wrong requests", [request for request in requests if request.light]),
        ):
            verdicts += await _together(target, some, bait)
            if problems := await health.problems() if some else []:
                verdicts.append(AttackVerdict(name, DEGRADED, problems))
        one_by_one: list[Attack | RequestAttack] = [
            *[a for a in attacks if a.alone],
            *[r for r in requests if not (r.light or r.slow)],
        ]
        verdicts += await _one_by_one(target, one_by_one, health, bait, show)
        verdicts += [_of_request(request, found) for request, found in zip(slow, await waiting, strict=True)]
        return verdicts, target, health


def _control(attack: Attack, bait: dict[str, Any]) -> bool:
    """Whether the attack succeeds as an ordinary process."""
    environment = {SECRET_VARIABLE: SECRET}
    if attack.before:
        run_unsandboxed(program(attack.before, bait, inside=False), environment)
    with ThreadPoolExecutor(1) as pool:
        beside = None
        if attack.neighbour:
            code = program(attack.neighbour, bait, inside=False)
            beside = pool.submit(run_unsandboxed, code, environment)
        output = run_unsandboxed(program(attack.code, bait, inside=False), environment, stdin=attack.stdin)
        if beside:
            output += beside.result()
    return "ESCAPED" in output or "DEGRADED" in output or bool(attack.trace and attack.trace(bait))


def controls(attacks: list[Attack], show: bool = True) -> dict[str, bool]:
    """Attack -> whether it succeeds without a sandbox, for those that harm nothing."""
    freely = {}
    with laid_out(0, SECRET) as bait:
        bait["server_port"] = bait["port"]
        for attack in tqdm([a for a in attacks if a.control], desc="without a sandbox", disable=None if show else True):
            freely[attack.name] = _control(attack, bait)
            kill_marked(bait["mark"])
    return freely


def run_attacks(
    mode: Mode = OWN,
    attacks: list[Attack] | None = None,
    requests: list[RequestAttack] | None = None,
    show: bool = True,
) -> Trial:
    """All attacks, or those that are given, against a server that is started in this mode."""
    attacks, requests = ATTACKS if attacks is None else attacks, REQUESTS if requests is None else requests
    with contextlib.ExitStack() as stack:
        url, pid = stack.enter_context(served(*SERVER, environment={SECRET_VARIABLE: SECRET}, mode=mode))
        bait = stack.enter_context(laid_out(int(url.rsplit(":", 1)[1]), SECRET, mode.user))
        stats = asyncio.run(_stats(url))
        bounded = stats["limits_whole_programs"]
        kept = [a for a in attacks if bounded or not a.whole_program]
        online = [r for r in requests if not r.own_server]
        starts = stack.enter_context(ThreadPoolExecutor(1)).submit(_of_own_servers, requests, mode, bounded)
        verdicts, target, health = asyncio.run(_against(url, pid, kept, online, bait, show))
        kill_marked(bait["mark"])
    if kept or online:
        verdicts += _after_the_end(target, health)
    verdicts += starts.result()
    return Trial(mode.name, str(stats["isolation"]), verdicts, [a.name for a in attacks if a not in kept])


def _of_own_servers(requests: list[RequestAttack], mode: Mode, bounded: bool) -> list[AttackVerdict]:
    """What came of those that start servers themselves."""
    return [_of_request(r, asyncio.run(r.alone(mode, bounded))) for r in requests if r.own_server]


async def _stats(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/stats") as answer:
        return await answer.json()


def _after_the_end(target: Target, health: Health) -> list[AttackVerdict]:
    """Whether the server, which has ended, left anything."""
    deadline = time.monotonic() + 10
    while (left := target.left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    problems = [f"{len(left)} processes"] * bool(left)
    problems += [f"{folder} is there" for folder in health.groups if folder.exists()]
    return [AttackVerdict("what is left when the server has ended", DEGRADED if problems else HELD, problems)]
