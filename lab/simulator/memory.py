"""Memory that torch frees is kept by the process: the next step takes the same pages."""

import ctypes

# Of glibc's <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER, _AT_ONCE = 2**31 - 1, 64 * 2**20


def keep_freed_memory() -> None:
    """Where the C library is glibc, give no freed memory back to the system; elsewhere nothing is changed.

    Tensors of a few megabytes are otherwise mapped and unmapped at every operator, and the system fills each page with
    zeros.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in ((_TRIM_THRESHOLD, _NEVER), (_MMAP_MAX, 0), (_TOP_PAD, _AT_ONCE)):
            mallopt(setting, value)
