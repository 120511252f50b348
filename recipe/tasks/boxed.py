r"""Where an answer is: in the last \boxed{...} or <answer> of a response, after its last ####, or its last number."""

import re

_BOXED = "\\boxed"
_SPACES = 4  # between \boxed and its brace
_MARK = "####"
_OPEN, _CLOSE = "<answer>", "</answer>"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_boxed(text: str, max_chars: int) -> str | None:
    r"""What the last \boxed{...} holds, braces balanced; None if there is none, or none that closes within `max_chars`.

    One pass over the text, whatever it is.
    """
    start = _after_last_box(text)
    if start is None:
        return None
    depth = 1
    for index in range(start, min(len(text), start + max_chars + 1)):
        if text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return text[start:index]
    return None


def _after_last_box(text: str) -> int | None:
    """Where the content of the last box begins: of a \\boxed that a brace follows."""
    end = len(text)
    while (end := text.rfind(_BOXED, 0, end)) >= 0:
        start = end + len(_BOXED)
        spaces = text[start : start + _SPACES + 1]
        if spaces.lstrip()[:1] == "{":
            return start + spaces.index("{") + 1
    return None


def last_tagged(text: str, max_chars: int) -> str | None:
    """What the last <answer>...</answer> holds that is closed; None if there is none, or it is longer."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, max(end, 0))
    if start < 0:
        return None
    start += len(_OPEN)
    end = text.find(_CLOSE, start)
    return text[start:end] if end - start <= max_chars else None


def after_mark(text: str, max_chars: int) -> str | None:
    """The rest of the line after the last ####; None if there is none, or it is empty or longer than `max_chars`."""
    start = text.rfind(_MARK)
    if start < 0:
        return None
    start += len(_MARK)
    line = text[start:].split("\n", 1)[0].strip()
    return line if 0 < len(line) <= max_chars else None


def last_number(text: str) -> str | None:
    """The last number, without its thousands' commas; None if there is none."""
    return next(reversed(_NUMBER.findall(text.replace(",", ""))), None)
