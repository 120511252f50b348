r"""Where a mathematical answer is: in the last \boxed{...} of a response, after its last ####, or its last number."""

import re

_BOXED = "\\boxed{"
_MARK = "####"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_boxed(text: str, max_chars: int) -> str | None:
    r"""What the last \boxed{...} holds, braces balanced; None if there is none, or none that closes within `max_chars`.

    One pass over the text, whatever it is.
    """
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for index in range(start, min(len(text), start + max_chars + 1)):
        if text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return text[start:index]
    return None


def after_mark(text: str, max_chars: int) -> str | None:
    """The rest of the line after the last ####; None if there is none, or it is empty or longer than `max_chars`."""
    start = text.rfind(_MARK)
    if start < 0:
        return None
    start += len(_MARK)
    line = text[start : start + max_chars + 2].lstrip(" \t").split("\n")[0].strip()
    return line if 0 < len(line) <= max_chars else None


def last_number(text: str) -> str | None:
    """The last number, without its thousands' commas; None if there is none."""
    return next(reversed(_NUMBER.findall(text.replace(",", ""))), None)
