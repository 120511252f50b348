"""The error of every check, and the words that all of them use."""

import difflib
from collections.abc import Iterable
from typing import Any


class SettingError(ValueError):
    """A setting is wrong. The message is one line: the setting, its value, and what to set instead."""


def shown(value: Any) -> str:
    """A setting's value as the command line spells it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def choices(given: Any, allowed: Iterable[Any]) -> str:
    """'did you mean vcpo? choose one of ...': the closest of the choices first, where one is close."""
    names = [shown(choice) for choice in allowed]
    listed = f"choose one of {', '.join(names)}" if len(names) > 1 else f"set it to {names[0]}"
    near = closest(shown(given), names)
    return f"did you mean {near}? {listed}" if near and len(names) > 1 else listed


def closest(given: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that is most like `given`; None where none is like it."""
    return next(iter(difflib.get_close_matches(given, list(names), n=1, cutoff=cutoff)), None)


def first_line(error: BaseException) -> str:
    """What an error of another package says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
