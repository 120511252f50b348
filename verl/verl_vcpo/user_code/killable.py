"""Processes for calls that may hang or crash: a call has a limit, at which its process is killed and replaced.

No library does this (pebble was tried): a process is a fresh interpreter that no other user can reach, started when a
call waits; all that a function starts is killed with it; coroutines run side by side; a result that cannot be read
fails its call alone; and no process is left however its parent ends.
"""

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from verl_vcpo.user_code import killable_process
from verl_vcpo.user_code.errors import LoadError, UserCodeError, took_too_long
from verl_vcpo.user_code.function import Function
from verl_vcpo.user_code.killable_process import LENGTH

_START_LIMIT_S = 300.0  # a function may load a model
# Another process is started when no process has become free for so long: calls of milliseconds then need one process,
# and calls that wait for a judge get as many processes as verl has threads.
_FREE_PROCESS_WAIT_S = 0.2
_MOST_PROCESSES = min(32, (os.cpu_count() or 1) + 4)
_MOST_COROUTINES = 1024  # in one process
_GRACE_S = 5.0  # beyond the limit at which a process ends its coroutines: then one of them blocks the process


class Pool:
    """Processes that have loaded a function: each runs one call at a time, or very many of a coroutine.

    Args:
        most: processes at a time.
        quiet: drop what the function prints; otherwise it goes to the standard error of this process.
    """

    def __init__(self, function: Function, most: int = _MOST_PROCESSES, quiet: bool = False) -> None:
        self._function, self._most, self._quiet = function, most, quiet
        self._slots: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        self._growing = asyncio.Lock()
        self._processes: list[_Process] = []

    async def call(self, arguments: dict[str, Any]) -> Any:
        """The function's result. The wait for a free process has no limit; the time limit begins with the call.

        Raises:
            UserCodeError: there is no result.
        """
        try:
            return await self._call(arguments, has_ended_one=False)
        except _ProcessorLimitError:
            return await self._call(arguments, has_ended_one=True)

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()

    async def _call(self, arguments: dict[str, Any], has_ended_one: bool) -> Any:
        process = await self._free()
        try:
            return await process.ask(arguments, has_ended_one)
        finally:
            if process.alive:
                self._slots.put_nowait(process)

    async def _free(self) -> "_Process":
        while True:
            try:
                async with asyncio.timeout(_FREE_PROCESS_WAIT_S if self._processes else 0):
                    process = await self._slots.get()
            except TimeoutError:
                await self._grow()
                continue
            if process.alive:
                return process

    async def _grow(self) -> None:
        async with self._growing:
            self._processes = [process for process in self._processes if process.alive]
            if self._slots.empty() and len(self._processes) < self._most:
                process = await _Process.started(self._function, self._quiet)
                self._processes.append(process)
                for _ in range(process.room):
                    self._slots.put_nowait(process)


class BlockingPool:
    """A pool for callers in threads, which share its processes."""

    def __init__(self, function: Function, most: int) -> None:
        self._loop, self._pool = loop_in_thread("killable"), Pool(function, most)

    def call(self, arguments: dict[str, Any]) -> Any:
        """The function's result. Raises UserCodeError: there is none."""
        return asyncio.run_coroutine_threadsafe(self._pool.call(arguments), self._loop).result()


def loop_in_thread(name: str) -> asyncio.AbstractEventLoop:
    """An event loop in a thread that ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


class _ProcessorLimitError(UserCodeError):
    """A limit of the call ended its process (verl_vcpo/user_code/processor_limit.py)."""


class _Process:
    """One process and the calls that it runs."""

    _listener: asyncio.Task[None]  # asyncio's loop holds tasks by weak references only

    def __init__(
        self,
        function: Function,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._function, self._process, self._reader, self._writer = function, process, reader, writer
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self.alive, self.room, self._limit_s = False, 1, function.timeout_s

    @classmethod
    async def started(cls, function: Function, quiet: bool) -> "_Process":
        """A process that has loaded the function. Raises LoadError."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            process = subprocess.Popen(
                [sys.executable, "-m", killable_process.__name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL if quiet else 2,  # what a function prints goes to the worker's log
                stderr=subprocess.DEVNULL if quiet else None,
                start_new_session=True,  # a process group, to be killed with all processes that the function starts
            )
        self = cls(function, process, reader, writer)
        try:
            await self._load()
        finally:
            if not self.alive:
                self.kill()
        return self

    async def _load(self) -> None:
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                self._writer.write(pickle.dumps(self._function))
                is_async = await self._message()
        except TimeoutError:
            raise LoadError(f"does not load: it takes longer than {_START_LIMIT_S:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise LoadError(f"does not load: its process {await self._end()}") from None
        if isinstance(is_async, LoadError):
            raise is_async
        if is_async:
            self.room, self._limit_s = _MOST_COROUTINES, self._limit_s + _GRACE_S
        self.alive, self._listener = True, asyncio.create_task(self._listen())

    async def ask(self, arguments: dict[str, Any], has_ended_one: bool) -> Any:
        """The result. Raises UserCodeError: the process is dead then, unless the function itself raised."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            async with asyncio.timeout(self._limit_s):
                self._writer.write(pickle.dumps((number, arguments, has_ended_one)))
                result = await answer
        except TimeoutError:
            self.kill()
            raise took_too_long(self._function.limit, self._function.timeout_s, self._company()) from None
        except asyncio.CancelledError:
            if self.room == 1:
                self.kill()  # the call would go on, with no caller left
            raise
        finally:
            del self._answers[number]
        try:
            return pickle.loads(result)
        except Exception as error:  # e.g. an object of a class in the function's module, which is not loaded here
            raise UserCodeError(f"returned what cannot be sent to another process: {error}") from None

    async def _listen(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                number, result, error = await self._message()
                if (answer := self._answers.get(number)) and not answer.done():
                    answer.set_exception(error) if error else answer.set_result(result)
        was_alive, self.alive = self.alive, False
        how = await self._end() if was_alive else "was killed, because another call in it did not return"
        kind = _ProcessorLimitError if self._process.returncode == -signal.SIGPROF else UserCodeError
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(kind(f"gave no result: its process {how}{self._company()}"))

    async def _message(self) -> Any:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return pickle.loads(await self._reader.readexactly(length))

    def _company(self) -> str:
        others = len(self._answers) - 1
        return f" (it, or one of {others} other calls in the same process)" if others > 0 else ""

    async def _end(self) -> str:
        """In a few words, how a process ended that has closed the socket."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # the process still runs, with the socket closed
            await asyncio.to_thread(self._process.wait, _GRACE_S)
        code = self._process.returncode
        self.kill()
        if code is None:
            return "closed its connection"
        return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """End the process, and all that its function has started."""
        self.alive = False
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._writer.close()
