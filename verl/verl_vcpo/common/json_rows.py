"""The rows of a JSON file: an object per line, or one list of objects. Every value stays as the file has it.

Readers of tables give a column one type: a text that looks like a date becomes a date, a large whole number a rounded
one, and a number in one row with a text in another is an error.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".json", ".jsonl")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""A surrogate, as JSON escapes it: two of them are a character, and one alone is none."""


def json_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, row); of a list, whose rows have no lines, (row from 1, row). Empty lines are left out.

    Raises:
        ValueError: no text in UTF-8, no JSON, or no objects; names the line.
    """
    begun = False
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"line {number}"
            text = decoded(line, where)
            if not text:
                continue
            if not begun and (text.startswith("[") or text == "{"):
                yield from enumerate(_of_one_value(file), 1)
                return
            begun = True
            yield number, _object(_parsed(text, where), where)


def _of_one_value(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that is one list, or one object, over several lines perhaps."""
    lines = [decoded(line, f"line {number}") for number, line in enumerate(file.read_bytes().split(b"\n"), 1)]
    value = _parsed("\n".join(lines), "its one list or object")
    rows = value if isinstance(value, list) else [value]
    return [_object(row, f"row {number}") for number, row in enumerate(rows, 1)]


def decoded(line: bytes, where: str) -> str:
    """Return a line's text without spaces around it. Raises ValueError, which begins with `where`: not in UTF-8."""
    try:
        text = line.decode("utf-8-sig").strip()  # a byte-order mark begins each part of files that were joined
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not text in UTF-8 (byte {line[error.start]:#x}); save the file as UTF-8") from None
    if "\0" in text:
        raise ValueError(f"{where}: not text in UTF-8 (a zero byte, as in UTF-16); save the file as UTF-8")
    return text


def _parsed(text: str, where: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=_with_each_key_once)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = where if where.startswith("line ") else f"line {error.lineno}"
        words = f"{error.msg}, at character {error.colno}"
        raise ValueError(f"{line}: not JSON ({words}); mend it: an object per line, or one list of objects") from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise ValueError(f"{where}: {half} is half a character; write the whole one, or leave it out") from None
    except RecursionError:
        raise ValueError(f"{where}: lists or objects within one another are too many; make them fewer") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return value


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice; leave one out")
    return found


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r:.40} is no JSON object; make it one, {{'prompt': ...}}")
    return value
