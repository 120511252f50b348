"""Files that are written completely or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """The block writes to the yielded path, and that file then replaces `file`. A crash leaves `file` as it was."""
    partial = file.with_name(f"{file.name}.partial")
    yield partial
    os.replace(partial, file)


def write_whole(file: Path, text: str) -> None:
    """Replace `file` by one with the content `text`, in one step."""
    with whole_file(file) as partial:
        partial.write_text(text)
