"""Folders of a living server: each has a lock, which the kernel takes back when the process ends."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "vcpo-sandbox-"


class OwnedFolder:
    """A new folder below `parent`, locked by this process. Raises OSError if the folder cannot be made."""

    def __init__(self, parent: Path) -> None:
        while True:
            self.path = parent / f"{_PREFIX}{secrets.token_hex(4)}"
            self.path.mkdir(mode=0o755)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Another server may have cleared up between the two calls, and removed the folder as abandoned.
            if self.path.exists():
                return
            os.close(self._lock)

    def close(self) -> None:
        """Remove the folder, which has to be empty."""
        with contextlib.suppress(FileNotFoundError):
            self.path.rmdir()
        os.close(self._lock)


def abandoned(parent: Path) -> Iterator[Path]:
    """Yield the folders below `parent` whose servers have ended without `OwnedFolder.close`."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # not a folder of ours, or gone meanwhile
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
