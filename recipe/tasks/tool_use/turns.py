"""What a turn says: the program that it asks to run, or the answer; and what the program's result looks like."""

import re
from dataclasses import dataclass
from enum import StrEnum

import regex

from code_sandbox.protocol import CommandResult, CommandStatus

# As the expression of SimpleTIR's code, but for a block without a name, which is run there: such a block is also the
# form of plans and outputs. Two searches, each once through the text: a single expression for the whole block looks for
# its end again after every opening fence, which is quadratic.
_OPENING = re.compile(r"```(?:python|py)[ \t\r]*\n")
_CLOSING = re.compile(r"^`{3,}", re.MULTILINE)  # with whatever follows: ```output would be no line of a program
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_TRACEBACK = re.compile(r"([ +|]*)(Exception Group )?Traceback \(most recent call last\):")
# What the interpreter writes of a warning, whose line of the source follows, and before the traceback of a thread.
_NO_ERROR = re.compile(r".+:\d+: \w+Warning: .*|Exception in thread .*:")
# The place of a syntax error, with its line and caret, is part of the exception. A frame's place goes on: ", in NAME".
_OF_SYNTAX = re.compile(r'[ |]*  File ".*", line \d+')
_GROUP_RULE, _GROUP_MARGIN = re.compile(r" *\+[-+. \d]+-"), re.compile(r"^(?:  )+\| ")
_SIGNAL = 128  # an exit code above: of a program that a signal ended
_ANSWER_LIMIT_S = 2.0
CLOSING_FENCE = "\n```\n"
"""The sampler stops here. Not relied on: an update may come in the middle of it."""
OBSERVATION = "\nCode execution result: {}\n"
"""What is appended to a program."""


class Void(StrEnum):
    """Why a turn has neither a complete block nor an answer (a void turn of SimpleTIR, arXiv 2509.02479)."""

    NO_BLOCK = "no_block"
    """It has no block of any language."""
    OTHER_BLOCK = "other_block"
    """It has blocks, and none of them begins with ```python or ```py alone on the rest of its line."""
    UNCLOSED = "unclosed"
    """A program begins and does not end: most often at the limit of the response."""


@dataclass(frozen=True)
class Turn:
    """A turn's text, read as a whole."""

    code: str | None
    """The first complete ```python block."""
    end: int | None
    """Where that block ends in the text. What follows was written without knowing the result, and is dropped."""
    answers: bool
    """Whether there is a final answer before it."""
    void: Void | None = None
    """Set where there is neither."""


def read_turn(text: str, answer_pattern: str) -> Turn:
    """Read all that the model wrote in one turn, in time linear in it.

    Raises:
        RuntimeError: `tool_use.answer_pattern` takes more than 2 s on this text, so it cannot be used.
    """
    opening = _OPENING.search(text)
    closing = _CLOSING.search(text, opening.end()) if opening else None  # a later opening has no other end
    answers = _answers(text[: opening.start()] if opening else text, answer_pattern)
    if opening is None or closing is None:
        other = Void.OTHER_BLOCK if _FENCE.search(text) else Void.NO_BLOCK
        return Turn(None, None, answers, None if answers else Void.UNCLOSED if opening else other)
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


def observation(result: CommandResult, time_limit_s: float) -> tuple[str, str]:
    """What the model reads of a program: its output; and how it ended, where it failed, raised or has no output.

    A program's errors are then all that it wrote to stderr; where that has a traceback, without the frames, of which
    types and whole messages of the exceptions stay, and without warnings.
    """
    output, errors, end = result.stdout.strip("\n"), "", ""
    timed_out = result.status == CommandStatus.TIME_LIMIT
    of_exceptions = _without_frames(result.stderr)
    if timed_out or result.return_code or not output or of_exceptions is not None:  # a thread's leave the exit code 0
        errors = result.stderr.strip("\n") if of_exceptions is None else of_exceptions
    if timed_out:
        end = f"time limit of {time_limit_s:g} s exceeded"
    elif result.return_code and (not errors or result.return_code > _SIGNAL):
        end = f"ended with exit code {result.return_code}"
    elif not (output or errors):
        end = "no output"
    return output, "\n".join(part for part in (errors, end) if part)


def _without_frames(stderr: str) -> str | None:
    """None where there is no traceback."""
    kept: list[str] = []
    margin: int | None = None  # of the traceback, or the warning, whose lines are being left out
    found = of_group = False
    for line in stderr.split("\n"):
        heading, of_syntax = _TRACEBACK.fullmatch(line), _OF_SYNTAX.fullmatch(line)
        found = found or bool(heading or of_syntax)
        if _NO_ERROR.fullmatch(line):
            margin = 0
        elif heading:
            margin, of_group = len(heading[1]), of_group or bool(heading[2])
        elif margin is None or of_syntax or not line[margin:].startswith("  "):
            margin = None
            kept.append(line)
    if not found:
        return None
    if of_group:
        kept = [_GROUP_MARGIN.sub("", line) for line in kept if not _GROUP_RULE.fullmatch(line)]
    return "\n".join(kept).strip("\n")
