"""Processes for calls that may hang or crash: a call has a limit, at which its process is killed and replaced.

No library does this (pebble was tried): a process is a fresh interpreter, started when a call waits; all that a
function starts is killed with it; of what a function prints there is a limit; a result that cannot be read fails its
call alone; and no process is left however its parent ends.
"""

import asyncio
import contextlib
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
_END_S = 5.0  # a process that has closed its socket, or was told to end, ends in this time, or is killed
_KEPT_OF_CALL, _KEPT_OF_PROCESS = 1 << 20, 64 << 20
"""Bytes that a call prints, and the calls of a process: the rest is dropped, for a log must not fill the disk."""
_DROPPED = "more than 1 MB printed in a call, or 64 MB in all calls of a process; the rest is dropped"


class Pool:
    """Processes that have loaded a function, and run one call at a time each.

    Args:
        most: processes at a time.
        quiet: drop what the function prints; otherwise it goes to the standard error of this process.
    """

    def __init__(self, function: Function, most: int = _MOST_PROCESSES, quiet: bool = False) -> None:
        self._function, self._most, self._quiet = function, most, quiet
        self._idle: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
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
            self._idle.put_nowait(process)  # a dead one is passed over

    async def _free(self) -> "_Process":
        while True:
            try:
                async with asyncio.timeout(_FREE_PROCESS_WAIT_S if self._processes else 0):
                    process = await self._idle.get()
            except TimeoutError:
                await self._grow()
                continue
            if process.alive:
                return process

    async def _grow(self) -> None:
        async with self._growing:
            self._processes = [process for process in self._processes if process.alive]
            if self._idle.empty() and len(self._processes) < self._most:
                process = await _Process.started(self._function, self._quiet)
                self._processes.append(process)
                self._idle.put_nowait(process)


class BlockingPool:
    """A pool for callers in threads, which share its processes."""

    def __init__(self, function: Function, most: int) -> None:
        self._loop, self._pool = asyncio.new_event_loop(), Pool(function, most)
        threading.Thread(target=self._loop.run_forever, name="killable", daemon=True).start()

    def call(self, arguments: dict[str, Any]) -> Any:
        """The function's result. Raises UserCodeError: there is none."""
        return asyncio.run_coroutine_threadsafe(self._pool.call(arguments), self._loop).result()


class _ProcessorLimitError(UserCodeError):
    """A limit of the call ended its process (verl_vcpo/user_code/processor_limit.py)."""


class _Process:
    """One process, which a failed call leaves dead unless the function itself raised."""

    def __init__(
        self, function: Function, process: subprocess.Popen[bytes], streams: tuple[asyncio.StreamReader, Any]
    ) -> None:
        self._function, self._process, (self._reader, self._writer) = function, process, streams
        self._printed = self._printed_in_call = 0

    @classmethod
    async def started(cls, function: Function, quiet: bool) -> "_Process":
        """A process that has loaded the function. Raises LoadError."""
        ours, theirs = socket.socketpair()
        with theirs:
            streams = await asyncio.open_connection(sock=ours)
            process = subprocess.Popen(
                [sys.executable, "-m", killable_process.__name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is not for it
            )
        self = cls(function, process, streams)
        if not quiet:
            threading.Thread(target=self._pass_on, name="printed", daemon=True).start()
        try:
            error = await self._answer(function, _START_LIMIT_S)
        except TimeoutError:
            raise LoadError(f"does not load: it takes longer than {_START_LIMIT_S:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise LoadError(f"does not load: its process {await self._end()}") from None
        if error:
            self.kill()
            raise error
        return self

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, arguments: dict[str, Any], has_ended_one: bool) -> Any:
        """The result. Raises UserCodeError."""
        self._printed_in_call = 0
        try:
            result, error = await self._answer((arguments, has_ended_one), self._function.timeout_s)
        except TimeoutError:
            raise took_too_long(self._function.limit, self._function.timeout_s) from None
        except (OSError, asyncio.IncompleteReadError):
            how = await self._end()
            kind = _ProcessorLimitError if self._process.returncode == -signal.SIGPROF else UserCodeError
            raise kind(f"gave no result: its process {how}") from None
        if error:
            raise error
        try:
            return pickle.loads(result)
        except Exception as unknown:  # e.g. an object of a class in the function's module, which is not loaded here
            raise UserCodeError(f"returned what cannot be sent to another process: {unknown}") from None

    async def _answer(self, message: object, limit_s: float) -> Any:
        """Send a message, and return the answer. A process that has not answered in time, or to a caller, is killed."""
        try:
            async with asyncio.timeout(limit_s):
                self._writer.write(pickle.dumps(message))
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                return pickle.loads(await self._reader.readexactly(length))
        except (TimeoutError, asyncio.CancelledError):
            self.kill()
            raise

    async def _end(self) -> str:
        """In a few words, how a process ended that has closed the socket."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # the process still runs, with the socket closed
            await asyncio.to_thread(self._process.wait, _END_S)
        code = self._process.returncode
        self.kill()
        if code is None:
            return "closed its connection"
        return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """End the process, and all that its function has started (`killable_process` sees to that)."""
        if self.alive:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:  # stopped, by a signal of the function's
                os.killpg(self._process.pid, signal.SIGCONT)
                try:
                    self._process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait()
        self._writer.close()

    def _pass_on(self) -> None:
        """Write what the process prints to the worker's log, up to the limits, until everyone who might has ended."""
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 1 << 16):
            left = min(_KEPT_OF_CALL - self._printed_in_call, _KEPT_OF_PROCESS - self._printed)
            self._printed += len(data)
            self._printed_in_call += len(data)
            kept = data[: max(left, 0)]
            if 0 <= left < len(data):
                kept += f"\n{self._function.path}:{self._function.name}: {_DROPPED}\n".encode()
            with contextlib.suppress(OSError):  # a full disk; the function must not wait for one who reads
                os.write(2, kept)
