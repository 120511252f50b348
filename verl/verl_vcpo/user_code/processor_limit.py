"""A limit of processor time for a part of a call: the kernel ends the call's process there, whatever the code does.

The pool (verl_vcpo/user_code/killable.py) then makes the call again in another process, where the part is over at once.
"""

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator

import psutil


class OverLimitError(Exception):
    """This part of the call has ended a process already."""


_has_ended_one: bool | None = None


def begin_call(has_ended_one: bool) -> None:
    """Allow limits, in a process that has one call at a time; `has_ended_one`: a limit of this call has ended one."""
    global _has_ended_one
    _has_ended_one = has_ended_one


def can_be_kept() -> bool:
    """Whether the process may be ended: a pool's, with this call and no other."""
    return _has_ended_one is not None and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def at_most(seconds: float, more_bytes: int) -> Iterator[None]:
    """Limit a block to so much processor time and so much more address space. No exception of its own leaves the block.

    Raises:
        OverLimitError: the block has ended a process already.
    """
    if _has_ended_one:
        raise OverLimitError
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more_bytes, most))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except Exception:  # e.g. MemoryError: there is no state to go on with
        signal.raise_signal(signal.SIGPROF)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (before, most))
