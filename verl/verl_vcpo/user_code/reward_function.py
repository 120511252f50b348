"""A reward function, and what a reward may be: a score, and what a validation reports beside the score.

The rule holds for every reward, whoever computed it. What is beside the score is a metric if it is a number, and is
written with the held-out answers alone if it is a text. `acc` is what a held-out accuracy is the mean of; where a
reward gives none, `acc` is the score.
"""

import operator
from typing import Any, ClassVar

from verl_vcpo.user_code.errors import UserCodeError
from verl_vcpo.user_code.function import Function
from verl_vcpo.user_code.values import as_float, shown

PRED = "pred"
"""The answer that a response gives, as a text: verl has the responses to a prompt vote by it."""
OVER_LIMIT = "over_limit"
"""1 if a limit ended the computation of the reward, else 0."""
RESERVED = frozenset({"acc_success_only", "gts", "input", "output", "reward", "step", "uid"})
"""What verl writes beside held-out answers, or reports of them, under names of its own."""
_LARGEST = 3.4028234e38
"""The largest float32, in which verl keeps a reward."""
_SCORE = "return a finite number, or a dict with one as its 'score'"
_NUMBERS = {
    "score": _SCORE,
    "acc": "make it 1 for a right response and 0 for a wrong one",
    OVER_LIMIT: "make it 1 where a limit ended the reward, else 0",
}
"""The names whose values are read, and have to be numbers, with the fix."""


class RewardFunction(Function):
    """verl's `reward.custom_reward_function`."""

    limit: ClassVar[str] = "async.reward_timeout_s"

    def checked(self, result: Any) -> dict[str, Any]:
        """`checked` of this module."""
        return checked(result)


def checked(result: Any) -> dict[str, Any]:
    """What a reward returned, by the module's rule: floats, among them 'score' and 'acc', and texts.

    A value of None or NaN is left out: the response has no such value, and no part in the metric's mean. Not so for
    'score', 'acc' and 'over_limit', which have to be numbers.

    Args:
        result: a number, or a dict with one as its 'score'. Numbers may be NumPy's or torch's.

    Raises:
        UserCodeError: verl cannot train on the score, or not report what comes with the score.
    """
    if not isinstance(result, dict):
        is_coroutine = type(result).__name__ == "coroutine"
        score = _number(result, "returned", "define it with async def" if is_coroutine else _SCORE)
        return {"score": score, "acc": score}
    if "score" not in result:
        raise UserCodeError(f"returned {shown(result)}, a dict without 'score'", _SCORE)
    plain: dict[str, Any] = {}
    for name, value in result.items():
        if not isinstance(name, str) or not name:
            raise UserCodeError(f"returned a dict with the key {shown(name)}", "make it a name")
        if name in RESERVED:
            raise UserCodeError(f"returned a dict with {name!r}, a name of verl's own", "rename it")
        if (kept := _beside_score(name, value)) is not None:
            plain[_text(name)] = kept
    return {"score": plain["score"], "acc": plain["score"], **plain}


def score_of(result: dict[str, Any]) -> float:
    """The score that is trained on, of a result that is `checked`."""
    return float(result["score"])


def of_manager(reward_score: Any, reward_extra_info: Any) -> tuple[float, dict[str, Any]]:
    """The reward that is trained on, and what is `checked` beside it, of a reward manager or an agent loop of any kind.

    Args:
        reward_score: may differ from the score beside it, by a manager's penalty.
        reward_extra_info: a dict; None: there is nothing beside the reward.

    Raises:
        UserCodeError: as `checked`.
    """
    if not isinstance(reward_extra_info, dict | None):
        raise UserCodeError(f"has reward_extra_info {shown(reward_extra_info)}", "make it a dict")
    own = checked(reward_score)
    beside = own if isinstance(reward_score, dict) else {"score": own["score"]}
    return own["score"], checked(beside | (reward_extra_info or {}))


def _beside_score(name: str, value: Any) -> float | str | None:
    """A value of a reward's dict as it is kept; None: it has none. Raises UserCodeError."""
    said = f"returned a dict whose {name!r} is"
    if name in _NUMBERS:
        return _number(value, said, _NUMBERS[name])
    if isinstance(value, str):
        return _text(value)
    if value is None or (number := as_float(value)) != number:  # NaN
        return None
    if number is None:
        words = f"{said} {shown(value)}, of which a validation can report no mean"
        raise UserCodeError(words, "make it a number or a text, or leave it out")
    if name == PRED:
        return _vote(value, number)
    return _number(value, said, "make it a finite number, or leave it out")


def _vote(value: Any, number: float) -> str:
    """42, 42.0 and "42" are one vote, and so are 0.0 and -0.0."""
    try:
        return str(operator.index(value))
    except TypeError:
        return str(int(number) if number.is_integer() else number)


def _number(value: Any, said: str, fix: str) -> float:
    """`value` as a number that a float32 can hold. Raises UserCodeError, which begins with `said`."""
    number = as_float(value)
    if number is None or not abs(number) <= _LARGEST:  # of NaN every comparison is false
        raise UserCodeError(f"{said} {shown(value)}", fix)
    return number


def _text(text: str) -> str:
    """`text` as a file can have it: a model's answer in JSON may contain half of a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()
