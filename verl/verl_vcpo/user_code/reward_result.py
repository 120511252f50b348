"""What a reward function returns, as verl can use it; and the error of a reward that gives no score."""

import reprlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LARGEST = 3.4028234e38
"""Of a float32, in which verl keeps a reward."""
_SCORE = "return a finite number, or a dict with one as its 'score'"
_SHOWN_CHARS = 80


class RewardError(RuntimeError):
    """A reward function gave no score: the call hung or raised, the process died, or what it returned is no score.

    Args:
        what: what the function did, a verb first: "returned None".
        fix: what to do about it.
    """

    def __init__(self, what: str, fix: str = "mend the function, or the row") -> None:
        super().__init__(what, fix)
        self.what, self.fix = what, fix

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


class RewardLoadError(RewardError):
    """There is no such function, or its file cannot be imported."""


class RewardRaised(RewardError):
    """The function itself raised. `said` is the exception's own text."""

    said = ""


def checked(result: Any) -> float | dict[str, Any]:
    """What a reward returned, with Python's own numbers in place of NumPy's and torch's.

    Raises:
        RewardError: verl cannot train on the score, or not report what comes with the score.
    """
    if not isinstance(result, dict):
        if (score := _number(result)) is None:
            is_coroutine = type(result).__name__ == "coroutine"
            raise RewardError(f"returned {_shown(result)}", "define it with async def" if is_coroutine else _SCORE)
        return score
    if "score" not in result:
        raise RewardError(f"returned {_shown(result)}, a dict without 'score'", _SCORE)
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in result.items()}
    for name, fix in (("score", _SCORE), ("acc", "make it 1 for a right response and 0 for a wrong one")):
        if name in result:
            plain[name] = _number(result[name])
            if plain[name] is None:
                raise RewardError(f"returned a dict whose {name!r} is {_shown(result[name])}", fix)
    for name, value in plain.items():
        if not (value is None or isinstance(value, str) or _has_a_mean(value)):
            raise RewardError(
                f"returned a dict whose {name!r} is {_shown(value)}, of which a validation can report no mean",
                "make it a number or a text, or leave it out",
            )
    return plain


def score_of(result: float | dict[str, Any]) -> float:
    """What is trained on, of a result that is `checked`."""
    return result["score"] if isinstance(result, dict) else result


def raised(error: BaseException) -> RewardError:
    """The error for an exception of a reward function; call it where the exception was caught."""
    installed = ("<", sys.prefix, sys.base_prefix, str(Path(__file__).parent))
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the caller's
    own = [frame for frame in frames if not frame.filename.startswith(installed)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    lines = str(error).strip().splitlines()
    complaint = RewardRaised(f"raises {type(error).__name__}" + (f": {lines[0]}" if lines else "") + where)
    complaint.said = str(error)
    return complaint


def took_too_long(setting: str, limit_s: float, which: str = "") -> RewardError:
    """The error for a call that did not end within the limit of this setting."""
    return RewardError(f"took longer than {limit_s:g} s{which}", f"raise {setting}, or mend the function")


def of_response(error: RewardError, reward: str, row: Any, data_source: Any, response: str) -> RewardError:
    """The same error, with the reward's name and what was to be scored."""
    return RewardError(
        f"the reward {reward} {error.what}, on row {row} of {str(data_source)!r}, for the response that starts with "
        f"{response[:_SHOWN_CHARS]!r}",
        error.fix,
    )


def with_prompt(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """`text` about a failure, with how the last of the prompt's messages starts, where there are any."""
    return f"{text} (the prompt: {str(messages[-1]['content'])[:_SHOWN_CHARS]!r})" if messages else text


def _number(value: Any) -> float | None:
    """`value` as a number that a float32 can hold; None where it is none."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: torch, of a tensor with many elements
        return None
    return number if abs(number) <= _LARGEST else None  # of NaN every comparison is false


def _has_a_mean(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_has_a_mean, value))
    return isinstance(value, float) or _number(value) is not None  # what does not apply may be NaN


def _shown(value: Any) -> str:
    text = " ".join(reprlib.repr(value).split())
    of_type = "" if value is None or isinstance(value, float | dict) else f" ({type(value).__name__})"
    return text + of_type
