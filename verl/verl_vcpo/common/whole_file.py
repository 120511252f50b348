"""Files and folders that are written completely or not at all, even if the power fails."""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SCRATCH = ".partial"


def free_beside(path: Path) -> Path:
    """Return `path` with the first of the endings .1, .2, ... that no file, folder or link has."""
    return next(name for n in itertools.count(1) if not os.path.lexists(name := Path(f"{path}.{n}")))


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

    An error or an interruption leaves `folder` as it was. So does a crash; one in the moment between two renamings
    leaves it as `NAME.old` in a hidden folder beside it, which stays until a new `folder` is written.
    """
    _make_parent(folder)
    with _folder_beside(folder) as scratch:
        partial = scratch / folder.name
        partial.mkdir()
        yield partial
        all_on_disk(partial)
        try:
            if folder.exists():
                os.replace(folder, _old(scratch, folder))
            os.replace(partial, folder)
        except BaseException:
            if _has_the_only_one(scratch, folder):
                os.replace(_old(scratch, folder), folder)
            raise
        on_disk(folder.parent)


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """Yield a new folder in the folder of `path`; remove it at the end, with those that killed processes have left.

    Other processes may write `path` at the same time. Each has a lock of a file in its folder, which the kernel takes
    back when the process ends in any way. On a network the lock of a file holds for all machines, a folder's does not.
    """
    while True:
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=_SCRATCH))
        lock = os.open(_lock(scratch, path), os.O_WRONLY | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _lock(scratch, path).exists():  # otherwise another process found the file before it was locked
            break
        os.close(lock)
    try:
        yield scratch
        of_path = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}{re.escape(_SCRATCH)}")
        for left in [beside for beside in path.parent.iterdir() if of_path.fullmatch(beside.name)]:
            _remove_abandoned(left, path)
    finally:
        os.close(lock)  # first, as NFS keeps the name of an open file, and with it the folder
        if not _has_the_only_one(scratch, path):
            shutil.rmtree(scratch, ignore_errors=True)


def _remove_abandoned(scratch: Path, path: Path) -> None:
    """Remove a folder of `_folder_beside` whose process has ended: it has the file of a lock, and nobody the lock."""
    with contextlib.suppress(OSError):  # the lock is another process's; the folder is gone, or is another user's
        lock = os.open(_lock(scratch, path), os.O_WRONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _has_the_only_one(scratch, path):
                return
            _lock(scratch, path).unlink()  # a process that waits for the lock makes another folder
        finally:
            os.close(lock)
        shutil.rmtree(scratch)


def _make_parent(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # pathlib's word for a file there
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder.parent)) from None


def _lock(scratch: Path, path: Path) -> Path:
    return scratch / f"{path.name}.lock"


def _old(scratch: Path, path: Path) -> Path:
    return scratch / f"{path.name}.old"


def _has_the_only_one(scratch: Path, path: Path) -> bool:
    """Return True if the folder that was at `path` is in `scratch`, and nothing is at `path`."""
    return os.path.lexists(_old(scratch, path)) and not os.path.lexists(path)


def try_file(file: Path) -> None:
    """Raise the OSError with which `whole_file(file)` would fail as things are now. Leaves nothing behind."""
    with _folder_beside(file) as scratch:
        (scratch / file.name).touch()


def try_folder(folder: Path) -> None:
    """Raise the OSError with which `whole_folder(folder)` would fail as things are now. Leaves folders above it."""
    _make_parent(folder)
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
