"""Files with lines of JSON, each with the number of its `step`: metrics.jsonl, samples.jsonl, skipped_prompts.jsonl.

A power cut, a full disk or an editor can spoil a line. Such a line is skipped: no reader fails because of it.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_vcpo.common.console import print_line
from verl_vcpo.common.disk import why_not_written
from verl_vcpo.common.held_folders import checked
from verl_vcpo.common.whole_file import write_whole


@functools.cache
def _say(text: str) -> None:
    print(text, file=sys.stderr)


def read_lines(path: Path, say: Callable[[str], None] = _say) -> Iterator[dict[str, Any]]:
    """Yield the lines that can be read, oldest first, without a last line that a crash has cut off.

    `say` gets a line that says how many cannot be read; without `say`, it is on standard error, once for each number.
    """
    spoilt = 0
    with open(path, "rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                continue
            if (line := _read(raw)) is None:
                spoilt += 1
            else:
                yield line
    if spoilt:
        say(f"warning: {path}: {spoilt} line(s) cannot be read: skipped")


def lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the lines up to `step`, for a file that a resumed run goes on with; the console says what is skipped."""
    return [line for line in read_lines(path, print_line) if line["step"] <= step]


class StepLines:
    """A file that a run appends whole lines to, and that a resumed run goes on with."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, step: int) -> None:
        """Continue an earlier process's file after step `step`: drop the lines of later steps. 0 drops all."""
        lines = lines_until(self.path, step) if step and self.path.is_file() else []
        if lines:
            write_whole(self.path, "".join(map(_json, lines)))
        else:
            self.path.unlink(missing_ok=True)

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append these lines."""
        append(self.path, "".join(map(_json, lines)))


def append(path: Path, text: str) -> None:
    """Append `text` to a file in a run's folder.

    Raises:
        FolderMoved: the folder was moved or removed.
        RuntimeError: the disk does not take the text, in one line.
    """
    try:
        with open(checked(path), "a") as file:
            file.write(text)
    except OSError as error:
        why = why_not_written(path.parent, error)
        raise RuntimeError(f"{path} was not written; {path.parent} has {why}") from error


def _json(line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


def _read(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None
