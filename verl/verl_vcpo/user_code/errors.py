"""The errors of calls that gave no result: each says in one line what the function did, and what to do about that."""

import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SHOWN_CHARS = 80


class UserCodeError(RuntimeError):
    """A call gave no result: it hung or raised, its process died, or what it returned is of no use.

    Args:
        what: what the function did, a verb first: "returned None".
        fix: what to do about it.
    """

    def __init__(self, what: str, fix: str = "mend the function") -> None:
        super().__init__(what, fix)
        self.what, self.fix = what, fix

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


class LoadError(UserCodeError):
    """There is no such function, or its file cannot be imported."""


class RaisedError(UserCodeError):
    """The function itself raised. `said` is the exception's own text."""

    said = ""


def raised(error: BaseException) -> RaisedError:
    """The error for an exception of a function; call it where the exception was caught."""
    installed = ("<", sys.prefix, sys.base_prefix, str(Path(__file__).parent))
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the caller's
    own = [frame for frame in frames if not frame.filename.startswith(installed)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    said = text_of(error)
    lines = said.strip().splitlines()
    what = f"raises {type(error).__name__}" + (f": {lines[0]}" if lines else "") + where
    complaint = RaisedError(what, "mend the function, or the row")
    complaint.said = said
    return complaint


def text_of(error: BaseException) -> str:
    """The exception's own text, which a class of the user's own may fail to make."""
    try:
        return str(error)
    except Exception as another:
        return f"(its __str__ raises {type(another).__name__})"


def took_too_long(setting: str, limit_s: float, which: str = "") -> UserCodeError:
    """The error for a call that did not end within the limit of this setting."""
    return UserCodeError(f"took longer than {limit_s:g} s{which}", f"raise {setting}, or mend the function")


def of_response(error: UserCodeError, reward: str, row: Any, data_source: Any, response: str) -> UserCodeError:
    """The same error, with the reward's name and what was to be scored."""
    return UserCodeError(
        f"the reward {reward} {error.what}, on row {row} of {str(data_source)!r}, for the response that starts with "
        f"{response[:_SHOWN_CHARS]!r}",
        error.fix,
    )


def with_prompt(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """`text` about a failure, with how the last of the prompt's messages starts, where there are any."""
    return f"{text} (the prompt: {str(messages[-1]['content'])[:_SHOWN_CHARS]!r})" if messages else text
