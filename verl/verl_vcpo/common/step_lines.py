"""Files with lines of JSON, each with the number of its `step`: metrics.jsonl and samples.jsonl.

A power cut, a full disk or an editor can spoil a line. Such a line is skipped: no reader fails because of it.
"""

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_vcpo.common.console import print_line

SPOILT = ".spoilt"
"""The ending of the name of the file that keeps the unreadable lines when a run goes on."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that can be read, oldest first, without a last line that a crash has cut off.

    A line on standard error says how many cannot be read, once for each number.
    """
    spoilt = 0
    for _, line in _lines(path):
        if line is None:
            spoilt += 1
        else:
            yield line
    if spoilt:
        _say(f"warning: {_cannot_be_read(path, spoilt)}")


def lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the lines up to `step`, for a file that a resumed run goes on with.

    Lines that cannot be read are appended to the file whose name ends in `SPOILT`; the console says so.
    """
    kept, spoilt = [], []
    for raw, line in _lines(path):
        if line is None:
            spoilt.append(raw)
        elif line["step"] <= step:
            kept.append(line)
    if spoilt:
        aside = path.with_name(path.name + SPOILT)
        with open(aside, "ab") as file:
            file.writelines(spoilt)
        print_line(f"warning: {_cannot_be_read(path, len(spoilt))}; kept in {aside.name}")
    return kept


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each whole line and its content; None for a line that cannot be read."""
    with open(path, "rb") as file:
        for raw in file:
            if raw.endswith(b"\n"):
                yield raw, _read(raw)


def _read(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def _cannot_be_read(path: Path, lines: int) -> str:
    return f"{path}: {lines} line(s) cannot be read: skipped"


@functools.cache
def _say(text: str) -> None:
    print(text, file=sys.stderr)
