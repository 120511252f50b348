"""One interpreter in its sandbox, which gets one program. No process of the program outlives `end`."""

import asyncio
import contextlib
import json
import marshal
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from code_sandbox.cgroups import TEARDOWN_S
from code_sandbox.interpreter import LENGTH_BYTES, READY
from code_sandbox.limits import IsolationError, Limits, ProgramOutcome

START_LIMIT_S = 60.0
"""The longest that an interpreter may take until it is ready."""
_REPORT_S = 10.0  # bubblewrap names its child as soon as it has one
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Output:
    """The output of an interpreter in one pipe: `first` bytes of its own, then up to `limit` bytes of its program."""

    def __init__(self, limit: int, first: int = 0) -> None:
        self.ready, self.full = asyncio.Event(), asyncio.Event()
        self._limit, self._first = limit, first
        self._kept = bytearray()

    @property
    def text(self) -> str:
        """The text that the program wrote."""
        return self._kept[self._first :].decode("utf-8", errors="replace")

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Read the stream to its end, whatever is kept: `Process.wait` waits for the end."""
        while chunk := await stream.read(1 << 16):
            self._kept += chunk[: self._first + self._limit - len(self._kept)]
            if len(self._kept) >= self._first:
                self.ready.set()
            if len(self._kept) >= self._first + self._limit:
                self.full.set()


class SandboxedInterpreter:
    """An interpreter below bubblewrap's process; all processes of its namespace die with the first one there.

    Args:
        process: bubblewrap, with open pipes.
        status: bubblewrap's reports (`--json-status-fd`).
        limits: the program's limits, except those that come with the program.
        descriptors: the most descriptors that a process may have open.
        release: called once all processes have ended.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        status: asyncio.StreamReader,
        limits: Limits,
        descriptors: int,
        release: Callable[[], Awaitable[None]],
    ) -> None:
        assert process.stdin and process.stdout and process.stderr
        self._process, self._stdin, self._limits, self._release = process, process.stdin, limits, release
        self._descriptors = descriptors
        # Descriptors of processes: a signal by number could reach a later process with the same number.
        self._bubblewrap = _opened(process.pid)
        self._first: int | None = None
        self._first_pid = 0
        self._exit_code: int | None = None
        self._reported = asyncio.Event()
        self._out, self._errors = _Output(limits.output_kb << 10, len(READY)), _Output(limits.output_kb << 10)
        self._over = asyncio.create_task(self._watch(status))
        self._pipes = [
            asyncio.create_task(self._out.follow(process.stdout)),
            asyncio.create_task(self._errors.follow(process.stderr)),
        ]
        self._gone: asyncio.Task[None] | None = None

    @property
    def lives(self) -> bool:
        """True while the interpreter can still get a program."""
        return not self._over.done() and self._gone is None

    async def ready(self) -> None:
        """Wait until the interpreter takes a program. Raises IsolationError if it does not start; then call `end`."""
        ready = asyncio.create_task(self._out.ready.wait())
        try:
            await asyncio.wait({ready, self._over}, timeout=START_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not self._out.ready.is_set() or self._over.done():
            await self.end()
            reason = self._errors.text.strip() or f"it was not ready after {START_LIMIT_S:g} s"
            raise IsolationError(f"an interpreter does not start in the sandbox: {reason}")

    async def run(self, code: str, stdin: str, limits: Limits) -> ProgramOutcome:
        """Run a program to its end or to a limit, and end all its processes. An interpreter runs one program.

        Args:
            limits: `time_s` and `memory_mb` count; the interpreter has had the other limits from its start.

        Raises:
            IsolationError: the interpreter ended before it had the program, or its processes cannot be ended.
        """
        try:
            request = marshal.dumps(
                {"code": code.encode(errors="replace"), "limits": self._resources(limits), "time_s": limits.time_s}
            )
            data = len(request).to_bytes(LENGTH_BYTES, "big") + request + stdin.encode(errors="replace")
            start = time.perf_counter()
            fed = asyncio.create_task(self._feed(data))
            full = [asyncio.create_task(output.full.wait()) for output in (self._out, self._errors)]
            try:
                await asyncio.wait({self._over, *full}, timeout=limits.time_s, return_when=asyncio.FIRST_COMPLETED)
                timed_out = not self._over.done() and not any(task.done() for task in full)
            finally:
                for task in (fed, *full):
                    task.cancel()
                duration_s = time.perf_counter() - start
        finally:
            await self.end()
        outcome = ProgramOutcome(self._out.text, self._errors.text, duration_s)
        if self._out.full.is_set() or self._errors.full.is_set():
            outcome.stderr += f"\n[ended: more than {self._limits.output_kb} KiB of output]"
        if not timed_out:
            killed = 128 + signal.SIGKILL  # at a limit
            outcome.return_code = killed if self._exit_code is None else self._exit_code
        return outcome

    async def end(self) -> None:
        """Kill every process of the interpreter, and wait until the kernel has ended all of them.

        Raises:
            IsolationError: the end takes longer than a minute.
        """
        if self._gone is None:
            self._gone = asyncio.create_task(self._end())
        await asyncio.shield(self._gone)  # the waiting task may be cancelled; the killing goes on

    async def _end(self) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reported.wait(), _REPORT_S)
            # Not bubblewrap alone: its child asks the kernel late, in its own start, to die with bubblewrap.
            for process in (self._first, self._bubblewrap):
                if process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(process, signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(self._process.wait(), self._over, *self._pipes), TEARDOWN_S)
            if self._first is not None:
                await asyncio.wait_for(_reaped(self._first), TEARDOWN_S)
            await self._release()
        except (TimeoutError, OSError) as error:
            reason = str(error) or f"more than {TEARDOWN_S:g} s"
            raise IsolationError(f"the processes of a program do not end: {reason}") from None
        finally:
            self._stdin.close()
            for process in (self._first, self._bubblewrap):
                if process is not None:
                    os.close(process)

    async def _watch(self, status: asyncio.StreamReader) -> None:
        """Read reports until bubblewrap has reported the end of the program, or has ended without a report."""
        try:
            async for line in status:
                report: dict[str, Any] = json.loads(line)
                if pid := report.get("child-pid"):
                    self._first, self._first_pid = _opened(pid), pid
                    self._reported.set()
                if "exit-code" in report:
                    self._exit_code = report["exit-code"]
                    return
        finally:
            self._reported.set()

    async def _feed(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program need not read
            self._stdin.write(data)
            await self._stdin.drain()
            self._stdin.close()

    def _resources(self, limits: Limits) -> dict[str, int]:
        """Return the limits that the interpreter sets inside; processes are counted per user namespace."""
        return {
            "RLIMIT_AS": self._address_space() + (limits.memory_mb << 20),
            "RLIMIT_NPROC": limits.processes + 2,
            "RLIMIT_FSIZE": limits.files_mb << 20,
            "RLIMIT_NOFILE": self._descriptors,
            "RLIMIT_SIGPENDING": 256,
            "RLIMIT_CORE": 1,  # with 0 a handler of core dumps would be started
        }

    def _address_space(self) -> int:
        """Return the bytes of the interpreter's address space before its program; imported packages add to it."""
        first = self._first_pid
        try:
            child = Path(f"/proc/{first}/task/{first}/children").read_text().split()[0]
            return int(Path(f"/proc/{child}/statm").read_text().split()[0]) * _PAGE
        except (OSError, IndexError) as error:
            raise IsolationError(f"an interpreter in the sandbox has ended before it got a program ({error})") from None


def _opened(pid: int) -> int | None:
    """Open a descriptor of the process; None if the process has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


async def _reaped(descriptor: int) -> None:
    """Wait until the process has ended. This process reaps orphans: bubblewrap's child becomes an orphan."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
    with contextlib.suppress(ChildProcessError):  # bubblewrap itself has reaped it
        os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG)
