"""A file is whole or it is not there."""

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write `text` to `file`, under another name first: a crash leaves what was there before."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)
