"""A reward function, and what it may return."""

import reprlib
from typing import Any, ClassVar

from verl_vcpo.user_code.errors import UserCodeError
from verl_vcpo.user_code.function import Function

_LARGEST = 3.4028234e38
"""The largest float32, in which verl keeps a reward."""
_SCORE = "return a finite number, or a dict with one as its 'score'"


class RewardFunction(Function):
    """verl's `reward.custom_reward_function`."""

    limit: ClassVar[str] = "async.reward_timeout_s"

    def checked(self, result: Any) -> float | dict[str, Any]:
        """`checked` of this module."""
        return checked(result)


def checked(result: Any) -> float | dict[str, Any]:
    """The score that a reward returned, or a dict with one, with Python's own numbers in place of NumPy's and torch's.

    Raises:
        UserCodeError: verl cannot train on the score, or not report what comes with the score.
    """
    if not isinstance(result, dict):
        is_coroutine = type(result).__name__ == "coroutine"
        return _number(result, "returned", "define it with async def" if is_coroutine else _SCORE)
    if "score" not in result:
        raise UserCodeError(f"returned {_shown(result)}, a dict without 'score'", _SCORE)
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in result.items()}
    for name, fix in (("score", _SCORE), ("acc", "make it 1 for a right response and 0 for a wrong one")):
        if name in plain:
            plain[name] = _number(result[name], f"returned a dict whose {name!r} is", fix)
    for name, value in plain.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not (value is None or isinstance(value, str) or all(isinstance(part, float | int) for part in parts)):
            raise UserCodeError(
                f"returned a dict whose {name!r} is {_shown(value)}, of which a validation can report no mean",
                "make it a number or a text, or leave it out",
            )
    return plain


def score_of(result: float | dict[str, Any]) -> float:
    """The score that is trained on, of a result that is `checked`."""
    return result["score"] if isinstance(result, dict) else result


def _number(value: Any, said: str, fix: str) -> float:
    """`value` as a number that a float32 can hold. Raises UserCodeError, which begins with `said`."""
    try:
        number = float("nan") if isinstance(value, str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: torch, of a tensor with many elements
        number = float("nan")
    if not abs(number) <= _LARGEST:  # of NaN every comparison is false
        raise UserCodeError(f"{said} {_shown(value)}", fix)
    return number


def _shown(value: Any) -> str:
    text = " ".join(reprlib.repr(value).split())
    return text if value is None or isinstance(value, float | dict) else f"{text} ({type(value).__name__})"
