"""A file is whole or it is not there."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """The block writes to the path it is given, which then takes the place of `file`: a crash leaves what was there."""
    partial = file.with_name(f"{file.name}.partial")
    yield partial
    os.replace(partial, file)


def write_whole(file: Path, text: str) -> None:
    """Write `text` to `file`."""
    with whole_file(file) as partial:
        partial.write_text(text)
