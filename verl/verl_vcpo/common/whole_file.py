"""Files and folders that are written completely or not at all, even if the power fails."""

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SCRATCH = ".partial"


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Yield a path for the block to write; the written file then replaces `file`. A crash leaves `file` as it was."""
    with _folder_beside(file) as scratch:
        partial = scratch / file.name
        yield partial
        on_disk(partial)
        os.replace(partial, file)
        on_disk(file.parent)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder for the block to fill; the filled folder then replaces `folder`.

    A crash leaves `folder` as it was or, in the moment between two renamings, as `old` in a hidden folder beside it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _folder_beside(folder) as scratch:
        partial = scratch / folder.name
        partial.mkdir()
        yield partial
        all_on_disk(partial)
        if folder.exists():
            os.replace(folder, scratch / "old")
        os.replace(partial, folder)
        on_disk(folder.parent)


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """Yield a new folder in the folder of `path`; remove it at the end, with those that killed processes have left.

    Other processes may write `path` at the same time. Each has a lock of its folder, which the kernel takes back when
    the process ends in any way.
    """
    while True:
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=_SCRATCH))
        lock = os.open(scratch, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if scratch.exists():  # otherwise another process found the folder before it was locked
            break
        os.close(lock)
    try:
        yield scratch
        for left in path.parent.glob(f".{glob.escape(path.name)}.*{_SCRATCH}"):
            _remove_abandoned(left)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(scratch: Path) -> None:
    """Remove a folder of `_folder_beside` whose process has ended: nobody has the lock."""
    with contextlib.suppress(OSError):  # the folder is gone meanwhile, or is another user's
        lock = os.open(scratch, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(scratch)
        except BlockingIOError:
            return
        finally:
            os.close(lock)


def try_file(file: Path) -> None:
    """Raise the OSError with which `whole_file(file)` would fail as things are now. Leaves nothing behind."""
    with _folder_beside(file) as scratch:
        (scratch / file.name).touch()


def try_folder(folder: Path) -> None:
    """Raise the OSError with which `whole_folder(folder)` would fail as things are now. Leaves folders above it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _folder_beside(folder) as scratch:
        (scratch / folder.name).mkdir()


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
