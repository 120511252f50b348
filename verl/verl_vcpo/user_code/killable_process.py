"""The process in which a function runs and can be killed: started by `verl_vcpo.user_code.killable` only.

Messages are pickles on a socket, which is standard input: first a `Function`, answered by a `LoadError` or None; then
calls (arguments, whether a limit of the call has ended a process), each answered by (pickled result, UserCodeError).
"""

import asyncio
import contextlib
import ctypes
import inspect
import os
import pickle
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from typing import Any

from verl_vcpo.user_code import processor_limit
from verl_vcpo.user_code.errors import LoadError, UserCodeError, raised
from verl_vcpo.user_code.function import Function

LENGTH = struct.Struct("!Q")
"""The header of every answer: the length in bytes."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve calls until the other side closes the socket."""
    # The kernel kills this process when the thread that started it ends, even during a call that never returns.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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
