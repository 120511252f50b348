"""What a turn says: the program that it asks to run, or the answer; and what the program's result looks like."""

import re
from dataclasses import dataclass

import regex

from code_sandbox.protocol import CommandResult, CommandStatus

# Fences stand at the start of a line; the closing one alone on its line. Two searches, each once through the text: a
# single expression for the whole block looks for its end again after every opening fence, which is quadratic.
_OPENING = re.compile(r"^```(?:python|py)[ \t]*\n", re.MULTILINE)
_CLOSING = re.compile(r"^```[ \t]*$", re.MULTILINE)
_ANSWER_LIMIT_S = 2.0
CLOSING_FENCE = "\n```\n"
"""The sampler stops here. Not relied on: an update may come in the middle of it."""


@dataclass(frozen=True)
class Turn:
    """A turn's text, read as a whole."""

    code: str | None
    """The first complete ```python block."""
    end: int | None
    """Where that block ends in the text. What follows was written without knowing the result, and is dropped."""
    answers: bool
    """Whether there is a final answer before it."""

    @property
    def void(self) -> bool:
        """Neither a complete block nor an answer (SimpleTIR, arXiv 2509.02479)."""
        return self.code is None and not self.answers


def read_turn(text: str, answer_pattern: str) -> Turn:
    """Read all that the model wrote in one turn, in time linear in it.

    Raises:
        RuntimeError: `tool_use.answer_pattern` takes more than 2 s on this text, so it cannot be used.
    """
    opening = _OPENING.search(text)
    closing = _CLOSING.search(text, opening.end()) if opening else None  # a later opening has no other end
    if opening is None or closing is None:
        return Turn(None, None, _answers(text, answer_pattern))
    answers = _answers(text[: opening.start()], answer_pattern)
    return Turn(text[opening.end() : closing.start()], closing.end(), answers)


def _answers(text: str, pattern: str) -> bool:
    # The pattern is the user's: `re` has no limit for one that is exponential on some text, `regex` has.
    try:
        return regex.search(pattern, text, timeout=_ANSWER_LIMIT_S) is not None
    except TimeoutError:
        raise RuntimeError(
            f"tool_use.answer_pattern={pattern}: takes more than {_ANSWER_LIMIT_S:g} s on {len(text)} characters that "
            f"start with {text[:80]!r}; give a pattern whose parts cannot match the same text in several ways"
        ) from None


def observation(result: CommandResult, time_limit_s: float) -> str:
    """What the model reads of a program: its output and, if it failed, the last line of what it complained."""
    parts = [result.stdout.strip("\n")]
    complaints = result.stderr.strip().splitlines()
    if result.status == CommandStatus.TIME_LIMIT:
        parts.append(f"time limit of {time_limit_s:g} s exceeded")
    elif result.return_code:
        parts.append(complaints[-1] if complaints else f"ended with exit code {result.return_code}")
    return "\n".join(part for part in parts if part) or "no output"
