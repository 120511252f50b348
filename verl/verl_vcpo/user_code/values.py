"""What user code returned: as a number, and in words."""

import reprlib
from typing import Any


def as_float(value: Any) -> float | None:
    """Return a number of Python's, NumPy's, torch's or another library as a float; None for what is no one real number.

    A number may be NaN or infinite. Text with a number is none.
    """
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except Exception:  # any, of a type of the user's own
        return None


def shown(value: Any) -> str:
    """Return a short text of one line, with the value's type where that is not obvious."""
    text = " ".join(reprlib.repr(value).split())
    return text if value is None or isinstance(value, float | dict) else f"{text} ({type(value).__name__})"
