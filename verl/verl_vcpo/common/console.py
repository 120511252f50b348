"""The console of a run: lines and, on a terminal, one moving line below them.

The moving line says what is being started and for how long; while the run trains it is the progress bar. In a pipe or
a file there are only lines.
"""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_REFRESHES_PER_S = 2
_STEPS_OF_ESTIMATE = 20
_ENDING = "Ending the run's processes"


def print_line(text: str) -> None:
    """Print above the moving line, on the terminal even while the output of other code goes to a file."""
    _current().line(text)


def width() -> int | None:
    """Return the columns of the terminal; None in a pipe or a file."""
    return _current().width


def stage(what: str) -> None:
    """Finish the current part of the start-up or the end, and begin the next; the moving line names the part."""
    _current().stage(what)


def training(total: int, done: int) -> None:
    """Begin the progress bar; earlier processes of the run made `done` of `total` steps."""
    _current().training(total, done)


def step_done() -> None:
    """Advance the progress bar by one step; without effect before `training`."""
    _current().step_done()


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Name what the run does in the block: in the progress bar or, before `training`, as a stage."""
    _current().begin(what)
    yield
    _current().finish()  # not where the block raises: `ending` says what was not finished


def ending() -> None:
    """Say that the run's processes are being ended, and that unfinished work failed or was interrupted."""
    _current().ending()


@contextlib.contextmanager
def owned(log: TextIO) -> Iterator[None]:
    """Keep the terminal for this module in the block: all else on standard output and error goes to `log`.

    Both file descriptors are redirected, so this holds for libraries in C, loggers that were set up earlier, and child
    processes.

    Args:
        log: a file.
    """
    global _screen
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before, saved = _screen, [os.dup(1), os.dup(2)]
    encoding = getattr(sys.__stdout__, "encoding", None) or "utf-8"
    terminal = open(os.dup(1), "w", encoding=encoding, errors="replace")  # noqa: SIM115  # closed below
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        _screen = Screen(terminal)
        try:
            yield
        finally:
            _screen.close()
            _screen = before
            log.flush()
            for descriptor, original in enumerate(saved, start=1):
                os.dup2(original, descriptor)
                os.close(original)
            terminal.close()


class Screen:
    """The lines on `stream` and, if the stream is a terminal, the moving line."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._doing: tuple[str, float] | None = None  # what, since when
        self._steps: StepTimes | None = None
        self._live = _moving_line(stream, self._bottom) if stream.isatty() else None

    @property
    def width(self) -> int | None:
        """The columns of the terminal; None where `stream` is no terminal."""
        return self._live.console.width if self._live else None

    def line(self, text: str) -> None:
        if self._live:
            from rich.text import Text

            self._live.console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def stage(self, what: str) -> None:
        self._steps = None
        self.begin(what)

    def begin(self, what: str) -> None:
        self.finish()
        if self._live is None and self._steps is None:
            self.line(f"{what} ...")
        self._doing = what, self._clock()
        self._refresh()

    def finish(self) -> None:
        if self._doing and self._steps is None:
            self.line(f"{self._doing[0]}: {duration(self._clock() - self._doing[1])}")
        self._doing = None
        self._refresh()

    def ending(self) -> None:
        if self._doing and self._doing[0] == _ENDING:
            return
        if self._doing:
            what, since = self._doing
            self.line(f"{what}: not finished after {duration(self._clock() - since)}")
        self._doing = None
        self.stage(_ENDING)

    def training(self, total: int, done: int) -> None:
        self.finish()
        self._steps = StepTimes(total, done, self._clock)
        self._refresh()

    def step_done(self) -> None:
        if self._steps:
            self._steps.advance()
            self._refresh()

    def close(self) -> None:
        self._steps = None
        self.finish()
        if self._live:
            self._live.stop()

    def _refresh(self) -> None:
        if self._live:
            if self._doing or self._steps:
                self._live.start()
            self._live.refresh()

    def _bottom(self) -> "RenderableType":
        """Render the moving line."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        doing, since = self._doing or ("", 0.0)
        spent = duration(self._clock() - since) if self._doing else ""
        if self._steps is None:
            return Text(f"{doing} ... {spent}" if doing else "", no_wrap=True, overflow="ellipsis")
        steps = self._steps
        bar = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None):
            bar.add_column(ratio=ratio, no_wrap=True)
        now = f"{doing} {spent}" if doing else f"step {steps.done + 1}: {duration(steps.since_last())}"
        bar.add_row(f"{steps.done}/{steps.total}", ProgressBar(steps.total, steps.done), f"{now}, {steps.left()}")
        return bar


class StepTimes:
    """The durations of the last steps, and an estimate of the time left.

    The first step of a process is left out of the estimate: samplers and trainer warm up in this step.
    """

    def __init__(self, total: int, done: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.done = total, done
        self._clock, self._last = clock, clock()
        self._first = True
        self._seconds: deque[float] = deque(maxlen=_STEPS_OF_ESTIMATE)

    def advance(self) -> None:
        """Count a finished step."""
        if not self._first:
            self._seconds.append(self.since_last())
        self._first, self._last = False, self._clock()
        self.done += 1

    def since_last(self) -> float:
        """Return the seconds since the last step was done."""
        return self._clock() - self._last

    def left_s(self) -> float | None:
        """Estimate the seconds until the run's last step is done; None before two steps were made."""
        if not self._seconds:
            return None
        each, steps = sum(self._seconds) / len(self._seconds), self.total - self.done
        return max(each * steps - self.since_last(), each * (steps - 1), 0.0)

    def left(self) -> str:
        """Return the estimate of the time left in words."""
        seconds = self.left_s()
        return "time left: after step 2" if seconds is None else f"{duration(seconds)} left"


def duration(seconds: float) -> str:
    """Return a duration in words, such as `7 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _moving_line(stream: TextIO, render: "Callable[[], RenderableType]") -> "Live":
    from rich.console import Console, ConsoleDimensions
    from rich.live import Live

    class Terminal(Console):
        @property  # type: ignore[misc]  # nobody sets it
        def size(self) -> ConsoleDimensions:
            # rich asks the standard streams, and `owned` has sent two of these into a file
            if "COLUMNS" not in os.environ:
                with contextlib.suppress(OSError):
                    columns, lines = os.get_terminal_size(stream.fileno())
                    if columns:
                        return ConsoleDimensions(columns, lines)
            return super().size

        def show_cursor(self, show: bool = True) -> bool:
            return False  # the cursor stays: a process that is killed could not bring it back

    return Live(
        console=Terminal(file=stream, force_terminal=True, highlight=False),
        get_renderable=render,
        refresh_per_second=_REFRESHES_PER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


_screen: Screen | None = None


def _current() -> Screen:
    return _screen or Screen(sys.__stdout__ or sys.stdout)
