"""No text that a model writes holds up its reward: twice the text costs twice the time, whatever it says.

Processor times of two lengths are compared, never a time with a limit: eight times the text may cost three times as
much as it should, and would cost 64 times as much if the cost were quadratic.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from recipe.tasks import boxed, gsm8k, math_reward, reward
from recipe.tasks.answer import read_answer
from recipe.tasks.tool_use.settings import ToolUseSettings
from recipe.tasks.tool_use.turns import read_turn
from recipe.tasks.verifier import MAX_ANSWER_CHARS, Verdict

SHORT, TIMES = 12_500, 8  # the long text has 100,000 characters
WORST_GROWTH = 3 * TIMES
_FLOOR_S = 5e-4  # less is noise, and no harm
_GIVE_UP_S = 5.0  # of processor time, for milliseconds of work: an exponential cost would never end

ANSWER_PATTERN = ToolUseSettings.answer_pattern
TRUTHS: dict[str, Any] = {"countdown": {"target": 22, "numbers": [3, 5, 7]}, "gsm8k": "18", "math": "18", "dapo": "18"}
READERS: dict[str, Callable[[str], object]] = {
    **{name: lambda text, name=name: reward.compute_score(name, text, TRUTHS[name]) for name in TRUTHS},
    "read_turn": lambda text: read_turn(text, ANSWER_PATTERN),
    "last_boxed": lambda text: boxed.last_boxed(text, len(text)),
    "after_mark": lambda text: boxed.after_mark(text, len(text)),
}
# What the readers look for, whole and in pieces.
ALPHABET = [
    *("\\boxed{", "\\boxed", "\\", "{", "}", "####", "#", "<answer>", "</answer>", "<", "</", "<answer", "answer>"),
    *("```python\n", "```py\n", "```python", "\n```\n", "```", "``", "`", "\n", " ", "\t", "\r"),
    *("18", "1", ",", ".", "$", "-", "+", "*", "/", "(", ")", "a", "dollars", "!", "\u0663", "\0", "\ud800"),
]
UNITS = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=12).map("".join)
ENDS = st.lists(st.sampled_from(ALPHABET), max_size=6).map("".join)
AS_FOUND = [Phase.explicit, Phase.generate]  # to make a failing text smaller would take minutes


@pytest.fixture(autouse=True)
def instant_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing an answer, which is short, has a limit of its own (test_verifier.py)."""
    monkeypatch.setattr(math_reward, "compare", lambda truth, answer: Verdict.DIFFERENT)


@contextmanager
def gives_up() -> Iterator[None]:
    def stop(signum: int, frame: Any) -> None:
        raise AssertionError(f"not done after {_GIVE_UP_S:g} s of processor time")

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _GIVE_UP_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def cost_s(read: Callable[[str], object], text: str) -> float:
    """Processor time, the least of a few tries: other processes can only add to it."""
    times = []
    with gives_up():
        for _ in range(3):
            start = time.thread_time()
            read(text)
            times.append(time.thread_time() - start)
    return min(times)


def assert_linear(read: Callable[[str], object], text_of: Callable[[int], str]) -> None:
    """`text_of`: the text of about so many characters."""
    for _ in range(3):  # a cost that grows too fast does so every time
        short, long = cost_s(read, text_of(SHORT)), cost_s(read, text_of(SHORT * TIMES))
        if long < WORST_GROWTH * max(short, _FLOOR_S):
            return
    raise AssertionError(f"{TIMES} times the text costs {long / max(short, _FLOOR_S):.0f} times as much: {long:.3g} s")


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=40, phases=AS_FOUND, report_multiple_bugs=False)
@given(start=ENDS, unit=UNITS, end=ENDS)
@example(start="", unit="```python\nx\n", end="")  # opened and never closed
@example(start="", unit="```python" + " " * 40, end="")
@example(start="```python\n", unit="``` ", end="")
@example(start="", unit="\n```\n", end="")
@example(start="", unit="<answer>", end="</answer>")
@example(start="", unit="</answer>", end="<answer>")
@example(start="\\boxed{", unit="{", end="}")
@example(start="", unit="\\boxed{", end="")
@example(start="", unit="#", end="")
@example(start="####", unit=" ", end="18")
@example(start="#### 18 ", unit="ha", end="!")
def test_time_is_linear_in_the_text(name: str, start: str, unit: str, end: str) -> None:
    assert_linear(READERS[name], lambda length: start + unit * (length // len(unit)) + end)


@pytest.mark.parametrize("answer", ["18 {}!", "18 {} (total)", "$ 18 {}'", "1,{}!", "18. {} 5"])
@pytest.mark.parametrize("unit", ["a", "ha ", " ", "1", ",", " a"])
def test_no_short_answer_is_exponential(answer: str, unit: str) -> None:
    """GSM8K answers have at most 64 characters, which is enough for centuries."""

    def read(times: int) -> float:
        text = "#### " + answer.format(unit * times)
        return cost_s(lambda _: [gsm8k.compute_score("gsm8k", text, "18") for _ in range(20)], text)

    few = max(read(4), _FLOOR_S)
    assert read((gsm8k.MAX_ANSWER_CHARS - len(answer)) // len(unit)) < WORST_GROWTH * few


@pytest.mark.parametrize("answer", ["{}", "\\text{{{}", "18{}!", "({})", "\\frac{{1}}{{{}", "{}\\text{{ cm}}"])
@pytest.mark.parametrize(
    "unit", ["a", " ", "1", "1,", " a", "{", "\\text{", "1 ", "^", "**", ".", "\\sqrt(", "answer ", "½"]
)
def test_no_answer_is_slow_to_read(answer: str, unit: str) -> None:
    """An answer to compare has at most `MAX_ANSWER_CHARS`."""

    def read(times: int) -> float:
        text = answer.format(unit * times)
        return cost_s(lambda _: read_answer.__wrapped__(text, letters_are_units=True), text)

    few = max(read(8), _FLOOR_S)
    assert read(MAX_ANSWER_CHARS // len(unit)) < WORST_GROWTH * MAX_ANSWER_CHARS / 64 * few


def test_an_answer_pattern_that_is_exponential_fails_with_its_name() -> None:
    with gives_up(), pytest.raises(RuntimeError, match=r"tool_use\.answer_pattern=\(a\|aa\)\+\$: takes more"):
        read_turn("a" * 64 + "!", "(a|aa)+$")
