"""Files and folders that are written completely or not at all, even if the power fails."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Yield a path for the block to write; the written file then replaces `file`. A crash leaves `file` as it was."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        yield partial
        on_disk(partial)
        os.replace(partial, file)
        on_disk(file.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder for the block to fill; the filled folder then replaces `folder`.

    A crash leaves `folder` as it was or, in the moment between two renamings, under the name that ends in `.old`.
    """
    partial, old = (folder.with_name(f".{folder.name}.{part}") for part in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        all_on_disk(partial)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
        os.replace(partial, folder)
        on_disk(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # where the block was interrupted


def try_file(file: Path) -> None:
    """Raise the OSError with which `whole_file(file)` would fail as things are now. Leaves nothing behind."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.touch()
    finally:
        partial.unlink(missing_ok=True)


def try_folder(folder: Path) -> None:
    """Raise the OSError with which `whole_folder(folder)` would fail as things are now. Leaves folders above it."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    partial.rmdir()


def is_free(folder: Path) -> bool:
    """Return True where a new folder can be written without a loss: nothing is there, or an empty folder."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def write_whole(file: Path, text: str) -> None:
    """Replace `file` by a file with the content `text`, in one step."""
    with whole_file(file) as partial:
        partial.write_text(text)


def on_disk(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's list of names: a renaming can reach it earlier."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems cannot flush a folder
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def all_on_disk(folder: Path) -> None:
    """Call `on_disk` for a folder and everything below it."""
    for path in (*folder.rglob("*"), folder):
        on_disk(path)
