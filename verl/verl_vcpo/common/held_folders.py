"""The folders that a run writes into, held open by its driver: a run whose folder was moved or removed ends.

The driver asks before each of its writes, and before it has another process write. Otherwise a folder would be made
anew at the old path, where another run may be by then.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class FolderMoved(RuntimeError):
    """The error of a run whose folder is no longer where the run writes."""


class _Held(NamedTuple):
    setting: str
    given: str
    path: Path
    descriptor: int

    @property
    def place(self) -> Path | None:
        """The folder's path now; None where the folder was removed, or has no path that this process can see."""
        path = Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
        try:
            return path if self.is_at(path) else None
        except OSError:  # of a file system that does not answer
            return None

    def is_at(self, path: Path) -> bool:
        """Return True if the folder is at `path`. Raises OSError where that cannot be known."""
        try:
            return os.path.samestat(path.stat(), os.fstat(self.descriptor))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):  # ESTALE: removed by another machine
                return False
            raise

    @property
    def may_be_there(self) -> bool:
        """False where the folder is known to be no longer at its path."""
        try:
            return self.is_at(self.path)
        except OSError:
            return True


_held: list[_Held] = []


@contextlib.contextmanager
def held(setting: str, path: str | Path) -> Iterator[None]:
    """Hold the folder `path` of a setting open in the block. Raises OSError where it cannot be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    folder = _Held(setting, str(path), Path(path).absolute(), descriptor)
    _held.append(folder)
    try:
        yield
    finally:
        _held.remove(folder)
        os.close(descriptor)


def checked(path: str | Path) -> Path:
    """Return the absolute `path`, to write there now.

    Raises:
        FolderMoved: a folder that is held is no longer at its path.
        OSError: a file system does not answer.
    """
    if words := moved_in_words():
        raise FolderMoved(words)
    return Path(path).absolute()


def moved() -> dict[str, Path | None]:
    """Return the settings whose folders are no longer at their paths, with the places of the folders, see `place`."""
    return {folder.setting: folder.place for folder in _held if not folder.is_at(folder.path)}


def moved_in_words() -> str:
    """Return what became of the first folder that was moved or removed; '' where all are at their paths."""
    given = {folder.setting: folder.given for folder in _held}
    for setting, now in moved().items():
        became = f"moved to {now}" if now else "removed, or moved to another disk,"
        return f"{setting}={given[setting]} was {became} while the run went on"
    return ""


def place(path: str | Path) -> Path | None:
    """Return where the folder that is held as `path` is now; None: nowhere. Any other `path` is returned itself."""
    folder = _held_as(path)
    return folder.place if folder else Path(path)


def through(path: str | Path) -> Path:
    """Return a path of this process alone that leads into the folder that is held as `path`, wherever it is moved."""
    folder = _held_as(path)
    return Path(f"/proc/self/fd/{folder.descriptor}") if folder else Path(path)


def _held_as(path: str | Path) -> _Held | None:
    return next((folder for folder in _held if folder.path == Path(path).absolute()), None)


def remove_made_anew(path: Path) -> None:
    """Remove the empty folders from `path` up to the path of a folder that was moved: another process has made them."""
    path = path.absolute()
    for folder in _held:
        if not folder.may_be_there:
            for made in (path, *path.parents):
                if made.is_relative_to(folder.path):
                    with contextlib.suppress(OSError):  # not empty: it is somebody else's
                        made.rmdir()
