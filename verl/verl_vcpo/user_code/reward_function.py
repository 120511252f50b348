"""A reward function: the arguments that verl calls it with, and what it may return."""

import inspect
import reprlib
from collections.abc import Callable
from typing import Any, ClassVar

from verl_vcpo.user_code.errors import LoadError, UserCodeError
from verl_vcpo.user_code.function import Function

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Of every call, by verl's reward managers."""
_LARGEST = 3.4028234e38
"""Of a float32, in which verl keeps a reward."""
_SCORE = "return a finite number, or a dict with one as its 'score'"


class RewardFunction(Function):
    """verl's `reward.custom_reward_function`."""

    limit: ClassVar[str] = "async.reward_timeout_s"

    def checked(self, result: Any) -> float | dict[str, Any]:
        """`checked` of this module."""
        return checked(result)

    def load(self) -> Callable[..., Any]:
        """The function. Raises LoadError, also where the function takes other arguments."""
        function = super().load()
        try:
            inspect.signature(function).bind(**dict.fromkeys(_ARGUMENTS), **self.fixed)
        except TypeError as error:
            raise LoadError(
                f"cannot be called with {', '.join([*_ARGUMENTS, *self.fixed])}: {error}", "give it these parameters"
            ) from None
        except ValueError:  # a function of C code, whose parameters are not known
            pass
        return function


def checked(result: Any) -> float | dict[str, Any]:
    """The score that a reward returned, or a dict with one, with Python's own numbers in place of NumPy's and torch's.

    Raises:
        UserCodeError: verl cannot train on the score, or not report what comes with the score.
    """
    if isinstance(result, dict):
        return _checked_dict(result)
    if (score := _number(result)) is None:
        is_coroutine = type(result).__name__ == "coroutine"
        raise UserCodeError(f"returned {_shown(result)}", "define it with async def" if is_coroutine else _SCORE)
    return score


def score_of(result: float | dict[str, Any]) -> float:
    """The score that is trained on, of a result that is `checked`."""
    return result["score"] if isinstance(result, dict) else result


def _checked_dict(result: dict[str, Any]) -> dict[str, Any]:
    if "score" not in result:
        raise UserCodeError(f"returned {_shown(result)}, a dict without 'score'", _SCORE)
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in result.items()}
    for name, fix in (("score", _SCORE), ("acc", "make it 1 for a right response and 0 for a wrong one")):
        if name in result:
            plain[name] = _number(result[name])
            if plain[name] is None:
                raise UserCodeError(f"returned a dict whose {name!r} is {_shown(result[name])}", fix)
    for name, value in plain.items():
        if not (value is None or isinstance(value, str) or _has_a_mean(value)):
            raise UserCodeError(
                f"returned a dict whose {name!r} is {_shown(value)}, of which a validation can report no mean",
                "make it a number or a text, or leave it out",
            )
    return plain


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
