"""The verifier: no answer holds it up, and its own failure is an error, not a verdict."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from recipe.tasks import verifier
from recipe.tasks.verifier import Verdict, compare
from verl_vcpo.user_code.errors import UserCodeError
from verl_vcpo.user_code.killable import Pool
from verl_vcpo.user_code.reward_function import RewardFunction

# takes far longer than any limit here
ENDLESS = "9^{9^{9^{9}}}"


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "LIMIT_S", 0.5)


def pids() -> list[int]:
    return [process._process.pid for process in verifier._pool()._pool._processes if process.alive]


def test_at_the_limit_the_process_is_killed_and_the_answer_counted() -> None:
    compare("2x", "x+x")
    (pid,) = pids()
    started = time.monotonic()
    assert compare("18", ENDLESS) is Verdict.OVER_LIMIT
    assert time.monotonic() - started < 30  # it would run for ages; this is no measurement
    assert not psutil.pid_exists(pid)
    assert compare("18x", "9x+9x") is Verdict.EQUAL


def test_a_process_that_died_is_replaced() -> None:
    compare("2x", "x+x")
    for pid in pids():
        os.kill(pid, signal.SIGKILL)
    while pids():
        time.sleep(0.01)
    assert compare("3x", "x+2x") is Verdict.EQUAL


def test_a_process_that_is_killed_by_others_says_nothing_about_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "LIMIT_S", 60.0)
    compare("2x", "x+x")
    idle = verifier._pool()._pool._idle
    before = idle.qsize()
    with ThreadPoolExecutor() as threads:
        verdict = threads.submit(compare, "18", ENDLESS)
        while idle.qsize() == before:
            time.sleep(0.01)
        for pid in pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(UserCodeError, match="ended with SIGKILL"):
            verdict.result(60)


def test_a_verifier_that_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier._math_verify.cache_clear()
    monkeypatch.setattr("math_verify.verify", lambda *_, **__: False)
    with pytest.raises(RuntimeError, match="math-verify does not find 1/2 equal to 2"):
        verifier.verdict_of("2x", "x+x", 1.0)


@pytest.mark.parametrize("truth", ["", "  "])
def test_a_ground_truth_that_cannot_be_read_is_an_error(truth: str) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        compare(truth, "1")


def test_a_reward_compares_in_its_own_process() -> None:
    """An ordinary answer starts no other process; one over the limit ends the reward's, and is a zero that counts."""
    pool = Pool(RewardFunction("pkg://recipe.tasks.reward", "compute_score", {}, 60.0), most=1)

    async def score(answer: str) -> Any:
        call = {"data_source": "math", "ground_truth": "18", "extra_info": None}
        return await pool.call({**call, "solution_str": f"\\boxed{{{answer}}}"})

    async def scenario() -> None:
        try:
            right = await score("9+9")
            (process,) = pool._processes
            below = psutil.Process(process._process.pid).children(recursive=True)
            assert len(below) == 2, "the second supervisor, and the reward's process"
            assert right == {"score": 1.0, "acc": 1.0, "over_limit": 0.0}
            assert await score(ENDLESS) == {"score": 0.0, "acc": 0.0, "over_limit": 1.0}
            assert not process.alive and pool._processes != [process]
            assert await score("9+9") == right
        finally:
            pool.close()

    asyncio.run(scenario())
