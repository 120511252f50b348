"""The error of every check, and the words that all of them use."""

import contextlib
import difflib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

_BETWEEN = "\nerror: "
Found = Iterator[tuple[str, str]]
"""Settings with what is wrong with them: words to follow `setting=value: `."""


class SettingError(ValueError):
    """A setting is wrong. The message is one line: the setting, its value, and what to set instead.

    Several settings that are wrong have a line each, and `error: ` before every line but the first.
    """

    @property
    def lines(self) -> list[str]:
        """One for each thing that is wrong."""
        return str(self).split(_BETWEEN)


def wrong(config: DictConfig, setting: str, words: str) -> SettingError:
    """The error of one setting, which has its value in `config`."""
    return SettingError(f"{setting}={shown(OmegaConf.select(config, setting))}: {words}")


def all_that_is_wrong(errors: Iterable[SettingError]) -> SettingError:
    """One error that says all of them, each once; not what another says with more words."""
    lines = list(dict.fromkeys(line for error in errors for line in error.lines))
    return SettingError(
        _BETWEEN.join(line for line in lines if not any(other != line and other.startswith(line) for other in lines))
    )


def check_each(*checks: Callable[[], object]) -> None:
    """Make all of the checks, and say what every one of them found."""
    errors = []
    for check in checks:
        try:
            check()
        except SettingError as error:
            errors.append(error)
    if errors:
        raise all_that_is_wrong(errors)


@contextlib.contextmanager
def paths_that_fail() -> Iterator[None]:
    """Refuse, in the block, a path that the kernel does not look up: a name too long, a folder that may not be entered.

    That can be the path of any setting, and comes up where the path is first looked at.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES) or error.filename is None:
            raise
        raise SettingError(f"{error.filename}: {os.strerror(error.errno).lower()}; give another path") from None


def shown(value: Any) -> str:
    """A setting's value as the command line spells it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def choices(given: Any, allowed: Iterable[Any]) -> str:
    """'did you mean vcpo? choose one of ...': the closest of the choices first, where one is close."""
    names = [shown(choice) for choice in allowed]
    if len(names) == 1:
        return f"set it to {names[0]}"
    near = closest(shown(given), names)
    return (f"did you mean {near}? " if near else "") + f"choose one of {', '.join(names)}"


def closest(given: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that is most like `given`; None where none is like it."""
    return next(iter(difflib.get_close_matches(given, list(names), n=1, cutoff=cutoff)), None)


def first_line(error: BaseException) -> str:
    """What an error of another package says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
