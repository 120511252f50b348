"""The process in which a function runs and can be killed: started by `verl_vcpo.user_code.killable` only.

Messages are pickles on a socket, which is standard input: first a `Function`, answered by whether it is a coroutine
function or a `LoadError`; then calls (number, arguments, whether a limit of the call has ended a process), each
answered by (number, pickled result, UserCodeError).
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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl_vcpo.user_code import processor_limit
from verl_vcpo.user_code.errors import LoadError, UserCodeError, raised, took_too_long
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
    server = _Server(stream)
    try:
        call = server.function.load()
    except LoadError as error:
        traceback.print_exc()
        server.send(error)
        return
    is_async = inspect.iscoroutinefunction(call)
    server.send(is_async)
    with contextlib.suppress(EOFError):
        if is_async:
            asyncio.run(server.serve_side_by_side(call))
        else:
            server.serve_one_by_one(call)


class _Server:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.function: Function = pickle.load(self._stream)

    def serve_one_by_one(self, call: Callable[..., Any]) -> None:
        while True:
            number, arguments, has_ended_one = pickle.load(self._stream)
            processor_limit.begin_call(has_ended_one)
            try:
                answer = self._result(number, call(**arguments, **self.function.fixed))
            except BaseException as error:  # a function may also call sys.exit
                answer = self._failure(number, error)
            self.send(answer)

    async def serve_side_by_side(self, call: Callable[..., Any]) -> None:
        reader = ThreadPoolExecutor(1)  # not one of the threads that the function may use up
        tasks: set[asyncio.Task[None]] = set()  # asyncio's loop holds tasks by weak references only
        while True:
            number, arguments, _ = await asyncio.get_running_loop().run_in_executor(reader, pickle.load, self._stream)
            task = asyncio.create_task(self._serve(number, call, arguments))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _serve(self, number: int, call: Callable[..., Any], arguments: dict[str, Any]) -> None:
        function = self.function
        clock = asyncio.timeout(function.timeout_s)
        try:
            async with clock:
                result = await call(**arguments, **function.fixed)
            answer = self._result(number, result)
        except BaseException as error:
            late = isinstance(error, TimeoutError) and clock.expired()
            answer = self._failure(number, took_too_long(function.limit, function.timeout_s) if late else error)
        self.send(answer)

    def _result(self, number: int, result: Any) -> tuple[Any, ...]:
        return number, pickle.dumps(self.function.checked(result)), None

    def _failure(self, number: int, error: BaseException) -> tuple[Any, ...]:
        if isinstance(error, UserCodeError):
            return number, None, error
        traceback.print_exception(error)
        return number, None, raised(error)

    def send(self, message: object) -> None:
        data = pickle.dumps(message)
        self._stream.write(LENGTH.pack(len(data)) + data)
        self._stream.flush()


if __name__ == "__main__":
    main()
