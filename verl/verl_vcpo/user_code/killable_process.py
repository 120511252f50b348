"""The process in which a function runs and can be killed: started by `verl_vcpo.user_code.killable` only.

It is two: one has the function, and its parent ends all that the function has started. The kernel gives that parent
(a subreaper) the processes whose own parents have ended, in whatever session and environment they are.

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
    kernel.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    # The kernel sends these signals when the thread that started a process ends, even during a call that never returns.
    kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    server = os.fork()
    if server:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the socket closes when the child ends
        _supervise(server)
    kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    _serve()


def _supervise(server: int) -> NoReturn:
    """Wait for the child `server` or SIGTERM, kill every descendant, and end as the child has ended."""
    ended: dict[int, int] = {}
    while server not in ended and signal.sigwait(_WATCHED) == signal.SIGCHLD:
        ended |= _reaped()
    deadline = time.monotonic() + _END_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)
        ended |= _reaped()
    code = os.waitstatus_to_exitcode(ended.get(server, signal.SIGKILL))
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left the one that tells something
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.kill(os.getpid(), -code)
    os._exit(1)


def _reaped() -> dict[int, int]:
    """By process, the exit statuses of children that have ended."""
    statuses = {}
    with contextlib.suppress(ChildProcessError):  # there is no child at all
        while (of := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[of[0]] = of[1]
    return statuses


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
