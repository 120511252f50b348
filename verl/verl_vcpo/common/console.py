"""The console of a run: lines and, on a terminal, one moving line below them.

The moving line says what is being started and for how long; while the run trains it is the progress bar. In a pipe or
a file there are only lines.
"""

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

_ENDING = "Ending the run's processes"
_ESTIMATE_S = 1800.0  # the time left is estimated from the steps of so many seconds


def print_line(text: str) -> None:
    """Print above the moving line, on the terminal even while the output of other code goes to a file."""
    screen().line(text)


@contextlib.contextmanager
def owned(log: TextIO) -> Iterator[None]:
    """Keep the terminal for this module in the block: all else on standard output and error goes to the file `log`.

    Both file descriptors are redirected, so this holds for libraries in C, loggers that were set up earlier, and child
    processes.
    """
    global _screen
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before, saved = _screen, [os.dup(1), os.dup(2)]
    terminal = _lasting(saved[0], partial(os.dup, log.fileno()))
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        _screen = Screen(terminal)
        try:
            yield
        finally:
            _screen.close()
            _screen = before
            with contextlib.suppress(OSError):  # a full disk
                log.flush()
            for descriptor, original in enumerate(saved, start=1):
                os.dup2(original, descriptor)
                os.close(original)


@contextlib.contextmanager
def outlived(log: Path) -> Iterator[None]:
    """For the block, a console that goes away ends nothing: a terminal that hangs up, a closed pipe, a full disk.

    What standard output cannot take goes to standard error, and the other way round; where neither takes it, to the end
    of the file `log`.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    streams = sys.stdout, sys.stderr
    if streams == (sys.__stdout__, sys.__stderr__):  # otherwise somebody else looks after them
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = (
            _lasting(one, partial(os.dup, other), partial(os.open, log, os.O_WRONLY | os.O_APPEND))
            for one, other in ((1, 2), (2, 1))
        )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        signal.signal(signal.SIGHUP, before)


class _Lasting(io.RawIOBase):
    """A descriptor, and where goes what it does not take: the first of `others`, descriptors to open, that takes it."""

    def __init__(self, descriptor: int, others: tuple[Callable[[], int], ...]) -> None:
        self._descriptor, self._others = descriptor, others

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            for opened in self._others:
                with contextlib.suppress(OSError):
                    descriptor = opened()
                    try:
                        os.write(descriptor, data)
                        break
                    finally:
                        os.close(descriptor)
            return len(data)


def _lasting(descriptor: int, *others: Callable[[], int]) -> TextIO:
    encoding = getattr(sys.__stdout__, "encoding", None) or "utf-8"
    raw = io.BufferedWriter(_Lasting(descriptor, others))
    return io.TextIOWrapper(raw, encoding=encoding, errors="replace", line_buffering=True)


class Screen:
    """The lines on `stream` and, if the stream is a terminal, the moving line."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._doing: tuple[str, float] | None = None  # what, since when
        self._trains = False
        self._moving: Progress | None = None
        self._console: Any = None
        if stream.isatty():
            from rich.console import Console

            self._console = Console(file=stream, force_terminal=True, highlight=False)

    def line(self, text: str) -> None:
        if self._console:
            self._fit()
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def stage(self, what: str) -> None:
        """Finish the current part of the start-up or the end, and begin the next; the moving line names the part."""
        self._trains = False
        self.begin(what)

    def begin(self, what: str) -> None:
        self.finish()
        self._doing = what, self._clock()
        if self._trains:
            self._say(what)
        elif self._console:
            self._move(what)
        else:
            self.line(f"{what} ...")

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Name what the run does in the block: in the progress bar or, before `training`, as a stage."""
        self.begin(what)
        yield
        self.finish()  # not where the block raises: `ending` says what was not finished

    def finish(self) -> None:
        if self._doing and not self._trains:
            self.line(f"{self._doing[0]}: {duration(self._clock() - self._doing[1])}")
        self._doing = None
        if self._trains:
            self._say("")
        else:
            self._hide()

    def ending(self) -> None:
        """Say that the run's processes are being ended, and that unfinished work failed or was interrupted."""
        if self._doing and self._doing[0] == _ENDING:
            return
        self.unfinished()
        self.stage(_ENDING)

    def unfinished(self) -> None:
        """Say that the current part failed or was interrupted, if there is one."""
        if self._doing:
            what, since = self._doing
            self.line(f"{what}: not finished after {duration(self._clock() - since)}")
        self._doing = None

    def training(self, total: int, done: int) -> None:
        """Begin the progress bar; earlier processes of the run made `done` of `total` steps."""
        self.finish()
        self._trains = True
        self._move("", total, done)

    def step_done(self) -> None:
        if self._trains and self._moving:
            self._moving.advance(self._moving.task_ids[0])

    def close(self) -> None:
        self._trains = False
        self.finish()

    def _say(self, what: str) -> None:
        if self._moving:
            self._moving.update(self._moving.task_ids[0], description=what)

    def _hide(self) -> None:
        if self._moving:
            self._moving.stop()
            self._moving = None

    def _fit(self) -> None:
        """Take over the width of the terminal, whose window may have changed."""
        with contextlib.suppress(OSError):
            self._console.width = os.get_terminal_size(self._stream.fileno()).columns or 80

    def _move(self, what: str, total: int | None = None, done: int = 0) -> None:
        """Show another moving line on a terminal: a stage or, with `total`, the progress bar."""
        if not self._console:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        self._hide()
        self._fit()
        bar = (MofNCompleteColumn(), BarColumn(bar_width=None)) if total else ()
        left = ("left:", TimeRemainingColumn()) if total else ()
        self._moving = Progress(
            *bar,
            "{task.description}",
            TimeElapsedColumn(),
            *left,
            console=self._console,
            transient=True,
            expand=True,
            refresh_per_second=2,
            speed_estimate_period=_ESTIMATE_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._moving.add_task(what, total=total, completed=done)
        self._moving.start()
        self._console.show_cursor(True)  # a process that is killed could not bring the cursor back


def duration(seconds: float) -> str:
    """Return a duration in words, such as `7 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


_screen: Screen | None = None


def screen() -> Screen:
    """Return the screen of the innermost `owned`; outside of all, another one on standard output."""
    return _screen or Screen(sys.__stdout__ or sys.stdout)
