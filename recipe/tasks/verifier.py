"""Whether two mathematical answers are equal, by math-verify, within a time that no answer can exceed.

math-verify's own time limit is a signal, which works in a main thread only and cannot end a long multiplication. Here
the kernel ends the process at the limit: that of the reward, or another one where the caller is in none.
"""

import logging
from collections.abc import Callable
from enum import StrEnum
from functools import cache

from recipe.tasks.answer import quick_verdict, read_pair
from recipe.tasks.equality import are_equal
from verl_vcpo.user_code import processor_limit
from verl_vcpo.user_code.function import Function
from verl_vcpo.user_code.killable import BlockingPool

# An answer costs less than 3 s of a core: this limit, and the start of the process that replaces the one it ended. The
# limit is on processor time, because on a busy machine an honest answer waits for a core.
LIMIT_S = 1.8
MORE_BYTES = 3 << 30  # of address space
# Honest answers are shorter; a longer answer counts as wrong without being read.
MAX_ANSWER_CHARS = 512
_MOST_PROCESSES = 4
_TIMEOUT_S = 120.0

logger = logging.getLogger(__name__)


class Verdict(StrEnum):
    """The outcome of a comparison."""

    EQUAL = "equal"
    DIFFERENT = "different"
    """Another value, or no mathematical expression."""
    OVER_LIMIT = "over_limit"
    """The answer took longer than the limit, or more memory than a process has. The answer's fault: it is wrong."""


def compare(truth: str, answer: str) -> Verdict:
    """Whether `answer` has the value of `truth`, both LaTeX or plain text, without a surrounding \\boxed.

    Raises:
        ValueError: `truth` is empty: an error in the data.
        RuntimeError: math-verify does not work. It says nothing about the answer, so it must not become a reward.
    """
    truth, answer = truth.strip(), answer.strip()
    if not truth:
        raise ValueError("the ground truth is empty")
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return Verdict.DIFFERENT
    if answer == truth:
        return Verdict.EQUAL
    if (equal := quick_verdict(*read_pair(truth, answer))) is not None:
        return Verdict.EQUAL if equal else Verdict.DIFFERENT
    if processor_limit.can_be_kept():
        return verdict_of(truth, answer, LIMIT_S)
    verdict: Verdict = _pool().call({"truth": truth, "answer": answer, "limit_s": LIMIT_S})
    return verdict


def verdict_of(truth: str, answer: str, limit_s: float) -> Verdict:
    """The verdict of math-verify, in a process that may be ended."""
    judge = _math_verify()
    try:
        with processor_limit.at_most(limit_s, MORE_BYTES):
            return judge(truth, answer)
    except processor_limit.OverLimitError:
        logger.warning("an answer was over the verifier's limit: %.80r", answer)
        return Verdict.OVER_LIMIT


@cache
def _pool() -> BlockingPool:
    return BlockingPool(Function(f"pkg://{__name__}", verdict_of.__name__, {}, _TIMEOUT_S), _MOST_PROCESSES)


@cache
def _math_verify() -> Callable[[str, str], Verdict]:
    """The comparison, tried once, with which sympy fills its caches."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # at every call: that its own time limit is off

    def judge(truth: str, answer: str) -> Verdict:
        return Verdict.EQUAL if are_equal(*read_pair(truth, answer)) else Verdict.DIFFERENT

    if judge("\\frac{1}{2}", "2^{-1}") is not Verdict.EQUAL:
        raise RuntimeError("math-verify does not find 1/2 equal to 2^{-1}")
    return judge
