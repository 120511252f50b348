"""The verifier: no answer holds it up, and its own failure is an error, not a verdict."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from recipe.tasks import verifier
from recipe.tasks.verifier import Verdict, Verifier, VerifierError

# takes far longer than any limit here
ENDLESS = "9^{9^{9^{9}}}"


@pytest.fixture(scope="module")
def pool() -> Iterator[Verifier]:
    """Two warm processes with a limit of half a second."""
    pool = Verifier(limit_s=0.5, processes=2)
    yield pool
    pool.close()


def pids(pool: Verifier) -> list[int]:
    return [process._process.pid for process in pool._idle]


def test_a_process_is_reused(pool: Verifier) -> None:
    assert pool.compare("\\frac{1}{2}", "0.5") is Verdict.EQUAL
    before = pids(pool)
    assert pool.compare("\\frac{1}{2}", "0.4") is Verdict.DIFFERENT
    assert pids(pool) == before


def test_at_the_limit_the_process_is_killed_and_the_answer_counted(pool: Verifier) -> None:
    pool.compare("1", "1.0")
    (pid,), counted = pids(pool), pool.over_limit
    started = time.monotonic()
    assert pool.compare("18", ENDLESS) is Verdict.OVER_LIMIT
    assert time.monotonic() - started < 30  # it would run for ages; this is no measurement
    assert pool.over_limit == counted + 1
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert pool.compare("18", "18.0") is Verdict.EQUAL


def test_threads_share_the_processes(pool: Verifier) -> None:
    verdicts: dict[int, Verdict] = {}
    threads = [
        threading.Thread(target=lambda i=i: verdicts.__setitem__(i, pool.compare(str(i), f"{i}.0"))) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert verdicts == {i: Verdict.EQUAL for i in range(8)}
    assert len(pids(pool)) <= pool.processes


def test_a_process_that_died_is_replaced(pool: Verifier) -> None:
    pool.compare("1", "1.0")
    for pid in pids(pool):
        os.kill(pid, signal.SIGKILL)
    assert pool.compare("3", "3.0") is Verdict.EQUAL


def test_an_answer_that_kills_a_fresh_process_too_is_over_the_limit(pool: Verifier, monkeypatch) -> None:
    # no answer is known that does it: stands in for a crash inside math-verify
    asked = verifier._VerifierProcess.ask

    def crash(self: verifier._VerifierProcess, question: dict[str, str], limit_s: float) -> dict:
        if question["answer"] == "crash":
            self._process.kill()
        return asked(self, question, limit_s)

    monkeypatch.setattr(verifier._VerifierProcess, "ask", crash)
    assert pool.compare("1", "crash") is Verdict.OVER_LIMIT


def test_the_second_process_has_the_time_that_the_first_left(monkeypatch) -> None:
    limits: list[float] = []

    def work_and_die(self: verifier._VerifierProcess, question: dict[str, str], limit_s: float) -> dict:
        limits.append(limit_s)
        raise verifier._Died(used_s=0.2)

    monkeypatch.setattr(verifier._VerifierProcess, "ask", work_and_die)
    monkeypatch.setattr(verifier._VerifierProcess, "__init__", lambda self: None)
    monkeypatch.setattr(verifier._VerifierProcess, "kill", lambda self: None)
    assert Verifier(limit_s=0.5).compare("1", "2") is Verdict.OVER_LIMIT
    assert limits == pytest.approx([0.5, 0.3])
    limits.clear()
    assert Verifier(limit_s=0.1).compare("1", "2") is Verdict.OVER_LIMIT
    assert limits == [0.1], "nothing was left"


def test_the_time_of_a_process_that_died_is_known() -> None:
    process = verifier._VerifierProcess()
    threading.Timer(1.0, process._process.kill).start()
    with pytest.raises(verifier._Died) as died:
        process.ask({"truth": "18", "answer": ENDLESS}, limit_s=30.0)
    process.kill()
    assert died.value.used_s > 0


def test_a_verifier_that_does_not_start_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(verifier.verifier_process, "__name__", "recipe.tasks.no_such_module")
    with pytest.raises(VerifierError, match="does not start: .*no_such_module"):
        Verifier(processes=1).compare("1", "1.0")


@pytest.mark.parametrize("truth", ["", "  "])
def test_a_ground_truth_that_cannot_be_read_is_an_error(pool: Verifier, truth: str) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        pool.compare(truth, "1")


def test_the_kernel_ends_a_process_whose_parent_is_gone(pool: Verifier) -> None:
    """The parent never kills this one: its limit of processor time does."""
    process = verifier._VerifierProcess()
    process._process.stdin.write(b'{"truth": "18", "answer": "9^{9^{9^{9}}}", "limit_s": 0.1}\n')
    assert process._process.wait(60) == -signal.SIGXCPU
    process.kill()
