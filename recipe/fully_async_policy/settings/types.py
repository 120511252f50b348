"""Types of settings. What a value may be stands beside the words that the user reads where it is something else."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from recipe.fully_async_policy.settings.errors import choices, shown


class Section(BaseModel):
    """A section of the configuration. A value is of its type already: nothing is converted."""

    model_config = ConfigDict(strict=True)


def says(words: str) -> WrapValidator:
    """Replaces pydantic's words for a value that the annotated type refuses."""

    def check(value: Any, accept: Any) -> Any:
        try:
            return accept(value)
        except ValidationError:
            raise _refused(words) from None

    return WrapValidator(check)


def one_of(*allowed: Any, why: str = "", unless: Callable[[str], bool] | None = None) -> WrapValidator:
    """Accepts these values alone.

    Args:
        why: the reason why others do not work, where the list of choices does not say it.
        unless: which other texts are accepted too.
    """

    def check(value: Any, accept: Any) -> Any:
        if unless and isinstance(value, str) and unless(value):
            return value
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
            raise _refused(f"{why}; {choices(value, allowed)}" if why else choices(value, allowed))
        return value

    return WrapValidator(check)


def _refused(words: str) -> PydanticCustomError:
    return PydanticCustomError("setting", "{words}", {"words": words})


Flag = Annotated[bool, says("give true or false")]
Text = Annotated[str, Field(min_length=1), says("give a name or a path")]
Count = Annotated[int, Field(ge=1), says("give a whole number of at least 1")]
Whole = Annotated[int, Field(ge=0), says("give a whole number, 0 or more")]
Number = Annotated[float, Field(allow_inf_nan=False), says("give a number")]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), says("give a number, 0 or more")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), says("give a number above 0")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), says("give a number of seconds above 0")]
Share = Annotated[float, Field(gt=0, le=1), says("give a share above 0, at most 1")]


def count_or(special: int, meaning: str) -> WrapValidator:
    """Accepts a whole number of at least 1, and `special`."""

    def check(value: Any, accept: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != special):
            raise _refused(f"give a whole number of at least 1, or {shown(special)} {meaning}")
        return value

    return WrapValidator(check)
