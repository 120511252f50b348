"""The process in which a function runs and can be killed: started by `verl_vcpo.user_code.killable` only.

It is three: one has the function, and the two above it end all that the function has started. The kernel gives those
(subreapers) the processes whose own parents have ended, in whatever session and environment they are. Two, so that a
function that kills or stops its parent is ended too.

Messages are pickles on a socket, which is standard input: first a `Function`, answered by a `LoadError` or None; then
calls (arguments, whether a limit of the call has ended a process), each answered by (pickled result, UserCodeError).
"""

import asyncio
import contextlib
import ctypes
import inspect
import os
import pickle
import resource
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import psutil

from verl_vcpo.user_code import processor_limit
from verl_vcpo.user_code.errors import LoadError, UserCodeError, raised
from verl_vcpo.user_code.function import Function

LENGTH = struct.Struct("!Q")
"""The header of every answer: the length in bytes."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WATCHED = (signal.SIGTERM, signal.SIGCHLD)
_END_S = 3.0  # a process that does not end by SIGKILL in this time is in the kernel, and is left


def main() -> None:
    """Serve calls in a child until the other side closes the socket; then, and at SIGTERM, end all that was started."""
    kernel = ctypes.CDLL(None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    for _ in range(2):
        kernel.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # The kernel sends this signal when the thread that started a process ends, even in a call that never returns.
        kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if child := os.fork():
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the socket closes when the last child ends
            _supervise(child)
    kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # a function may signal its process group
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    _serve()


def _supervise(child: int) -> NoReturn:
    """Wait for the child or SIGTERM, kill every descendant, and end as the child has ended."""
    ended: dict[int, int] = {}
    while child not in ended and signal.sigwait(_WATCHED) == signal.SIGCHLD:
        _reap(ended)
    deadline = time.monotonic() + _END_S
    while _reap(ended) and time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(ended.get(child, signal.SIGKILL))
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left the one that tells something
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.kill(os.getpid(), -code)
    os._exit(1)


def _reap(ended: dict[int, int]) -> bool:
    """Add the exit statuses of children that have ended, by process. Return False once there is no child at all.

    Then there is no descendant either: those whose parents have ended are children.
    """
    with contextlib.suppress(ChildProcessError):
        while (of := os.waitpid(-1, os.WNOHANG))[0]:
            ended[of[0]] = of[1]
        return True
    return False


def _serve() -> None:
    stream = socket.socket(fileno=os.dup(0)).makefile("rwb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    function: Function = pickle.load(stream)
    try:
        call = function.load()
    except LoadError as error:
        traceback.print_exc()
        _send(stream, error)
        return
    _send(stream, None)
    with contextlib.suppress(EOFError), asyncio.Runner() as runner:
        while True:
            arguments, has_ended_one = pickle.load(stream)
            processor_limit.begin_call(has_ended_one)
            _send(stream, _answer(function, call, arguments, runner))


def _answer(
    function: Function, call: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner
) -> tuple[bytes | None, UserCodeError | None]:
    try:
        result = call(**arguments, **function.fixed)
        if inspect.iscoroutinefunction(call):
            result = runner.run(result)
        return pickle.dumps(function.checked(result)), None
    except UserCodeError as error:
        return None, error
    except BaseException as error:  # a function may also call sys.exit
        traceback.print_exception(error)
        return None, raised(error)


def _send(stream: Any, message: object) -> None:
    data = pickle.dumps(message)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    main()
