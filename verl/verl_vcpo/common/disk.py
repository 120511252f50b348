"""The disk of a folder, and why it takes no file, in words: most libraries name neither the cause nor the place."""

import errno
import os
import resource
from pathlib import Path

_CAUSES = {
    errno.EDQUOT: "your quota there is used up",
    errno.EROFS: "it is mounted read-only",
    errno.EFBIG: "the file is too large for it",
}


def disk_of(folder: str | Path) -> Path:
    """The first folder above that is there."""
    path = Path(folder).absolute()
    return next(above for above in (path, *path.parents) if above.exists())


def why_not_written(place: Path, error: BaseException) -> str:
    """Return what `place` has, to follow the words "PLACE has": `12 MB free, no inode for another file (REASON)`.

    Args:
        place: the folder that was written to, or one that is not there any more.
        error: what was raised, also by another process through Ray.
    """
    error = getattr(error, "cause", None) or error
    reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    try:
        found = os.statvfs(disk_of(place))
    except OSError as unknown:
        return f"a file system that cannot be read: {unknown.strerror} ({reason})"
    words = [f"{found.f_bavail * found.f_frsize / 1e6:.0f} MB free"]
    if found.f_files and not found.f_favail:  # a file system without a number of inodes has f_files 0
        words.append("but no inode for another file: remove files there")
    if cause := _CAUSES.get(getattr(error, "errno", None) or 0):
        words.append(cause)
    elif found.f_flag & os.ST_RDONLY:
        words.append(_CAUSES[errno.EROFS])
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY:
        words.append(f"and this process may write files of {largest / 1e6:.3g} MB at the most (ulimit -f)")
    return f"{', '.join(words)} ({reason})"
