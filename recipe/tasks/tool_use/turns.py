"""What a turn says: the program that it asks to run, or the answer; and what the program's result looks like."""

import re
from dataclasses import dataclass

from recipe.code_sandbox.protocol import CommandResult, CommandStatus

# Fences stand at the start of a line; the closing one alone on its line.
_BLOCK = re.compile(r"^```(?:python|py)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
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
    """Read all that the model wrote in one turn."""
    block = _BLOCK.search(text)
    if block is None:
        return Turn(None, None, re.search(answer_pattern, text) is not None)
    answers = re.search(answer_pattern, text[: block.start()]) is not None
    return Turn(block[1], block.end(), answers)


def observation(result: CommandResult, time_limit_s: float) -> str:
    """What the model reads of a program: its output and, if it failed, the last line of what it complained."""
    parts = [result.stdout.strip("\n")]
    complaints = result.stderr.strip().splitlines()
    if result.status == CommandStatus.TIME_LIMIT:
        parts.append(f"time limit of {time_limit_s:g} s exceeded")
    elif result.return_code:
        parts.append(complaints[-1] if complaints else f"ended with exit code {result.return_code}")
    return "\n".join(part for part in parts if part) or "no output"
