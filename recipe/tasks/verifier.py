"""Whether two mathematical answers are equal, by math-verify, within a time that no answer can exceed.

math-verify's own time limit is a signal, which works in a main thread only, and verl scores in other threads. So the
comparison runs in processes of its own, which stay warm and are killed at the limit.
"""

import atexit
import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Any, cast

import psutil

from recipe.tasks import verifier_process

# An answer costs less than 3 s of a core: this limit, and half a second to start each of the one or two processes that
# replace those that the answer ended.
LIMIT_S = 1.8
PROCESSES = 4
# The limit is on processor time, because on a busy machine an honest answer waits for a core. Elapsed time is limited
# to this many times as much, for an answer that blocks without using the processor.
_PATIENCE = 20
_LOOK_EVERY_S = 0.05
# Honest answers are shorter; a longer answer counts as wrong without being read.
MAX_ANSWER_CHARS = 512
_START_LIMIT_S = 120.0
_ATTEMPTS = 2

logger = logging.getLogger(__name__)


class VerifierError(RuntimeError):
    """The verifier itself does not work. It says nothing about the answer, so it must not become a reward."""


class Verdict(StrEnum):
    """The outcome of a comparison."""

    EQUAL = "equal"
    DIFFERENT = "different"
    """Another value, or no mathematical expression."""
    OVER_LIMIT = "over_limit"
    """The answer took longer than the limit, or more memory than a process has. The answer's fault: it is wrong."""


class _Died(Exception):
    """The process ended instead of answering.

    used_s: the processor time that it took for it.
    """

    def __init__(self, used_s: float) -> None:
        super().__init__(used_s)
        self.used_s = used_s


@dataclass
class Verifier:
    """Compares answers in at most `processes` processes, started when first needed. Threads can share it.

    limit_s: seconds of processor time for one comparison; at most 20 times that of real time.
    over_limit: how many answers were over a limit so far.
    """

    limit_s: float = LIMIT_S
    processes: int = PROCESSES
    over_limit: int = 0

    def __post_init__(self) -> None:
        self._free = threading.BoundedSemaphore(self.processes)
        self._idle: list[_VerifierProcess] = []
        self._lock = threading.Lock()

    def compare(self, truth: str, answer: str) -> Verdict:
        """Whether `answer` has the value of `truth`, both LaTeX or plain text, without a surrounding \\boxed.

        Raises:
            ValueError: `truth` cannot be read: an error in the data.
            VerifierError: no process could be started.
        """
        truth, answer = truth.strip(), answer.strip()
        if not truth:
            raise ValueError("the ground truth is empty")
        if not answer or len(answer) > MAX_ANSWER_CHARS:
            return Verdict.DIFFERENT
        if answer == truth:
            return Verdict.EQUAL
        with self._free:
            verdict = self._compare(truth, answer)
        if verdict is Verdict.OVER_LIMIT:
            with self._lock:
                self.over_limit += 1
                logger.warning("an answer was over the verifier's limit (%d so far): %.80r", self.over_limit, answer)
        return verdict

    def close(self) -> None:
        """End the idle processes; the verifier can be used again."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _compare(self, truth: str, answer: str) -> Verdict:
        # A process that was idle may have died of something else. A fresh one has just compared two numbers: where
        # it dies as well, it is the answer that kills it.
        left_s = self.limit_s
        for _ in range(_ATTEMPTS):
            process = self._take()
            try:
                reply = process.ask({"truth": truth, "answer": answer}, left_s)
            except TimeoutError:
                process.kill()
                return Verdict.OVER_LIMIT
            except _Died as died:
                process.kill()
                self.close()
                left_s -= died.used_s
                if left_s <= 0:
                    break
            except BaseException:
                process.kill()
                raise
            else:
                with self._lock:
                    self._idle.append(process)
                if "error" in reply:
                    raise ValueError(f"ground truth {truth!r}: {reply['error']}")
                return Verdict.EQUAL if reply["equal"] else Verdict.DIFFERENT
        return Verdict.OVER_LIMIT

    def _take(self) -> "_VerifierProcess":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _VerifierProcess()


class _VerifierProcess:
    """One warm process: a JSON line in, a JSON line out."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by kill
        self._process = subprocess.Popen(
            [sys.executable, "-m", verifier_process.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        self._stdin, self._stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)  # pipes
        try:
            ready = self.ask({"truth": "\\frac{1}{2}", "answer": "0.5"}, _START_LIMIT_S)
        except (TimeoutError, _Died) as error:
            self._errors.seek(0)
            last = (self._errors.read().decode(errors="replace").strip().splitlines() or [type(error).__name__])[-1]
            self.kill()
            raise VerifierError(f"the process that compares answers with math-verify does not start: {last}") from None
        if ready != {"equal": True}:
            self.kill()
            raise VerifierError(f"math-verify does not find 1/2 equal to 0.5: {ready}")

    def ask(self, question: dict[str, str], limit_s: float) -> dict[str, Any]:
        """Raises TimeoutError at the limit, _Died where the process ends."""
        deadline, before_s = time.monotonic() + _PATIENCE * limit_s, self._used_s()
        reply = b""
        try:
            self._stdin.write(json.dumps({**question, "limit_s": limit_s}).encode() + b"\n")
        except OSError as error:
            raise _Died(0.0) from error
        while not reply.endswith(b"\n"):
            readable, _, _ = select.select([self._stdout], [], [], _LOOK_EVERY_S)
            if not readable:
                if time.monotonic() > deadline or self._used_s() - before_s > limit_s:
                    raise TimeoutError
                continue
            part = os.read(self._stdout.fileno(), 65536)
            if not part:
                raise _Died(self._used_s() - before_s)  # not waited for yet: its times are known
            reply += part
        return json.loads(reply)

    def _used_s(self) -> float:
        """Processor time so far."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.NoSuchProcess as error:
            raise _Died(0.0) from error
        return times.user + times.system

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._stdin, self._stdout, self._errors):
            with contextlib.suppress(OSError):  # what was not written is of no use any more
                stream.close()


VERIFIER = Verifier()
"""The process's own; what rewards use."""

atexit.register(VERIFIER.close)
